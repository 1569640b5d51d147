"""Tests of papers' claims on our records: which method is better, and by how much.

A claim says that a row listed under its table's ``best`` is better than another row with a worse
published number, over one group of columns. It is tested in one of our frames (`Frame`) for each
recipe with runs of both rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any

from feddg_bench.analysis.tables.build import of_table, p_text
from feddg_bench.analysis.tables.columns import (
    MeasuredColumn,
    measured_columns,
    shown_columns,
    varied_keys,
)
from feddg_bench.analysis.tables.describe import (
    Description,
    RowSpec,
    load_description,
    named_tables,
)
from feddg_bench.analysis.tables.generic import Frame, frames, trained
from feddg_bench.analysis.tables.grid import Entry, Grid, text_grid
from feddg_bench.analysis.tables.rows import FRAMES, Row, make_rows
from feddg_bench.analysis.tables.setups import departures, in_track, own_choices
from feddg_bench.analysis.tables.writers import document
from feddg_bench.common.titles import counted
from feddg_bench.plugins import dataset_title
from feddg_bench.records.differences import varying
from feddg_bench.records.statistics import (
    FEWEST,
    LEVEL,
    Comparison,
    Measured,
    Place,
    Sample,
    compare,
    needed,
    simultaneous,
)

if TYPE_CHECKING:
    import pandas as pd

_MOST = 999
"""Largest number of scenarios or seeds that is named as needed for a decision."""
_SPLIT = "test"
"""Claims about validation domains are left out: those domains serve to choose a round."""


@dataclass(frozen=True)
class Claim:
    """A row of the table of claims: one row of a paper's table is better than another.

    A claim has a row for each recipe with runs of both, the most telling one first; without any,
    it has one row, whose fields from `recipe` on are empty.
    """

    source: str  # paper and table
    where: str  # head of the columns
    better: str  # label of the row claimed to be better
    worse: str  # label of the other row
    claimed: float  # the published mean difference, in the table's unit
    decimals: int  # decimals printed in the table
    recipe: str = ""  # recipe of the runs
    frame: str = ""  # title of their frame
    trained: float = 0.0  # mean of both rows on `id_test`, in the metric's unit; 0 if not measured
    # `*` if the setup is not the paper's, `†` if it is, but the paper leaves parts unpublished
    setup: str = ""
    # Over scenarios, or over seeds if there are too few scenarios. It is corrected for all claims
    # about the same better row in the same columns, tested in the same recipe (`simultaneous`).
    comparison: Comparison | None = None
    rates_apart: bool = False  # whether the rows differ in a setting that one run chose
    scenarios: int = 0  # number of sets of training domains
    seeds: int = 0  # number of seeds
    columns: tuple[str, ...] = ()  # heads of the averaged columns that vary settings
    # The published mean difference over the averaged columns; `None` if the paper prints only a
    # mean over more columns.
    published: float | None = None

    @property
    def name(self) -> tuple[str, str, str, str]:
        """What its rows share."""
        return self.source, self.where, self.better, self.worse

    @property
    def decidable(self) -> bool:
        """Whether there are enough runs for an interval."""
        return self.comparison is not None and not math.isnan(self.comparison.difference.low)

    @property
    def verdict(self) -> str:
        """The test's verdict; empty without one.

        It is undecided if the difference is not significant, if the paper has no gain in these
        columns, or if the rows differ in a setting that one run chose: it may be the cause.
        """
        if self.comparison is None:
            return ""
        silent = self.rates_apart or (self.published is not None and self.published <= 0)
        if silent or not self.comparison.p_value < LEVEL:
            return "undecided"
        return "holds" if self.comparison.difference.value > 0 else "does not hold"


def claims(runs: pd.DataFrame) -> list[Claim]:
    """Return every claim of the papers' tables shipped with the suite, tested on a `read_frame`.

    Raises:
        DataError: If one cell would average runs that differ.
    """
    known: dict[frozenset[str], list[Frame]] = {}  # by varied keys: tables share them
    found: list[Claim] = []
    for name in named_tables():
        _, description = load_description(name)
        if description.best:
            varied = frozenset(varied_keys(description))
            if varied not in known:
                known[varied] = frames(runs, free=varied)
            found += _of_table(name, description, known[varied])
    groups: dict[tuple[str, ...], list[tuple[int, Comparison]]] = {}
    for place, claim in enumerate(found):
        if claim.comparison is not None:
            together = (*claim.name[:3], claim.recipe)
            groups.setdefault(together, []).append((place, claim.comparison))
    for group in groups.values():
        several = simultaneous([comparison for _, comparison in group])
        for (place, _), corrected in zip(group, several, strict=True):
            found[place] = replace(found[place], comparison=corrected)
    return found


def _of_table(name: str, description: Description, of: Sequence[Frame]) -> Iterator[Claim]:
    where = {k: v for k, v in description.where.items() if not k.startswith(FRAMES)}
    loose = description.model_copy(update={"where": where, "others": False})
    columns = measured_columns(loose, None)
    own = [frame for frame in of if in_track(frame.runs[0], description.own_recipe)]
    made = [(f, make_rows(name, loose, columns, f.runs, variants=True)) for f in own]
    specs = {spec.label: spec for spec in description.rows if spec.where is not None}
    for number, group in enumerate(description.groups):
        tested = [c for c in columns if (c.group, c.split) == (number, _SPLIT)]
        values = _published(loose, columns, frozenset(c.number for c in tested))
        sign = -1 if description.lower_is_better else 1
        head = group.head or str({**description.where, **group.where}.get("dataset", ""))
        for best, other in product(description.best, specs):
            if best == other or _frame_of(specs[best]) != _frame_of(specs[other]):
                continue
            mine, theirs = values.get(best, {}), values.get(other, {})
            gaps = {of: sign * (mine[of] - theirs[of]) for of in mine if of in theirs}
            if not gaps or math.fsum(gaps.values()) <= 0:
                continue
            mean = fmean(gaps.values())
            claim = Claim(description.title, head, best, other, mean, description.decimals)
            tests = (_tested(claim, f, rows, description, tested, gaps) for f, rows in made)
            yield from _of_each_recipe(filter(None, tests)) or [claim]


def _of_each_recipe(tests: Iterable[Claim]) -> list[Claim]:
    """Return one test of each recipe, in its first setup by `_rank`; the best trained comes first.

    A recipe in which nothing can be tested is left out if another one has a test.
    """
    found: dict[str, Claim] = {}
    for test in sorted(tests, key=_rank):
        found.setdefault(test.recipe, test)
    told = [test for test in found.values() if test.decidable] or [*found.values()][:1]
    return sorted(told, key=lambda test: (test.setup == "*", -test.trained, test.recipe))


def _published(
    description: Description, columns: Sequence[MeasuredColumn], numbers: frozenset[int]
) -> dict[str, dict[frozenset[int], float]]:
    """Return each row's published numbers by column, or only its mean over all columns.

    Printed means do not always match their columns, so the columns are used if all are printed.
    """
    found: dict[str, dict[frozenset[int], float]] = {}
    shown = [c for c in shown_columns(description, columns) if c.numbers <= numbers]
    for kind, spec in product(("mean", "measured"), description.rows):
        row = Row(spec, spec.label, {**description.where, **(spec.where or {})})
        printed = {c.numbers: of_table(description, row, c) for c in shown if c.kind == kind}
        known = {of: number.value for of, number in printed.items() if number}
        if known and len(known) == len(printed):
            found[spec.label] = known
    return found


def _frame_of(spec: RowSpec) -> dict[str, Any]:
    return {k: v for k, v in (spec.where or {}).items() if k.startswith(FRAMES)}


def _tested(
    claim: Claim,
    frame: Frame,
    rows: Sequence[Row],
    description: Description,
    columns: Sequence[MeasuredColumn],
    gaps: Mapping[frozenset[int], float],
) -> Claim | None:
    """Return a claim as tested in a frame; ``None`` if its rows share no scenario and seed there.

    ``gaps`` holds the published differences by set of columns.
    """
    numbers = frozenset(column.number for column in columns)
    labels = (claim.better, claim.worse)
    pairs = list(product(*([row for row in rows if row.spec.label == label] for label in labels)))
    if not pairs:
        return None
    mine, theirs = max(pairs, key=lambda pair: _comparable(pair[0], pair[1], numbers))
    ours: Sample = mine.part(numbers)
    their: Sample = theirs.part(numbers)
    both = [pair for pair in ours if pair in their]
    if not both:
        return None
    units = {place[1] for place, _ in both}
    over_seeds = len(units) < FEWEST  # the test is then valid for these units only
    if over_seeds:
        both = _complete(both)
        ours, their = _by_seed(ours, both), _by_seed(their, both)
    held = {place[0] for place, _ in both}
    run = next(run for number in sorted(numbers) for run in mine.runs.get(number, ()))
    recipe = description.own_recipe
    departs = departures(run.settings, recipe, run.dataset, run.method)
    lower, fewest = description.lower_is_better, 1 if over_seeds else FEWEST
    whole = frozenset[int]().union(*(of for of in gaps if of <= held)) == held
    return replace(
        claim,
        recipe=run.recipe,
        frame=frame.description.title,
        trained=trained(
            run for row in (mine, theirs) for n in sorted(held) for run in row.runs.get(n, ())
        ),
        setup="*" if departs else "†" if own_choices(recipe, run.dataset) else "",
        comparison=compare(ours, their, lower_is_better=lower, seeds=fewest),
        rates_apart=_rates_apart(mine, theirs, held),
        scenarios=len(units),
        seeds=len({seed for _, seed in both}),
        columns=tuple(
            column.spec.head
            for column in columns
            if column.number in held and any(key.startswith(FRAMES) for key in column.spec.where)
        ),
        published=fmean(gap for of, gap in gaps.items() if of <= held) if whole else None,
    )


def _rates_apart(mine: Row, theirs: Row, numbers: Collection[int]) -> bool:
    """Return whether rows differ in a setting that one run chose, such as the learning rate."""
    rows = [[run for n in sorted(numbers) for run in row.runs.get(n, ())] for row in (mine, theirs)]
    keys = {key for runs in rows for run in runs for key in run.by_one_run}
    one, other = ({(key, repr(run.get(key))) for run in runs for key in keys} for runs in rows)
    return one != other


def _comparable(mine: Row, theirs: Row, numbers: frozenset[int]) -> tuple[int, int]:
    """Return how well two rows match: by shared measurements, then by how few settings differ.

    Thus a method and its ablation are compared under the same reading of the paper.
    """
    both = mine.part(numbers).keys() & theirs.part(numbers).keys()
    settings = [row.members[0].settings if row.members else {} for row in (mine, theirs)]
    return len(both), -len(varying(settings))


def _complete(pairs: Sequence[Measured]) -> list[Measured]:
    """Return the pairs of the seeds that share the largest set of places, so that means compare."""
    held: dict[int, frozenset[Place]] = {}
    for place, seed in pairs:
        held[seed] = held.get(seed, frozenset()) | {place}
    seeds = Counter(held.values())
    most = max(seeds, key=lambda places: (len(places), seeds[places], sorted(places)))
    return [(place, seed) for place, seed in pairs if held[seed] == most]


def _by_seed(sample: Sample, pairs: Sequence[Measured]) -> Sample:
    """Return a sample whose units are seeds, each with the mean over its pairs."""
    values: dict[int, list[float]] = {}
    for place, seed in pairs:
        values.setdefault(seed, []).append(sample[place, seed])
    return {((0, f"seed {s}", ""), 0): fmean(found) for s, found in values.items()}


def _rank(test: Claim) -> tuple[bool, bool, bool, int, str]:
    """Return a sort key for setups: the paper's, those with an interval, tuned ones, most runs."""
    runs = test.scenarios * test.seeds
    return test.setup == "*", not test.decidable, "tuned" not in test.frame, -runs, test.frame


def tally(found: Sequence[Claim]) -> str:
    """Return the number of claims by the verdict of their first row, as text."""
    firsts = {claim.name: claim for claim in reversed(found)}.values()
    verdicts = Counter(claim.verdict for claim in firsts)
    apart = Counter(claim.verdict for claim in firsts if claim.rates_apart)
    told = ", ".join(
        f"{verdicts[verdict]} {verdict if verdicts[verdict] == 1 else plural}"
        + (f" ({apart[verdict]} at different learning rates‡)" if apart[verdict] else "")
        for verdict, plural in (
            ("holds", "hold"),
            ("does not hold", "do not hold"),
            ("undecided", "undecided"),
        )
    )
    return f"{counted(len(firsts), 'claim')} of papers: {told}, {verdicts['']} without runs"


def claims_grids(found: Sequence[Claim]) -> Iterator[Grid]:
    """Yield a grid for each paper's table: tested claims as rows, the others as notes."""
    heads = ("published", "ours", "p", "verdict", "detects", "needs", "in interval", "setup")
    for source in dict.fromkeys(claim.source for claim in found):
        mine = [claim for claim in found if claim.source == source]
        silent: dict[tuple[str, str], list[str]] = {}
        for claim in mine:
            if claim.comparison is None:
                silent.setdefault((claim.where, claim.better), []).append(claim.worse)
        notes = (
            f"{dataset_title(where)}, {better} above {'; '.join(rest)}: no runs."
            for (where, better), rest in silent.items()
        )
        rows = (_row(claim, claim.comparison) for claim in mine if claim.comparison is not None)
        yield text_grid(source, heads, rows, notes)


def claims_text(found: Sequence[Claim]) -> str:
    """Return the claims as Markdown."""
    introduction = (
        f"{tally(found)}. Each claim says that a paper's method is better on test domains than "
        "another row of its table.\n\n"
        "*Ours* is the mean difference with its 95 % interval (Student's t) over units, the sets "
        f"of training domains; with fewer than {FEWEST} units it is over seeds and valid for these "
        "units only. *p* "
        "is corrected by Holm's procedure for all rows that the method is compared with in a "
        f"recipe; a claim *holds*, or *does not hold*, if p < {LEVEL:g}. With fewer than "
        f"{FEWEST} seeds there is no p. Intervals, *detects* and "
        "*needs* are corrected by Bonferroni's, so that a method's intervals in a recipe hold all "
        "at once with 95 % confidence. Holm's procedure is less strict: the interval of a decided "
        "claim can contain 0. ‡: the two rows ran at different learning rates, selected on one "
        "run, so the comparison says nothing about the methods. *Published* is the published "
        "difference over the same columns, and *in interval* says whether our interval contains "
        "it. If a paper prints only a mean over more columns, that mean is given, and *in "
        "interval* is left open. *: the setup is not the paper's. †: the paper leaves parts of "
        "the setup unpublished, and we chose them.\n\n"
        "*Detects* is the smallest true difference that the test detects with 80 % power, and "
        "*needs* the number of scenarios or seeds with which it would detect the published "
        "difference, if they scatter as ours do.\n\n"
        "A claim has a line for each recipe with a test. It shows the tuned setup if this gives an "
        "interval, and otherwise the setup with the most runs. The paper's recipe comes first; "
        "then the recipe whose runs have the higher accuracy on held-out images of the training "
        "domains (`id_test`), since their training has come further. The first line gives the "
        "verdict that is counted above."
    )
    title = "What the papers claim, and what our runs say"
    return document(title, introduction, claims_grids(found))


def _needs(claim: Claim, comparison: Comparison, published: float) -> str:
    """Return the number of scenarios or seeds that would decide an undecided claim."""
    open_ = claim.verdict == "undecided" and not claim.rates_apart
    if not open_ or not claim.decidable or published <= 0:
        return "-"
    units = "scenarios" if claim.scenarios >= FEWEST else "seeds"
    number = needed(comparison, published, _MOST)
    return f"over {_MOST} {units}" if number is None else f"{number} {units}"


def _row(claim: Claim, comparison: Comparison) -> Sequence[str | Entry]:
    """Return a claim's label and the cells with its test result."""
    found, smallest = comparison.difference, comparison.detectable
    published = claim.claimed if claim.published is None else claim.published
    ours = found.text(claim.decimals, signed=True)
    inside = "yes" if found.low <= published <= found.high else "no"
    runs = f"{counted(claim.scenarios, 'scenario')}, {counted(claim.seeds, 'seed')}"
    over = f"; {', '.join(claim.columns)}" if claim.columns else ""
    return (
        f"{claim.better} above {claim.worse}, {dataset_title(claim.where)}",
        Entry(published, f"{published:+z.{claim.decimals}f}"),
        Entry(found.value, ours, low=found.low, high=found.high),
        Entry(comparison.p_value, p_text(comparison.p_value)),
        claim.verdict + "‡" * claim.rates_apart,
        Entry(smallest, f"{smallest:.{claim.decimals}f}") if claim.decidable else "-",
        _needs(claim, comparison, published),
        inside if claim.decidable and claim.published is not None else "-",
        f"{claim.frame}{claim.setup} ({runs}{over})",
    )
