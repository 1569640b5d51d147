"""Captions and notes: what was run, how numbers were obtained, and rows that stand out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from feddg_bench.analysis.tables.caveats import by_one_run, few_images
from feddg_bench.analysis.tables.describe import COMPARED, SUMMARIES
from feddg_bench.analysis.tables.grid import Line
from feddg_bench.analysis.tables.rows import Row
from feddg_bench.analysis.tables.setups import modal, own_choices, unlike_recipe
from feddg_bench.analysis.tables.sheet import Sheet
from feddg_bench.common.titles import backbone_title
from feddg_bench.config.schema import PartitionSettings
from feddg_bench.data.protocols import TITLES
from feddg_bench.plugins import dataset_title, harmless
from feddg_bench.records.differences import assignments, differences, setting_text, values
from feddg_bench.records.metrics import find_metric
from feddg_bench.records.rules import CHOOSING, LAST, Rule
from feddg_bench.records.runs import RecordedRun
from feddg_bench.records.statistics import COLLAPSE, FEWEST

RULE_SENTENCES: Mapping[Rule, str] = {
    "last": "last round",
    "mean_last_5": f"mean of the last {LAST} evaluated rounds",
    "best_by_val": "round of the best {metric} on the validation domain",
    "best_by_id_val": "round of the best {metric} on held-out training-domain images",
    "oracle": "ORACLE: best round on the test domain",
}
ABBREVIATIONS = (
    "SD: sample standard deviation; N: clients; K: clients of a round; lambda: from 0, as few "
    "domains a client as possible, to 1, the same mixture of domains everywhere; px: the side of "
    "an image."
)
MOST_WORDS = 40
"""Maximum number of words of title and caption together."""
_CLIENTS = ("partition.clients", "N={}")
_SAMPLED = ("federation.per_round", "K={}")
_MIXED = ("partition.heterogeneity", "lambda={}")
_DRAWN = ("partition.alpha", "alpha={}")
_SKEWED = ("partition.alpha", "classes drawn with alpha={}")
_SHARDS = ("partition.classes_per_client", "{} classes per client")
SPREAD = {
    "heterogeneous": (_CLIENTS, _SAMPLED, _MIXED),
    "dirichlet": (_CLIENTS, _SAMPLED, _DRAWN),
    "label_dirichlet": (_CLIENTS, _SAMPLED, _MIXED, _SKEWED),
    "label_shards": (_CLIENTS, _SAMPLED, _MIXED, _SHARDS),
    "per_domain": (("partition.clients_per_domain", "{} clients per domain"), _SAMPLED),
    "domain": (("partition.kind", "one client per {}"), _SAMPLED),
    "pooled": (("partition.kind", "all images {}"),),
}
"""Kind of partition -> the settings that describe it, with their formats."""
_OTHER = (_CLIENTS, _SAMPLED, ("partition.kind", "partition {}"))
"""The same for all other kinds."""
_FIRST = (
    ("features.encoder", "frozen {}"),
    ("backbone.name", "{}"),
    ("data.image_size", "{} px"),
    ("backbone.hidden", "MLP {}"),
    ("federation.rounds", "{} rounds"),
)
_MORE = (
    ("backbone.pretrained", "pretrained {}"),
    ("train.local_epochs", "local epochs {}"),
    ("train.batch_size", "batches of {}"),
    ("train.optimizer", "{}"),
    ("train.lr", "lr {}"),
    ("federation.bn", "batch normalisation {}"),
)
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
_SPREADS = {
    "sd": ("SD", "sample standard deviation"),
    "interval": ("95 % interval", "half of its 95 % interval (Student's t)"),
}
"""Meaning of the number after ±, for captions and for definitions."""


CAPTION = "{setup} {measure}{spread} {seeds}{rules}{one_run}{untested}."


def caption(sheet: Sheet) -> str:
    """Return the data sets, the protocol, the setup, the seeds and the selection rule.

    Title and caption have at most `MOST_WORDS` words, so parts of the setup can be left out; the
    notes hold all of it.
    """
    runs, title = sheet.runs, sheet.description.title
    if not runs:
        listed = "; its notes list the commands to make them" * bool(sheet.rows)
        return f"No run of this table is recorded yet{listed}."
    filled = {number for row in sheet.rows for number, found in row.runs.items() if found}
    rules = dict.fromkeys(c.rule for c in sheet.columns if c.split and c.number in filled)
    several = f", mean ± {_SPREADS[sheet.description.spread][0]} over"
    one_run = by_one_run(sheet.rows)[1]
    said = {
        "measure": capital(_measure(sheet)),
        "spread": several if len(sheet.seeds) > 1 else ",",
        "seeds": seeds_text(sheet.seeds),
        "rules": "".join(f", {RULE_SENTENCES[r].format(metric=_key(runs))}" for r in rules),
        "one_run": f"; {one_run}" if one_run else "",
        "untested": f"; {UNTESTED}" * (len(sheet.rows) > 1 and few_seeds(sheet.seeds)),
    }
    protocols, recipes, scenarios = (
        sorted({getattr(run, name) for run in runs}) for name in ("protocol", "recipe", "scenario")
    )
    datasets = sorted({(run.dataset, dataset_title(run.dataset, run.label)) for run in runs})
    setup = [
        ", ".join(name for _, name in datasets),
        *(TITLES.get(name, name) for name in protocols),
        *(f"scenario {name}" for name in scenarios if len(scenarios) == 1),
        f"recipe {', '.join(recipes)}"
        + ", tuned" * any(run.changed for run in runs)
        + " (not the paper's setup)" * any(sheet.outside.values()),
    ]
    setup = [part for part in setup if part not in title]
    more = _settings(runs, sheet.varied, ()) if len(datasets) == 1 else []
    while True:
        words = CAPTION.format(setup=sentence(", ".join([*setup, *more])), **said).strip()
        if not more or len(f"{title} {words}".split()) <= MOST_WORDS:
            return words
        more.pop()


def notes(sheet: Sheet, lines: Sequence[Line], elsewhere: Mapping[str, str]) -> tuple[str, ...]:
    """Return sentences on how numbers were obtained, and on rows that stand out.

    Args:
        sheet: The table.
        lines: Its lines.
        elsewhere: Source of a published number that is left out -> how its setup differs.
    """
    return tuple(
        sentence(words)
        for words in (
            *_measured(sheet),
            *_compared(sheet),
            *_published(lines),
            ABBREVIATIONS,
            *sheet.description.notes,
            *_rows(sheet),
            *_codes(sheet.rows),
            *_cpus(sheet.rows),
            *_collapses(sheet),
            *_frames(sheet, elsewhere),
        )
    )


def _measured(sheet: Sheet) -> Iterator[str]:
    """Yield notes on the metric, the rules and the runs."""
    runs, seeds = sheet.runs, sheet.seeds
    spread = _SPREADS[sheet.description.spread][1]
    over = f", mean ± {spread} over seeds" if len(seeds) > 1 else ""
    when = seeds_text(seeds) if seeds else "no run of this table is recorded yet"
    yield f"{_measure(sheet)}{over}; {when}"
    for rule in dict.fromkeys(column.rule for column in sheet.columns if column.split is not None):
        words = f"Selection rule {rule}: {RULE_SENTENCES[rule].format(metric=_key(runs))}"
        yield words + ", the earliest of equal ones" * (rule in CHOOSING)
    groups = sheet.description.groups
    if any(len({column.split for column in group.columns}) > 1 for group in groups):
        yield _BOTH
    named: dict[tuple[str, str], list[RecordedRun]] = {}
    for run in runs:
        named.setdefault((run.dataset, dataset_title(run.dataset, run.label)), []).append(run)
    for (_, title), mine in sorted(named.items(), key=lambda pair: pair[0]):
        recipes = ", ".join(sorted({run.recipe for run in mine}))
        yield f"{title}, recipe {recipes}: {', '.join(_settings(mine, sheet.varied, _MORE))}"
    yield from filter(None, [few_images(run.few for run in runs)])
    yield from tuning(sheet.rows)
    yield from _privacy(sheet.rows)


def _compared(sheet: Sheet) -> Iterator[str]:
    """Yield notes on tests and comparisons."""
    seeds, reference = sheet.seeds, sheet.reference
    if len(sheet.rows) > 1 and seeds:
        units: dict[tuple[int, int], set[str]] = {}
        for number, row in enumerate(sheet.rows):
            for (column, unit, _), _ in row.sample:
                units.setdefault((number, sheet.columns[column].group), set()).add(unit)
        tested = max(map(len, units.values()))
        several = UNTESTED if few_seeds(seeds) else TESTED.format(tested)
        yield several if tested >= FEWEST else _FEW
        if tested >= FEWEST:
            yield _units(sheet.runs)
    kinds = {kind for group in sheet.description.groups for kind in group.summaries}
    kinds -= {"p_value", "p_same"} if few_seeds(seeds) else set()
    about = {
        kind: one.about + one.interval * (len(seeds) > 1)
        for kind, one in SUMMARIES.items()
        if kind in kinds and one.about
    }
    against = [words for kind, words in about.items() if kind in COMPARED]
    if reference is not None and against:
        yield (
            f"comparisons are with {reference.label}, over the scenarios and seeds of both rows: "
            + "; ".join(against).format(reference.label)
        )
        yield (
            f"all rows are compared with the same runs of {reference.label}, whose luck moves all "
            f"differences together"
        )
        if {"p_value", "p_same"} & kinds:
            yield (
                "p-values are corrected (Holm) for the number of methods, without rows with all "
                f"images in one place and rows that equal {reference.label} in every number"
            )
    yield from (about[kind] for kind in sorted(about.keys() - COMPARED))


def _published(lines: Sequence[Line]) -> Iterator[str]:
    """Yield a note on the sources of published numbers."""
    if sources := {e.source: None for line in lines for e in line.entries if e and e.source}:
        apart = any(line.kind == "difference" for line in lines)
        yield f"published: {'; '.join(sources)}{'; difference: ours - published' * apart}"


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


def _measure(sheet: Sheet) -> str:
    """Return the table's only metric, or `Numbers`, and the unit."""
    metrics = {column.metric for column in sheet.columns}
    said = find_metric(metrics.pop()).title if len(metrics) == 1 else "Numbers"
    return said + (f" in {sheet.description.unit}" if sheet.description.unit else "")


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
    left_out = ("backbone.name", "backbone.pretrained", "federation.bn") if encoded else ()
    return [
        re.sub(r"^1 (round|client)s", r"1 \1", form.format(_plain(common[key])))
        for key, form in (*_FIRST, *spread, *more)
        if key in common
        and key not in left_out
        and (common[key] or key not in ("features.encoder", "backbone.hidden"))
        and (key not in free or len({repr(run.settings.get(key)) for run in runs}) == 1)
    ]


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
            words = {_tuning_of(run) for run in row.members}
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


def _selected(run: RecordedRun) -> dict[str, Any]:
    """Return the settings that tuning selected, without those that the run's command replaced."""
    found = run.tuned.settings.items() if run.tuned else ()
    return {key: value for key, value in found if run.settings.get(key) == value}


def _tuning_of(run: RecordedRun) -> str:
    """Return how a run's settings were tuned; they were not if its command replaced one."""
    if run.tuned and _selected(run) == run.tuned.settings:
        return run.tuned.words
    return "not tuned"


def _privacy(rows: Sequence[Row]) -> list[str]:
    """Return the privacy guarantees of protected rows, each with its runs' largest epsilon."""
    found: dict[str, list[str]] = {}
    for row in rows:
        records = [run.privacy for run in row.members if run.privacy]
        if records:
            worst = max(records, key=lambda record: record.epsilon or 0)
            found.setdefault(worst.words(), []).append(row.label)
    return [f"privacy of {', '.join(labels)}: {words}" for words, labels in found.items()]


def _rows(sheet: Sheet) -> Iterator[str]:
    """Yield notes on rows that were tuned or differ from most."""
    aside = {*sheet.varied, "data.split_csv", "partition.rounding"}
    for row in sheet.rows:
        own, chosen, unlike = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        for run in row.members:
            chosen |= _selected(run)
        for run in {(run.dataset, id(run.settings)): run for run in row.members}.values():
            keys = [k for k in run.settings if k not in {*aside, *chosen} and k[:6] != "hyper."]
            own |= values(differences(run.settings, sheet.usual[run.dataset], keys))
            unlike |= unlike_recipe(run)
        unlike = {k: v for k, v in unlike.items() if k not in (row.where or {})}
        said, apart = assignments(own), assignments({**row.variant.differences, **unlike})
        rest = [f"and {len(said) - _MANY} more"] if len(said) > _MANY else []
        for verb, found in (
            ("differs from most rows in", said[:_MANY] + rest),
            ("was tuned to", assignments(chosen)),
            ("is", apart if any(part not in row.label for part in apart) else ()),
        ):
            if found:
                yield f"row {row.label} {verb} {', '.join(found)}"


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


def _collapses(sheet: Sheet) -> Iterator[str]:
    """Yield a note on the runs that collapsed."""
    if sheet.collapsed and sheet.reference is not None:
        rows = ", ".join(f"{row.label} {count}" for row, count in sheet.collapsed.items())
        yield (
            f"some runs collapse: their difference to {sheet.reference.label} is at least "
            f"{COLLAPSE:g} points below the median over seeds ({rows}). The IQM therefore comes "
            f"first and orders the rows"
        )


def _frames(sheet: Sheet, elsewhere: Mapping[str, str]) -> Iterator[str]:
    """Yield notes on rows that depart from the paper's setup, and on choices of our own."""
    for departs in dict.fromkeys(filter(None, sheet.outside.values())):
        labels = [row.label for row, found in sheet.outside.items() if found == departs]
        yield (
            f"not in the setup of the paper's table, hence without a difference: "
            f"{', '.join(labels)} ({', '.join(departs)})"
        )
    if sheet.description.paper is not None:
        inside = [run for row in sheet.rows if not sheet.outside[row] for run in row.members]
        for dataset in sorted({run.dataset for run in inside}):
            if chosen := own_choices(sheet.description.own_recipe, dataset):
                yield f"not published, hence our choice: {', '.join(chosen)}"
    if elsewhere:
        said = "; ".join(f"{source} ({found})" for source, found in elsewhere.items())
        yield f"published for another setup, hence not compared: {said}"


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
    return capital(words) + ("" if words.endswith(".") or not words else ".")


def capital(words: str) -> str:
    """Return words with an initial capital, unless their first word has inner ones."""
    first = words.partition(" ")[0]
    return words[:1].upper() + words[1:] if first[1:] == first[1:].lower() else words
