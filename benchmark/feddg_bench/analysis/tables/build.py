"""Make a table with numbers in it from a description and records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from feddg_bench.analysis.tables import captions
from feddg_bench.analysis.tables.caveats import caveats
from feddg_bench.analysis.tables.columns import (
    Column,
    Kind,
    MeasuredColumn,
    measured_columns,
    shown_columns,
)
from feddg_bench.analysis.tables.commands import fill_commands
from feddg_bench.analysis.tables.describe import COMPARED, Description, RunFilter, Summary
from feddg_bench.analysis.tables.frames import RECIPES, departures, own_choices
from feddg_bench.analysis.tables.grid import DASH, MARKS, REFERENCE, Bold, Entry, Grid, Line
from feddg_bench.analysis.tables.rows import Row, by_round, make_rows, on_split
from feddg_bench.records.published import Published, published_accuracy, published_number
from feddg_bench.records.record import ScenarioRecord
from feddg_bench.records.robustness import at_equal_id
from feddg_bench.records.rules import CHOOSING, Rule
from feddg_bench.records.runs import RecordedRun
from feddg_bench.records.statistics import (
    COLLAPSE,
    TIE,
    Comparison,
    Estimate,
    Sample,
    Unit,
    average_ranks,
    best_rows,
    by_seed,
    collapsed,
    compare,
    corrected,
    improvement,
    iqm,
    is_blind,
    mean_and_std,
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
) -> Grid:
    """Return a table.

    Args:
        name: Stem of its files.
        description: Its rows and columns.
        runs: Runs of one setup, unless all its variants are wanted.
        select: Selection rule in place of the description's.
        any_paper: Whether a number that any paper publishes for the same scenario stands beneath
            the measured one.
        variants: Whether runs of a row that differ in settings are rows of their own (`make_rows`).
        bold: What is marked: see `Bold`.

    Raises:
        DataError: If one cell would average runs with different settings.
        SettingsError: If several published numbers fit a cell.
    """
    builder = _Builder(
        name, description, runs, select, any_paper=any_paper, variants=variants, bold=bold
    )
    return builder.grid()


class _Builder:
    """Fills a table and gathers its footnotes on the way. For arguments see `build`."""

    def __init__(
        self,
        name: str,
        description: Description,
        runs: Sequence[RecordedRun],
        select: Rule | None,
        *,
        any_paper: bool,
        variants: bool,
        bold: Bold,
    ) -> None:
        self.name, self.description, self.any_paper = name, description, any_paper
        self.bold, self.variants = bold, variants
        self.recipe = ""  # with the paper's frame, where the table is a paper's
        if description.paper is not None:
            self.recipe = description.recipe or RECIPES[description.paper]
        self.columns = columns = measured_columns(description, select)
        self.rows = rows = make_rows(name, description, columns, runs, variants=variants)
        found: dict[int, set[Unit]] = {column.number: set() for column in columns}
        for row in rows:
            for unit, _ in row.sample:
                found[unit[0]].add(unit)
        self.units = {number: sorted(units) for number, units in found.items()}
        self.seeds = sorted({seed for row in rows for _, seed in row.sample})
        self.first = [unit for c in columns if c.group == 0 for unit in self.units[c.number]]
        self.footnotes: list[str] = []
        self.fills: dict[tuple[str, str], None] = {}
        self.elsewhere: dict[str, str] = {}  # published numbers in another frame -> what differs
        against = [r for r in rows if r.method == description.against and r.sample and r.method]
        self.reference = max(against, key=lambda row: len(row.sample), default=None)
        self.seeds_of: dict[tuple[int, frozenset[int], bool], dict[int, float]] = {}
        self.comparisons: dict[frozenset[int], dict[Row, Comparison]] = {}
        self.curves: dict[frozenset[int], list[tuple[Sample, Sample]]] = {}
        self.collapsed = self._collapsed()
        self.shown = tuple(shown_columns(self._led(), columns))
        self.ranks: dict[tuple[Unit, ...], list[float | None]] = {}
        # Accuracies tie within TIE, whatever the table prints; others tie if they print the same.
        self.tie = TIE if description.unit == "%" else 0.5 * 10.0**-description.decimals

    def grid(self) -> Grid:
        if self.description.ranked:
            self._rank_rows()
        self.mixed = {} if self.variants else captions.mixed(self.description, self.rows)
        outside = {id(row): self._outside(row) for row in self.rows}
        ours = [self._line(row, outside) for row in self.rows]
        for position, column in enumerate(self.shown):
            self._mark(ours, position, column)
        lines: list[Line] = []
        for row, line in zip(self.rows, ours, strict=True):
            published = tuple(self._published(row, column) for column in self.shown)
            if row.where is not None:
                lines.append(line)
            if not any(published):
                continue
            facts = {"method": row.method}
            label = row.label if row.where is None else "published"
            lines.append(Line("published", row.label, label, published, facts))
            gaps = tuple(map(_gap, line.entries, published, self.shown))
            if any(gaps) and not outside[id(row)]:
                lines.append(Line("difference", row.label, "difference", gaps, facts))
        oracle = any(column.rule == "oracle" for column in self.columns if column.split)
        return Grid(
            self.name,
            self.description.title + (" (ORACLE selection)" if oracle else ""),
            captions.caption(
                self.description,
                self.columns,
                self.rows,
                self.seeds,
                outside=any(outside.values()),
            ),
            captions.definitions(
                self.description, self.columns, self.rows, self.reference, self.seeds, lines
            ),
            self.shown,
            tuple(lines),
            tuple(self.footnotes),
            (
                *captions.notes(self.description, self.rows),
                *self._collapses(),
                *self._frames(outside),
            ),
            tuple(self.fills),
            {row.label: _runs(row) for row in self.rows if row.variant is not None},
        )

    def _rank_rows(self) -> None:
        """Put the rows in the order of the first group's mean; those without one come last.

        Where runs collapse, it is the IQM.
        """
        sign = 1 if self.description.lower_is_better else -1
        means = {id(row): self._mean(row) for row in self.rows}
        if self.collapsed:
            means = {
                id(row): None if means[id(row)] is None else iqm(self._first(row)).value
                for row in self.rows
            }
        self.rows = sorted(
            self.rows, key=lambda r: (means[id(r)] is None, sign * (means[id(r)] or 0), r.label)
        )

    def _first(self, row: Row) -> dict[tuple[Unit, int], float]:
        """Return the values of the first group, of seeds that have all its scenarios."""
        seeds, units = by_seed(row.sample, self.first), set(self.first)
        return {p: v for p, v in row.sample.items() if p[0] in units and p[1] in seeds}

    def _collapsed(self) -> dict[Row, int]:
        """Return how many runs collapsed, of rows that have any and all of the first group."""
        if self.reference is None or not self.description.ranked or self.description.unit != "%":
            return {}
        theirs = self._first(self.reference)
        found = {row: len(collapsed(self._first(row), theirs)) for row in self.rows}
        return {row: count for row, count in found.items() if count}

    def _led(self) -> Description:
        """Return the description, with the IQM first in each group where runs collapse.

        It takes the mean's place among the columns that are no details.
        """
        if not self.collapsed:
            return self.description
        swapped: Mapping[Summary, Summary] = {"iqm": "mean"}
        groups = [
            group.model_copy(
                update={
                    "summaries": {
                        kind: group.summaries[kind]
                        for kind in sorted(group.summaries, key=lambda kind: kind != "iqm")
                    },
                    "details": [swapped.get(kind, kind) for kind in group.details],
                }
            )
            for group in self.description.groups
        ]
        return self.description.model_copy(update={"groups": groups})

    def _collapses(self) -> Iterator[str]:
        """Yield a note on the runs that collapsed."""
        if self.collapsed and self.reference is not None:
            rows = ", ".join(f"{row.label} {count}" for row, count in self.collapsed.items())
            yield captions.sentence(
                f"runs collapse, {COLLAPSE:g} points or more below the median over seeds of the "
                f"difference to {self.reference.label} ({rows}): hence the IQM goes first and "
                f"orders the rows"
            )

    def _mean(self, row: Row) -> float | None:
        """Return a row's mean over the first group; ``None`` if no seed has all its scenarios."""
        seeds = by_seed(row.sample, self.first)
        return mean_and_std(list(seeds.values()))[0] if seeds else None

    def _accuracy(self, row: Row) -> float | None:
        """Return `_mean` where it is an accuracy on held-out domains, else ``None``."""
        held = [c for c in self.columns if c.group == 0]
        known = {(c.metric, c.split) for c in held} <= {("accuracy", "test"), ("accuracy", "val")}
        return self._mean(row) if known else None

    def _wanted(self, column: Column) -> list[Unit] | None:
        """Return the scenarios of a column; ``None`` if no row has any for one of its sources."""
        if not all(self.units[source.number] for source in column.sources):
            return None
        return [unit for source in column.sources for unit in self.units[source.number]]

    # ----------------------------------------------------------------------------- cells

    def _outside(self, row: Row) -> tuple[str, ...]:
        """Return how a row's runs depart from the frame of the paper; empty if they do not."""
        if not self.recipe or row.variant is None:
            return ()
        found = (
            departures(
                run.settings,
                self.recipe,
                run.dataset,
                run.method,
                {**(row.where or {}), **column.where},
            )
            for column in self.columns
            for run in row.runs.get(column.number, ())
        )
        return next(filter(None, found), ())

    def _frames(self, outside: Mapping[int, tuple[str, ...]]) -> Iterator[str]:
        """Yield a note on rows whose runs are not in the paper's frame."""
        together: dict[tuple[str, ...], list[str]] = {}
        for row in self.rows:
            together.setdefault(outside[id(row)], []).append(row.label)
        for found, labels in together.items():
            if found:
                yield captions.sentence(
                    f"not in the frame of the paper's table, so that no difference is printed: "
                    f"{', '.join(labels)} ({', '.join(found)})"
                )
        inside = [row.variant for row in self.rows if row.variant and not outside[id(row)]]
        for dataset in sorted({run.dataset for variant in inside for run in variant.runs}):
            if self.recipe and (chosen := own_choices(self.recipe, dataset)):
                yield captions.sentence(f"not published, hence our choice: {', '.join(chosen)}")
        if self.elsewhere:
            yield captions.sentence(
                f"published in another frame, hence not beside these: "
                f"{'; '.join(f'{source} ({found})' for source, found in self.elsewhere.items())}"
            )

    def _line(self, row: Row, outside: Mapping[int, tuple[str, ...]]) -> Line:
        if row.where is None:
            return Line("ours", row.label, row.label, (None,) * len(self.shown))
        missing: Sequence[MeasuredColumn] = [
            column
            for column in self.columns
            if not self._seeds(row, frozenset((column.number,)), self.units[column.number])
            and column.number not in row.silent
        ]
        scenarios = {n: [unit[1].split(" ")[-1] for unit in u] for n, u in self.units.items()}
        if outside[id(row)]:  # what is missing is the whole row, in the paper's frame
            mine = [r for r in self.rows if r.spec is row.spec and not outside[id(r)]]
            missing = [] if mine else self.columns
        like = Row(row.spec, row.spec.label, row.where) if outside[id(row)] else row
        fills = fill_commands(self.description, like, missing, scenarios, self.seeds)
        self.fills |= dict.fromkeys((like.label, command) for command in fills.values())
        variant = row.variant
        facts = {
            "method": row.method,
            "recipe": "; ".join(sorted({r.recipe for r in variant.runs})) if variant else "",
            "variant": variant.label if variant else "",
        }
        runs = variant.runs if variant else ()
        said = [f"with {self.mixed[row]}"] if row in self.mixed else []
        said += caveats(runs, self._accuracy(row))
        marks = tuple(map(self._footnote, said))
        entries = tuple(self._entry(row, column, fills) for column in self.shown)
        return Line("ours", row.label, row.label, entries, facts, marks)

    def _entry(self, row: Row, column: Column, fills: Mapping[int, str]) -> Entry:
        kind, units = column.kind, self._wanted(column)
        seeds = self._seeds(row, column.numbers, units, worst=kind == "worst")
        keys = tuple(
            dict.fromkeys(
                run.key
                for source in column.sources
                for run in row.runs.get(source.number, ())
                if kind in COMPARED or run.seed in seeds
            )
        )
        if not seeds and not (kind in COMPARED and row.part(column.numbers)):
            silent = [source for source in column.sources if source.number in row.silent]
            fill = next((fills[s.number] for s in column.sources if s.number in fills), "")
            notes = (self._footnote(_silence(silent[0])),) if silent else ()
            return Entry(None, fill=fill, footnotes=notes)
        if kind == "rank":
            rank = self._rank(row, tuple(units or ()))
            return Entry(None) if rank is None else Entry(rank, f"{rank:.1f}", keys=keys)
        if kind in COMPARED:
            return self._compared(row, column, keys)
        fewer = list(seeds) != self.seeds
        notes = (self._footnote(f"over {captions.seeds_text(seeds)} alone"),) if fewer else ()
        if kind == "id_test":
            known = self._known(row, column)
            seeds = by_seed(known, units or ())
            if not seeds:
                return Entry(None)
        if kind == "iqm":
            part = row.part(column.numbers)
            whole = {pair: value for pair, value in part.items() if pair[1] in seeds}
            return _estimate(iqm(whole), f".{column.decimals}f", keys, notes)
        mean, std = mean_and_std(list(seeds.values()))
        said = f"{mean:.{column.decimals}f}"
        said += "" if std is None else f" ± {std:.{column.decimals}f}"
        return Entry(mean, said, std, tuple(seeds), keys=keys, footnotes=notes)

    def _seeds(
        self, row: Row, numbers: frozenset[int], units: list[Unit] | None, *, worst: bool = False
    ) -> dict[int, float]:
        """Return `by_seed` for some columns of a row; empty if there are no scenarios."""
        key = (id(row), numbers, worst)
        if key not in self.seeds_of:
            part = row.part(numbers)
            self.seeds_of[key] = by_seed(part, units, worst=worst) if units else {}
        return self.seeds_of[key]

    def _rank(self, row: Row, units: tuple[Unit, ...]) -> float | None:
        if units not in self.ranks:
            samples = [other.sample for other in self.rows]
            lower = self.description.lower_is_better
            self.ranks[units] = average_ranks(samples, units, lower_is_better=lower, tie=self.tie)
        return self.ranks[units][self.rows.index(row)]

    def _compared(self, row: Row, column: Column, keys: tuple[str, ...]) -> Entry:
        """Return the comparison of a row with the reference row."""
        if self.reference is None:
            why = f"there is no run of {self.description.against} to compare with"
            return Entry(None, footnotes=(self._footnote(why),))
        if row is self.reference:
            return Entry(None, REFERENCE, keys=keys)
        form = f"+.{column.decimals}f"
        if column.kind == "improvement":
            mine, theirs = row.part(column.numbers), self.reference.part(column.numbers)
            lower = self.description.lower_is_better
            return _estimate(improvement(mine, theirs, lower_is_better=lower), ".2f", keys)
        if column.kind == "excess":
            above = at_equal_id(
                (self._known(row, column), row.part(column.numbers)),
                (self._known(self.reference, column), self.reference.part(column.numbers)),
                self._curve(self.reference, column),
            )
            return Entry(None) if above is None else _estimate(above, form, keys)
        found = self._comparisons(column.numbers)[row]
        if not found.scenarios:
            return Entry(None)
        if column.kind == "wins":
            return Entry(None, f"{found.wins}/{found.ties}/{found.losses}", keys=keys)
        if column.kind == "p_value":
            doubts = tuple(map(self._footnote, self._doubts(row, column)))
            known = None if math.isnan(found.p_value) else found.p_value
            return Entry(known, p_text(found.p_value), keys=keys, footnotes=doubts)
        if column.kind == "detectable":
            return _estimate(Estimate(found.detectable), f".{column.decimals}f", keys)
        return _estimate(found.difference, form, keys)

    def _doubts(self, row: Row, column: Column) -> Iterator[str]:
        """Yield why the t-test of a row does not hold its level."""
        if math.isnan(self._comparisons(column.numbers)[row].p_value) or self.reference is None:
            return
        if row in self.collapsed:
            yield "a t-test of means does not hold where runs collapse"
        elif is_blind(row.part(column.numbers), self.reference.part(column.numbers)):
            yield (
                "the seeds of one scenario scatter far more than those of the others, so that this "
                "test finds too little"
            )

    def _known(self, row: Row, column: Column) -> Sample:
        """Return the row's numbers on `id_test` in the runs of a column."""
        return {
            place: value
            for source in column.sources
            for place, value in on_split(row, source, "id_test").items()
        }

    def _curve(self, row: Row, column: Column) -> list[tuple[Sample, Sample]]:
        """Return numbers on `id_test` and in a column after each evaluated round."""
        splits = {source.split for source in column.sources}
        if self.description.unit != "%" or len(splits) > 1 or None in splits:
            return []
        if column.numbers not in self.curves:
            known, held = (
                by_round(row, column.sources, str(split)) for split in ("id_test", *splits)
            )
            both = sorted(known.keys() & held.keys())
            self.curves[column.numbers] = [(known[number], held[number]) for number in both]
        return self.curves[column.numbers]

    def _comparisons(self, numbers: frozenset[int]) -> dict[Row, Comparison]:
        """Return each row against the reference; p-values after Holm's correction."""
        if numbers not in self.comparisons:
            assert self.reference is not None  # noqa: S101 - nothing is compared without one
            theirs, lower = self.reference.part(numbers), self.description.lower_is_better
            found = {
                row: compare(row.part(numbers), theirs, lower_is_better=lower, tie=self.tie)
                for row in self.rows
                if row is not self.reference
            }
            several = corrected(list(found.values()))
            self.comparisons[numbers] = dict(zip(found, several, strict=True))
        return self.comparisons[numbers]

    def _mark(self, lines: list[Line], position: int, column: Column) -> None:
        """Mark the best and the second row of a column."""
        units, lower = self._wanted(column), self.description.lower_is_better
        if column.kind not in _MARKED or units is None or self.bold == "none":
            return
        if self.bold == "tested":
            tested = best_rows([row.sample for row in self.rows], units, lower_is_better=lower)
            marked = [[] if number is None else [number] for number in tested]
        else:  # rows that print the same share a mark
            printed: dict[float, list[int]] = {}
            for number, line in enumerate(lines):
                entry = line.entries[position]
                if entry is not None and entry.value is not None:
                    value = round(entry.value, column.decimals)
                    printed.setdefault(value, []).append(number)
            marked = [printed[value] for value in sorted(printed, reverse=not lower)[:2]]
        for numbers, mark in zip(marked, MARKS, strict=False):
            for number in numbers:
                entries = list(lines[number].entries)
                entry = entries[position]
                entries[position] = None if entry is None else replace(entry, mark=mark)
                lines[number] = replace(lines[number], entries=tuple(entries))

    def _footnote(self, sentence: str) -> int:
        if sentence not in self.footnotes:
            self.footnotes.append(sentence)
        return self.footnotes.index(sentence)

    # ------------------------------------------------------------------------- published

    def _published(self, row: Row, column: Column) -> Entry | None:
        found = self._of_any_paper(row, column) if self.any_paper else self._of_table(row, column)
        if found is None:
            return None
        notes: tuple[int, ...] = ()
        if found.wrong_mean is not None:
            wrong = f"the published average {found.value:g} is not the mean of its published "
            notes = (self._footnote(f"{wrong}columns, {found.wrong_mean:.2f}"),)
        form = ".3g" if column.kind == "p_value" else f".{column.decimals}f"
        return Entry(found.value, f"{found.value:{form}}", source=found.source, footnotes=notes)

    def _of_table(self, row: Row, column: Column) -> Published | None:
        """Return the number that the table's paper prints in a cell, if there is one.

        Method, data set, split, domain and metric come from the row and the column, unless the
        description gives other values for the file of published numbers.
        """
        paper, table, told = self.description.paper, self.description.table, row.spec.published
        if paper is None or table is None or told is None or column.kind not in PUBLISHED:
            return None
        first = column.sources[0]
        guess: RunFilter = {
            "method": row.method,
            "metric": first.metric,
            "split": first.split or "",
        }
        if isinstance(first.where.get("dataset"), str):
            guess = {**guess, "dataset": first.where["dataset"]}
        domain = first.where.get(first.split) if first.split else None
        if column.kind == "mean":
            guess = {**guess, "domain": "AVG"}
        elif isinstance(domain, str):
            guess = {**guess, "domain": domain}
        if column.kind == "p_value":
            guess = {**guess, "metric": "p_value"}
        where = {**guess, **told, **column.published}
        return published_number(paper, table, {key: str(value) for key, value in where.items()})

    def _of_any_paper(self, row: Row, column: Column) -> Published | None:
        """Return the number that any paper publishes for a measured column's scenario.

        For a mean over columns, return the mean of their numbers, if all columns have one.
        """
        if column.kind not in _MARKED:
            return None
        found: list[Published] = []
        for source in column.sources:
            run = next((r for other in self.rows for r in other.runs.get(source.number, ())), None)
            if run is None or source.split not in ("val", "test") or source.metric != "accuracy":
                return None
            train = tuple(run.train.split("+"))
            scenario = ScenarioRecord(name=run.scenario, train=train, val=run.val, test=run.test)
            number = published_accuracy(
                row.method, run.dataset, run.protocol, scenario, source.split
            )
            if number is None:
                return None
            own = row.runs.get(source.number) or [run]
            recipe = RECIPES[number.row["paper"]]
            if other := departures(own[0].settings, recipe, run.dataset, row.method):
                self.elsewhere[number.source] = ", ".join(other)
                return None
            found.append(number)
        mean = sum(number.value for number in found) / len(found)
        return Published(mean, "; ".join(dict.fromkeys(number.source for number in found)))


def _estimate(
    found: Estimate, form: str, keys: tuple[str, ...], footnotes: tuple[int, ...] = ()
) -> Entry:
    """Return a number with its interval, if it has one."""
    if math.isnan(found.value):
        return Entry(None)
    said = f"{found.value:{form}}"
    if math.isnan(found.low):
        return Entry(found.value, said, keys=keys, footnotes=footnotes)
    said += f" [{found.low:{form}}, {found.high:{form}}]"
    return Entry(found.value, said, low=found.low, high=found.high, keys=keys, footnotes=footnotes)


def p_text(value: float) -> str:
    """Return a p-value as text, a dash for NaN."""
    if math.isnan(value):
        return DASH
    return "<0.0001" if value < 1e-4 else f"{value:.4f}" if value < 0.01 else f"{value:.3f}"


def _gap(ours: Entry | None, published: Entry | None, column: Column) -> Entry | None:
    """Return the difference from a published number, if both numbers exist."""
    if ours is None or published is None or ours.value is None or published.value is None:
        return None
    found = ours.value - published.value
    return None if column.kind == "p_value" else Entry(found, f"{found:+.{column.decimals}f}")


def _silence(column: MeasuredColumn) -> str:
    """Return why a row's runs have no number for a column."""
    chooses = CHOOSING.get(column.rule)
    if chooses and chooses != column.split:
        return (
            f"rule {column.rule} needs the split {chooses}, which these runs lack, or they do not "
            f"measure {column.metric} on {column.split}"
        )
    return f"these runs do not measure {column.metric} on {column.split or 'a run'}"


def _runs(row: Row) -> dict[str, tuple[str, ...]]:
    """Return ``seed:key`` of a row's runs by scenario, and by data set if there are several."""
    found: dict[str, list[RecordedRun]] = {}
    runs = row.variant.runs if row.variant else ()
    several = len({(run.dataset, run.protocol) for run in runs}) > 1
    for run in sorted(runs, key=lambda run: (run.seed, run.key)):
        name = f"{run.dataset} {run.protocol} {run.scenario}" if several else run.scenario
        found.setdefault(name, []).append(run)
    return {name: tuple(f"{r.seed}:{r.key}" for r in found[name]) for name in sorted(found)}
