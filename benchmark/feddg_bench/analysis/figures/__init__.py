"""Figures: of records, of partitions, and of models trained for them.

Nothing here imports PyTorch but what needs a model: `training` and what draws from it.
"""
