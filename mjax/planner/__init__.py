"""Predictions of a run before it starts: memory, communication, time. No device is used."""
