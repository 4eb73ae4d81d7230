"""Files, names and progress."""
