"""What a run carries from step to step, how it lies on a mesh, and how it is kept on disk."""
