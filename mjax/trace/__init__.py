"""The work of a step, read from its traced and its compiled program."""
