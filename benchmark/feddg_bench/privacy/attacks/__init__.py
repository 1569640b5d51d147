"""Kinds of attacks: one module each, found by its name as methods are."""
