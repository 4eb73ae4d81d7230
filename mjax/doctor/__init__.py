"""`mjax doctor`: whether this installation and this machine are fit to train, each thing checked by doing it once."""
