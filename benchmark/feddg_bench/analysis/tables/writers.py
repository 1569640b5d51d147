"""Markdown, CSV and LaTeX of a table."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence

from feddg_bench.analysis.tables.grid import Entry, Grid
from feddg_bench.analysis.tables.html import html

CSV_COLUMNS = (
    "table",
    "row",
    "method",
    "recipe",
    "variant",
    "group",
    "column",
    "kind",
    "dataset",
    "protocol",
    "scenario",
    "train",
    "val",
    "test",
    "split",
    "metric",
    "select",
    "value",
    "std",
    "seeds",
    "text",
    "mark",
    "low",
    "high",
    "published",
    "published_source",
    "difference",
    "run_keys",
    "fill",
    "footnotes",
)


def markdown(grid: Grid) -> str:
    """Return a table as Markdown with its notes, the commands for missing cells and run keys."""
    heads = ["", *(_md(" ".join(filter(None, (c.group, c.head)))) for c in grid.columns)]
    lines = [f"# {_md(grid.title)}", "", _row(heads), _row(["---", *["---:"] * len(grid.columns)])]
    for line in grid.lines:
        label = _md(line.label) if line.kind == "ours" else f"*{_md(line.label)}*"
        lines.append(_row([label, *(_md_entry(entry) for entry in line.entries)]))
    lines += ["", " ".join(map(_md, grid.caption))]
    if grid.footnotes or grid.notes:
        lines.append("")
    lines += [f"- <sup>{n}</sup> {_md(text)}." for n, text in enumerate(grid.footnotes, 1)]
    lines += [f"- {_md(note)}" for note in grid.notes]
    if grid.fills:
        lines += ["", "Commands that fill what is missing:", ""]
        lines += [f"- {_md(row)}: `{command}`" for row, command in grid.fills]
    if grid.runs:
        lines += ["", "<details><summary>Runs of each row, by scenario, as seed:key"]
        lines[-1] += "</summary>\n"
        for row, scenarios in grid.runs.items():
            said = "; ".join(f"{name}: {' '.join(keys)}" for name, keys in scenarios.items())
            lines.append(f"- {_md(row)}: {_md(said)}")
        lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _md(text: str) -> str:
    return re.sub(r"([|*_<>\\])", r"\\\1", text).replace("\n", " ")


def _md_entry(entry: Entry | None) -> str:
    if entry is None:
        return ""
    text = entry.text
    if entry.mark == "best":
        text = f"**{text}**"
    elif entry.mark == "second":
        text = f"<u>{text}</u>"
    marks = ",".join(str(n + 1) for n in entry.footnotes)
    return f"{text} <sup>{marks}</sup>" if marks else text


def csv_text(grid: Grid) -> str:
    """Return a table as tidy CSV: one row for each of its cells, with run keys and command."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    lines = {(line.row, line.kind): line for line in grid.lines}
    for row in dict.fromkeys(line.row for line in grid.lines):
        ours, published = lines.get((row, "ours")), lines.get((row, "published"))
        gap = lines.get((row, "difference"))
        for n, column in enumerate(grid.columns):
            mine = ours.entries[n] if ours else None
            paper = published.entries[n] if published else None
            if mine is None and paper is None:
                continue
            values = {
                "table": grid.name,
                "row": row,
                **(ours or published).facts,  # type: ignore[union-attr]
                "group": column.group,
                "column": column.head,
                "kind": column.kind,
                **column.facts,
            }
            if mine is not None:
                values |= _csv_entry(mine)
            if paper is not None:
                values["published"] = _full(paper.value)
                values["published_source"] = paper.source
                values["footnotes"] = "; ".join(
                    grid.footnotes[n] for e in (mine, paper) if e for n in e.footnotes
                )
                if gap is not None:
                    difference = gap.entries[n]
                    values["difference"] = _full(difference.value) if difference else ""
            elif mine is not None:
                values["footnotes"] = "; ".join(grid.footnotes[n] for n in mine.footnotes)
            writer.writerow(values)
    return out.getvalue()


def _csv_entry(entry: Entry) -> dict[str, str]:
    return {
        "value": _full(entry.value),
        "std": _full(entry.std),
        "seeds": " ".join(map(str, entry.seeds)),
        "text": "" if entry.fill else entry.text,
        "mark": entry.mark or "",
        "low": _full(entry.low),
        "high": _full(entry.high),
        "run_keys": " ".join(entry.keys),
        "fill": entry.fill,
    }


def _full(value: float | None) -> str:
    return "" if value is None else f"{value:.10g}"


# --------------------------------------------------------------------------------- LaTeX

_TEX: Mapping[str, str] = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "\u2013": "--",
}


def tex(text: str) -> str:
    """Return a text with what LaTeX would read as commands written out."""
    return "".join(_TEX.get(letter, letter) for letter in text)


def latex(grid: Grid) -> str:
    r"""Return a table for ``\input`` into a document that uses booktabs and graphicx."""
    width = len(grid.columns)
    lines = [
        r"% \usepackage{booktabs,graphicx}; runs of each row, by scenario, as seed:key:",
        *(
            f"% {row}: " + "; ".join(f"{n}: {' '.join(keys)}" for n, keys in scenarios.items())
            for row, scenarios in grid.runs.items()
        ),
        *(f"% missing, {row}: {command}" for row, command in grid.fills),
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{tex(grid.title)}. {' '.join(map(tex, grid.caption))}}}",
        rf"\label{{tab:{re.sub(r'[^A-Za-z0-9-]+', '-', grid.name)}}}",
        r"\smallskip",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{l{'r' * width}}}",
        r"\toprule",
    ]
    if any(column.group for column in grid.columns):
        heads, rules, at = [""], [], 2
        for head, count in grid.groups():
            heads.append(rf"\multicolumn{{{count}}}{{c}}{{{tex(head)}}}")
            if head:
                rules.append(rf"\cmidrule(lr){{{at}-{at + count - 1}}}")
            at += count
        lines += [" & ".join(heads) + r" \\", " ".join(rules)]
    lines += [_tex_row(["", *(tex(column.head) for column in grid.columns)]), r"\midrule"]
    for line in grid.lines:
        label = tex(line.label)
        first = label if line.kind == "ours" else rf"\quad\textit{{{label}}}"
        lines.append(_tex_row([first, *map(_tex_entry, line.entries)]))
    lines += [r"\bottomrule", r"\end{tabular}}"]
    notes = [
        *(rf"$^{{{n}}}$ {tex(text)}." for n, text in enumerate(grid.footnotes, 1)),
        *map(tex, grid.notes),
    ]
    if notes:
        lines += [r"\par\smallskip\begin{minipage}{\linewidth}\footnotesize"]
        lines += [r"\par ".join(notes), r"\end{minipage}"]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def _tex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _tex_entry(entry: Entry | None) -> str:
    if entry is None:
        return ""
    text = re.sub(r"(?<![\w.])-(?=\d)", "$-$", tex(entry.text))  # a minus, not a hyphen
    if entry.mark == "best":
        text = rf"\textbf{{{text}}}"
    elif entry.mark == "second":
        text = rf"\underline{{{text}}}"
    marks = ",".join(str(n + 1) for n in entry.footnotes)
    return f"{text}$^{{{marks}}}$" if marks else text


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


WRITERS: Mapping[str, Callable[[Grid], str]] = {
    "md": markdown,
    "tex": latex,
    "csv": csv_text,
    "html": html,
}
"""Format -> writer; formats are also the files' endings."""
