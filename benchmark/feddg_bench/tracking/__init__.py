"""Tracking of runs by W&B."""
