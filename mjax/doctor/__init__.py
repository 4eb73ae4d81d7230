"""`mjax doctor`: checks of this installation and this machine, each made by doing the thing once."""
