"""Processes, devices and flags of a machine or a cluster."""
