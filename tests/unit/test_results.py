"""Texts about our results: methods are compared at one learning rate, with the tables' numbers."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
NUMBERS = re.compile(r"([+-]?[\d.]+)(?: \[([+-][\d.]+), ([+-][\d.]+)\])?(?: ± [\d.]+)?")
RATE = re.compile(r"\blr ([\d.]+)")
OWN_RATE = re.compile(r"- Row (.*) (?:was tuned to|differs from most rows in) .*\blr=([\d.]+\d)")


class Written(NamedTuple):
    """A number of a method in a table of a text."""

    rate: str  # the stated learning rate
    method: str
    numbers: tuple[float, ...]  # with the ends of its interval, if there is one
    digits: int


class Measured(NamedTuple):
    """A number in one of the tables that are made from records."""

    rate: str
    numbers: tuple[float, ...]
    frozen: bool  # on frozen features, which are never compared with trained networks


@cache
def measured() -> dict[str, list[Measured]]:
    """Return the numbers of all tables by method."""
    found: dict[str, list[Measured]] = {}
    for path in (ROOT / "results").glob("**/tables/*.csv"):
        notes = path.with_suffix(".notes.md").read_text()
        usual = RATE.search(notes)
        own = dict(OWN_RATE.findall(notes))
        for cell in csv.DictReader(path.read_text().splitlines()):
            if not cell.get("method") or not cell.get("value") or "group" not in cell:
                continue
            of_column = RATE.search(cell["group"])
            rate = of_column or usual
            named = own.get(cell["row"]) or (rate[1] if rate else "")
            ends = (cell["value"], cell["low"], cell["high"])
            numbers = tuple(float(end) for end in ends if end)
            frozen = "features" in path.parts
            found.setdefault(cell["row"], []).append(Measured(named, numbers, frozen))
    return found


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield heads and rows of the tables in a Markdown text."""
    for part in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        heads, _, *rows = ([c.strip() for c in line.strip("|").split("|")]
                           for line in part.splitlines())  # fmt: skip
        yield heads, rows


def method_of(label: str) -> str:
    """Return the method of a row, such as `ERM, all images in one place`; empty if it has none."""
    name = label.strip("*").partition(",")[0]
    return name if name in measured() else ""


def about_rates(heads: list[str]) -> bool:
    """Return whether a table compares rates, or lists runs that chose a setup."""
    lists = "rate" in heads and not any("difference" in head for head in heads)
    return lists or any("minus lr" in head or re.fullmatch(r"0\.\d+", head) for head in heads)


def compared(text: str) -> Iterator[Written]:
    """Yield the numbers in tables that compare methods.

    Raises:
        AssertionError: If such a table states no learning rate.
    """
    for heads, rows in tables(text):
        methods = [method_of(row[0]) for row in rows]
        if len({*methods} - {""}) < 2 or about_rates(heads):
            continue
        of_table = RATE.fullmatch(heads[0])
        assert of_table, f"a table of {', '.join(methods)} states no learning rate"
        for method, row in zip(methods, rows, strict=True):
            for head, cell in zip(heads[1:], row[1:], strict=True):
                if found := NUMBERS.fullmatch(cell):
                    numbers = tuple(float(part) for part in found.groups() if part)
                    rate = (RATE.search(head) or of_table)[1]
                    yield Written(rate, method, numbers, len(found[1].partition(".")[2]))


def unlike_the_records(text: str) -> Iterator[Written]:
    """Yield numbers that tables made from records show at other rates alone.

    Intervals that no table shows are yielded, too; other numbers can be means of a few cells.
    """
    for section in re.split(r"^## ", text, flags=re.M):
        frozen = "frozen features" in section.partition("\n")[0]
        for one in compared(section):
            rates = {
                other.rate
                for other in measured()[one.method]
                if other.frozen == frozen
                and len(one.numbers) in (1, len(other.numbers))
                and all(
                    abs(ours - theirs) <= 0.55 * 10.0**-one.digits
                    for ours, theirs in zip(one.numbers, other.numbers, strict=False)
                )
            }
            if one.rate not in rates and (rates or len(one.numbers) > 1):
                yield one


def test_tables_of_results_compare_methods_at_one_rate() -> None:
    text = (ROOT / "results/README.md").read_text()
    assert list(unlike_the_records(text)) == []
    assert len(list(compared(text))) > 250
    at_another = text.replace("| lr 0.008 |", "| lr 0.004 |", 1)
    assert {one.method for one in unlike_the_records(at_another)} >= {"FedAvg", "FedADG", "CCST"}
    with pytest.raises(AssertionError, match=r"a table of CCST.* states no learning rate"):
        list(compared(text.replace("| lr 0.008 |", "| |", 1)))


def test_the_table_of_the_readme_has_the_numbers_of_its_table() -> None:
    """Difference, ends of its interval, p and operations are those of PACS, recipe `desktop`."""
    path = ROOT / "results/tables/pacs-ltdo-desktop.csv"
    cells = {
        (cell["row"], cell["kind"]): cell
        for cell in csv.DictReader(path.read_text().splitlines())
        if cell["group"] == "unseen" and cell["column"] not in ("val", "test")
    }
    shown = [rows for _, rows in tables((ROOT / "README.md").read_text()) if method_of(rows[0][0])]
    (rows,) = [rows for rows in shown if len(rows[0]) == 5]
    for method, gap, interval, p, compute in rows:
        difference = cells[method, "difference"]
        low, _, high = interval.partition(" to ")
        for said, exact in ((gap, "value"), (low, "low"), (high, "high")):
            assert said == f"{float(difference[exact]):+.1f}"
        assert float(p) == pytest.approx(float(cells[method, "p_value"]["value"]), abs=0.0051)
        assert compute == f"{float(cells[method, 'compute']['value']):.1f}"
    federated = [
        (-float(cell["value"]), row)
        for (row, kind), cell in cells.items()
        if kind == "difference" and cell["value"] and row != "ERM"
    ]
    assert [row[0] for row in rows] == [row for _, row in sorted(federated)][:5]
