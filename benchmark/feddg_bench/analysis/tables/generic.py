"""Tables without a description: one for each data set, protocol, recipe and frame that has runs.

Runs with tuned settings have tables of their own, beside those with the recipe's.

The frame is what methods must share to be compared: who holds which images, the backbone, the
images' size, how many rounds. Runs that differ in other settings become separate rows.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from feddg_bench.analysis.tables.describe import (
    COMPARED,
    HEADS,
    ColumnSpec,
    Description,
    GroupSpec,
    Summary,
)
from feddg_bench.analysis.tables.frames import usual_settings
from feddg_bench.common.files import file_name
from feddg_bench.records.metrics import Metric
from feddg_bench.records.runs import RecordedRun
from feddg_bench.records.statistics import FEWEST
from feddg_bench.records.variants import assignments, natural

AGAINST = "fedavg"
BY_CLIENTS = ("partition.clients", "partition.heterogeneity", "federation.per_round")
"""Parts of the frame that mean nothing where one client holds all images."""

ADDED = {"data.background": "black", "data.exif": False}
"""Parts of the frame that came after the first records, which lack them while they have these."""

WIDTH = 8
"""Most columns that stand side by side."""


@dataclass(frozen=True)
class Generic:
    """A table without a description."""

    name: str
    file: str  # stem of its Markdown and CSV, the same for all frames
    description: Description  # its columns; every method is a row
    runs: tuple[RecordedRun, ...]
    recipe: str  # label of the runs' recipe, with `, tuned` if their settings were tuned


def generic_tables(runs: Sequence[RecordedRun], against: str | None = None) -> list[Generic]:
    """Return the tables for whatever runs are there, in the order of their names.

    Methods are compared with ``against``; by default with `AGAINST`, if it has runs.
    """
    groups: dict[tuple[str, str, str], list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault((run.dataset, run.protocol, run.recipe), []).append(run)
    tables: list[Generic] = []
    for (dataset, protocol, recipe), tuned, members in _by_tuning(groups):
        frames = _frames(members)
        label = recipe + ", tuned" * tuned
        for frame, mine in frames:
            name = file = file_name(dataset, protocol, recipe) + "-tuned" * tuned
            title = f"{dataset}, {protocol}, recipe {label}"
            different = _different(frame, recipe, dataset, [f for f, _ in frames])
            if different:
                name += "-" + _slug(different)
                title += f": {', '.join(different)}"
            known = against or (AGAINST if any(run.method == AGAINST for run in mine) else None)
            description = _describe(title, mine, known)
            tables.append(Generic(name, file, description, tuple(mine), label))
    return sorted(tables, key=lambda table: natural(table.name))


def _by_tuning(
    groups: Mapping[tuple[str, str, str], list[RecordedRun]],
) -> Iterator[tuple[tuple[str, str, str], bool, list[RecordedRun]]]:
    """Yield each group's key, whether it is tuned, and its runs.

    A run for which tuning chose the recipe's own settings may be in both kinds of group.
    """
    for key, members in sorted(groups.items()):
        plain = [run for run in members if not run.changed]
        if len(plain) == len(members) or not all(run.tuned for run in plain):
            yield key, False, plain
        if len(plain) < len(members):
            yield key, True, [run for run in members if run.tuned]


def _describe(title: str, runs: Sequence[RecordedRun], against: str | None) -> Description:
    """Return a description with scenarios as columns and summaries of each split."""
    found = {run.scenario: run for run in runs}
    scenarios = [found[name] for name in sorted(found)]
    first = scenarios[0]
    groups = []
    last = (run.evaluation("last") for run in runs)
    known = first.metric.percent and any("id_test" in found for found in last if found)
    for part in ("test", "val"):
        held = [(run, run.val if part == "val" else run.test) for run in scenarios]
        domains = Counter(domain for _, domain in held)
        columns = [
            ColumnSpec(
                head=domain if domains[domain] == 1 else f"{domain} ({run.scenario})",
                where={"scenario": run.scenario},
            )
            for run, domain in sorted(held, key=lambda pair: (str(pair[1]), pair[0].scenario))
            if domain is not None
        ]
        if not columns:
            continue
        several = len(columns) > 1
        kinds: list[Summary] = ["mean"] if part == "val" and several else []
        if part == "test":
            single = ("mean", "worst", "iqm")
            kinds = [kind for kind in HEADS if several or kind not in single]
            kinds = [kind for kind in kinds if known or kind not in ("id_test", "excess")]
            kinds = [kind for kind in kinds if against or kind not in COMPARED]
            tested = ("detectable", "excess")
            kinds = [kind for kind in kinds if len(columns) >= FEWEST or kind not in tested]
        groups.append(
            GroupSpec(
                head=part,
                split=part,
                columns=columns,
                summaries={kind: HEADS[kind] for kind in kinds},
            )
        )
    if groups and any(run.imbalance for run in runs) and first.metric.name != "macro_f1":
        groups.append(_macro_f1(groups[0]))
    return Description(
        title=title,
        **shown_as(first.metric),
        where={"dataset": first.dataset, "protocol": first.protocol},
        others=True,
        ranked=True,
        width=WIDTH,
        groups=groups,
        against=against,
    )


def _macro_f1(test: GroupSpec) -> GroupSpec:
    """Return the macro F1 over test, for runs whose classes are imbalanced: its mean."""
    columns = [
        column.model_copy(update={"head": "macro F1", "metric": "macro_f1"})
        for column in test.columns
    ]
    several = len(columns) > 1
    summaries: dict[Summary, str] = {"mean": "macro F1"} if several else {}
    return GroupSpec(
        head="test", split="test", columns=columns, hidden=several, summaries=summaries
    )


def shown_as(metric: Metric) -> dict[str, Any]:
    """Return a description's settings for a metric: its name, unit and number of decimals."""
    percent = metric.percent
    return {"metric": metric.name, "unit": "%" if percent else "", "decimals": 2 if percent else 3}


@dataclass(frozen=True)
class Frame:
    """Runs that can be compared: they share data set, protocol, recipe and federation.

    The ``name``, such as ``digits4-ltdo-quick``, is a stem for files.
    """

    name: str
    title: str
    runs: tuple[RecordedRun, ...]

    def metric_label(self, split: str) -> str:
        """Return an axis label for the data set's key metric on a split."""
        return f"{split} {self.runs[0].metric.label}"

    def scenario_labels(self) -> dict[str, str]:
        """Return each scenario's label: its test domain if these all differ, else its name."""
        tests = {run.scenario: run.test for run in self.runs}
        alike = len(set(tests.values())) < len(tests)
        return {name: name if alike else tests[name] for name in sorted(tests)}


def frames(runs: Sequence[RecordedRun], free: Collection[str] = ()) -> list[Frame]:
    """Return the frames among runs, by name.

    Runs of a frame may differ in the settings ``free``.
    """
    by_key = {run.key: run for run in runs}
    if free:
        stripped: dict[int, dict[str, Any]] = {}
        for run in runs:  # runs share their settings object; so must what is left of it
            if id(run.settings) not in stripped:
                left = {key: v for key, v in run.settings.items() if key not in free}
                stripped[id(run.settings)] = left
        runs = [replace(run, settings=stripped[id(run.settings)]) for run in runs]
    return [
        Frame(table.name, table.description.title, tuple(by_key[run.key] for run in table.runs))
        for table in generic_tables(runs)
    ]


# ------------------------------------------------------------------------------- frames


def _frames(runs: Sequence[RecordedRun]) -> list[tuple[dict[str, Any], list[RecordedRun]]]:
    """Return frames with their runs.

    Runs with all images in one client are in every frame that they fit and whose scenarios have
    theirs, or that they fit alone where none has it.
    """
    federated: dict[str, tuple[dict[str, Any], list[RecordedRun]]] = {}
    pooled: list[RecordedRun] = []
    by_settings: dict[tuple[int, str], dict[str, Any]] = {}
    for run in runs:
        if run.settings.get("partition.kind") == "pooled":
            pooled.append(run)
            continue
        key = (id(run.settings), run.fingerprint)
        if key not in by_settings:
            by_settings[key] = _frame(run)
        frame = by_settings[key]
        federated.setdefault(repr(frame), (frame, []))[1].append(run)
    found = [federated[key] for key in sorted(federated)]
    scenarios = [{run.scenario for run in members} for _, members in found]
    alone: dict[str, tuple[dict[str, Any], list[RecordedRun]]] = {}
    for run in pooled:
        mine = _without_clients(_frame(run))
        fitting = [n for n, (frame, _) in enumerate(found) if _without_clients(frame) == mine]
        having = [n for n in fitting if run.scenario in scenarios[n]]
        for number in having or fitting:
            found[number][1].append(run)
        if not fitting:
            alone.setdefault(repr(mine), (mine, []))[1].append(run)
    return found + [alone[key] for key in sorted(alone)]


def _frame(run: RecordedRun) -> dict[str, Any]:
    """Return what methods must share to be compared."""
    aside = ("partition.kind", "data.split_csv")
    frame = {
        key: value
        for key, value in run.settings.items()
        if key.startswith(("partition.", "backbone.", "data.")) and key not in aside
    }
    for key in ("federation.rounds", "federation.per_round"):
        frame[key] = run.settings.get(key)
    frame["split file"] = run.settings.get("data.split_csv") is not None
    frame["images"] = run.fingerprint[:8]
    return frame | {key: run.settings.get(key, default) for key, default in ADDED.items()}


def _without_clients(frame: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in frame.items() if k not in BY_CLIENTS}


def _different(
    frame: Mapping[str, Any], recipe: str, dataset: str, frames: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return the settings that vary between frames and differ from the recipe in this one."""
    usual = usual_settings(recipe, dataset) or frames[0]
    varying = [
        key for key in frame if len({repr(other.get(key)) for other in frames if key in other}) > 1
    ]
    return assignments(
        {key: frame[key] for key in varying if key not in usual or frame[key] != usual[key]}
    )


def _slug(different: Sequence[str]) -> str:
    """Return differences as part of a file name; a hash stands for more than three."""
    if len(different) > 3:
        return hashlib.sha256("-".join(different).encode()).hexdigest()[:8]
    return file_name("-".join(said.replace("=", "-", 1).replace(" ", "-") for said in different))
