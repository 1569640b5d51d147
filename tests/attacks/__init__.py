"""Attacks on the suite: ``python -m tests.attacks`` runs them and prints their outcomes."""
