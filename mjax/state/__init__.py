"""The state of a run: its layout on a mesh, its precision, and its checkpoints."""
