"""Record observed messages and state of our methods for their cards: ``make cards``.

Run it after a change that a card shows, such as a new message. A test fails if it is needed.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from feddg_bench.plugins import load_method, names
from feddg_bench.runs.cards import SHIPPED, card_request, see_crossing


def card(method: str) -> dict[str, Any]:
    """Return the entry of one method: the key of the observed run, and the observations."""
    (plan,) = card_request({"method": method}).one_scenario().plan(check=False)
    seen = asdict(see_crossing(plan))
    del seen["deviations"]  # stated by the method's module
    return {"key": plan.key, **seen}


def main() -> None:
    """Write the file of cards."""
    ours = [n for n in names("method") if load_method(n).__module__.startswith("feddg_methods.")]
    cards = {name: card(name) for name in ours}
    SHIPPED.write_text(json.dumps(cards, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
