"""All methods in one table: papers, messages, operations, worlds and lines of code."""

from __future__ import annotations

import ast
import csv
import io
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache

from feddg_bench.plugins import method_title, outline
from feddg_bench.runs.cards import Crossing, operations, references, shipped_card
from generators import ROOT, table

HEADS = (
    "method",
    "group",
    "operations per image",
    "undoes",
    "lines",
    "client sends, bytes a round",
    "receives, bytes a round",
    "paper",
)
CONTROL = "Null"
"""World in which there is nothing to undo."""
LEARNED = -5.0
"""A method that is further below the attainable accuracy there, in points, has learned too little
for its share of other worlds to mean anything."""


def method_table(names: Iterable[str]) -> str:
    """Return the table of methods, and the definitions of its columns."""
    rows = (_row(name) for name in names)
    return f"""The head of a column sorts the table.

::::{{table}}
:class: sortable

{table(HEADS, rows)}
::::

- **Bytes**: messages of one client in a round of a tiny run, measured: the small network
  ({_model() // 4:,} parameters) on ten classes, or features of CLIP for methods that need texts. A
  version of the model counts once. *Once* is sent before the first round only.
- **Operations per image**: those of clients in a round after the first, for each of their images
  and local epochs, over FedAvg's with the same network ({_million()}), measured in the same run:
  convolutions and matrix products of all calls, forward and backward, with the random choices of
  one batch. An empty cell: measured with another network. *Compute* in the
  [leaderboards](../leaderboards/index.md) counts all operations of a run.
- **Undoes**: [planted worlds](../leaderboards/worlds.md) in which the method's 95 % interval lies
  above FedAvg's, with the share of the shift that it recovers. *None* means measured without such a
  world; *unclear*, that the method is more than {-LEARNED:.0f} points below the attainable accuracy
  in the control, where nothing is to undo; an empty cell, not measured.
- **Lines** of the method's file, without comments, docstrings and blank lines.
"""


def _row(name: str) -> tuple[object, ...]:
    declared, seen = outline(name), shipped_card(name)
    papers = "; ".join(
        f"[{each.title}]({each.link}), {each.venue.partition(' on ')[0] or 'arXiv'} {each.year}"
        for each in references(declared.citation)
    )
    link = f"[{method_title(name)}]({name}.md)"
    up, down = (_bytes(seen, way) for way in ("up", "down")) if seen else ("", "")
    share = operations(name)
    work = "" if share is None else f"{share:.2f}"
    return link, declared.group, work, _undone(name), _lines(name), up, down, papers


def _bytes(seen: Crossing, direction: str) -> str:
    """Return the bytes that one client sends or receives in a round, and those of once."""
    each, once, model = 0, 0, 0
    for message in seen.messages:
        if message.direction == direction:
            later = "each round" in message.when
            for item in message.items:
                if direction == "down" and item.name == "weights":
                    model = max(model, item.bytes)
                else:
                    each += item.bytes * later
                    once += item.bytes * (not later)
    text = f"{each + model:,}"
    return f"{text}; once {once:,}" if once else text


def _model() -> int:
    """Return the bytes of the model in the measured runs."""
    seen = shipped_card("fedavg")
    assert seen is not None
    return next(m.items[0].bytes for m in seen.messages if m.direction == "up")


def _million() -> str:
    """Return FedAvg's operations for an image in the measured runs."""
    seen = shipped_card("fedavg")
    assert seen is not None
    return f"{seen.flop / 1e6:.1f} million"


@cache
def _worlds() -> dict[str, dict[str, tuple[float, float, float, str]]]:
    """Return value, low and high end, and metric by method and world."""
    found: dict[str, dict[str, tuple[float, float, float, str]]] = {}
    path = ROOT / "results/worlds/tables/worlds.csv"
    with path.open(encoding="utf-8", newline="") as file:
        for cell in csv.DictReader(file):
            if cell["value"] and cell["low"] and not cell["variant"]:
                ends = (float(cell[name]) for name in ("value", "low", "high"))
                found.setdefault(cell["method"], {})[cell["column"]] = (*ends, cell["metric"])
    return found


def _undone(name: str) -> str:
    """Return the worlds in which the method's interval lies above FedAvg's."""
    if name not in _worlds() or name == "fedavg":
        return ""
    if _worlds()[name][CONTROL][0] < LEARNED:
        return "unclear"
    reference = _worlds()["fedavg"]
    undone = [
        f"{world.lower()} {value:.0f} %" if metric == "recovered" else world.lower()
        for world, (value, low, _, metric) in _worlds()[name].items()
        if world != CONTROL and low > reference[world][2]
    ]
    return ", ".join(undone) or "none"


def _lines(name: str) -> int:
    """Return the number of lines of a method's file that are code."""
    text = (ROOT / f"methods/feddg_methods/{name}.py").read_text(encoding="utf-8")
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*skipped, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - set(_docstrings(text)))


def _docstrings(text: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(text)):
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant):
                yield from range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)
