"""Attacks on the suite: ``python -m tests.attacks`` repeats them and prints what happened."""
