"""Tables: the one at the end of a command (`summary`), and papers' tables made from records."""

from feddg_bench.analysis.tables.summary import Cell, MethodsTable, Table, compared, summary

__all__ = ["Cell", "MethodsTable", "Table", "compared", "summary"]
