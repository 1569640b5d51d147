"""Make a table with numbers from a description and records.

Every cell is a function of the rows' numbers; footnotes are part of the cells that refer to them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from feddg_bench.analysis.tables import captions
from feddg_bench.analysis.tables.caveats import row_footnotes
from feddg_bench.analysis.tables.columns import (
    Column,
    Kind,
    MeasuredColumn,
    measured_columns,
    shown_columns,
)
from feddg_bench.analysis.tables.commands import fill_commands, merged
from feddg_bench.analysis.tables.describe import COMPARED, RECIPES, Description, RunFilter
from feddg_bench.analysis.tables.grid import DASH, MARKS, REFERENCE, Bold, Entry, Grid, Line, Mark
from feddg_bench.analysis.tables.rows import Row, by_round, choose_rows, fill_rows, on_split
from feddg_bench.analysis.tables.setups import departures
from feddg_bench.analysis.tables.sheet import Sheet
from feddg_bench.records.metrics import METRICS
from feddg_bench.records.published import Published, published_accuracy, published_number
from feddg_bench.records.robustness import at_equal_id
from feddg_bench.records.rules import CHOOSING, Rule
from feddg_bench.records.runs import RecordedRun
from feddg_bench.records.statistics import (
    FEWEST,
    Estimate,
    Sample,
    average_ranks,
    best_rows,
    by_seed,
    improvement,
    iqm,
    is_blind,
    mean_and_std,
    t_interval,
)

_MARKED: tuple[Kind, ...] = ("measured", "mean")
PUBLISHED: tuple[Kind, ...] = ("measured", "mean", "p_value")
"""Kinds of columns that papers print."""


def build(
    name: str,
    description: Description,
    runs: Sequence[RecordedRun],
    *,
    select: Rule | None = None,
    any_paper: bool = False,
    variants: bool = False,
    bold: Bold = "tested",
    rows: Sequence[Row] | None = None,
    fills: bool = True,
) -> Grid:
    """Return a table.

    Args:
        name: Stem of its files.
        description: Its rows and columns.
        runs: Runs of one setup, unless all its variants are wanted.
        select: Selection rule in place of the description's.
        any_paper: Whether to show, below a measured number, one that any paper publishes for the
            same scenario.
        variants: Whether runs of a row that differ in settings become separate rows.
        bold: Rows to mark: see `Bold`.
        rows: Result of `choose_rows` for this description, or for another one of the same runs.
        fills: Whether to make commands for missing cells.

    Raises:
        DataError: If one cell would average runs with different settings.
        SettingsError: If several published numbers fit a cell.
    """
    columns = measured_columns(description, select)
    chosen = choose_rows(description, columns, runs, variants) if rows is None else rows
    sheet = Sheet(description, columns, fill_rows(name, description, columns, chosen))
    groups = description.groups
    if sheet.collapsed:
        groups = [group.led_by_iqm() for group in groups]
    rows, silent = sheet.rows, sheet.silent
    shown = tuple(
        column
        for column in shown_columns(description.model_copy(update={"groups": groups}), columns)
        if not column.numbers <= silent
    )
    missing = [_fills(sheet, row) if fills else _NOTHING for row in rows]
    cells = [_marked(sheet, column, bold, list(_cells(sheet, column, missing))) for column in shown]
    footnotes = row_footnotes(sheet, variants=variants)
    elsewhere: dict[str, str] = {}
    lines: list[Line] = []
    for place, row in enumerate(rows):
        facts = {"method": row.method}
        if row.where is not None:
            of_runs = {
                "recipe": "; ".join(sorted({run.recipe for run in row.members})),
                "variant": row.variant.label,
            }
            ours = tuple(entries[place] for entries in cells)
            said = tuple(footnotes[row])
            lines.append(Line("ours", row.label, row.label, ours, facts | of_runs, said))
        published: list[Entry | None] = []
        for column in shown:
            found, apart = (
                _of_any_paper(rows, row, column)
                if any_paper
                else (of_table(description, row, column), {})
            )
            published.append(None if found is None else _printed(found, column))
            elsewhere |= apart
        if any(published):
            label = row.label if row.where is None else "published"
            lines.append(Line("published", row.label, label, tuple(published), facts))
        gaps = tuple(
            _gap(entries[place], paper, column)
            for entries, paper, column in zip(cells, published, shown, strict=True)
        )
        if any(gaps) and not sheet.outside[row]:
            lines.append(Line("difference", row.label, "difference", gaps, facts))
    oracle = any(column.rule == "oracle" for column in columns if column.split)
    return Grid(
        name,
        description.title + " (ORACLE selection)" * oracle,
        captions.caption(sheet),
        shown,
        tuple(lines),
        captions.notes(sheet, lines, elsewhere),
        _commands(missing, {column.number for column in columns} - silent),
        {row.label: _runs(row) for row in rows if row.members},
        tuple(_absent(sheet, missing)),
    )


# --------------------------------------------------------------------------------- cells

_Missing = tuple[str, Mapping[int, str]]
"""A row's label, and the commands that fill its cells by column."""
_NOTHING: _Missing = ("", {})


def _cells(sheet: Sheet, column: Column, missing: Sequence[_Missing]) -> Iterator[Entry]:
    """Yield a column's cells, from top to bottom."""
    kind, numbers, places = column.kind, column.numbers, sheet.wanted(column.sources)
    compared, worst = kind in COMPARED, kind == "worst"
    curve: list[tuple[Sample, Sample]] = []
    if kind == "rank" and places:
        samples = [row.part(numbers) for row in sheet.rows]
        lower = sheet.description.lower_is_better
        ranks = average_ranks(samples, places, lower_is_better=lower, tie=sheet.tie)
    elif kind == "excess" and sheet.reference and sheet.description.unit == "%":
        curve = _curve(sheet.reference, column)
    for place, (row, (_, fills)) in enumerate(zip(sheet.rows, missing, strict=True)):
        part = row.part(numbers)
        seeds = by_seed(part, places, worst=worst) if places else {}
        keys = tuple(
            dict.fromkeys(
                run.key
                for source in column.sources
                for run in row.runs.get(source.number, ())
                if compared or run.seed in seeds
            )
        )
        if not seeds and not (compared and part):
            fill = next((fills[s.number] for s in column.sources if s.number in fills), "")
            silent = [_silence(source) for source in column.sources if source.number in row.silent]
            yield Entry(None, fill=fill, footnotes=tuple(silent[:1]))
        elif compared:
            entry = _compared(sheet, row, column, keys, curve)
            alike = row is not sheet.reference and part == (sheet.reference or row).part(numbers)
            same = alike and kind not in ("wins", "compute")
            yield replace(entry, text=DASH) if same else entry
        elif kind == "rank":
            rank = ranks[place]
            yield Entry(None) if rank is None else Entry(rank, f"{rank:.1f}", keys=keys)
        else:
            fewer = list(seeds) != sheet.seeds
            notes = (f"over {captions.seeds_text(seeds)} alone",) if fewer else ()
            yield _own(sheet, row, column, seeds, keys, notes)


def _own(
    sheet: Sheet,
    row: Row,
    column: Column,
    seeds: Mapping[int, float],
    keys: tuple[str, ...],
    notes: tuple[str, ...],
) -> Entry:
    """Return a row's entry that depends on no other row; ``seeds`` holds its complete seeds."""
    if column.kind == "iqm":
        whole = {p: v for p, v in row.part(column.numbers).items() if p[1] in seeds}
        return _estimate(iqm(whole), column.decimals, keys, notes)
    if column.kind == "id_test":
        seeds = by_seed(_known(row, column), sheet.wanted(column.sources))
        if not seeds:
            return Entry(None)
    values = list(seeds.values())
    mean, std = mean_and_std(values)
    spread, low, high = std, None, None
    if sheet.description.spread == "interval":
        low, high = _ends(t_interval(np.array(values)))
        spread = None if high is None else high - mean
    said = f"{mean:z.{column.decimals}f}"
    said += "" if spread is None else f" ± {spread:.{column.decimals}f}"
    return Entry(mean, said, std, tuple(seeds), low, high, keys=keys, footnotes=notes)


def _compared(
    sheet: Sheet,
    row: Row,
    column: Column,
    keys: tuple[str, ...],
    curve: Sequence[tuple[Sample, Sample]],
) -> Entry:
    """Return a row's comparison with the reference row; ``curve`` holds the latter's rounds."""
    if (reference := sheet.reference) is None:
        why = f"there is no run of {sheet.description.against} to compare with"
        return Entry(None, footnotes=(why,))
    if column.kind == "compute":
        ratio = _operations(row, reference, column)
        return Entry(ratio, DASH if ratio is None else f"{ratio:.2f}", keys=keys)
    if row is reference:
        return Entry(None, REFERENCE, keys=keys)
    kind, digits = column.kind, column.decimals
    mine, theirs = row.part(column.numbers), reference.part(column.numbers)
    if kind == "improvement":
        lower = sheet.description.lower_is_better
        return _estimate(improvement(mine, theirs, lower_is_better=lower), 2, keys)
    if kind == "excess":
        known = (_known(row, column), mine), (_known(reference, column), theirs)
        above = at_equal_id(*known, curve)
        return Entry(None) if above is None else _estimate(above, digits, keys, signed=True)
    found = sheet.comparisons[column.numbers][row]
    if not found.units:
        return Entry(None)
    if kind == "wins":
        return Entry(None, f"{found.wins}/{found.ties}/{found.losses}", keys=keys)
    if kind in ("p_value", "p_same"):
        value = found.p_value if kind == "p_value" else found.p_same
        if row in sheet.outside_family:
            return Entry(None, keys=keys)
        if math.isnan(value):
            if kind == "p_same":
                return Entry(None, captions.TOO_FEW, keys=keys)
            few = (captions.UNTESTED,) if found.units >= FEWEST else ()
            return Entry(None, keys=keys, footnotes=few)
        doubts: tuple[str, ...] = ()
        if row in sheet.collapsed:
            doubts = ("a t-test of means does not hold where runs collapse",)
        elif kind == "p_value" and is_blind(mine, theirs):
            doubts = (
                "the seeds of one unit scatter far more than those of the others, so this test "
                "has low power",
            )
        return Entry(value, p_text(value), keys=keys, footnotes=doubts)
    if kind == "detectable":
        return _estimate(Estimate(found.detectable), digits, keys)
    return _estimate(found.difference, digits, keys, signed=True)


def _operations(row: Row, reference: Row, column: Column) -> float | None:
    """Return a row's operations over the reference's; ``None`` if a record does not count them."""
    mine, theirs = (
        {
            (run.dataset, run.protocol, run.scenario, run.seed): run.costs.get("teraflop")
            for source in column.sources
            for run in of.runs.get(source.number, ())
        }
        for of in (row, reference)
    )
    pairs = [(value, theirs[run]) for run, value in mine.items() if run in theirs]
    known = [(ours, other) for ours, other in pairs if ours is not None and other is not None]
    if not known or len(known) < len(pairs):
        return None
    total = math.fsum(other for _, other in known)  # 0 if no client was asked
    return math.fsum(ours for ours, _ in known) / total if total else None


def _known(row: Row, column: Column) -> Sample:
    """Return a row's numbers on `id_test` in the runs of a column."""
    each = (on_split(row, source, "id_test") for source in column.sources)
    return {place: value for found in each for place, value in found.items()}


def _curve(row: Row, column: Column) -> list[tuple[Sample, Sample]]:
    """Return a row's numbers on `id_test` and in a column after each evaluated round."""
    if any(source.split is None for source in column.sources):
        return []
    known, held = (by_round(row, column.sources, split) for split in ("id_test", None))
    return [(known[number], held[number]) for number in sorted(known.keys() & held.keys())]


def _marked(sheet: Sheet, column: Column, bold: Bold, entries: list[Entry]) -> list[Entry]:
    """Return a column's cells with the best and the second-best marked."""
    places, lower = sheet.wanted(column.sources), sheet.description.lower_is_better
    if column.kind not in _MARKED or not places or bold == "none":
        return entries
    if bold == "tested":
        parts = [row.part(column.numbers) for row in sheet.rows]
        tested = best_rows(parts, places, lower_is_better=lower)
        marks: dict[int | None, Mark] = dict(zip(tested, MARKS, strict=True))
        return [
            replace(entry, mark=marks[place]) if place in marks else entry
            for place, entry in enumerate(entries)
        ]
    digits = column.decimals  # rows with the same printed number share a mark
    printed = [None if e.value is None else round(e.value, digits) for e in entries]
    best = sorted({value for value in printed if value is not None}, reverse=not lower)
    by_value = dict(zip(best, MARKS, strict=False))
    return [
        entry if value is None else replace(entry, mark=by_value.get(value))
        for entry, value in zip(entries, printed, strict=True)
    ]


def _estimate(
    found: Estimate,
    decimals: int,
    keys: tuple[str, ...],
    footnotes: tuple[str, ...] = (),
    *,
    signed: bool = False,
) -> Entry:
    """Return a number with its interval, if it has one."""
    if math.isnan(found.value):
        return Entry(None)
    low, high = _ends(found)
    said = found.text(decimals, signed=signed)
    return Entry(found.value, said, low=low, high=high, keys=keys, footnotes=footnotes)


def _ends(found: Estimate) -> tuple[float | None, float | None]:
    """Return the ends of an interval; ``None`` if there is none."""
    low, high = (None if math.isnan(end) else end for end in (found.low, found.high))
    return low, high


def p_text(value: float) -> str:
    """Return a p-value as text, a dash for NaN."""
    if math.isnan(value):
        return DASH
    return "<0.0001" if value < 1e-4 else f"{value:.4f}" if value < 0.01 else f"{value:.3f}"


def _silence(column: MeasuredColumn) -> str:
    """Return why a row's runs have no number for a column."""
    chooses = CHOOSING.get(column.rule)
    known = METRICS.get(column.metric)
    where = "" if known and known.clients else f" on {column.split or 'a run'}"
    lacks = f"measure {column.metric}{where}{known.remedy if known else ''}"
    if chooses and chooses != column.split:
        return (
            f"rule {column.rule} needs the split {chooses}, which these runs lack, or they do not "
            f"{lacks}"
        )
    return f"these runs do not {lacks}"


# ----------------------------------------------------------------------------- published


def of_table(description: Description, row: Row, column: Column) -> Published | None:
    """Return the number that the table's paper prints in a cell, if there is one.

    Method, data set, split, domain and metric come from the row and the column, unless the
    description gives other values for the file of published numbers.
    """
    paper, table, told = description.paper, description.table, row.spec.published
    if paper is None or table is None or told is None or column.kind not in PUBLISHED:
        return None
    first = column.sources[0]
    guess: RunFilter = {"method": row.method, "metric": first.metric, "split": first.split or ""}
    if isinstance(first.where.get("dataset"), str):
        guess = {**guess, "dataset": first.where["dataset"]}
    domain = first.where.get(first.split) if first.split else None
    if column.kind == "mean":
        domain = "AVG"
    if isinstance(domain, str):
        guess = {**guess, "domain": domain}
    if column.kind == "p_value":
        guess = {**guess, "metric": "p_value"}
    where = {**guess, **told, **column.published}
    return published_number(paper, table, {key: str(value) for key, value in where.items()})


def _of_any_paper(
    rows: Sequence[Row], row: Row, column: Column
) -> tuple[Published | None, dict[str, str]]:
    """Return the number that any paper publishes for a measured column's scenario.

    For a mean over columns, it is the mean of their numbers, if all columns have one. The second
    part explains why a published number is left out: its source -> how the setup differs.
    """
    found: list[Published] = []
    for source in column.sources if column.kind in _MARKED else ():
        if source.split not in ("val", "test") or source.metric != "accuracy":
            return None, {}
        run = next((r for other in rows for r in other.runs.get(source.number, ())), None)
        if run is None:
            return None, {}
        number = published_accuracy(
            row.method,
            run.dataset,
            run.protocol,
            run.train.split("+"),
            run.get(source.split),
            source.split,
        )
        if number is None:
            return None, {}
        own = row.runs.get(source.number) or [run]
        recipe = RECIPES[number.row["paper"]]
        if other := departures(own[0].settings, recipe, run.dataset, row.method):
            return None, {number.source: ", ".join(other)}
        found.append(number)
    if not found:
        return None, {}
    mean = fmean(number.value for number in found)
    sources = "; ".join(dict.fromkeys(number.source for number in found))
    return Published(mean, sources), {}


def _printed(found: Published, column: Column) -> Entry:
    """Return a published number as a cell."""
    notes: tuple[str, ...] = ()
    if found.wrong_mean is not None:
        wrong = f"the published average {found.value:g} is not the mean of its published "
        notes = (f"{wrong}columns, {found.wrong_mean:.2f}",)
    form = ".3g" if column.kind == "p_value" else f".{column.decimals}f"
    return Entry(found.value, f"{found.value:{form}}", source=found.source, footnotes=notes)


def _gap(ours: Entry, published: Entry | None, column: Column) -> Entry | None:
    """Return the difference from a published number, if both numbers exist."""
    if ours.value is None or published is None or published.value is None:
        return None
    found = ours.value - published.value
    return None if column.kind == "p_value" else Entry(found, f"{found:+z.{column.decimals}f}")


# --------------------------------------------------------------------------------- notes


def _fills(sheet: Sheet, row: Row) -> _Missing:
    """Return the commands that fill a row's cells; all cells if its runs have another setup."""
    if row.where is None:
        return _NOTHING
    missing: Sequence[MeasuredColumn] = [
        column
        for column in sheet.columns
        if not by_seed(row.part([column.number]), sheet.places[column.number])
        and column.number not in row.silent
    ]
    if sheet.outside[row]:
        inside = any(other.spec is row.spec and not sheet.outside[other] for other in sheet.rows)
        row, missing = Row(row.spec, row.spec.label, row.where), [] if inside else sheet.columns
    scenarios = {n: [place[2] for place in u] for n, u in sheet.places.items()}
    return row.label, fill_commands(sheet.description, row, missing, scenarios, sheet.seeds)


def _commands(missing: Sequence[_Missing], numbers: Collection[int]) -> tuple[tuple[str, str], ...]:
    """Return the labels of rows and the commands that fill some columns."""
    return tuple(
        dict.fromkeys(
            (label, command)
            for label, fills in missing
            for number, command in fills.items()
            if number in numbers
        )
    )


def _absent(sheet: Sheet, missing: Sequence[_Missing]) -> Iterator[tuple[str, str]]:
    """Yield the heads of groups without runs, and the command that fills them."""
    heads: dict[str, list[str]] = {}
    for number in sorted({c.group for c in sheet.columns if c.number in sheet.silent}):
        mine = [c.number for c in sheet.columns if c.group == number]
        commands = " && ".join(merged(command for _, command in _commands(missing, mine)))
        heads.setdefault(commands, []).append(sheet.description.groups[number].head)
    yield from ((", ".join(filter(None, of)), commands) for commands, of in heads.items())


def _runs(row: Row) -> dict[str, tuple[str, ...]]:
    """Return ``seed:key`` of a row's runs by scenario, and by data set if there are several."""
    found: dict[str, list[str]] = {}
    several = len({(run.dataset, run.protocol) for run in row.members}) > 1
    for run in sorted(row.members, key=lambda run: (run.seed, run.key)):
        name = f"{run.dataset} {run.protocol} {run.scenario}" if several else run.scenario
        found.setdefault(name, []).append(f"{run.seed}:{run.key}")
    return {name: tuple(found[name]) for name in sorted(found)}
