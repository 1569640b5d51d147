"""Federated domain generalisation methods, one module each."""
