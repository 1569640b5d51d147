"""The groups of attacks; each runs in its own lab."""

from __future__ import annotations

import importlib
import logging
import warnings

from tests.attacks.lab import Row, open_lab, seconds

GROUPS = (
    "odd",
    "pictures",
    "records",
    "models",
    "hangs",
)
"""Modules of this package; imported on demand, since started processes import this module."""


def run(group: str, *, full: bool = False) -> tuple[list[Row], float]:
    """Return the outcomes of a group's attacks, and their CPU seconds.

    With ``full``, large grids are tried completely.
    """
    start = seconds()
    quiet = logging.NullHandler()  # notices are checked by the attacks
    logging.getLogger().addHandler(quiet)
    try:
        with warnings.catch_warnings(), open_lab() as lab:
            warnings.simplefilter("ignore")  # warnings are not part of the verdicts
            lab.full = full
            importlib.import_module(f"tests.attacks.{group}").attack(lab)
    finally:
        logging.getLogger().removeHandler(quiet)
    lab.add("programs started", sorted(set(lab.programs)) or "none", not lab.programs)
    lab.add("files outside", sorted(set(lab.outside)) or "none", not lab.outside)
    return lab.rows, seconds() - start
