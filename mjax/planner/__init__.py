"""Predictions of a run before it starts: memory, communication, time. Nothing here touches a device."""
