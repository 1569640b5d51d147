"""Figures: of records, of partitions, and of models trained for them.

Only what needs a model imports PyTorch: `training` and the figures drawn from it.
"""
