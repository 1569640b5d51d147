"""Descriptions of tables: YAML files that select the runs of rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from pydantic import Field, model_validator

from feddg_bench.common.errors import SettingsError, unknown
from feddg_bench.common.files import find_yaml, shipped_names
from feddg_bench.config.layers import dotted_keys, full_key, load_layer, validate
from feddg_bench.config.reading import composed, known_name, read_yaml
from feddg_bench.config.recipes import recipe_names
from feddg_bench.config.schema import Section
from feddg_bench.data.protocols import PROTOCOLS
from feddg_bench.plugins import method_title, names, plugin_name
from feddg_bench.records.differences import natural, setting_key, setting_name, setting_text
from feddg_bench.records.metrics import METRICS
from feddg_bench.records.rules import Rule
from feddg_bench.records.runs import FIELDS, RecordedRun

if TYPE_CHECKING:
    import pandas as pd

Value = str | int | float | bool | None
RunFilter = Mapping[str, Value | list[Value]]
"""A field of a run (method, dataset, protocol, scenario, label, train, val, test, seed, recipe,
version) or a setting by dotted key -> the value that a run must have, or a list of allowed ones."""

Split = Literal["id_val", "id_test", "val", "test"]

Own = Literal["mean", "id_test", "worst", "iqm", "rank"]
Tested = Literal["wins", "difference", "p_value", "p_same", "detectable"]
Summary = Literal[Own, Tested, "excess", "compute", "improvement"]
"""A number over the columns of a group, see `SUMMARIES`; all but `Own` compare with a method."""


class _Summary(NamedTuple):
    head: str  # default head of its column
    about: str = ""  # its definition for notes; `{0}` is the method compared with
    interval: str = ""  # end of the definition if there are several seeds
    detail: bool = False  # whether leaderboards show it in their notes


SUMMARIES: Mapping[Summary, _Summary] = {
    "mean": _Summary("mean"),
    "id_test": _Summary(
        "id_test mean",
        "mean on id_test: the same runs on held-out images of the training domains",
    ),
    "worst": _Summary(
        "worst",
        "worst: the smallest value among the columns of a group, for each seed",
        detail=True,
    ),
    "iqm": _Summary(
        "IQM",
        "IQM: mean of the middle half of all runs",
        ", with a 95 % interval by a bootstrap over seeds within each unit, widened for few seeds; "
        "it holds for these units only",
        detail=True,
    ),
    "rank": _Summary(
        "rank",
        "rank: mean over the columns of a group, among rows that have all of them",
        detail=True,
    ),
    "wins": _Summary("w/t/l", "wins/ties/losses by unit", detail=True),
    "difference": _Summary(
        "difference",
        "mean difference with its 95 % interval (Student's t over units' mean differences), which "
        "describes units like these, not new seeds",
    ),
    "p_value": _Summary(
        "p", "p of a two-sided t-test over units' mean differences, for units like these"
    ),
    "p_same": _Summary(
        "p, these units",
        "p, these units: of a two-sided t-test over the seeds' mean differences, for exactly these "
        "units and further seeds; it needs five seeds",
    ),
    "detectable": _Summary(
        "detects",
        "detects: the smallest true difference that such a test detects with 80 % power",
        detail=True,
    ),
    "excess": _Summary(
        "at equal id_test",
        "at equal id_test: the mean minus the mean predicted for {0} at the row's id_test, by the "
        "slope of {0}'s evaluated rounds on a logit scale, with a 95 % jackknife interval over "
        "units; none if id_test differs by more than over those rounds",
    ),
    "compute": _Summary(
        "compute",
        "compute: all operations of a run except those of evaluation, over {0}'s in the same "
        "scenarios and seeds; a dash where a record does not count them",
    ),
    "improvement": _Summary(
        "P(better)",
        "P(better): probability that a run is better than one of {0} in its unit",
        ", with an interval by the same bootstrap",
        detail=True,
    ),
}
COMPARED: frozenset[Summary] = frozenset(SUMMARIES.keys() - get_args(Own))
"""Summaries that compare with a method; p-values are corrected by Holm's procedure."""

RECIPES = {"pardon": "pardon", "fisc": "pardon", "fedccrl": "fedccrl", "ppdg": "ppdg"}
"""Paper -> the recipe with its setup."""

COSTS = {
    "megabytes_up": "MB up a round",
    "megabytes_down": "MB down a round",
    "local_training_time": "s training a client",
    "aggregation_time": "s aggregation a round",
    "one_time_cost": "s before round 1",
    "teraflop": "TFLOP a run",
}
"""Metric of a whole run -> head of its column."""


class ColumnSpec(Section):
    """One column."""

    head: str
    where: RunFilter = Field(default_factory=dict)
    split: Split | None = None
    metric: str | None = None
    over: Literal["images", "domains", "worst"] = "images"
    """Metric over all images of a split, or its mean or its smallest value over domains."""
    published: RunFilter = Field(default_factory=dict)
    """Columns of the file of published numbers -> their values, if they cannot be inferred."""


class GroupSpec(Section):
    """Columns under one head."""

    head: str = ""
    where: RunFilter = Field(default_factory=dict)
    split: Split | None = None
    select: Rule | None = None
    """Selection rule of these columns, if different from the table's."""
    metric: str | None = None
    hidden: bool = False
    """Show only the summaries."""
    columns: list[ColumnSpec] = Field(min_length=1)
    summaries: dict[Summary, str] = Field(default_factory=dict)
    """Summary -> head of its column."""
    detail: bool = False
    """Show these columns only in the notes and the CSV."""
    details: list[Summary] = Field(default_factory=list)
    """Summaries shown only in the notes and the CSV."""
    published: dict[Summary, RunFilter] = Field(default_factory=dict)

    def led_by_iqm(self) -> GroupSpec:
        """Return the group with the IQM first, in the place of the mean."""
        kinds = sorted(self.summaries, key=lambda kind: kind != "iqm")
        swapped: Mapping[Summary, Summary] = {"iqm": "mean"}
        details = [swapped.get(kind, kind) for kind in self.details]
        summaries = {kind: self.summaries[kind] for kind in kinds}
        return self.model_copy(update={"summaries": summaries, "details": details})


class RowSpec(Section):
    """One row, or several if its runs differ in settings."""

    label: str
    where: RunFilter | None = None
    """``null``: a row of published numbers only."""
    published: RunFilter | None = Field(default_factory=dict)
    """As for columns; ``null``: no number of this row is published."""


class Description(Section):
    """A table.

    `rows` may be empty if `others` is true: then every method with runs is a row.
    """

    title: str
    paper: str | None = None
    """Name of a file of published numbers."""
    table: str | None = None
    """Number of the table in that paper."""
    best: list[str] = Field(default_factory=list)
    """Labels of the rows that the paper claims are better than the others (`claims`)."""
    select: Rule = "last"
    metric: str = "accuracy"
    unit: str = "%"
    lower_is_better: bool = False
    decimals: int = Field(2, ge=0, le=6)
    spread: Literal["sd", "interval"] = "sd"
    """Number after ±: the standard deviation over seeds, or half of the mean's 95 % interval."""
    recipe: str | None = None
    """Recipe for the commands that fill cells."""
    where: RunFilter = Field(default_factory=dict)
    others: bool = False
    """Add a row for every other method with runs."""
    ranked: bool = False
    """Order rows from the best to the worst mean of the first group."""
    rows: list[RowSpec] = Field(default_factory=list)
    groups: list[GroupSpec] = Field(min_length=1)
    against: str | None = None
    """Method that rows are compared with."""
    notes: list[str] = Field(default_factory=list)
    framed: tuple[str, ...] = ()
    """Keys of `where` that have the usual value of another recipe than the paper's."""

    @property
    def own_recipe(self) -> str:
        """The recipe with the paper's setup; empty if it is not a paper's table."""
        return self.recipe or RECIPES.get(self.paper or "", "")

    @model_validator(mode="after")
    def _complete(self) -> Description:
        if not self.rows and not self.others:
            raise ValueError("a table needs rows, or others: true")
        if self.against is None and any(COMPARED & set(g.summaries) for g in self.groups):
            raise ValueError(f"{', '.join(sorted(COMPARED))} need against: METHOD")
        if (self.paper is None) != (self.table is None):
            raise ValueError("paper and table belong together")
        labels = [row.label for row in self.rows]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two rows have the label {twice[0]!r}; give each its own")
        if strange := sorted(set(self.best) - set(labels)):
            raise ValueError(f"best has {strange[0]!r}, which is no row")
        for where in self._filters():
            check_names(where)
        return self

    def _filters(self) -> Iterator[RunFilter]:
        yield self.where
        yield from (row.where for row in self.rows if row.where is not None)
        for group in self.groups:
            yield group.where
            yield from (column.where for column in group.columns)


def check_names(where: RunFilter) -> None:
    """Raise `ValueError` with the nearest known name if a filter has an unknown name."""
    for name in where:
        if name not in _filterable() and not name.startswith(("hyper.", "world.")):
            raise ValueError(unknown("filter", name, _filterable()))


def field_key(name: str, option: str) -> str:
    """Return a field of a run, or the key of a setting given in full, in short or by its symbol.

    Raises:
        SettingsError: If it is unknown or ambiguous; the message names the ``option``.
    """
    try:
        return full_key(setting_key(name), FIELDS)
    except SettingsError as error:
        raise SettingsError(f"{option}: {error}") from error


def read_filter(pairs: Sequence[str]) -> dict[str, list[Value]]:
    """Return ``KEY=VALUE`` pairs as a filter of runs; commas separate alternative values.

    Raises:
        SettingsError: If a pair cannot be read or its key is unknown.

    >>> read_filter(["method=FedAvg,pardon", "lambda=0.5", "lr=0.1"])
    {'method': ['fedavg', 'pardon'], 'partition.heterogeneity': [0.5], 'train.lr': [0.1]}
    """
    wanted: dict[str, list[Value]] = {}
    for pair in [pairs] if isinstance(pairs, str) else pairs:
        key, equals, raw = pair.partition("=")
        if not equals or not key.strip():
            raise SettingsError(
                f"cannot read --filter {pair!r}: expected KEY=VALUE, such as dataset=pacs"
            )
        full = field_key(key.strip(), "--filter")
        values = [read_yaml(part, f"the value of --filter {pair!r}") for part in raw.split(",")]
        wanted.setdefault(full, []).extend(_known(full, value) for value in values)
    return wanted


_NAMES: Mapping[str, Callable[[], Collection[str]]] = {
    "method": partial(names, "method"),
    "dataset": partial(names, "data set"),
    "protocol": lambda: PROTOCOLS,
    "recipe": recipe_names,
}
"""Field of a run -> known names, which a user can spell otherwise."""


@cache
def _filterable() -> frozenset[str]:
    return frozenset((*FIELDS, *dotted_keys()))


def named_tables() -> tuple[str, ...]:
    """Return the names of the tables that come with the package."""
    return shipped_names("sweeps/tables")


def load_description(name: str, also: Collection[str] = ()) -> tuple[str, Description]:
    """Return the name and the description of a shipped table, or of a YAML file.

    If the name is unknown, the error lists the shipped tables and the other known names, ``also``.

    Raises:
        SettingsError: If it is unknown, unreadable or invalid; the message names file and key.
    """
    path = find_yaml("table", "sweeps/tables", name, also=also)
    return path.stem, _shipped(path) if path.stem == name else _described(path)


def _described(path: Path) -> Description:
    layer = load_layer(path, "table")
    if "table" in layer:
        layer = {**layer, "table": str(layer["table"])}
    try:
        return _in_our_names(validate(Description, layer))
    except SettingsError as error:
        raise SettingsError(f"table {path}: {error}") from error


def _in_our_names(given: Description) -> Description:
    """Return a user's description with names in the suite's spelling.

    Raises:
        SettingsError: If a metric, or the method compared with, is unknown.
    """
    groups = [
        group.model_copy(
            update={
                "where": _spelt(group.where),
                "columns": [c.model_copy(update={"where": _spelt(c.where)}) for c in group.columns],
            }
        )
        for group in given.groups
    ]
    named = [given.metric, *(group.metric for group in groups)]
    named += [column.metric for group in groups for column in group.columns]
    for metric in named:
        if metric is not None and metric not in (*METRICS, *COSTS):
            raise SettingsError(unknown("metric", metric, (*METRICS, *COSTS)))
    rows = [
        row.model_copy(update={"where": None if row.where is None else _spelt(row.where)})
        for row in given.rows
    ]
    against = given.against and plugin_name("method", given.against)
    where = _spelt(given.where)
    update = {"where": where, "rows": rows, "groups": groups, "against": against}
    return given.model_copy(update=update)


def _spelt(where: RunFilter) -> RunFilter:
    return {
        key: [_known(key, one) for one in value] if isinstance(value, list) else _known(key, value)
        for key, value in where.items()
    }


def _known(key: str, value: Value) -> Value:
    """Return a value of a filter; names of methods and others are in the suite's spelling."""
    return known_name(value, _NAMES[key]()) if key in _NAMES and isinstance(value, str) else value


_shipped = cache(_described)


def filtered(runs: pd.DataFrame, where: RunFilter) -> pd.DataFrame:
    """Return the rows of a `run_frame` that match a filter."""
    kept = {run.key for run in fitting(runs["run"], where)}
    return runs[runs["key"].isin(kept)]


def fitting(runs: Iterable[RecordedRun], where: RunFilter) -> list[RecordedRun]:
    """Return the runs that match a filter, in their order."""
    found = list(runs)
    for name, wanted in where.items():  # one key at a time: runs share few values of each
        known: dict[Value, bool] = {}
        kept = []
        for run in found:
            value = getattr(run, name) if name in FIELDS else run.settings.get(name)
            fits = known.get(value)
            if fits is None:
                fits = known[value] = _fits(value, wanted)
            if fits:
                kept.append(run)
        found = kept
    return found


def no_run(runs: Sequence[RecordedRun], where: RunFilter) -> str:
    """Return the error that no run matches a filter, with the values that runs have instead."""

    def text(value: Value) -> str:
        return "null" if value is None else setting_text(value)  # as a filter takes it

    said = []
    for key, wanted in where.items():
        values = wanted if isinstance(wanted, list) else [wanted]
        known = sorted({text(run.get(key)) for run in runs}, key=natural)
        few = ", ".join(known[:10]) + (", ..." if len(known) > 10 else "")
        there = "" if fitting(runs, {key: wanted}) else f" (there are {few})"
        said.append(f"{setting_name(key)} {' or '.join(map(text, values))}{there}")
    return f"none of the {len(runs):,} runs has {' and '.join(said)}"


def _fits(value: Any, wanted: Value | list[Value]) -> bool:
    if isinstance(wanted, list):
        return any(_fits(value, one) for one in wanted)
    if isinstance(value, str) and isinstance(wanted, int):
        return value == str(wanted)  # a domain such as 15 is a number in YAML
    if isinstance(value, str) and isinstance(wanted, str):
        return composed(value) == composed(wanted)
    return bool(value == wanted)


def compared_with(description: Description, method: str) -> Description:
    """Return a description whose groups compare their columns with a method, which has a row."""
    heads = {kind: one.head for kind, one in SUMMARIES.items() if kind in COMPARED}
    groups = [
        group.model_copy(update={"summaries": {**group.summaries, **heads, **group.summaries}})
        for group in description.groups
    ]
    rows = description.rows
    if rows and not any((row.where or {}).get("method") == method for row in rows):
        rows = [*rows, RowSpec(label=method_title(method), where={"method": method})]
    return description.model_copy(update={"groups": groups, "against": method, "rows": rows})
