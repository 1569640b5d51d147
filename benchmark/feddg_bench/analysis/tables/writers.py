"""Write a table as Markdown, CSV or LaTeX."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from feddg_bench.analysis.sheets import csv_lines
from feddg_bench.analysis.tables.grid import Entry, Grid
from feddg_bench.common.errors import printable

CSV_COLUMNS = (
    *("table", "row", "method", "recipe", "variant", "group", "column", "kind"),
    *("dataset", "protocol", "scenario", "train", "val", "test", "split", "metric", "select"),
    *("value", "std", "seeds", "text", "mark", "low", "high"),
    *("published", "published_source", "difference", "run_keys", "footnotes"),
)


def markdown(grid: Grid) -> str:
    """Return a table as Markdown with its notes, the commands for missing cells and run keys."""
    lines = [f"# {_md(grid.title)}", ""]
    for places in grid.blocks():
        columns = [grid.columns[n] for n in places]
        heads = ["", *(_md(column.title) for column in columns)]
        lines += [_row(heads), _row(["---", *["---:"] * len(columns)])]
        for line in grid.lines:
            label = _md(line.label) if line.kind == "ours" else f"*{_md(line.label)}*"
            cells = [_md_entry(line.entries[n]) for n in places]
            lines.append(_row([label + _raised(line.footnotes), *cells]))
        lines.append("")
    lines.append(" ".join(map(_md, grid.caption)))
    if grid.footnotes or grid.notes:
        lines.append("")
    lines += [f"- <sup>{n}</sup> {_md(text)}." for n, text in enumerate(grid.footnotes, 1)]
    lines += [f"- {_md(note)}" for note in grid.notes]
    if grid.fills:
        lines += ["", "Commands that fill what is missing:", ""]
        lines += [f"- {_md(row)}: {_code(command)}" for row, command in grid.fills]
    if grid.runs:
        head = "Runs of each row, by scenario, as seed:key"
        lines += ["", f"<details><summary>{head}</summary>", ""]
        lines += [f"- {_md(row)}: {_md(_told(cells))}" for row, cells in grid.runs.items()]
        lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def _told(scenarios: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{name}: {' '.join(keys)}" for name, keys in scenarios.items())


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _md(text: str) -> str:
    shown = re.sub(r"([|*_<>\\]|\](?=[(\[:]))", r"\\\1", text.replace("\n", " "))
    return printable(shown)


def _code(text: str) -> str:
    return f"`` {printable(text)} ``" if "`" in text else f"`{printable(text)}`"


def _raised(footnotes: Sequence[int]) -> str:
    return f" <sup>{','.join(str(n + 1) for n in footnotes)}</sup>" if footnotes else ""


def _md_entry(entry: Entry | None) -> str:
    if entry is None:
        return ""
    form = {"best": "**{}**", "second": "<u>{}</u>", None: "{}"}[entry.mark]
    return form.format(entry.text) + _raised(entry.footnotes)


def csv_text(grid: Grid) -> str:
    """Return a table as tidy CSV: one row for each of its numbers.

    Measured cells name their runs by key; a mean or rank does so only if it has runs that no
    measured cell of its row has. Cells without a number are left out; the Markdown lists the
    commands that fill them, once for each row.
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
            values["footnotes"] = "; ".join(grid.footnotes[m] for m in marks)
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


def tex(text: str) -> str:
    """Return a text with the characters escaped that LaTeX would read as commands."""
    return "".join(_TEX.get(letter, letter) for letter in printable(text.replace("\n", " ")))


def latex(grid: Grid) -> str:
    r"""Return a table for ``\input`` into a document that uses booktabs and graphicx."""
    lines = [
        r"% \usepackage{booktabs,graphicx}; runs of each row, by scenario, as seed:key:",
        *(printable(f"% {row}: {_told(scenarios)}") for row, scenarios in grid.runs.items()),
        *(printable(f"% missing, {row}: {command}") for row, command in grid.fills),
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{tex(grid.title)}. {' '.join(map(tex, grid.caption))}}}",
        rf"\label{{tab:{re.sub(r'[^A-Za-z0-9-]+', '-', grid.name)}}}",
    ]
    for places in grid.blocks():
        lines += [r"\par\smallskip", *_tabular(grid, places)]
    notes = [
        *(rf"$^{{{n}}}$ {tex(text)}." for n, text in enumerate(grid.footnotes, 1)),
        *map(tex, grid.notes),
    ]
    if notes:
        lines += [r"\par\smallskip\begin{minipage}{\linewidth}\footnotesize"]
        lines += [r"\par ".join(notes), r"\end{minipage}"]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def _tabular(grid: Grid, places: Sequence[int]) -> list[str]:
    """Return the lines of one block, no wider than the text."""
    columns = [grid.columns[n] for n in places]
    lines = [
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
    ]
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
        label = tex(line.label) + _superscript(line.footnotes)
        first = label if line.kind == "ours" else rf"\quad\textit{{{label}}}"
        lines.append(_tex_row([first, *(_tex_entry(line.entries[n]) for n in places)]))
    return [*lines, r"\bottomrule", r"\end{tabular}}"]


def _tex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _superscript(footnotes: Sequence[int]) -> str:
    return f"$^{{{','.join(str(n + 1) for n in footnotes)}}}$" if footnotes else ""


def _tex_entry(entry: Entry | None) -> str:
    if entry is None:
        return ""
    text = re.sub(r"(?<![\w.])-(?=\d)", "$-$", tex(entry.text))  # a minus, not a hyphen
    if entry.mark is not None:
        text = rf"\{'textbf' if entry.mark == 'best' else 'underline'}{{{text}}}"
    return text + _superscript(entry.footnotes)


def latex_document(names: Sequence[str]) -> str:
    """Return a document that shows the tables of these names, to be compiled beside them."""
    return "\n".join(
        [
            r"\documentclass{article}",
            r"\usepackage[utf8]{inputenc}",
            r"\usepackage[T1]{fontenc}",
            r"\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}",
            r"\usepackage[landscape,margin=1.5cm]{geometry}",
            r"\usepackage{booktabs,graphicx}",
            r"\begin{document}",
            *(rf"\input{{{name}.tex}}\clearpage" for name in names),
            r"\end{document}",
            "",
        ]
    )


WRITERS: Mapping[str, Callable[[Grid], str]] = {"md": markdown, "tex": latex, "csv": csv_text}
"""Format -> writer; formats are also the files' endings."""


def whole_file(ending: str, grids: Sequence[Grid]) -> str:
    """Return the text of a file that holds one table, or several in Markdown or CSV."""
    first, *others = map(WRITERS[ending], grids)
    if ending == "md":
        return "\n".join([first, *(f"#{text}" for text in others)])  # headings one level lower
    return first + "".join(text.partition("\n")[2] for text in others)  # names of columns once
