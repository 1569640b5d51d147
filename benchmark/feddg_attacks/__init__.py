"""Privacy, measured: what crosses in a run, and what an attacker learns from it."""
