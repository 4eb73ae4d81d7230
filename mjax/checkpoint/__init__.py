"""Checkpoints: their files, contents and integrity."""
