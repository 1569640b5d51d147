"""Figures of records, of partitions, and of models trained for figures.

Only `training` and the figures drawn from its models import PyTorch.
"""
