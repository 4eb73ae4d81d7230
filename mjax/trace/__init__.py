"""What a step does, read from its traced and its compiled program."""
