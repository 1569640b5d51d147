"""Captions and notes: what was run, how numbers were chosen, what to beware of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from feddg_bench.analysis.tables.rows import Row
from feddg_bench.common.errors import FeddgError
from feddg_bench.plugins import load_dataset
from feddg_bench.records.metrics import find_metric
from feddg_bench.records.published import Published
from feddg_bench.records.rules import Rule
from feddg_bench.records.runs import Run
from feddg_bench.records.variants import assignments, text

RULES: Mapping[Rule, str] = {
    "last": "the last round",
    "best_by_val": "the round with the best {metric} on the validation domain (the earliest)",
    "best_by_id_val": "the round with the best {metric} on held-out images of the training domains "
    "(the earliest)",
    "oracle": "ORACLE: the round with the best {metric} on the test domain itself, which nobody "
    "can choose in practice",
}

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


def headline(kind: str) -> tuple[tuple[str, str], ...]:
    """Return the settings that a caption says, if most rows have them, for a kind of partition."""
    return (
        ("backbone.name", "{}"),
        ("backbone.pretrained", "pretrained {}"),
        ("data.image_size", "{} px"),
        *SPREAD[kind],
        ("federation.rounds", "{} rounds"),
        ("train.local_epochs", "local epochs {}"),
        ("train.batch_size", "batches of {}"),
        ("train.optimizer", "{}"),
        ("train.lr", "lr {}"),
        ("federation.bn", "batch normalisation {}"),
    )


MANY = 8
"""More differences than this are counted, not listed."""


def frame(runs: Sequence[Run], free: Iterable[str]) -> list[str]:
    """Return, for each data set, recipes and the settings that most runs have, in a sentence."""
    sentences = []
    for dataset in sorted({run.dataset for run in runs}):
        mine = [run for run in runs if run.dataset == dataset]
        common = modal(mine)
        said = [
            form.format(_plain(common[key]))
            for key, form in headline(common.get("partition.kind", "heterogeneous"))
            if key in common and (key not in free or _shared(mine, key))
        ]
        recipes = ", ".join(sorted({run.recipe for run in mine}))
        sentences.append(f"{_title(dataset)}, recipe {recipes}: {', '.join(said)}")
    return sentences


def _shared(runs: Sequence[Run], key: str) -> bool:
    """Tell whether all runs have one value of a setting."""
    return len({repr(run.settings.get(key)) for run in runs}) == 1


@cache
def _title(dataset: str) -> str:
    """Return a data set's name as people write it; a record may be of one that is not here."""
    try:
        return load_dataset(dataset).title
    except FeddgError:
        return dataset


def modal(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the most frequent value of each setting, methods' own aside, over methods.

    A method counts once for each value that it has, so that a sweep of one does not outvote the
    others.
    """
    votes: dict[str, Counter[str]] = {}
    values: dict[tuple[str, str], Any] = {}
    for settings in {(run.method, id(run.settings)): run.settings for run in runs}.values():
        for key, value in settings.items():
            if not key.startswith("hyper."):
                votes.setdefault(key, Counter())[repr(value)] += 1
                values[key, repr(value)] = value
    return {
        key: values[key, min(found, key=lambda value: (-found[value], value))]
        for key, found in votes.items()
    }


def differences(rows: Sequence[Row], free: Iterable[str]) -> list[str]:
    """Return a sentence for each row whose settings, the method's own aside, are not the usual."""
    runs = [run for row in rows if row.variant for run in row.variant.runs]
    usual = {
        dataset: modal([run for run in runs if run.dataset == dataset])
        for dataset in {run.dataset for run in runs}
    }
    aside = {*free, "data.split_csv", "partition.rounding"}
    sentences = []
    for row in rows:
        if row.variant is None:
            continue
        found: dict[str, Any] = {}
        own = {(run.dataset, id(run.settings)): run.settings for run in row.variant.runs}
        for (dataset, _), settings in own.items():
            for key, value in settings.items():
                common = usual[dataset].get(key)
                if key not in aside and not key.startswith("hyper.") and value != common:
                    found[key] = value
        said = assignments(found)
        if len(said) > MANY:
            said = [*said[:MANY], f"and {len(said) - MANY} more"]
        if said:
            sentences.append(f"row {row.label} differs from most in {', '.join(said)}")
        full = assignments(row.variant.differences)
        if any(part not in row.label for part in full):
            sentences.append(f"row {row.label} is {', '.join(full)}")
    return sentences


def wrong_average(published: Published) -> str:
    """Return the footnote of a published average that is not the mean of its columns."""
    return (
        f"the published average {published.value:g} is not the mean of its published columns, "
        f"{published.wrong_mean:.2f}"
    )


def rule_sentence(rules: Iterable[Rule], metrics: Iterable[str] = ("accuracy",)) -> str:
    """Return how rounds were chosen, by the key metrics of the runs' data sets."""
    metric = " or ".join(find_metric(name).title for name in sorted(set(metrics))) or "accuracy"
    said = [f"{rule}: {RULES[rule].format(metric=metric)}" for rule in dict.fromkeys(rules)]
    return "Selection rule " + "; ".join(said)


def seeds_text(seeds: Iterable[int]) -> str:
    """Return seeds as text, such as ``seeds 0, 1, 2``."""
    found = sorted(seeds)
    return f"seed{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "all" if value is None else text(value)


MARKS = (
    "bold: better than every other row; underlined: better than every row but that one; only "
    "where a paired t-test over seeds and scenarios has p < 0.05 against each of them"
)
ONE_SEED = "one seed: nothing is marked as best"
SUMMARIES = {
    "worst": "worst: the smallest of the columns of a group, for each seed",
    "rank": "rank: mean over the columns of a group, among rows that have all of them",
}


def against(label: str) -> str:
    """Return what comparisons with a row mean."""
    return (
        f"comparisons are with {label}, over the seeds and scenarios that both have: wins/ties/"
        "losses, mean difference with its 95 % bootstrap interval, p of a two-sided paired t-test"
    )


def sentence(words: str) -> str:
    """Return words with a capital letter, but where a name such as iWildCam begins, and a stop."""
    first = words.partition(" ")[0]
    start = words[:1] if first[1:] != first[1:].lower() else words[:1].upper()
    return f"{start}{words[1:]}" + ("" if words.endswith(".") else ".")
