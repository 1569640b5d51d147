"""HTML of a table: one file that asks for no other."""

from __future__ import annotations

from html import escape

from feddg_bench.analysis.tables.grid import Column, Entry, Grid, Line

STYLE = """
:root{color-scheme:light dark;--soft:#555;--line:#ddd;--missing:#a00}
@media(prefers-color-scheme:dark){:root{--soft:#aaa;--line:#444;--missing:#f88}}
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:90rem;padding:0 1rem;
background:Canvas;color:CanvasText}h1{font-size:1.5rem}h2{font-size:1.2rem}
.wide{overflow-x:auto}table{border-collapse:separate;border-spacing:0;border-top:2px solid;
border-bottom:2px solid;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:Canvas}
thead tr:last-child>*{border-bottom:1px solid}
th.group{text-align:center;border-bottom:1px solid var(--line)}
tr.ours~tr.ours>*{border-top:1px solid var(--line)}
tr.published,tr.difference{color:var(--soft);font-style:italic}tr.published th,tr.difference th{
font-weight:normal;padding-left:1.6rem}td.missing{color:var(--missing);cursor:help}
code{font-size:.85em;overflow-wrap:anywhere}
"""


def html(grid: Grid) -> str:
    """Return a table as a page; a cell's title says its runs, or the command that fills it."""
    notes = [f"<li><sup>{n}</sup> {escape(t)}.</li>" for n, t in enumerate(grid.footnotes, 1)]
    notes += [f"<li>{escape(note)}</li>" for note in grid.notes]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(grid.title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(grid.title)}</h1>",
        f'<div class="wide"><table id="{escape(grid.name)}"><thead>',
        *_heads(grid),
        "</thead><tbody>",
        *(_line(line, grid.columns) for line in grid.lines),
        "</tbody></table></div>",
        f"<p>{escape(' '.join(grid.caption))}</p>",
    ]
    if notes:
        parts += ["<ul>", *notes, "</ul>"]
    if grid.fills:
        parts += ["<h2>Commands that fill what is missing</h2><ul>"]
        parts += [
            f"<li>{escape(row)}: <code>{escape(command)}</code></li>" for row, command in grid.fills
        ]
        parts += ["</ul>"]
    if grid.runs:
        parts.append("<details><summary>Runs of each row, by scenario, as seed:key")
        parts.append("</summary><ul>")
        for row, scenarios in grid.runs.items():
            said = "; ".join(f"{name}: {' '.join(keys)}" for name, keys in scenarios.items())
            parts.append(f"<li>{escape(row)}: <code>{escape(said)}</code></li>")
        parts += ["</ul></details>"]
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _heads(grid: Grid) -> list[str]:
    rows = []
    if any(column.group for column in grid.columns):
        groups = "".join(
            f'<th class="group" colspan="{count}" scope="colgroup">{escape(head)}</th>'
            for head, count in grid.groups()
        )
        rows.append(f"<tr><td></td>{groups}</tr>")
    heads = "".join(f'<th scope="col">{escape(column.head)}</th>' for column in grid.columns)
    return [*rows, f"<tr><td></td>{heads}</tr>"]


def _line(line: Line, columns: tuple[Column, ...]) -> str:
    cells = "".join(_cell(entry) for entry, _ in zip(line.entries, columns, strict=True))
    return f'<tr class="{line.kind}"><th scope="row">{escape(line.label)}</th>{cells}</tr>'


def _cell(entry: Entry | None) -> str:
    if entry is None:
        return "<td></td>"
    text = escape(entry.text)
    if entry.mark == "best":
        text = f"<b>{text}</b>"
    elif entry.mark == "second":
        text = f"<u>{text}</u>"
    if entry.footnotes:
        text += f"<sup>{','.join(str(n + 1) for n in entry.footnotes)}</sup>"
    about = ""
    if entry.fill:
        about = f' class="missing" title="{escape(entry.fill)}"'
    elif entry.keys:
        keys = escape(" ".join(entry.keys))
        about = f' title="runs {keys}" data-runs="{keys}"'
    elif entry.source:
        about = f' title="{escape(entry.source)}"'
    return f"<td{about}>{text}</td>"
