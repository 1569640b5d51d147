"""Sweeps: W&B's own sweep files, run without an account, on one machine or on several.

A file becomes *points* (`definition`, `search`), and a point becomes the runs that
``feddg-bench run`` would make from it (`jobs`). Equal workers (`workers`) take runs by
exclusive leases (`leases`).
"""
