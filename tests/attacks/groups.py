"""The groups of attacks, each in a lab of its own."""

from __future__ import annotations

import importlib
import logging
import warnings

from tests.attacks.lab import Row, open_lab, seconds

GROUPS = (
    "odd",
    "replies",
    "clients",
    "pictures",
    "forgeries",
    "records",
    "models",
    "hangs",
)
"""Modules of this package; imported when needed, as processes that are started import this one."""


def run(group: str, *, full: bool = False) -> tuple[list[Row], float]:
    """Return what the attacks of a group did, and the CPU seconds they took.

    With ``full``, large grids are tried completely.
    """
    start = seconds()
    quiet = logging.NullHandler()  # notices are read where they are judged
    logging.getLogger().addHandler(quiet)
    try:
        with warnings.catch_warnings(), open_lab() as lab:
            warnings.simplefilter("ignore")  # what is warned of is not what is judged
            lab.full = full
            importlib.import_module(f"tests.attacks.{group}").attack(lab)
    finally:
        logging.getLogger().removeHandler(quiet)
    lab.add("programs started", sorted(set(lab.programs)) or "none", not lab.programs)
    lab.add("files outside", sorted(set(lab.outside)) or "none", not lab.outside)
    return lab.rows, seconds() - start
