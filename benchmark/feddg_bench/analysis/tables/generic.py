"""Frames: sets of comparable runs, and tables of them that need no description file.

The methods of a frame share the distribution of images over clients, the backbone, the image size
and the number of rounds; also the optimiser, if FedAvg ran with several.
"""

from __future__ import annotations

import hashlib
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from feddg_bench.analysis.tables.describe import (
    COMPARED,
    SUMMARIES,
    ColumnSpec,
    Description,
    GroupSpec,
    RowSpec,
    Summary,
    field_key,
    fitting,
    no_run,
)
from feddg_bench.analysis.tables.setups import (
    BY_CLIENTS,
    SPLIT,
    TUNED,
    least_departing,
    setups,
    usual_settings,
)
from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import file_name
from feddg_bench.common.titles import domain_title
from feddg_bench.data.protocols import TITLES
from feddg_bench.plugins import dataset_title, method_title
from feddg_bench.records.differences import (
    assignments,
    differences,
    natural,
    setting_name,
    setting_text,
    telling,
    values,
)
from feddg_bench.records.metrics import Metric
from feddg_bench.records.rules import UNSEEN, Rule, unseen_splits
from feddg_bench.records.runs import FIELDS, RecordedRun, key_metric
from feddg_bench.records.statistics import FEWEST

if TYPE_CHECKING:
    import pandas as pd

AGAINST = "fedavg"
ADDED = {"data.background": "black", "data.exif": False}
"""Settings added after the first records were made -> the value in records that lack them."""

_OPTIMIZER = "train.optimizer"
_FEDERATION = ("federation.rounds", "federation.per_round")


@dataclass(frozen=True)
class Frame:
    """Comparable runs: they share data set, protocol, setup and federation."""

    name: str  # stem of file names, such as `digits4-ltdo-quick`
    setup: str  # stem shared by all frames of a data set, protocol and setup
    description: Description  # of a table with a column per scenario and a row per method
    runs: tuple[RecordedRun, ...]
    recipe: str  # label of the runs' recipe, with `, tuned` if their settings were tuned
    optimizer: str = ""  # of these runs, if those of other optimisers are apart
    others: int = 0  # number of runs of the setup in other frames, if this one stands for it

    def described(self, select: Rule | None) -> Description:
        """Return the description for a selection rule; ``None`` is the last round."""
        known = self.description
        return _describe(known.title, self.runs, known.against, select or known.select)

    @property
    def title(self) -> str:
        """Data set, protocol and recipe as papers write them, and what distinguishes the frame."""
        return self.description.title

    def metric_label(self, split: str) -> str:
        """Return an axis label for the data set's key metric on a split."""
        return f"{split} {self.runs[0].metric.label}"

    def scenario_labels(self, split: str = "test") -> dict[str, str]:
        """Return each scenario's label: its test domain if that tells it, else its name."""
        tests = {run.scenario: run.test for run in self.runs}
        alike = split == UNSEEN or len(set(tests.values())) < len(tests)
        return {name: name if alike else domain_title(tests[name]) for name in sorted(tests)}


def frames(
    runs: pd.DataFrame, against: str | None = None, free: Collection[str] = ()
) -> list[Frame]:
    """Return the frames among runs, in the order of their names.

    Args:
        runs: Any runs, as of `read_frame`.
        against: Method that tables compare the others with; by default `AGAINST`, if it has runs.
        free: Settings in which runs of a frame may differ.
    """
    found: list[Frame] = []
    reference = AGAINST if against is None else against
    parts = (part for of in _setups(runs) for part in _by_optimizer(*of, reference, free))
    for name, title, recipe, members, optimizer in parts:
        together = _together(members, free)
        first = members[0]
        usual = usual_settings(first.recipe, first.dataset) or together[0][0]
        varied = telling(shared for shared, _ in together)
        for shared, mine in together:
            apart = assignments(values(differences(shared, usual, varied)))
            more = f": {', '.join(apart)}" if apart else ""
            known = against or (AGAINST if any(run.method == AGAINST for run in mine) else None)
            found.append(
                Frame(
                    name + (f"-{slug(apart)}" if apart else ""),
                    name,
                    _describe(title + more, mine, known),
                    tuple(mine),
                    recipe,
                    optimizer,
                )
            )
    return sorted(found, key=lambda frame: natural(frame.name))


def leaderboards(
    runs: pd.DataFrame, against: str | None = None, recipe: str | None = None
) -> list[Frame]:
    """Return one frame for each data set, protocol and setup, or for those of one recipe.

    It is the frame with the recipe's own settings, or else the one with the most runs.
    """
    found: dict[str, list[Frame]] = {}
    for frame in frames(runs, against):
        if recipe is None or frame.runs[0].recipe == recipe:
            found.setdefault(frame.setup, []).append(frame)
    shown = [(max(of, key=lambda f: (f.name == f.setup, len(f.runs))), of) for of in found.values()]
    return [
        replace(frame, name=frame.setup, others=sum(len(f.runs) for f in of if f is not frame))
        for frame, of in shown
    ]


def trained(runs: Iterable[RecordedRun]) -> float:
    """Return the mean key metric on `id_test` after the last round; 0 if it was not measured.

    It shows how far training has come: where it is low, methods differ by the speed of training.
    """
    found = (key_metric(run, run.evaluation("last"), "id_test") for run in runs)
    known = [number for number in found if number is not None]
    return fmean(known) if known else 0.0


def most_telling(frames: Sequence[Frame]) -> list[Frame]:
    """Return, for each data set and protocol, the largest frame and the best trained one.

    Each folder of a user's own images and each encoder of features counts as a data set, and so
    does an optimiser with a frame of its own. The largest has the most runs in its rows; `trained`
    says how well a frame's runs are trained.
    """
    found: dict[tuple[str | None, ...], list[Frame]] = {}
    for frame in frames:
        first = frame.runs[0]
        of = (first.dataset, first.label, _encoder(first), first.protocol, frame.optimizer)
        found.setdefault(of, []).append(frame)

    def size(frame: Frame) -> int:
        by_method: dict[str, list[RecordedRun]] = {}
        for run in frame.runs:
            by_method.setdefault(run.method, []).append(run)
        return sum(len(least_departing(mine, {})) for mine in by_method.values())

    best = [
        frame.name
        for of in found.values()
        for frame in (max(of, key=size), max(of, key=lambda frame: trained(frame.runs)))
    ]
    return [frame for frame in frames if frame.name in best]


def by_values(
    methods: Sequence[str],
    columns: str,
    runs: pd.DataFrame,
    dataset: str | None = None,
    protocol: str | None = None,
    recipe: str | None = None,
) -> tuple[str, Description]:
    """Return the name and the description of a table with a column for each value.

    Args:
        methods: Methods in the rows; if empty, all methods with runs.
        columns: A field of a run, such as ``scenario``, or a setting, such as
            ``partition.heterogeneity`` or ``lambda``.
        runs: Runs from which the values are taken.
        dataset: Data set; needed if there are several, unless each is a column.
        protocol: Protocol; by default all, each with a group of columns.
        recipe: Recipe of the runs, if it matters.

    Raises:
        SettingsError: If a name is unknown, no run fits, or runs of several data sets do.
    """
    columns = field_key(columns, "--columns")
    if columns == "recipe":
        raise SettingsError(
            "a table shows one recipe: compare two by `tables --recipe NAME --against OTHER`"
        )
    given = {"dataset": dataset, "protocol": protocol}
    where: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    asked = where | ({"method": list(methods)} if methods else {})
    asked |= {} if recipe is None else {"recipe": recipe}
    fit = fitting(runs["run"], asked)
    if not fit and len(runs):
        raise SettingsError(no_run([*runs["run"]], asked))
    if not fit:
        raise SettingsError("there is no record: run something first, or give --results DIR")
    datasets = sorted({run.dataset for run in fit})
    if columns != "dataset" and len(datasets) > 1:
        raise SettingsError(
            f"there are runs of the data sets {' and '.join(datasets)}: name one, as in --dataset "
            f"{datasets[0]}"
        )
    labels = sorted({run.label for run in fit if run.label})
    if len(labels) > 1:
        raise SettingsError(
            f"there are runs of the own data sets {' and '.join(labels)}: name one, as in "
            f"--filter {shlex.quote(f'label={labels[0]}')}"
        )
    if columns != "dataset":
        where["dataset"] = datasets[0]
    protocols = sorted({run.protocol for run in fit}) if columns != "protocol" else [""]
    groups, notes = [], []
    for name in protocols:
        mine = [run for run in fit if name in ("", run.protocol)]
        specs = _by_value(columns, mine)
        common = specs[0].where.get("scenario") if columns != "scenario" else None
        if isinstance(common, list) and len(common) < len({run.scenario for run in mine}):
            every = ", ".join(map(setting_text, common))
            notes.append(f"{TITLES.get(name, name)}: over the scenarios of all columns, {every}")
        groups.append(
            GroupSpec(
                head=TITLES.get(name, name) if len(protocols) > 1 else "test",
                where={"protocol": name} if name else {},
                split="test",
                columns=specs,
                summaries={"mean": "mean"} if len(specs) > 1 and columns != "seed" else {},
            )
        )
    if len(protocols) == 1 and protocols[0]:
        where["protocol"] = protocols[0]
    by = setting_name(columns)
    own = labels[0] if labels else None
    titles = [dataset_title(where["dataset"], own)] if "dataset" in where else []
    titles += [TITLES.get(where["protocol"], where["protocol"])] if "protocol" in where else []
    shown = methods or sorted({run.method for run in fit})
    return file_name(*where.values(), "by", by.replace(" ", "-")), Description(
        title=", ".join([*titles, f"by {by}" if titles else f"By {by}"])
        + ", over the scenarios of all columns" * bool(notes),
        **shown_as(fit[0].metric),
        where=where,
        rows=[RowSpec(label=method_title(m), where={"method": m}) for m in shown],
        groups=groups,
        notes=notes,
    )


def _by_value(name: str, runs: Sequence[RecordedRun]) -> list[ColumnSpec]:
    """Return a column per value of a field or setting, over the scenarios common to all values."""
    known: dict[Any, set[str]] = {}
    for run in runs:
        known.setdefault(run.get(name), set()).add(run.scenario)
    said = setting_name(name)
    tests = {run.scenario: run.test for run in runs}
    by_test = name == "scenario" and len({*tests.values()}) == len(tests)
    common = set.intersection(*known.values())
    alike = name in FIELDS or not common or all(found == common for found in known.values())
    same: dict[str, Any] = {} if alike else {"scenario": sorted(common)}
    return [
        ColumnSpec(
            head=domain_title(tests[value]) if by_test else f"{said} {setting_text(value)}",
            where={name: value, **same},
        )
        for value in sorted(known, key=lambda value: natural(setting_text(value)))
    ]


def varied(runs: pd.DataFrame, recipe: str | None = None) -> list[Frame]:
    """Return all runs of each data set, protocol and setup, regardless of their settings."""
    return [
        Frame(
            f"{name}-variants",
            name,
            _describe(f"{title}: what was varied", members, None),
            tuple(members),
            setup,
        )
        for name, title, setup, members in _setups(runs)
        if recipe in (None, members[0].recipe)
    ]


def _setups(runs: pd.DataFrame) -> Iterator[tuple[str, str, str, list[RecordedRun]]]:
    """Yield the stem of file names, the title, the setup and its runs.

    The runs share one label and, on frozen features, one encoder.
    """
    of = [runs[name] for name in ("dataset", "protocol", "label")] + [runs["run"].map(_encoder)]
    for (dataset, protocol, label, encoder), mine in runs.groupby(of):
        for setup, members in setups(mine):
            recipe, tuned, _ = setup.partition(TUNED)
            named = [dataset, *[label] * bool(label)]
            stem = file_name(*named, protocol, recipe, *[encoder] * bool(encoder))
            title = f"{dataset_title(dataset, label or None)}, {TITLES.get(protocol, protocol)}"
            whole = f"{recipe}, {encoder}{tuned}" if encoder else setup
            yield (
                stem + "-tuned" * bool(tuned),
                f"{title}, recipe {whole}",
                setup,
                [*members["run"]],
            )


def _by_optimizer(
    name: str,
    title: str,
    setup: str,
    runs: list[RecordedRun],
    against: str,
    free: Collection[str],
) -> Iterator[tuple[str, str, str, list[RecordedRun], str]]:
    """Yield a setup's runs with the recipe's optimiser, and those with each other one.

    A difference to the method ``against`` is then one of methods alone. If it has no runs with the
    optimiser of a method, that method's runs stay with the recipe's.
    """
    usual = (usual_settings(runs[0].recipe, runs[0].dataset) or {}).get(_OPTIMIZER)
    methods: dict[str, set[str]] = {}
    for run in runs:
        methods.setdefault(str(run.settings.get(_OPTIMIZER)), set()).add(run.method)
    both = _OPTIMIZER not in free and against in methods.get(str(usual), ())
    apart = sorted(by for by, of in methods.items() if both and by != usual and {against} < of)
    rest = [run for run in runs if str(run.settings.get(_OPTIMIZER)) not in apart]
    yield name, title, setup, rest, str(usual) if apart else ""
    for by in apart:
        mine = [run for run in runs if str(run.settings.get(_OPTIMIZER)) == by]
        yield f"{name}-{file_name(by)}", f"{title}, {by.upper()}", f"{setup}, {by}", mine, by


def _encoder(run: RecordedRun) -> str:
    """Return the encoder of frozen features; empty for fine-tuned models and the recipe's own."""
    encoder = run.settings.get("features.encoder") or ""
    usual = usual_settings(run.recipe, run.dataset) or {}
    return "" if encoder == usual.get("features.encoder") else encoder


def _describe(
    title: str, runs: Sequence[RecordedRun], against: str | None, select: Rule = "last"
) -> Description:
    """Return a description with scenarios as columns and summaries of each split.

    If ``select`` uses neither held-out domain, both are unseen: summaries are over the means of
    both, and methods are compared on these.
    """
    found = {run.scenario: run for run in runs}
    scenarios = [found[name] for name in sorted(found)]
    first = scenarios[0]
    last = (run.evaluation("last") for run in runs)
    known = first.metric.percent and any("id_test" in found for found in last if found)
    by_split = {part: _by_scenario(scenarios, part) for part in ("test", "val")}
    test, val = by_split["test"], by_split["val"]
    both = len(val) == len(test) and len(unseen_splits(select)) > 1
    several = len(test) > 1
    lacking: Mapping[Summary, bool] = {
        "mean": not (several or both),
        "worst": not several,
        "iqm": not several,
        "id_test": not known,
        "excess": not known or len({run.train for run in runs}) < FEWEST,
        "detectable": len({run.train for run in runs}) < FEWEST,
        "p_value": len({run.seed for run in runs}) < FEWEST,
        "p_same": len({run.seed for run in runs}) < FEWEST,
        "compute": not any("teraflop" in run.costs for run in runs if run.method == against),
    }
    summaries = {
        kind: one.head
        for kind, one in SUMMARIES.items()
        if not lacking.get(kind) and (against or kind not in COMPARED)
    }
    mean: dict[Summary, str] = {"mean": "mean"} if several else {}
    details = [kind for kind, one in SUMMARIES.items() if one.detail]
    shown: dict[str, Any] = {"summaries": summaries, "details": details}
    if both:
        groups = [GroupSpec(head=UNSEEN, columns=[*val, *test], hidden=True, **shown)]
        for split, columns in (("val", val), ("test", test)):
            told: dict[Summary, str] = {"mean": split}
            groups.append(GroupSpec(head=UNSEEN, columns=columns, summaries=told, hidden=True))
        beside = [
            GroupSpec(head="test", columns=test),
            GroupSpec(head="val", columns=val, detail=True),
        ]
    else:
        groups = [GroupSpec(head="test", columns=test, **shown)]
        beside = [GroupSpec(head="val", columns=val, summaries=mean, detail=True)] if val else []
    if any(run.imbalance for run in runs) and first.metric.name != "macro_f1":
        groups.append(_macro_f1(groups[0]))
    return Description(
        title=title,
        **shown_as(first.metric),
        where={"dataset": first.dataset, "protocol": first.protocol},
        others=True,
        ranked=True,
        groups=[*groups, *beside],
        against=against,
    )


def _by_scenario(
    scenarios: Sequence[RecordedRun], split: Literal["val", "test"]
) -> list[ColumnSpec]:
    """Return a column for each scenario's domain in a split, given one run of each scenario."""
    held = [(run, domain) for run in scenarios if (domain := getattr(run, split)) is not None]
    domains = Counter(domain for _, domain in held)
    return [
        ColumnSpec(
            head=domain_title(domain) + f" ({run.scenario})" * (domains[domain] > 1),
            where={"scenario": run.scenario},
            split=split,
        )
        for run, domain in sorted(held, key=lambda pair: (str(pair[1]), pair[0].scenario))
    ]


def _macro_f1(first: GroupSpec) -> GroupSpec:
    """Return the first group with its mean macro F1, for runs with imbalanced classes."""
    columns = [
        column.model_copy(update={"head": "macro F1", "metric": "macro_f1"})
        for column in first.columns
    ]
    several = len(columns) > 1
    summaries: dict[Summary, str] = {"mean": "macro F1"} if several else {}
    return GroupSpec(head=first.head, columns=columns, hidden=several, summaries=summaries)


def shown_as(metric: Metric) -> dict[str, Any]:
    """Return a description's settings for a metric: its name, unit and number of decimals."""
    percent = metric.percent
    return {"metric": metric.name, "unit": "%" if percent else "", "decimals": 2 if percent else 3}


# -------------------------------------------------------------------------------- frames


def _together(
    runs: Sequence[RecordedRun], free: Collection[str]
) -> list[tuple[dict[str, Any], list[RecordedRun]]]:
    """Return the shared settings and the runs of each frame.

    A run with all images in one client joins every matching frame that has its scenario, every
    matching frame if none has it, and a frame of such runs if no frame matches.
    """
    pooled: list[RecordedRun] = []
    federated: dict[str, tuple[dict[str, Any], list[RecordedRun]]] = {}
    known: dict[tuple[int, str, str], dict[str, Any]] = {}
    for run in runs:
        if run.settings.get("partition.kind") == "pooled":
            pooled.append(run)
            continue
        key = (id(run.settings), run.fingerprint, run.method)
        shared = known[key] if key in known else known.setdefault(key, _shared(run, free))
        federated.setdefault(repr(shared), (shared, []))[1].append(run)
    found = [federated[key] for key in sorted(federated)]
    scenarios = [{run.scenario for run in members} for _, members in found]
    alone: dict[str, tuple[dict[str, Any], list[RecordedRun]]] = {}
    for run in pooled:
        mine = _shared(run, (*free, *BY_CLIENTS))
        fitting = [
            n
            for n, (shared, _) in enumerate(found)
            if {k: v for k, v in shared.items() if k not in BY_CLIENTS} == mine
        ]
        for number in [n for n in fitting if run.scenario in scenarios[n]] or fitting:
            found[number][1].append(run)
        if not fitting:
            alone.setdefault(repr(mine), (mine, []))[1].append(run)
    return found + [alone[key] for key in sorted(alone)]


def _shared(run: RecordedRun, free: Collection[str]) -> dict[str, Any]:
    """Return the settings that runs must share to be compared.

    Rounds and clients per round that the recipe gives to one method count as the recipe's.
    """
    settings = {**ADDED, **run.settings}
    prefixes = (
        "partition.",
        "backbone.",
        "features.",
        "data.",
        "world.",
        "federation.unseen_clients",
    )
    keys = [key for key in run.settings if key.startswith(prefixes)]
    keys += _FEDERATION
    shared = {key: settings.get(key) for key in keys if key not in {*free, "partition.kind", SPLIT}}
    usual = usual_settings(run.recipe, run.dataset)
    own = usual_settings(run.recipe, run.dataset, run.method)
    if usual and own:
        owned = (key for key in _FEDERATION if key in shared and shared[key] == own[key])
        shared |= {key: usual[key] for key in owned}
    shared["split file"] = settings.get(SPLIT) is not None
    shared["images"] = run.images
    return shared | {key: settings[key] for key in ADDED}


def slug(different: Sequence[str]) -> str:
    """Return differences as part of a file name; more than three become a hash."""
    if len(different) > 3:
        return hashlib.sha256("-".join(different).encode()).hexdigest()[:8]
    return file_name("-".join(said.replace("=", "-", 1).replace(" ", "-") for said in different))
