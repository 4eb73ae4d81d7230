"""The compiled programs: the train step, its forward pass, losses, optimizer, precision, and the layout of its
state."""
