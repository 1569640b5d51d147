"""Data sets, one module each."""
