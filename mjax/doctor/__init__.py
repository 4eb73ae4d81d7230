"""`mjax doctor`: checks of this installation and this machine, each by trying the real thing."""
