"""The core of feddg-bench: one federated loop, its data, its results and its command line."""

__version__ = "0.1.0"
