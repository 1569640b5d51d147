"""From a description and records to a table with numbers in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from feddg_bench.analysis.tables import captions, papers
from feddg_bench.analysis.tables.columns import (
    Measured,
    Shown,
    measured_columns,
    shown_columns,
    varied_keys,
)
from feddg_bench.analysis.tables.commands import fill_commands
from feddg_bench.analysis.tables.describe import Description
from feddg_bench.analysis.tables.entries import DASH, compared, gap, silence
from feddg_bench.analysis.tables.grid import Entry, Grid, Kind, Line
from feddg_bench.analysis.tables.rows import Row, make_rows
from feddg_bench.records.metrics import find_metric
from feddg_bench.records.rules import Rule
from feddg_bench.records.runs import Run
from feddg_bench.records.statistics import (
    TIE,
    Comparison,
    Unit,
    average_ranks,
    best_rows,
    by_seed,
    compare,
    mean_and_std,
)

MARKED: tuple[Kind, ...] = ("measured", "mean")
COMPARED: tuple[Kind, ...] = ("wins", "difference", "p_value")


def build(
    name: str,
    description: Description,
    runs: Sequence[Run],
    *,
    select: Rule | None = None,
    any_paper: bool = False,
) -> Grid:
    """Return a table.

    Args:
        name: Stem of its files.
        description: Rows and columns.
        runs: Records, of this table and of others.
        select: Selection rule instead of the description's.
        any_paper: Put the number of any paper beside a measured one whose scenario it has.

    Raises:
        DataError: If one cell would average runs with different settings.
        SettingsError: If several published numbers fit a cell.
    """
    columns = measured_columns(description, select)
    rows = make_rows(name, description, columns, runs)
    return _Builder(name, description, columns, rows, any_paper=any_paper).grid()


class _Builder:
    """Fills a table; what it gathers on the way are footnotes.

    Args:
        name: Stem of its files.
        description: Rows and columns.
        columns: Measured columns.
        rows: Rows with their samples.
        any_paper: See `build`.
    """

    def __init__(
        self,
        name: str,
        description: Description,
        columns: Sequence[Measured],
        rows: Sequence[Row],
        *,
        any_paper: bool,
    ) -> None:
        self.name, self.description = name, description
        self.columns, self.rows, self.any_paper = columns, rows, any_paper
        found: dict[int, set[Unit]] = {column.number: set() for column in columns}
        for row in rows:
            for unit, _ in row.sample:
                found[unit[0]].add(unit)
        self.units = {number: sorted(units) for number, units in found.items()}
        self.seeds = sorted({seed for row in rows for _, seed in row.sample})
        self.footnotes: list[str] = []
        self.fills: dict[tuple[str, str], None] = {}
        self.reference = _reference(rows, description.against)
        self.compared: dict[tuple[int, frozenset[int]], Comparison] = {}
        self.ranks: dict[tuple[Unit, ...], list[float | None]] = {}
        # Accuracies tie within TIE whatever their table prints; others if they print the same.
        self.tie = TIE if description.unit == "%" else 0.5 * 10.0**-description.decimals

    def grid(self) -> Grid:
        shown = shown_columns(self.description, self.columns)
        ours = [self._line(row, shown) for row in self.rows]
        for position, column in enumerate(shown):
            self._mark(ours, position, column)
        lines: list[Line] = []
        for row, line in zip(self.rows, ours, strict=True):
            published = [self._published(row, column) for column in shown]
            if row.where is not None:
                lines.append(line)
            if any(published):
                label = row.label if row.where is None else "published"
                facts = {"method": row.method}
                lines.append(Line("published", row.label, label, tuple(published), facts))
                gaps = [
                    gap(e, p, c) for e, p, c in zip(line.entries, published, shown, strict=True)
                ]
                if any(gaps):
                    lines.append(Line("difference", row.label, "difference", tuple(gaps), facts))
        return Grid(
            self.name,
            self._title(),
            self._caption(lines),
            tuple(column.column for column in shown),
            tuple(lines),
            tuple(self.footnotes),
            self._notes(),
            tuple(self.fills),
            {row.label: _runs(row) for row in self.rows if row.variant is not None},
        )

    def _wanted(self, shown: Shown) -> list[Unit] | None:
        """Return the scenarios of a column; ``None`` if one of its sources has none in any row."""
        if not all(self.units[column.number] for column in shown.sources):
            return None
        return [unit for column in shown.sources for unit in self.units[column.number]]

    # ----------------------------------------------------------------------------- cells

    def _line(self, row: Row, shown: Sequence[Shown]) -> Line:
        if row.where is None:
            return Line("ours", row.label, row.label, (None,) * len(shown))
        missing = [
            column
            for column in self.columns
            if not by_seed(row.part((column.number,)), self.units[column.number])
            and column.number not in row.silent
        ]
        scenarios = {n: [unit[1].split(" ")[-1] for unit in u] for n, u in self.units.items()}
        fills = fill_commands(self.description, row, missing, scenarios, self.seeds)
        for command in fills.values():
            self.fills[row.label, command] = None
        entries = tuple(self._entry(row, column, fills) for column in shown)
        variant = row.variant
        facts = {
            "method": row.method,
            "recipe": "; ".join(sorted({r.recipe for r in variant.runs})) if variant else "",
            "variant": variant.label if variant else "",
        }
        return Line("ours", row.label, row.label, entries, facts)

    def _entry(self, row: Row, shown: Shown, fills: Mapping[int, str]) -> Entry:
        kind, units = shown.kind, self._wanted(shown)
        part = row.part(shown.numbers)
        seeds = by_seed(part, units, worst=kind == "worst") if units else {}
        keys = tuple(
            dict.fromkeys(
                run.key
                for column in shown.sources
                for run in row.runs.get(column.number, ())
                if kind in COMPARED or run.seed in seeds
            )
        )
        if not seeds and not (kind in COMPARED and part):
            silent = [column for column in shown.sources if column.number in row.silent]
            fill = next((fills[c.number] for c in shown.sources if c.number in fills), "")
            notes = (self._footnote(silence(silent[0])),) if silent else ()
            return Entry(None, DASH, fill=fill, footnotes=notes)
        if kind == "rank":
            return self._rank(row, units or [], keys)
        if kind in COMPARED:
            return self._compared(row, shown, keys)
        mean, std = mean_and_std(list(seeds.values()))
        decimals = shown.column.decimals
        said = f"{mean:.{decimals}f}" + ("" if std is None else f" ± {std:.{decimals}f}")
        fewer = list(seeds) != self.seeds
        notes = (self._footnote(f"over {captions.seeds_text(seeds)} alone"),) if fewer else ()
        return Entry(mean, said, std, tuple(seeds), keys=keys, footnotes=notes)

    def _published(self, row: Row, shown: Shown) -> Entry | None:
        if self.any_paper:
            found = papers.of_any_paper(self.rows, row, shown)
        else:
            found = papers.of_table(self.description, row, shown)
        if found is None:
            return None
        notes: tuple[int, ...] = ()
        if found.wrong_mean is not None:
            notes = (self._footnote(captions.wrong_average(found)),)
        decimals = shown.column.decimals
        said = f"{found.value:.3g}" if shown.kind == "p_value" else f"{found.value:.{decimals}f}"
        return Entry(found.value, said, source=found.source, footnotes=notes)

    def _rank(self, row: Row, units: Sequence[Unit], keys: tuple[str, ...]) -> Entry:
        key = tuple(units)
        if key not in self.ranks:
            samples = [other.sample for other in self.rows]
            lower = self.description.lower_is_better
            self.ranks[key] = average_ranks(samples, units, lower_is_better=lower, tie=self.tie)
        rank = self.ranks[key][self.rows.index(row)]
        if rank is None:
            return Entry(None, DASH)
        return Entry(rank, f"{rank:.1f}", keys=keys)

    def _compared(self, row: Row, shown: Shown, keys: tuple[str, ...]) -> Entry:
        """Return the comparison of a row with the reference row."""
        if self.reference is None:
            why = f"there is no run of {self.description.against} to compare with"
            return Entry(None, DASH, footnotes=(self._footnote(why),))
        if row is self.reference:
            return Entry(None, "reference", keys=keys)
        mark = (self.rows.index(row), shown.numbers)
        if mark not in self.compared:
            self.compared[mark] = compare(
                row.part(shown.numbers),
                self.reference.part(shown.numbers),
                lower_is_better=self.description.lower_is_better,
                tie=self.tie,
            )
        return compared(self.compared[mark], shown.column, keys)

    def _mark(self, lines: list[Line], position: int, shown: Shown) -> None:
        """Mark the best and the second row of a column where a test supports it."""
        units = self._wanted(shown)
        if shown.kind not in MARKED or units is None:
            return
        samples = [row.sample for row in self.rows]
        lower = self.description.lower_is_better
        best, second = best_rows(samples, units, lower_is_better=lower)
        for number, mark in ((best, "best"), (second, "second")):
            if number is not None:
                entries = list(lines[number].entries)
                entry = entries[position]
                if entry is not None:
                    entries[position] = replace(entry, mark=mark)  # type: ignore[arg-type]
                lines[number] = replace(lines[number], entries=tuple(entries))

    # ----------------------------------------------------------------------------- captions

    def _footnote(self, sentence: str) -> int:
        if sentence not in self.footnotes:
            self.footnotes.append(sentence)
        return self.footnotes.index(sentence)

    def _title(self) -> str:
        oracle = any(column.rule == "oracle" for column in self.columns if column.split)
        return self.description.title + (" (ORACLE selection)" if oracle else "")

    def _caption(self, lines: Sequence[Line]) -> tuple[str, ...]:
        runs = [run for row in self.rows if row.variant for run in row.variant.runs]
        metrics = {column.metric for column in self.columns}
        metric = find_metric(metrics.pop()).title if len(metrics) == 1 else "numbers"
        unit = f" in {self.description.unit}" if self.description.unit else ""
        said = []
        if self.seeds:
            over = ", mean ± sample standard deviation over seeds" if len(self.seeds) > 1 else ""
            said.append(f"{metric}{unit}{over}; {captions.seeds_text(self.seeds)}")
        else:
            said.append(f"{metric}{unit}; there are no runs of this table yet")
        rules = [column.rule for column in self.columns if column.split is not None]
        if rules:
            said.append(captions.rule_sentence(rules, {run.metric.name for run in runs}))
        said += captions.frame(runs, varied_keys(self.description))
        if len(self.rows) > 1 and self.seeds:
            said.append(captions.MARKS if len(self.seeds) > 1 else captions.ONE_SEED)
        kinds = {kind for group in self.description.groups for kind in group.summaries}
        if self.reference is not None and kinds & set(COMPARED):
            said.append(captions.against(self.reference.label))
        said += [captions.SUMMARIES[kind] for kind in sorted(kinds & set(captions.SUMMARIES))]
        sources = {e.source: None for line in lines for e in line.entries if e and e.source}
        if sources:
            said.append(f"published: {'; '.join(sources)}; difference: ours - published")
        return tuple(captions.sentence(part) for part in said)

    def _notes(self) -> tuple[str, ...]:
        notes = [
            *self.description.notes,
            *captions.differences(self.rows, varied_keys(self.description)),
        ]
        return tuple(captions.sentence(note) for note in notes)


def _reference(rows: Sequence[Row], method: str | None) -> Row | None:
    """Return the row that others are compared with: of the method's rows the one of most runs."""
    found = [row for row in rows if method is not None and row.method == method and row.sample]
    return max(found, key=lambda row: len(row.sample), default=None)


def _runs(row: Row) -> dict[str, tuple[str, ...]]:
    """Return ``seed:key`` of a row's runs by scenario, and by data set if there are several."""
    found: dict[str, list[Run]] = {}
    runs = row.variant.runs if row.variant else ()
    several = len({(run.dataset, run.protocol) for run in runs}) > 1
    for run in runs:
        name = f"{run.dataset} {run.protocol} {run.scenario}" if several else run.scenario
        found.setdefault(name, []).append(run)
    return {
        name: tuple(
            f"{run.seed}:{run.key}" for run in sorted(found[name], key=lambda r: (r.seed, r.key))
        )
        for name in sorted(found)
    }
