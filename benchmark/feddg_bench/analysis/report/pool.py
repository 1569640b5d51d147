"""Values that many runs share, written once."""

from __future__ import annotations

import json
from typing import Any


class Pool:
    """A list of distinct JSON values; others refer to them by position.

    Attributes:
        values: The values in the order in which they were first added.
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[str, int] = {}

    def add(self, value: Any) -> int:
        """Return the position of a value, which is appended if it is new."""
        mark = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        mark = f"{type(value).__name__} {mark}"  # 1, "1" and true are different values
        place = self._places.get(mark)
        if place is None:
            place = self._places[mark] = len(self.values)
            self.values.append(value)
        return place
