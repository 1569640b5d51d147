"""Captions and notes: what was run, how numbers were chosen, what to beware of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from feddg_bench.analysis.tables.columns import MeasuredColumn, varied_keys
from feddg_bench.analysis.tables.describe import Description
from feddg_bench.analysis.tables.frames import FRAME, departing, unlike_recipe
from feddg_bench.analysis.tables.grid import Line
from feddg_bench.analysis.tables.rows import Row
from feddg_bench.analysis.tables.titles import dataset_title
from feddg_bench.data.protocols import TITLES
from feddg_bench.plugins import harmless
from feddg_bench.records.metrics import find_metric
from feddg_bench.records.rules import LAST, Rule
from feddg_bench.records.runs import RecordedRun
from feddg_bench.records.statistics import FEWEST
from feddg_bench.records.variants import assignments, setting_text

RULE_SENTENCES: Mapping[Rule, str] = {
    "last": "the last round",
    "mean_last_5": f"the mean over the last {LAST} evaluated rounds",
    "best_by_val": "the round with the best {metric} on the validation domain (the earliest)",
    "best_by_id_val": "the round with the best {metric} on held-out images of the training domains "
    "(the earliest)",
    "oracle": "ORACLE: the round with the best {metric} on the test domain itself, which nobody "
    "can choose in practice",
}

SHORT_RULES: Mapping[Rule, str] = {
    "last": "last round",
    "mean_last_5": f"mean of the last {LAST} evaluated rounds",
    "best_by_val": "round of the best {metric} on the validation domain",
    "best_by_id_val": "round of the best {metric} on held-out training-domain images",
    "oracle": "ORACLE: best round on the test domain",
}
MOST_WORDS = 40
"""Most words of a title and a caption."""
BY_CLIENTS = ("partition.clients", "partition.heterogeneity", "federation.per_round")
"""Settings that mean nothing where one client holds all images."""
_CLIENTS = ("partition.clients", "N = {}")
_SAMPLED = ("federation.per_round", "K = {}")
SPREAD = {
    "heterogeneous": (_CLIENTS, _SAMPLED, ("partition.heterogeneity", "lambda = {}")),
    "dirichlet": (_CLIENTS, _SAMPLED, ("partition.alpha", "alpha = {}")),
    "per_domain": (("partition.clients_per_domain", "{} clients a domain"), _SAMPLED),
    "domain": (("partition.kind", "one client a {}"), _SAMPLED),
    "pooled": (("partition.kind", "all images {}"),),
}
"""Kind of partition -> the settings that say who holds what."""
_OTHER = (_CLIENTS, _SAMPLED, ("partition.kind", "partition {}"))
"""The same for a kind that this list lacks."""
_MANY = 8
"""Most differences that are listed; the rest are only counted."""

TESTED = (
    "bold: better than every other row; underlined: better than every row but that one; where "
    "two-sided t-tests over the mean differences of {} scenarios have p < 0.05 against each of "
    "them, after Holm's correction; that is a claim about scenarios like these"
)
_FEW = (
    f"nothing is marked as best: it takes {FEWEST} scenarios to tell a method's difference from a "
    "scenario's own"
)
SUMMARIES = {
    "id_test": "mean on id_test: of the same runs on held-out images of the training domains",
    "worst": "worst: the smallest of the columns of a group, for each seed",
    "iqm": "IQM: mean of the middle half of all runs, with a 95 % interval of a bootstrap over "
    "seeds inside each scenario, widened for so few: about these scenarios alone",
    "rank": "rank: mean over the columns of a group, among rows that have all of them",
}
_AGAINST = {
    "wins": "wins/ties/losses by scenario",
    "difference": "mean difference with its 95 % interval (Student's t over scenarios' mean "
    "differences), which is about scenarios like these",
    "p_value": "p of a two-sided t-test over scenarios' mean differences, after Holm's correction "
    "for the rows",
    "detectable": "detects: the smallest difference that this test finds with 80 % power",
    "excess": "at equal id_test: the mean minus the one that {0} would have at the row's id_test, "
    "by the slope of {0}'s evaluated rounds on a logit scale, with a 95 % interval of a jackknife "
    "over scenarios; none where id_test differs by more than over those rounds",
    "improvement": "P(better): probability that a run is better than one of {0} in the same "
    "scenario, with an interval of the same bootstrap",
}
"""Summary that compares with a method -> what it is."""


def caption(
    description: Description,
    columns: Sequence[MeasuredColumn],
    rows: Sequence[Row],
    seeds: Sequence[int],
    *,
    outside: bool,
) -> str:
    """Return the data sets, the protocol, the setup, the seeds and the selection rule.

    With the title these are `MOST_WORDS` words at most, so that some of the setup may be left out;
    all is in the definitions. ``outside`` says that the setup is not the paper's.
    """
    runs = [run for row in rows if row.variant for run in row.variant.runs]
    if not runs:
        return "There are no runs of this table yet."
    metrics = {column.metric for column in columns}
    said = find_metric(metrics.pop()).title if len(metrics) == 1 else "Numbers"
    said += f" in {description.unit}" if description.unit else ""
    said += f", mean ± SD over {seeds_text(seeds)}" if len(seeds) > 1 else f", {seeds_text(seeds)}"
    filled = {number for row in rows for number, found in row.runs.items() if found}
    rules = dict.fromkeys(c.rule for c in columns if c.split and c.number in filled)
    titles = [find_metric(name).title for name in sorted({run.metric.name for run in runs})]
    metric = " or ".join(titles) or "accuracy"
    said = ", ".join([said, *(SHORT_RULES[rule].format(metric=metric) for rule in rules)])
    datasets = sorted({run.dataset for run in runs})
    recipes = sorted({run.recipe for run in runs})
    setup = [", ".join(map(dataset_title, datasets))]
    setup += [TITLES.get(name, name) for name in sorted({run.protocol for run in runs})]
    scenarios = {run.scenario for run in runs}
    setup += [f"scenario {scenarios.pop()}"] if len(scenarios) == 1 else []
    tuned = ", tuned" if any(run.changed for run in runs) else ""
    setup.append(f"recipe {', '.join(recipes)}{tuned}" + " (not the paper's setup)" * outside)
    more = [] if len(datasets) > 1 else _short_frame(runs, varied_keys(description))
    most = MOST_WORDS - len(description.title.split())
    setup = [part for part in setup if part not in description.title]
    while True:
        words = f"{sentence(', '.join([*setup, *more]))} {sentence(said)}".strip()
        if not more or len(words.split()) <= most:
            return words
        more.pop()


def _short_frame(runs: Sequence[RecordedRun], free: Collection[str]) -> list[str]:
    """Return what most runs of a data set have in common, the most telling first."""
    common = modal(runs)
    form: Mapping[str, str] = {
        "backbone.name": "{}",
        "data.image_size": "{} px",
        "federation.rounds": "{} rounds",
        "partition.clients": "N={}",
        "federation.per_round": "K={}",
        "partition.heterogeneity": "lambda={}",
    }
    pooled = () if common.get("partition.kind", "heterogeneous") == "heterogeneous" else BY_CLIENTS
    return [
        said.format(_plain(common[key]))
        for key, said in form.items()
        if key in common and key not in (*free, *pooled)
    ]


def definitions(
    description: Description,
    columns: Sequence[MeasuredColumn],
    rows: Sequence[Row],
    reference: Row | None,
    seeds: Sequence[int],
    lines: Sequence[Line],
) -> tuple[str, ...]:
    """Return sentences that say how a table's numbers were made."""
    runs = [run for row in rows if row.variant for run in row.variant.runs]
    metrics = {column.metric for column in columns}
    metric = find_metric(metrics.pop()).title if len(metrics) == 1 else "numbers"
    unit = f" in {description.unit}" if description.unit else ""
    if seeds:
        over = ", mean ± sample standard deviation over seeds" if len(seeds) > 1 else ""
        said = [f"{metric}{unit}{over}; {seeds_text(seeds)}"]
    else:
        said = [f"{metric}{unit}; there are no runs of this table yet"]
    rules = [column.rule for column in columns if column.split is not None]
    if rules:
        said.append(rule_sentence(rules, {run.metric.name for run in runs}))
    said += _frame(runs, varied_keys(description))
    said += tuning(rows)
    said += _privacy(rows)
    if len(rows) > 1 and seeds:
        group = {column.number: column.group for column in columns}
        tested = max(
            len({scenario for (number, scenario), _ in row.sample if group[number] == wanted})
            for row in rows
            for wanted in set(group.values())
        )
        said.append(TESTED.format(tested) if tested >= FEWEST else _FEW)
    kinds = {kind for group in description.groups for kind in group.summaries}
    against = [words for kind, words in _AGAINST.items() if kind in kinds]
    if reference is not None and against:
        listed = "; ".join(against).format(reference.label)
        said.append(
            f"comparisons are with {reference.label}, over the scenarios and seeds that both have: "
            f"{listed}"
        )
    said += [SUMMARIES[kind] for kind in sorted(kinds & set(SUMMARIES))]
    sources = {e.source: None for line in lines for e in line.entries if e and e.source}
    if sources:
        apart = any(line.kind == "difference" for line in lines)
        gap = "; difference: ours - published" if apart else ""
        said.append(f"published: {'; '.join(sources)}{gap}")
    return tuple(map(sentence, said))


def _frame(runs: Sequence[RecordedRun], free: Iterable[str]) -> list[str]:
    """Return a sentence for each data set with its recipes and the settings that most runs have."""
    sentences = []
    for dataset in sorted({run.dataset for run in runs}):
        mine = [run for run in runs if run.dataset == dataset]
        common = modal(mine)
        headline = (
            ("backbone.name", "{}"),
            ("backbone.pretrained", "pretrained {}"),
            ("data.image_size", "{} px"),
            *SPREAD.get(common.get("partition.kind", "heterogeneous"), _OTHER),
            ("federation.rounds", "{} rounds"),
            ("train.local_epochs", "local epochs {}"),
            ("train.batch_size", "batches of {}"),
            ("train.optimizer", "{}"),
            ("train.lr", "lr {}"),
            ("federation.bn", "batch normalisation {}"),
        )
        said = [
            form.format(_plain(common[key]))
            for key, form in headline
            if key in common
            and (key not in free or len({repr(run.settings.get(key)) for run in mine}) == 1)
        ]
        recipes = ", ".join(sorted({run.recipe for run in mine}))
        sentences.append(f"{dataset_title(dataset)}, recipe {recipes}: {', '.join(said)}")
    return sentences


def tuning(rows: Sequence[Row]) -> list[str]:
    """Return a sentence on how the settings of rows were tuned; none if tuning changed nothing."""
    by_trials: dict[str, list[str]] = {}
    runs = {row.label: row.variant.runs for row in rows if row.variant}
    for label, mine in runs.items():
        said = " or ".join(sorted({run.tuned.words if run.tuned else "not tuned" for run in mine}))
        by_trials.setdefault(said, []).append(label)
    if not any(run.changed for mine in runs.values() for run in mine):
        return []
    if len(by_trials) == 1:
        how = f"{next(iter(by_trials))} each"
    else:
        how = "; ".join(
            f"{said}: {', '.join(labels)}" for said, labels in sorted(by_trials.items())
        )
    one = any(run.tuned and run.tuned.scenario for mine in runs.values() for run in mine)
    also = (
        "; what was chosen serves all scenarios, also those that test on these domains"
        if one
        else ""
    )
    return [f"settings were tuned by held-out images of the training domains, {how}{also}"]


def _privacy(rows: Sequence[Row]) -> list[str]:
    """Return the privacy guarantees of protected rows, each by the largest epsilon of its runs."""
    found: dict[str, list[str]] = {}
    for row in rows:
        runs = row.variant.runs if row.variant else ()
        records = [run.privacy for run in runs if run.privacy]
        if records:
            worst = max(records, key=lambda record: record.epsilon or 0)
            found.setdefault(worst.words(), []).append(row.label)
    return [f"privacy of {', '.join(labels)}: {words}" for words, labels in found.items()]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "all" if value is None else setting_text(value)


def modal(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the most frequent value of each setting over methods, except methods' own settings.

    A method counts once for each value that it has, so that many variants of one method do not
    outvote the others. Ties go to the value of most variants.
    """
    votes: dict[str, dict[str, list[str]]] = {}
    values: dict[tuple[str, str], Any] = {}
    alike = {(run.method, id(run.settings)): run.settings for run in runs}
    for (method, _), settings in alike.items():
        for key, value in settings.items():
            if not key.startswith("hyper."):
                votes.setdefault(key, {}).setdefault(repr(value), []).append(method)
                values[key, repr(value)] = value
    found = {}
    for key, methods in votes.items():
        first = min(
            methods, key=lambda value: (-len({*methods[value]}), -len(methods[value]), value)
        )
        found[key] = values[key, first]
    return found


def notes(description: Description, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return a table's own notes, and notes on rows that are equal, tuned or unlike most."""
    runs = [run for row in rows if row.variant for run in row.variant.runs]
    usual = {
        dataset: modal([run for run in runs if run.dataset == dataset])
        for dataset in {run.dataset for run in runs}
    }
    aside = {*varied_keys(description), "data.split_csv", "partition.rounding"}
    said = [*description.notes, *equal_rows(rows)]
    for row in rows:
        if row.variant is None:
            continue
        environments = [run.environment for run in row.variant.runs]
        cpus = {repr(found["cpu"]) for found in environments if found.get("cpu")}
        if len(cpus) > 1 and not all(found.get("portable") for found in environments):
            said.append(
                f"row {row.label} was run on {len(cpus)} kinds of CPU without --portable: on one "
                f"kind the numbers may be others"
            )
        chosen = {
            key: value
            for run in row.variant.runs
            if run.tuned
            for key, value in run.tuned.settings.items()
        }
        own = {(run.dataset, id(run.settings)): run.settings for run in row.variant.runs}
        found = assignments(
            {
                key: value
                for (dataset, _), settings in own.items()
                for key, value in settings.items()
                if key not in (*aside, *chosen) and not key.startswith("hyper.")
                if value != usual[dataset].get(key)
            }
        )
        if len(found) > _MANY:
            found = [*found[:_MANY], f"and {len(found) - _MANY} more"]
        if found:
            said.append(f"row {row.label} differs from most in {', '.join(found)}")
        if chosen:
            said.append(f"row {row.label} was tuned to {', '.join(assignments(chosen))}")
        unlike = {k: v for run in row.variant.runs for k, v in unlike_recipe(run).items()}
        unsaid = {k: v for k, v in unlike.items() if k not in (row.where or {})}
        full = assignments({**row.variant.differences, **unsaid})
        if any(part not in row.label for part in full):
            said.append(f"row {row.label} is {', '.join(full)}")
    return tuple(map(sentence, [*said, *_codes(rows), *_elsewhere(rows)]))


def mixed(description: Description, rows: Sequence[Row]) -> dict[Row, str]:
    """Return, for rows whose runs were made with other rounds, networks and so on, what differs.

    What a recipe or a method gives its own value is no difference, unless a run departs from it.
    """
    aside = varied_keys(description)
    runs = {row: row.variant.runs for row in rows if row.variant}
    asked = {row: {*aside, *(row.where or {})} for row in runs}
    away = {key for row, mine in runs.items() for r in mine for key in departing(r, asked[row])}
    usual = {
        dataset: modal([run for mine in runs.values() for run in mine if run.dataset == dataset])
        for dataset in {run.dataset for mine in runs.values() for run in mine}
    }
    found = {}
    for row, mine in runs.items():
        tuned = {key for run in mine if run.tuned for key in run.tuned.settings}
        other = {
            key: run.get(key)
            for run in mine
            for key in sorted((away & {*FRAME}) - asked[row] - tuned)
            if not (run.get("partition.kind") == "pooled" and key in BY_CLIENTS)
            if run.get(key) != usual[run.dataset].get(key)
        }
        if other:
            found[row] = ", ".join(assignments(other))
    return found


def _codes(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each row whose runs were made by codes that may differ in numbers."""
    said = []
    for row in rows:
        codes: dict[tuple[str, int], set[str]] = {}
        for run in row.variant.runs if row.variant else ():
            if run.code is not None:
                codes.setdefault((run.method, run.version), set()).add(run.code)
        for (method, version), found in codes.items():
            if len(found) > 1 and not found <= harmless(method, version):
                said.append(
                    f"row {row.label} mixes runs of {len(found)} codes of one version of {method}, "
                    f"whose numbers may differ: raise `version` where the code changed, or repeat "
                    f"them with --again"
                )
    return said


def _elsewhere(rows: Sequence[Row]) -> list[str]:
    """Return a sentence on rows whose runs were all made on another kind of CPU than most rows'."""
    by_cpu: dict[str, list[str]] = {}
    for row in rows:
        runs = row.variant.runs if row.variant else ()
        cpus = {run.environment.get("cpu") for run in runs if not run.environment.get("portable")}
        if len(cpus) == 1 and (cpu := cpus.pop()):
            by_cpu.setdefault(str(cpu), []).append(row.label)
    others = sorted(by_cpu, key=lambda cpu: (-len(by_cpu[cpu]), cpu))[1:]
    return [
        f"run on another kind of CPU than most rows ({cpu}), where a seed gives other last bits: "
        f"{', '.join(by_cpu[cpu])}"
        for cpu in others
    ]


def equal_rows(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each row whose numbers all equal those of an earlier row."""
    found: dict[tuple[Any, ...], Row] = {}
    said = []
    for row in rows:
        numbers = tuple(sorted(row.sample.items()))
        first = found.setdefault(numbers, row)
        if numbers and first is not row and first.variant and row.variant:
            same = f"row {row.label} has the numbers of row {first.label} in every run"
            bn = {run.get("federation.bn") for r in (first, row) for run in r.variant.runs}  # type: ignore[union-attr]
            why = ", as it must where the network has no batch normalisation"
            said.append(same + (why if len(bn) > 1 else ""))
    return said


def rule_sentence(rules: Iterable[Rule], metrics: Iterable[str] = ("accuracy",)) -> str:
    """Return how rounds were chosen, with the names of the key metrics of the runs' data sets."""
    metric = " or ".join(find_metric(name).title for name in sorted(set(metrics))) or "accuracy"
    said = {rule: RULE_SENTENCES[rule].format(metric=metric) for rule in rules}
    return "Selection rule " + "; ".join(f"{rule}: {words}" for rule, words in said.items())


def seeds_text(seeds: Iterable[int]) -> str:
    """Return seeds as text, such as ``seeds 0 to 2``."""
    found = sorted(seeds)
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"seeds {found[0]} to {found[-1]}"
    return f"seed{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def sentence(words: str) -> str:
    """Return words as a sentence: with a capital and a full stop.

    A first word with capitals of its own, such as iWildCam, stays as it is.
    """
    if not words:
        return ""
    first = words.partition(" ")[0]
    start = words[:1] if first[1:] != first[1:].lower() else words[:1].upper()
    return f"{start}{words[1:]}" + ("" if words.endswith(".") else ".")
