"""Checkpoints: their files, what each holds, and whether it is whole."""
