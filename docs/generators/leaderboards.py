"""Leaderboards: tables by track; each number has its runs and a command that repeats it.

Numbers are those of the tables in ``results``, which `feddg-bench tables` writes: nothing is
computed again. Commands come from the records.
"""

from __future__ import annotations

import csv
import html
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from feddg_bench.analysis.tables.commands import repeat_command
from feddg_bench.records.runs import RecordedRun, read_runs
from generators import ROOT, Page, table

Cell = Mapping[str, str]
"""A line of a table's CSV file."""

SUMMARIES = ("mean", "difference", "p_value", "id_test", "excess", "compute")
"""Kinds of the columns that stand first; the means of ``val`` and ``test`` follow."""
HEADS = {"p_value": "p", "id_test": "id_test", "excess": "at equal id_test"}
NO_NUMBER = "\N{EN DASH}"


class Track(NamedTuple):
    """Tables whose accuracies may stand beside each other."""

    title: str
    about: str
    paths: tuple[str, ...]  # globs in `results`


TRACKS = (
    Track(
        "Photographs, fine-tuned networks",
        "Clients fine-tune all weights of a network that was pretrained on ImageNet.",
        ("tables/pacs-*-desktop.csv", "tables/pacs-*-laptop*.csv"),
    ),
    Track(
        "Photographs, frozen features",
        "Clients train a classifier on features of a network that stays as it is. "
        "[How to make such runs](../../tutorials/frozen-features.md).",
        ("features/tables/pacs-*-features*.csv",),
    ),
    Track(
        "Digits, networks from scratch",
        "Clients train a small network from random weights.",
        (
            "handwritten/tables/handwritten-*.csv",
            "tables/digits4-*.csv",
            "coverage/tables/digits4-*.csv",
            "tables/rmnist-*.csv",
        ),
    ),
    Track(
        "Planted worlds",
        "Synthetic images whose best accuracy is known: which shift does a method undo? "
        "[How to read these numbers](../../tutorials/worlds.md).",
        ("worlds/tables/worlds.csv", "worlds/tables/worlds-*.csv"),
    ),
)


@dataclass(frozen=True)
class Board:
    """A table on a page of its own."""

    path: Path  # its CSV file
    title: str
    caption: str  # setup and units, below the table
    cells: list[Cell]

    @property
    def name(self) -> str:
        """Name of the table, and of its page."""
        return self.path.stem

    @property
    def folder(self) -> Path:
        """Folder of the records."""
        return self.path.parents[1]

    def rows(self) -> dict[str, list[Cell]]:
        """Return the cells by label of the row."""
        found: dict[str, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell["row"], []).append(cell)
        return found


def boards() -> Iterator[tuple[Track, list[Board]]]:
    """Yield the tables of each track."""
    for track in TRACKS:
        paths = [path for each in track.paths for path in sorted((ROOT / "results").glob(each))]
        yield track, [_read(path) for path in paths]


def pages() -> Iterator[Page]:
    """Yield an overview, and a page for each table."""
    tracks = [*boards()]
    for _, found in tracks:
        for board in found:
            yield Page(f"leaderboards/{board.name}.md", _page(board))
    yield Page("leaderboards/index.md", _overview(tracks))


def _read(path: Path) -> Board:
    with path.open(encoding="utf-8", newline="") as file:
        cells = [row for row in csv.DictReader(file) if row["table"] == path.stem]
    lines = path.with_suffix(".md").read_text(encoding="utf-8").splitlines()
    said = [line for line in lines if line and line[0] not in "#|-[*"]
    return Board(path, lines[0].removeprefix("# "), said[0], cells)


def _overview(tracks: Iterable[tuple[Track, list[Board]]]) -> str:
    text = """# Leaderboards

Each table is one *setup*: data set, protocol, recipe, and whether learning rates were tuned.
Numbers of different setups cannot be compared, and *tracks* never share a table. In the tables,
*difference* is that to FedAvg over the same scenarios and seeds, with its 95 % interval, and *p* is
corrected by Holm's procedure for all methods of the table. A method with a larger mean whose
interval contains 0 is not shown to be better. [Our results](../results/README.md) discuss every
setup; [claims](../results/claims.md) test the statements of papers.

The head of a column sorts the table. The name of a method leads to the keys of the runs behind its
numbers, and to commands that repeat them. Records of others are welcome: [how to submit
them](../../submit.md).

"""
    for track, found in tracks:
        rows = (_line(board) for board in found)
        heads = ("table", "methods", "scenarios", "seeds")
        text += f"## {track.title}\n\n{track.about}\n\n{table(heads, rows)}\n"
    return text + _contents(board.name for _, found in tracks for board in found)


def _line(board: Board) -> tuple[object, ...]:
    methods, scenarios = (len({cell[field] for cell in board.cells if cell[field]})
                          for field in ("method", "scenario"))  # fmt: skip
    seeds = sorted({int(seed) for cell in board.cells for seed in cell["seeds"].split()})
    return f"[{board.title}]({board.name}.md)", methods, scenarios, _span(seeds)


def _span(numbers: list[int]) -> str:
    """Return numbers as a range if they have no gap."""
    if len(numbers) > 1 and numbers == [*range(numbers[0], numbers[-1] + 1)]:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _page(board: Board) -> str:
    rows = board.rows()
    columns = _columns(board.cells)
    notes: list[str] = []
    lines = []
    for row, cells in rows.items():
        found = {_place(cell): cell for cell in cells}
        shown = [set(_notes(found[place])) for place in columns if place in found]
        of_row = set.intersection(*shown) if shown else set()
        label = f'<a href="#{_anchor(row)}">{html.escape(row)}</a>'
        marks = _marks([note for note in _notes(cells[0]) if note in of_row], notes)
        texts = [_text(found.get(place), of_row, notes) for place in columns]
        lines.append((label + marks, *texts))
    heads = ("method", *columns.values())
    footnotes = "".join(f"{n}. {html.escape(note)}\n" for n, note in enumerate(notes, 1))
    folder = board.folder.relative_to(ROOT).as_posix()
    whole = f"../{folder}/tables/{board.name}"
    return f"""# {board.title}

::::{{table}}
:class: sortable

{table(heads, iter(lines))}
::::

{board.caption}

{footnotes}
{_explained(board)} explains the columns. More columns and
[notes]({whole}.notes.md) are in the [whole table]({whole}.md), which `feddg-bench tables` makes
from the records in `{folder}`.

## Runs

{_runs(board)}"""


def _explained(board: Board) -> str:
    """Return a link to the page that says what the columns mean."""
    if board.folder.name == "worlds":
        return "[Planted worlds](../../tutorials/worlds.md)"
    return "[Statistics](../../explanation/statistics.md)"


def _place(cell: Cell) -> tuple[str, str, str]:
    return cell["group"], cell["kind"], cell["column"]


def _columns(cells: Collection[Cell]) -> dict[tuple[str, str, str], str]:
    """Return the places of the columns, and their heads."""
    places = list(dict.fromkeys(map(_place, cells)))
    measured = [place for place in places if place[1] == "measured"]
    group = next((place[0] for place in places if place[1] != "measured"), None)
    found = {}
    for kind in SUMMARIES:
        for place in places:
            if place[:2] == (group, kind) and place[2] not in ("val", "test", "macro F1"):
                found[place] = HEADS.get(kind, place[2])
    for place in places:
        if place[:2] == (group, "mean") and place[2] in ("val", "test"):
            found[place] = place[2]
    groups = {place[0] for place in measured}
    for place in measured:
        if place[0] in ("test", "") or not groups & {"test", ""}:
            whole = len(groups) > 1 and place[0] not in ("test", "")
            found[place] = f"{place[0]}, {place[2]}" if whole else place[2]
    return found


def _text(cell: Cell | None, of_row: Collection[str], notes: list[str]) -> str:
    """Return the text of a cell, with marks of the notes that are not those of its row."""
    if cell is None or not cell["text"]:
        return NO_NUMBER
    text = cell["text"].lstrip("'")  # which keeps spreadsheets from reading a sign as a formula
    return text + _marks([note for note in _notes(cell) if note not in of_row], notes)


def _notes(cell: Cell) -> list[str]:
    return [note for note in cell["footnotes"].split("; ") if note]


def _marks(mine: Iterable[str], notes: list[str]) -> str:
    """Return marks of footnotes, which join ``notes``."""
    mine = [*mine]
    notes += [note for note in mine if note not in notes]
    marks = ", ".join(str(notes.index(note) + 1) for note in mine)
    return f" <sup>{marks}</sup>" if marks else ""


def _anchor(row: str) -> str:
    return "runs-" + "".join(letter if letter.isalnum() else "-" for letter in row.lower())


def _runs(board: Board) -> str:
    """Return the keys of the runs in each row by scenario, and commands that repeat them."""
    text = []
    for row, cells in board.rows().items():
        keys = dict.fromkeys(key for cell in cells for key in cell["run_keys"].split())
        commands = "\n".join(_commands(_recorded(board.folder, key) for key in keys))
        lines: dict[tuple[str, str], list[RecordedRun]] = {}
        for run in (_recorded(board.folder, key) for key in keys):
            lines.setdefault((run.dataset, run.scenario), []).append(run)
        several = len({dataset for dataset, _ in lines}) > 1
        listed = "".join(
            f"<tr><td>{dataset if several else ''} {scenario}</td><td>"
            + ", ".join(f"{run.seed}: <code>{run.key}</code>" for run in runs)
            + "</td></tr>\n"
            for (dataset, scenario), runs in lines.items()
        )
        counted = f"{len(keys)} run{'s' * (len(keys) != 1)}"
        text.append(
            f'<details id="{_anchor(row)}">\n<summary>{html.escape(row)}: {counted}</summary>\n'
            f"<table>\n<tr><th>scenario</th><th>seed: key</th></tr>\n{listed}</table>\n"
            f"<pre>{html.escape(commands)}</pre>\n</details>\n"
        )
    return "\n".join(text)


def _commands(runs: Iterable[RecordedRun]) -> Iterator[str]:
    """Yield commands that repeat runs, one for all scenarios and seeds of equal settings."""
    alike: dict[str, list[RecordedRun]] = {}
    for run in runs:
        threads = int(run.environment.get("threads") or 1)
        alike.setdefault(repeat_command(run, run.nested, threads), []).append(run)
    for command, same in alike.items():
        scenarios: dict[str, set[int]] = {}
        for run in same:
            scenarios.setdefault(run.scenario, set()).add(run.seed)
        together: dict[tuple[int, ...], list[str]] = {}
        for scenario, seeds in scenarios.items():
            together.setdefault(tuple(sorted(seeds)), []).append(scenario)
        for chosen, named in together.items():
            seeds = ",".join(map(str, chosen))
            yield f"{command} --scenario {','.join(named)} --seeds {seeds}"


def _recorded(folder: Path, key: str) -> RecordedRun:
    return _of_folder(folder)[key]


@cache
def _of_folder(folder: Path) -> dict[str, RecordedRun]:
    return {run.key: run for run in read_runs(folder)}


def _contents(pages: Iterable[str]) -> str:
    """Return a table of contents that only the sidebar shows."""
    return "```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"
