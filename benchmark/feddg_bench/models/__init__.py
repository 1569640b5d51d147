"""Backbones and their weights."""
