"""The groups of attacks, each in a lab of its own."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

from tests.attacks import forgeries, pictures, replies, settings
from tests.attacks.lab import Lab, Row, open_lab, seconds

GROUPS: dict[str, Callable[[Lab], None]] = {
    "settings": settings.attack,
    "replies": replies.attack,
    "pictures": pictures.attack,
    "forgeries": forgeries.attack,
}


def run(group: str) -> tuple[list[Row], float]:
    """Return what the attacks of a group did, and the CPU seconds they took."""
    start = seconds()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), open_lab() as lab:
            warnings.simplefilter("ignore")  # what is warned of is not what is judged
            GROUPS[group](lab)
    finally:
        logging.disable(before)
    lab.add("programs started", sorted(set(lab.programs)) or "none", not lab.programs)
    lab.add("files outside", sorted(set(lab.outside)) or "none", not lab.outside)
    return lab.rows, seconds() - start
