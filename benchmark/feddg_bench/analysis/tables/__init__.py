"""Tables: the one at the end of a command (`summary`), and papers' tables made from records."""

from feddg_bench.analysis.tables.summary import Cell, Table, summary

__all__ = ["Cell", "Table", "summary"]
