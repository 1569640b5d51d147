"""Captions and notes: what was run, how numbers were selected, and caveats."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from feddg_bench.analysis.tables.caveats import few_images
from feddg_bench.analysis.tables.columns import MeasuredColumn, varied_keys
from feddg_bench.analysis.tables.describe import Description
from feddg_bench.analysis.tables.grid import Line
from feddg_bench.analysis.tables.rows import Row
from feddg_bench.analysis.tables.setups import FRAME, departing, is_frozen, modal, unlike_recipe
from feddg_bench.common.titles import WITHOUT_EFFECT, backbone_title
from feddg_bench.config.schema import LAYERS, PartitionSettings
from feddg_bench.data.protocols import TITLES
from feddg_bench.plugins import acts_on, dataset_title, harmless
from feddg_bench.records.differences import (
    assignments,
    differences,
    setting_name,
    setting_text,
    values,
)
from feddg_bench.records.metrics import find_metric
from feddg_bench.records.rules import CHOOSING, LAST, Rule
from feddg_bench.records.runs import RecordedRun
from feddg_bench.records.statistics import FEWEST

RULE_SENTENCES: Mapping[Rule, str] = {
    "last": "last round",
    "mean_last_5": f"mean of the last {LAST} evaluated rounds",
    "best_by_val": "round of the best {metric} on the validation domain",
    "best_by_id_val": "round of the best {metric} on held-out training-domain images",
    "oracle": "ORACLE: best round on the test domain",
}
MOST_WORDS = 40
"""Maximum number of words of title and caption together."""
BY_CLIENTS = ("partition.clients", "partition.heterogeneity", "federation.per_round")
"""Settings without meaning if one client holds all images."""
_CLIENTS = ("partition.clients", "N={}")
_SAMPLED = ("federation.per_round", "K={}")
_MIXED = ("partition.heterogeneity", "lambda={}")
_DRAWN = ("partition.alpha", "alpha={}")
SPREAD = {
    "heterogeneous": (_CLIENTS, _SAMPLED, _MIXED),
    "dirichlet": (_CLIENTS, _SAMPLED, _DRAWN),
    "label_dirichlet": (
        _CLIENTS,
        _SAMPLED,
        _MIXED,
        ("partition.alpha", "classes drawn with alpha={}"),
    ),
    "label_shards": (
        _CLIENTS,
        _SAMPLED,
        _MIXED,
        ("partition.classes_per_client", "{} classes per client"),
    ),
    "per_domain": (("partition.clients_per_domain", "{} clients per domain"), _SAMPLED),
    "domain": (("partition.kind", "one client per {}"), _SAMPLED),
    "pooled": (("partition.kind", "all images {}"),),
}
"""Kind of partition -> the settings that describe it, with their formats."""
_OTHER = (_CLIENTS, _SAMPLED, ("partition.kind", "partition {}"))
"""The same for all other kinds."""
_FIRST = (
    ("backbone.name", "{}"),
    ("data.image_size", "{} px"),
    ("federation.rounds", "{} rounds"),
)
_FROZEN = (
    ("features.encoder", "frozen {}"),
    ("data.image_size", "{} px"),
    ("backbone.hidden", "MLP {}"),
    ("federation.rounds", "{} rounds"),
)
"""The same for features."""
_MORE = (
    ("backbone.pretrained", "pretrained {}"),
    ("train.local_epochs", "local epochs {}"),
    ("train.batch_size", "batches of {}"),
    ("train.optimizer", "{}"),
    ("train.lr", "lr {}"),
    ("federation.bn", "batch normalisation {}"),
)
_RATE = "train.lr"
_MANY = 8
"""Maximum number of differences listed; the rest are only counted."""

TESTED = (
    "bold: significantly better than every other row; underlined: than every row except the bold "
    "one; by two-sided t-tests over the mean differences of {} units, with p < 0.05 against each "
    "row after Holm's correction; the tests concern units like these, not new seeds"
)
_FEW = f"no row is marked as best, since the test over units needs at least {FEWEST} of them"
TOO_FEW = "too few seeds"
UNTESTED = f"no test, as it needs at least {FEWEST} seeds"
_BOTH = (
    "unseen: the mean over both held-out domains of a scenario, val and test; val chose neither a "
    "round nor a setting"
)
SUMMARIES = {
    "id_test": "mean on id_test: the same runs on held-out images of the training domains",
    "worst": "worst: the smallest value among the columns of a group, for each seed",
    "iqm": "IQM: mean of the middle half of all runs",
    "rank": "rank: mean over the columns of a group, among rows that have all of them",
}
_AGAINST = {
    "wins": "wins/ties/losses by unit",
    "difference": "mean difference with its 95 % interval (Student's t over units' mean "
    "differences), which describes units like these, not new seeds",
    "p_value": "p of a two-sided t-test over units' mean differences, for units like these",
    "p_same": "p, these units: of a two-sided t-test over the seeds' mean differences, for exactly "
    "these units and further seeds; it needs five seeds",
    "detectable": "detects: the smallest true difference that such a test detects with 80 % power",
    "excess": "at equal id_test: the mean minus the mean predicted for {0} at the row's id_test, "
    "by the slope of {0}'s evaluated rounds on a logit scale, with a 95 % jackknife interval over "
    "units; none if id_test differs by more than over those rounds",
    "compute": "compute: all operations of a run except those of evaluation, over {0}'s in the "
    "same scenarios and seeds; a dash where a record does not count them",
    "improvement": "P(better): probability that a run is better than one of {0} in its unit",
}
"""Summary that compares with a method -> its definition."""
_INTERVALS = {
    "iqm": ", with a 95 % interval by a bootstrap over seeds within each unit, widened for few "
    "seeds; it holds for these units only",
    "improvement": ", with an interval by the same bootstrap",
}
"""Summary -> the end of its definition if there are several seeds; one gives no interval."""
_SPREADS = {
    "sd": ("SD", "sample standard deviation"),
    "interval": ("95 % interval", "half of its 95 % interval (Student's t)"),
}
"""Meaning of the number after ±, for captions and for definitions."""


def caption(
    description: Description,
    columns: Sequence[MeasuredColumn],
    rows: Sequence[Row],
    seeds: Sequence[int],
    *,
    outside: bool,
) -> str:
    """Return the data sets, the protocol, the setup, the seeds and the selection rule.

    Title and caption have at most `MOST_WORDS` words, so parts of the setup can be left out; the
    definitions hold all of it. ``outside`` says that the setup is not the paper's.
    """
    runs = [run for row in rows for run in row.members]
    if not runs:
        return "No run of this table is recorded yet; its notes list the commands to make them."
    filled = {number for row in rows for number, found in row.runs.items() if found}
    rules = dict.fromkeys(c.rule for c in columns if c.split and c.number in filled)
    over = f", mean ± {_SPREADS[description.spread][0]} over" if len(seeds) > 1 else ","
    said = f"{_measure(description, columns)}{over} "
    said += ", ".join(
        [seeds_text(seeds), *(RULE_SENTENCES[r].format(metric=_key(runs)) for r in rules)]
    )
    said += f"; {words}" if (words := by_one_run(rows)[1]) else ""
    said += f"; {UNTESTED}" * (len(rows) > 1 and few_seeds(seeds))
    protocols, recipes, scenarios = (
        sorted({getattr(run, name) for run in runs}) for name in ("protocol", "recipe", "scenario")
    )
    datasets = sorted({(run.dataset, dataset_title(run.dataset, run.label)) for run in runs})
    tuned = ", tuned" if any(run.changed for run in runs) else ""
    setup = [
        ", ".join(title for _, title in datasets),
        *(TITLES.get(name, name) for name in protocols),
        *(f"scenario {name}" for name in scenarios if len(scenarios) == 1),
        f"recipe {', '.join(recipes)}{tuned}" + " (not the paper's setup)" * outside,
    ]
    setup = [part for part in setup if part not in description.title]
    more = _settings(runs, varied_keys(description), ()) if len(datasets) == 1 else []
    most = MOST_WORDS - len(description.title.split())
    while True:
        words = f"{sentence(', '.join([*setup, *more]))} {sentence(said)}".strip()
        if not more or len(words.split()) <= most:
            return words
        more.pop()


def definitions(
    description: Description,
    columns: Sequence[MeasuredColumn],
    rows: Sequence[Row],
    reference: Row | None,
    seeds: Sequence[int],
    lines: Sequence[Line],
) -> tuple[str, ...]:
    """Return sentences on how a table's numbers were obtained."""
    runs = [run for row in rows for run in row.members]
    spread = _SPREADS[description.spread][1]
    over = f", mean ± {spread} over seeds" if len(seeds) > 1 else ""
    when = seeds_text(seeds) if seeds else "no run of this table is recorded yet"
    said = [f"{_measure(description, columns)}{over}; {when}"]
    for rule in dict.fromkeys(column.rule for column in columns if column.split is not None):
        words = f"Selection rule {rule}: {RULE_SENTENCES[rule].format(metric=_key(runs))}"
        said.append(words + ", the earliest of equal ones" * (rule in CHOOSING))
    if any(len({column.split for column in group.columns}) > 1 for group in description.groups):
        said.append(_BOTH)
    named = {(run.dataset, dataset_title(run.dataset, run.label)) for run in runs}
    for dataset, title in sorted(named):
        mine = [
            r for r in runs if (r.dataset, dataset_title(r.dataset, r.label)) == (dataset, title)
        ]
        recipes = ", ".join(sorted({run.recipe for run in mine}))
        settings = ", ".join(_settings(mine, varied_keys(description), _MORE))
        said.append(f"{title}, recipe {recipes}: {settings}")
    if few := few_images(run.few for run in runs):
        said.append(few)
    said += [*tuning(rows), *_privacy(rows)]
    if len(rows) > 1 and seeds:
        units: dict[tuple[int, int], set[str]] = {}
        for number, row in enumerate(rows):
            for (column, unit, _), _ in row.sample:
                units.setdefault((number, columns[column].group), set()).add(unit)
        tested = max(map(len, units.values()))
        several = UNTESTED if few_seeds(seeds) else TESTED.format(tested)
        said.append(several if tested >= FEWEST else _FEW)
        if tested >= FEWEST:
            said.append(_units(runs))
    kinds = {kind for group in description.groups for kind in group.summaries}
    kinds -= {"p_value", "p_same"} if few_seeds(seeds) else set()
    intervals = _INTERVALS if len(seeds) > 1 else {}
    against = [words + intervals.get(kind, "") for kind, words in _AGAINST.items() if kind in kinds]
    if reference is not None and against:
        listed = "; ".join(against).format(reference.label)
        said.append(
            f"comparisons are with {reference.label}, over the scenarios and seeds of both rows: "
            f"{listed}"
        )
        shared = f"all rows are compared with the same runs of {reference.label}"
        said.append(f"{shared}, whose luck moves all differences together")
        if {"p_value", "p_same"} & kinds:
            said.append(
                "p-values are corrected (Holm) for the number of methods, without rows with all "
                f"images in one place and rows that equal {reference.label} in every number"
            )
    said += [SUMMARIES[kind] + intervals.get(kind, "") for kind in sorted(kinds & set(SUMMARIES))]
    if sources := {e.source: None for line in lines for e in line.entries if e and e.source}:
        apart = any(line.kind == "difference" for line in lines)
        gap = "; difference: ours - published" if apart else ""
        said.append(f"published: {'; '.join(sources)}{gap}")
    return tuple(map(sentence, said))


def _units(runs: Sequence[RecordedRun]) -> str:
    """Return the definition of the unit of replication, and whether the runs' units overlap."""
    said = (
        "unit of replication: the domains that a model was trained on; numbers of one unit, such "
        "as those of its unseen domains, are averaged first"
    )
    for dataset in sorted({run.dataset for run in runs}):
        units = {run.train for run in runs if run.dataset == dataset}
        domains = [domain for unit in units for domain in unit.split("+")]
        if len(domains) > len(found := {*domains}):
            said += (
                f"; the {len(units)} units of {dataset_title(dataset)} share {len(found)} domains, "
                f"so they are not independent"
            )
    return said


def _measure(description: Description, columns: Sequence[MeasuredColumn]) -> str:
    """Return the table's only metric, or `Numbers`, and the unit."""
    metrics = {column.metric for column in columns}
    said = find_metric(metrics.pop()).title if len(metrics) == 1 else "Numbers"
    return said + (f" in {description.unit}" if description.unit else "")


def _key(runs: Sequence[RecordedRun]) -> str:
    """Return the key metrics of the runs' data sets."""
    names = sorted({run.metric.name for run in runs})
    return " or ".join(find_metric(name).title for name in names) or "accuracy"


def _settings(
    runs: Sequence[RecordedRun], free: Collection[str], more: Iterable[tuple[str, str]]
) -> list[str]:
    """Return the most frequent settings of a data set's runs, the most informative first.

    Settings in ``free``, which columns vary, are included only if they have a single value.
    """
    common = {"partition.classes_per_client": PartitionSettings().classes_per_client, **modal(runs)}
    spread = SPREAD.get(common.get("partition.kind", "heterogeneous"), _OTHER)
    encoded = common.get("features.encoder") is not None
    first = _FROZEN if encoded else _FIRST
    return [
        _single(form.format(_plain(common[key])))
        for key, form in (*first, *spread, *more)
        if key in common
        and not (encoded and key in ("backbone.pretrained", "federation.bn"))
        and (common[key] or key != "backbone.hidden")
        and (key not in free or len({repr(run.settings.get(key)) for run in runs}) == 1)
    ]


def _single(text: str) -> str:
    return re.sub(r"^1 (round|client)s", r"1 \1", text)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "all" if value is None else backbone_title(setting_text(value))


def tuning(rows: Sequence[Row]) -> list[str]:
    """Return a sentence on how the rows' settings were tuned.

    There is none where tuning changed nothing, unless every run was tuned.
    """
    runs = [run for row in rows for run in row.members]
    changed = any(run.changed for run in runs)
    if not runs or not (changed or all(run.tuned for run in runs)):
        return []
    by_trials: dict[str, list[str]] = {}
    for row in rows:
        if row.members:
            words = {run.tuned.words if run.tuned else "not tuned" for run in row.members}
            by_trials.setdefault(" or ".join(sorted(words)), []).append(row.label)
    said = "; ".join(f"{words}: {', '.join(by_trials[words])}" for words in sorted(by_trials))
    how = f"{next(iter(by_trials))} each" if len(by_trials) == 1 else said
    if any(run.tuned and run.tuned.scenario for run in runs):
        kept = "recipe's settings were selected for every row and"
        how += (
            f"; the {'selected settings' if changed else kept} are used in all scenarios, "
            "including those that test on these domains"
        )
    return [f"settings were tuned on held-out images of the training domains, {how}"]


def _privacy(rows: Sequence[Row]) -> list[str]:
    """Return the privacy guarantees of protected rows, each with its runs' largest epsilon."""
    found: dict[str, list[str]] = {}
    for row in rows:
        records = [run.privacy for run in row.members if run.privacy]
        if records:
            worst = max(records, key=lambda record: record.epsilon or 0)
            found.setdefault(worst.words(), []).append(row.label)
    return [f"privacy of {', '.join(labels)}: {words}" for words, labels in found.items()]


def by_one_run(rows: Sequence[Row]) -> tuple[dict[Row, str], str]:
    """Return footnotes on settings that one run chose; a single text if most rows have them.

    Such a setting may cause the difference between two rows.
    """
    keys = {row: {key for run in row.members for key in run.by_one_run} for row in rows}
    keys = {row: chosen for row, chosen in keys.items() if chosen}
    if 2 * len(keys) <= len(rows):
        return {row: _by_one_run(chosen) for row, chosen in keys.items()}, ""
    return {}, _by_one_run({key for chosen in keys.values() for key in chosen})


def _by_one_run(keys: Collection[str]) -> str:
    return f"{', '.join(sorted(map(setting_name, keys)))} chosen by one run"


def notes(description: Description, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return a table's own notes, and notes on rows that were tuned or differ from most."""
    usual = _usual(rows)
    aside = {*varied_keys(description), "data.split_csv", "partition.rounding"}
    said = [*description.notes]
    for row in rows:
        own, chosen, unlike = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        for run in row.members:
            chosen |= run.tuned.settings if run.tuned else {}
        for run in {(run.dataset, id(run.settings)): run for run in row.members}.values():
            keys = [k for k in run.settings if k not in {*aside, *chosen} and k[:6] != "hyper."]
            own |= values(differences(run.settings, usual[run.dataset], keys))
            unlike |= unlike_recipe(run)
        unlike = {k: v for k, v in unlike.items() if k not in (row.where or {})}
        apart = assignments({**row.variant.differences, **unlike})
        said += [
            f"row {row.label} {verb} {', '.join(found)}"
            for verb, found in (
                ("differs from most rows in", _shortened(assignments(own))),
                ("was tuned to", assignments(chosen)),
                ("is", apart if any(part not in row.label for part in apart) else ()),
            )
            if found
        ]
    return tuple(map(sentence, [*said, *_codes(rows), *_cpus(rows)]))


def _usual(rows: Sequence[Row]) -> dict[str, Mapping[str, Any]]:
    """Return the most frequent settings by data set."""
    by_dataset: dict[str, list[RecordedRun]] = {}
    for row in rows:
        for run in row.members:
            by_dataset.setdefault(run.dataset, []).append(run)
    return {dataset: modal(runs) for dataset, runs in by_dataset.items()}


def _shortened(said: list[str]) -> list[str]:
    return [*said[:_MANY], f"and {len(said) - _MANY} more"] if len(said) > _MANY else said


def mixed(description: Description, rows: Sequence[Row]) -> dict[Row, str]:
    """Return the differences of rows with another setup, such as other rounds or networks.

    A value that a recipe or a method sets is not a difference, unless a run departs from it.
    """
    usual, aside = _usual(rows), varied_keys(description)
    asked = {row: {*aside, *(row.where or {})} for row in rows}
    away = {key for row in rows for run in row.members for key in departing(run, asked[row])}
    found = {}
    for row in rows:
        tuned = {key for run in row.members if run.tuned for key in run.tuned.settings}
        keys = sorted((away & {*FRAME}) - asked[row] - tuned)
        other: dict[str, Any] = {}
        for run in row.members:
            pooled = BY_CLIENTS if run.get("partition.kind") == "pooled" else ()
            compared = [key for key in keys if key not in pooled]
            other |= values(differences(run.settings, usual[run.dataset], compared))
        if other:
            found[row] = ", ".join(assignments(other))
    return found


def _codes(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each row that mixes source codes whose numbers may differ."""
    said = []
    for row in rows:
        codes: dict[tuple[str, int], set[str]] = {}
        for run in row.members:
            if run.code is not None:
                codes.setdefault((run.method, run.version), set()).add(run.code)
        said += [
            f"row {row.label} mixes runs of {len(found)} codes of one version of {method}, whose "
            f"numbers may differ: raise `version` where the code changed, or repeat them with "
            f"--again"
            for (method, version), found in codes.items()
            if len(found) > 1 and not found <= harmless(method, version)
        ]
    return said


def _cpus(rows: Sequence[Row]) -> list[str]:
    """Return sentences on rows with several kinds of CPU, and on those with another than most.

    A portable run gives the same numbers on every kind.
    """
    several, by_cpu = list[str](), dict[str, list[str]]()
    for row in rows:
        bound = [run.environment for run in row.members if not run.environment.get("portable")]
        if bound and len({r.environment.get("cpu") for r in row.members} - {None, ""}) > 1:
            several.append(row.label)
        cpus = {found.get("cpu") for found in bound}
        if len(cpus) == 1 and (cpu := cpus.pop()):
            by_cpu.setdefault(str(cpu), []).append(row.label)
    said = [
        f"run on several kinds of CPU without --portable, so reruns on one kind can differ: "
        f"{', '.join(several)}"
    ] * bool(several)
    others = sorted(by_cpu, key=lambda cpu: (-len(by_cpu[cpu]), cpu))[1:]
    return said + [
        f"run on another kind of CPU than most rows ({cpu}), which rounds differently: "
        f"{', '.join(by_cpu[cpu])}"
        for cpu in others
    ]


def equal_rows(rows: Sequence[Row]) -> dict[Row, str]:
    """Return a footnote for each row whose numbers all equal those of another row.

    These include numbers that the table does not show: the worst client can have 0 % in any run.
    The other one is the first, if possible of a method that does not declare what it acts on.
    """
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if numbers := tuple(sorted(row.sample.items())):
            every = frozenset(run.table.numbers.tobytes() for run in row.members)
            found.setdefault((numbers, every), []).append(row)
    said = {}
    for equal in found.values():
        first = min(equal, key=lambda row: any(acts_on(run.method) for run in row.members))
        for row in equal:
            both = (*first.members, *row.members)
            acts = {acts_on(run.method) for run in both}
            why = " in every run"
            if "batch_norm" in acts or len({run.get("federation.bn") for run in both}) > 1:
                why = f": {WITHOUT_EFFECT['batch_norm']}"
            elif "features" in acts and not any(map(_trains_features, both)):
                why = f": {WITHOUT_EFFECT['features']}"
            if row is not first:
                said[row] = f"identical to {first.label}{why}"
    return said


def _trains_features(run: RecordedRun) -> bool:
    """Return whether a run trains layers below the classifier."""
    return not is_frozen(run.settings) or any(run.get(f"backbone.{layer}") for layer in LAYERS)


def other_rates(
    description: Description, rows: Sequence[Row], reference: Row | None
) -> dict[Row, str]:
    """Return a footnote for each row whose learning rate is not that of the reference.

    There is none where columns vary the rate, or the row's label names it.
    """
    if reference is None or _RATE in varied_keys(description):
        return {}
    theirs, said = _rates(reference), {}
    for row in rows:
        apart = row.variant.differences
        for dataset, rates in _rates(row).items():
            if theirs.get(dataset, rates) != rates and _RATE not in {*apart, *(row.where or {})}:
                said[row] = f"at {_rate(rates)}, {reference.label} at {_rate(theirs[dataset])}"
    return said


def _rates(row: Row) -> dict[str, set[float]]:
    """Return the learning rates of a row's runs by data set."""
    found: dict[str, set[float]] = {}
    for run in row.members:
        found.setdefault(run.dataset, set()).add(run.get(_RATE))
    return found


def _rate(values: Collection[float]) -> str:
    return f"lr={' and '.join(setting_text(value) for value in sorted(values))}"


def few_seeds(seeds: Collection[int]) -> bool:
    """Return whether there are seeds, but too few for a test."""
    return 0 < len(seeds) < FEWEST


def seeds_text(seeds: Iterable[int]) -> str:
    """Return seeds as text, such as ``seeds 0 to 2``."""
    found = sorted(seeds)
    if not found:
        return "no numbers yet"
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"seeds {found[0]} to {found[-1]}"
    return f"seed{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def sentence(words: str) -> str:
    """Return words as a sentence, with an initial capital and a full stop.

    A first word with inner capitals, such as iWildCam, is not changed.
    """
    if not words:
        return ""
    first = words.partition(" ")[0]
    start = words[:1] if first[1:] != first[1:].lower() else words[:1].upper()
    return f"{start}{words[1:]}" + ("" if words.endswith(".") else ".")
