"""Tracking of runs: W&B in a process of its own, other loggers in this one."""
