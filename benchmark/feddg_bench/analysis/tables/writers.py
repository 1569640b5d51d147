"""Write a table as Markdown, CSV or LaTeX."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby

from feddg_bench.analysis.sheets import csv_lines
from feddg_bench.analysis.tables.grid import REFERENCE, Entry, Grid, Line
from feddg_bench.common.errors import printable

CSV_COLUMNS = (
    *("table", "row", "method", "recipe", "variant", "group", "column", "kind"),
    *("dataset", "protocol", "scenario", "train", "val", "test", "split", "metric", "select"),
    *("value", "std", "seeds", "text", "mark", "low", "high"),
    *("published", "published_source", "difference", "run_keys", "footnotes"),
)
RAISED, TEX_RAISED = " <sup>{}</sup>", "$^{{{}}}$"
WIDTH = 8
"""Maximum number of numeric columns side by side in Markdown."""


def markdown(grid: Grid) -> str:
    """Return a table as Markdown, with its caption and its footnotes."""
    lines = [f"# {_md(grid.title)}", "", *_md_blocks(grid)]
    lines += [_md(grid.caption), "", *_md_footnotes(grid)]
    lines += [f"- {_md(heads)}: no runs; {_code(command)}" for heads, command in grid.absent]
    lines += [*[""] * bool(grid.absent), f"[Notes]({grid.name}.notes.md)"]
    return "\n".join(lines) + "\n"


def document(title: str, introduction: str, grids: Iterable[Grid], end: str = "") -> str:
    """Return `text_grid` tables as Markdown, each between its title and its notes."""
    lines = [f"# {title}", "", *([introduction, ""] if introduction else [])]
    for grid in grids:
        lines += [f"## {_md(grid.title)}", ""]
        lines += _md_blocks(grid, most=len(grid.columns)) if grid.lines else []
        lines += [*(f"- {_md(note)}" for note in grid.notes), *([""] if grid.notes else [])]
    return "\n".join([*lines, *([end, ""] if end else [])])


def notes_text(grid: Grid) -> str:
    """Return the details that a table's caption omits, as Markdown.

    These are its notes, detail columns, commands for missing cells and the keys of each row's runs.
    """
    lines = [f"# Notes: {_md(grid.title)}", ""]
    lines += [f"- {_md(text)}" for text in grid.notes]
    if details := _md_blocks(grid, details=True):
        lines += ["", "## More columns", "", *details, *_md_footnotes(grid)[:-1]]
    if grid.fills:
        lines += ["", "## Commands that fill what is missing", ""]
        lines += [f"- {_md(row)}: {_code(command)}" for row, command in grid.fills]
    if grid.runs:
        lines += ["", "## Runs of each row, by scenario, as seed:key", ""]
        lines += [f"- {_md(row)}: {_md(_told(cells))}" for row, cells in grid.runs.items()]
    return "\n".join(lines) + "\n"


def _md_blocks(grid: Grid, *, details: bool = False, most: int = WIDTH) -> list[str]:
    """Return the lines of the column blocks, each below the group name that its columns share."""
    lines: list[str] = []
    for places in grid.blocks(lambda block: len(block) <= most, details=details):
        columns = [grid.columns[n] for n in places]
        groups = {column.group for column in columns}
        lines += [f"**{_md(name)}**\n" for name in groups if name and len(groups) == 1]
        heads = [column.head if len(groups) == 1 else column.title for column in columns]
        sides = ["---:" if _numeric(grid, place) else "---" for place in places]
        lines += [_row(["", *map(_md, heads)]), _row(["---", *sides])]
        for line in grid.lines:
            if details and line.kind != "ours":
                continue
            label = _md(line.label) if line.kind == "ours" else f"*{_md(line.label)}*"
            cells = [_md_entry(grid, line.entries[n]) for n in places]
            lines.append(_row([label + _numbers(grid, line, RAISED), *cells]))
        lines.append("")
    return lines


def _numeric(grid: Grid, place: int) -> bool:
    """Return whether a column holds numbers; a column of a `text_grid` may hold texts."""
    entries = (line.entries[place] for line in grid.lines)
    text = grid.columns[place].kind == "text"
    return not text or any(entry and entry.value is not None for entry in entries)


def _md_footnotes(grid: Grid) -> list[str]:
    """Return the footnotes' lines and an empty line; nothing if there are no footnotes."""
    lines = [f"- <sup>{n}</sup> {_md(text)}." for n, text in enumerate(grid.footnotes, 1)]
    return [*lines, ""] if lines else []


def _told(scenarios: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{name}: {' '.join(keys)}" for name, keys in scenarios.items())


def _row(cells: Sequence[str]) -> str:
    return f"|{'|'.join(cells)}|"


def _md(text: str) -> str:
    shown = re.sub(r"([|*_<>\\]|\](?=[(\[:]))", r"\\\1", text.replace("\n", " "))
    return printable(shown)


def _code(text: str) -> str:
    return f"`` {printable(text)} ``" if "`" in text else f"`{printable(text)}`"


def _numbers(grid: Grid, part: Line | Entry, form: str) -> str:
    """Return the footnotes' numbers in the given format."""
    numbers = ",".join(map(str, grid.numbers(part.footnotes)))
    return form.format(numbers) if numbers else ""


def _md_entry(grid: Grid, entry: Entry | None) -> str:
    if entry is None:
        return ""
    form = {"best": "**{}**", "second": "<u>{}</u>", None: "{}"}[entry.mark]
    return form.format(entry.text) + _numbers(grid, entry, RAISED)


def csv_text(grid: Grid) -> str:
    """Return a table as tidy CSV: one row per number.

    Measured cells list the keys of their runs; a mean or rank does so only if it includes runs that
    no measured cell of its row has. Cells without a number are left out; the Markdown lists the
    commands that fill them, once per row.
    """
    rows = []
    lines = {(line.row, line.kind): line for line in grid.lines}
    places = [
        {"group": c.group, "column": c.head, "kind": c.kind, **c.facts()} for c in grid.columns
    ]
    for row in dict.fromkeys(line.row for line in grid.lines):
        ours, published, gaps = (
            lines.get((row, kind)) for kind in ("ours", "published", "difference")
        )
        facts = (ours or published).facts  # type: ignore[union-attr]
        measured = {
            key
            for column, entry in zip(grid.columns, ours.entries if ours else (), strict=False)
            if column.kind == "measured" and entry is not None
            for key in entry.keys
        }
        for n, place in enumerate(places):
            mine, paper, gap = (
                line.entries[n] if line else None for line in (ours, published, gaps)
            )
            if (mine is None or mine.fill) and paper is None:
                continue
            values = {"table": grid.name, "row": row, **facts, **place}
            marks = list(ours.footnotes) if ours else []
            if mine is not None:
                values |= {
                    "value": _full(mine.value),
                    "std": _full(mine.std),
                    "seeds": " ".join(map(str, mine.seeds)),
                    "text": "" if mine.fill else mine.text,
                    "mark": mine.mark or "",
                    "low": _full(mine.low),
                    "high": _full(mine.high),
                    "run_keys": ""
                    if place["kind"] != "measured" and measured.issuperset(mine.keys)
                    else " ".join(mine.keys),
                }
                marks += mine.footnotes
            if paper is not None:
                values |= {"published": _full(paper.value), "published_source": paper.source}
                values["difference"] = _full(gap.value) if gap else ""
                marks += paper.footnotes
            values["footnotes"] = "; ".join(marks)
            rows.append([values.get(name, "") for name in CSV_COLUMNS])
    return csv_lines(CSV_COLUMNS, rows)


def _full(value: float | None) -> str:
    return "" if value is None else f"{value:.10g}"


# --------------------------------------------------------------------------------- LaTeX

_TEX: Mapping[str, str] = {
    "\\": r"\textbackslash{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "\u2013": "--",
}
TEXT_WIDTH = 335.0
r"""In points: ten less than ``\textwidth`` of a 10 pt article, as widths are estimates."""
COLUMN_GAP = 7.0
r"""Points between two columns, twice ``\tabcolsep``."""
LINES = 39
"""Maximum number of lines in a float, without its caption; the other blocks go into another one."""
HEAD = 4
"""Lines that the head and the rules of a block take."""
SMALLER = ((44, r"\scriptsize"), (42, r"\footnotesize"), (34, r"\small"))
"""Numbers of rows above which a block fits on a page only in a smaller font."""


def tex(text: str) -> str:
    """Return a text with LaTeX's special characters escaped."""
    return "".join(_TEX.get(letter, letter) for letter in printable(text.replace("\n", " ")))


def latex(grid: Grid) -> str:
    r"""Return a table for ``\input`` into a document that uses booktabs.

    It is at most as wide as the text of an article. Blocks that do not fit side by side are
    stacked; blocks that do not fit on a page go into another float.
    """
    lines = [
        "% Needs booktabs. Runs of each row, by scenario, as seed:key:",
        *(printable(f"% {row}: {_told(scenarios)}") for row, scenarios in grid.runs.items()),
        *(printable(f"% missing, {row}: {command}") for row, command in grid.fills),
        *(printable(f"% no runs, {heads}: {command}") for heads, command in grid.absent),
        *(printable(f"% {text}") for text in grid.notes),
    ]
    blocks = grid.blocks(lambda places: _points(grid, places) <= TEXT_WIDTH)
    each = max(1, LINES // (len(grid.lines) + HEAD))
    size = next((font for rows, font in SMALLER if len(grid.lines) > rows), "")
    label = re.sub(r"[^A-Za-z0-9-]+", "-", grid.name)
    for start in range(0, len(blocks), each):
        more = f"-{start // each + 1}" if start else ""
        continued = " (continued)" if start else ""
        lines += [
            r"\begin{table}",
            r"\centering\setlength{\tabcolsep}{3.5pt}",
            rf"\caption{{{tex(grid.title)}{continued}. {tex(grid.caption)}}}",
            rf"\label{{tab:{label}{more}}}{size}",
        ]
        for places in blocks[start : start + each]:
            lines += [r"\par\smallskip", *_tabular(grid, places)]
        if grid.footnotes and start + each >= len(blocks):
            said = [rf"$^{{{n}}}$ {tex(text)}." for n, text in enumerate(grid.footnotes, 1)]
            lines += [r"\par\smallskip\begin{minipage}{\linewidth}\footnotesize"]
            lines += [" ".join(said), r"\end{minipage}"]
        lines.append(r"\end{table}")
    return "\n".join(lines) + "\n"


def _points(grid: Grid, places: Sequence[int]) -> float:
    """Return a block's estimated width in points, in 10 pt Computer Modern or Latin Modern."""
    indented = [
        (line, 10.0 * (line.kind != "ours") + 4.0 * len(line.footnotes)) for line in grid.lines
    ]
    total = max((_wide(line.label) + more for line, more in indented), default=0.0)
    for _, found in groupby(places, lambda n: grid.columns[n].group):
        block, width = list(found), 0.0
        for n in block:
            entries = [line.entries[n] for line in grid.lines]
            cells = [_wide(_short(e)) + 4.0 * bool(e.footnotes) for e in entries if e is not None]
            width += max([_wide(grid.columns[n].head), *cells]) + COLUMN_GAP
        total += max(width, _wide(grid.columns[block[0]].group) + COLUMN_GAP)
    return total


def _short(entry: Entry) -> str:
    return "ref." if entry.text == REFERENCE else entry.text


@lru_cache(maxsize=10_000)  # each block is tried in several widths
def _wide(text: str) -> float:
    """Return a text's estimated width in points; deviations are printed small."""
    whole, _, std = text.partition(" ± ")
    points = math.fsum(
        2.9 if letter in ".,:;' iljt[]()|" else 7.2 if letter.isupper() or letter in "+-" else 5.1
        for letter in whole
    )
    return points + (5.5 + 3.8 * len(std) if std else 0)


def _tabular(grid: Grid, places: Sequence[int]) -> list[str]:
    """Return the lines of one block."""
    columns = [grid.columns[n] for n in places]
    lines = [rf"\begin{{tabular}}{{@{{}}l{'r' * len(columns)}@{{}}}}", r"\toprule"]
    if any(column.group for column in columns):
        heads, rules, at = [""], [], 2
        for head, found in groupby(column.group for column in columns):
            count = len(list(found))
            heads.append(rf"\multicolumn{{{count}}}{{c}}{{{tex(head)}}}")
            if head:
                rules.append(rf"\cmidrule(lr){{{at}-{at + count - 1}}}")
            at += count
        lines += [_tex_row(heads), " ".join(rules)]
    lines += [_tex_row(["", *(tex(column.head) for column in columns)]), r"\midrule"]
    for line in grid.lines:
        label = tex(line.label) + _numbers(grid, line, TEX_RAISED)
        first = label if line.kind == "ours" else rf"\quad\textit{{{label}}}"
        lines.append(_tex_row([first, *(_tex_entry(grid, line.entries[n]) for n in places)]))
    return [*lines, r"\bottomrule", r"\end{tabular}"]


def _tex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _tex_entry(grid: Grid, entry: Entry | None) -> str:
    if entry is None:
        return ""
    text, _, std = _short(entry).partition(" ± ")
    text = re.sub(r"(?<![\w.])-(?=\d)", "$-$", tex(text))  # a minus, not a hyphen
    if entry.mark is not None:
        text = rf"\{'textbf' if entry.mark == 'best' else 'underline'}{{{text}}}"
    if std:
        text += rf"{{\scriptsize$\pm${std}}}"
    return text + _numbers(grid, entry, TEX_RAISED)


def latex_document(names: Sequence[str]) -> str:
    """Return a document that inputs the named tables; compile it in their folder."""
    return "\n".join(
        [
            r"\documentclass{article}",
            r"\usepackage[utf8]{inputenc}",
            r"\usepackage[T1]{fontenc}",
            r"\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}",
            r"\usepackage{booktabs}",
            r"\begin{document}",
            *(rf"\input{{{name}.tex}}\clearpage" for name in names),
            r"\end{document}",
            "",
        ]
    )


WRITERS: Mapping[str, Mapping[str, Callable[[Grid], str]]] = {
    "md": {"md": markdown, "notes.md": notes_text},
    "tex": {"tex": latex},
    "csv": {"csv": csv_text},
}
"""Format -> file name ending -> writer."""
