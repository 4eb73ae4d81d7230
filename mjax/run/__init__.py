"""The work around the step: the loop, its start and continuation, metrics, display and health."""
