"""Kinds of attack: one module each, found by name like methods."""
