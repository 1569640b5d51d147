"""Setups: the runs that one table can compare, and their differences.

A setup is a recipe with its own or with tuned settings. A table shows one setup; each row holds the
runs that depart least from the recipe's usual settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from feddg_bench.common.errors import FeddgError
from feddg_bench.config.recipes import recipe_names, unpublished
from feddg_bench.config.settle import recipe_layers, settle
from feddg_bench.plugins import load_dataset, outline, own_values
from feddg_bench.records.differences import (
    Difference,
    assignments,
    differences,
    label,
    natural,
    setting_name,
    setting_text,
    telling,
    values,
)
from feddg_bench.records.frame import runs_where
from feddg_bench.records.runs import RecordedRun, flatten

if TYPE_CHECKING:
    import pandas as pd

FRAME = (
    "backbone.name",
    "backbone.pretrained",
    "backbone.projection",
    "features.encoder",
    "data.image_size",
    "partition.kind",
    "partition.clients",
    "partition.clients_per_domain",
    "partition.heterogeneity",
    "federation.per_round",
    "federation.rounds",
    "federation.bn",
    "train.local_epochs",
    "train.batch_size",
    "train.optimizer",
    "train.lr",
)
"""Settings that define the setup of a paper's experiments."""

BY_CLIENTS = ("partition.clients", "partition.heterogeneity", "federation.per_round")
"""Settings without meaning if one client holds all images."""
SPLIT = "data.split_csv"
FILES = (SPLIT, "backbone.weights")
"""Settings recorded as a hash instead of the path that a command needs."""

TUNED = ", tuned"
"""End of the names of setups whose settings were tuned."""

SELECT = "select"
"""Stands for the selection rule (not a setting) among the unpublished parts of a setup."""


# ------------------------------------------------------------------------------- recipes


@cache
def is_shipped(recipe: str) -> bool:
    """Return whether a recipe comes with the package."""
    return recipe in recipe_names()


@cache
def usual_settings(recipe: str, dataset: str, method: str = "") -> Mapping[str, Any] | None:
    """Return a recipe's settings for a data set, by dotted key, without any changes by the user.

    If a method is given, its own settings are included, presets resolved. ``None`` if the recipe is
    not shipped (a name in a record is not a path), if it does not cover the data set, or if the
    method is not installed (its needs are unknown).
    """
    if not is_shipped(recipe):
        return None
    try:
        needs = outline(method).needs if method else {}
        layers = recipe_layers(recipe, dataset, method, needs)
        own = partial(own_values, method) if method else None
        settings = settle(layers, own, load_dataset(dataset).Settings)
    except FeddgError:
        return None
    return flatten(settings.model_dump(mode="json"))


def is_frozen(settings: Mapping[str, Any]) -> bool:
    """Return whether settings, by dotted key, train a classifier alone, on frozen features.

    Such runs are a track of their own: papers' tables fine-tune all layers.
    """
    return settings.get("backbone.trainable") == "head" or (
        settings.get("backbone.name") == "features"
    )


def in_track(run: RecordedRun, recipe: str) -> bool:
    """Return whether a run is in the track of a paper's recipe, frozen or fine-tuned."""
    return is_frozen(run.settings) == is_frozen(usual_settings(recipe, run.dataset) or {})


def departing(run: RecordedRun, aside: Collection[str] = ()) -> dict[str, Difference]:
    """Return how a run departs from its recipe; empty if the recipe is unavailable.

    Tuned settings, files and the settings in ``aside`` are left out.
    """
    return {key: pair for key, pair in _departing(run).items() if key not in aside}


@cache
def _departing(run: RecordedRun) -> Mapping[str, Difference]:
    usual = usual_settings(run.recipe, run.dataset, run.method) or {}
    tuned = run.tuned.settings if run.tuned else {}
    kept = (key for key in run.settings if key in usual and key not in (*FILES, *tuned))
    return differences(run.settings, usual, kept)


def unlike_recipe(run: RecordedRun) -> dict[str, Any]:
    """Return the method settings for captions in which a run departs from its recipe."""
    told = {f"hyper.{name}" for name in run.labels}
    return {key: ours for key, ours in values(departing(run)).items() if key in told}


@cache
def own_choices(recipe: str, dataset: str) -> tuple[str, ...]:
    """Return the settings that a recipe chooses because its paper does not publish them.

    They are texts such as ``rounds=60``; the selection rule is only named, since captions state it.
    Empty if the recipe does not cover the data set.
    """
    usual = usual_settings(recipe, dataset)
    left_open = unpublished(recipe, dataset) if usual is not None else ()
    return tuple(
        setting_name(key) if key == SELECT else assignments({key: (usual or {})[key]})[0]
        for key in left_open
    )


def departures(
    settings: Mapping[str, Any],
    recipe: str,
    dataset: str,
    method: str,
    where: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Return the differences of a run from a paper's setup, such as ``rounds=30 for 50``.

    Args:
        settings: The run's settings, by dotted key.
        recipe: Recipe with the paper's setup.
        dataset: The run's data set.
        method: The run's method.
        where: Settings required by a table's cell; they replace the recipe's.
    """
    frame = usual_settings(recipe, dataset, method)
    if frame is None:
        return (f"recipe {recipe} has no frame for {dataset}",)
    asked = {k: v for k, v in (where or {}).items() if not isinstance(v, list)}
    return tuple(assignments(differences(settings, {**frame, **asked}, FRAME)))


# -------------------------------------------------------------------------------- setups


def setups(runs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name and the runs of each setup: a recipe, with `TUNED` if settings were tuned.

    A run for which tuning chose the recipe's own settings can belong to both setups of its recipe.
    """
    for recipe, mine in runs.groupby("recipe"):
        plain = mine[~mine["changed"]]
        if len(plain) == len(mine) or not all(run.tuned for run in plain["run"]):
            yield recipe, plain
        if len(plain) < len(mine):
            yield recipe + TUNED, runs_where(mine, lambda run: run.tuned is not None)


def least_departing(
    runs: Sequence[RecordedRun], where: Mapping[str, Any], free: Collection[str] = ()
) -> list[RecordedRun]:
    """Return the runs of each data set that depart least from the usual settings of their recipe.

    They agree in all settings except those in ``free``. Tuned settings and those required by the
    row (``where``) are not departures. Ties go to the later version of a method, then to the group
    with more runs.
    """

    def rank(entry: Alike) -> tuple[int, int, int, str]:
        first = entry.runs[0]
        away = departing(first, {*where, *free})
        return len(away), -first.version, -len(entry.runs), repr(sorted(first.settings.items()))

    by_dataset: dict[str, list[Alike]] = {}
    for entry in alike(runs, free):
        by_dataset.setdefault(entry.dataset, []).append(entry)
    return [run for entries in by_dataset.values() for run in min(entries, key=rank).runs]


def modal(runs: Sequence[RecordedRun]) -> Mapping[str, Any]:
    """Return each setting's most frequent value, counted by methods, then by kinds of runs.

    A method's variants do not outvote other methods.
    """
    firsts = {(run.method, id(run.settings)): run for run in runs}
    return _modal(frozenset(firsts.values()))


@lru_cache(maxsize=1000)  # the views of a table repeat the same runs
def _modal(runs: Iterable[RecordedRun]) -> Mapping[str, Any]:
    votes: dict[str, dict[str, list[str]]] = {}
    values: dict[tuple[str, str], Any] = {}
    for run in sorted(runs, key=lambda run: (run.method, run.key)):
        for key, value in run.settings.items():
            if not key.startswith("hyper."):
                votes.setdefault(key, {}).setdefault(repr(value), []).append(run.method)
                values[key, repr(value)] = value
    found = {}
    for key, methods in votes.items():
        first = min(methods, key=lambda text: (-len({*methods[text]}), -len(methods[text]), text))
        found[key] = values[key, first]
    return found


# ------------------------------------------------------------------------------ variants


@dataclass(frozen=True)
class Variant:
    """Runs that agree in all settings except seed, scenario and those that columns vary."""

    label: str  # how it differs from the row's other variants; may be empty
    # The differences by key: settings, recipe, version or images. A setting that did not exist yet
    # when a run was made, or has no effect in it, is absent.
    differences: Mapping[str, Any]
    runs: tuple[RecordedRun, ...]


class Alike(NamedTuple):
    """Runs of a data set that agree in everything that must not be averaged over."""

    dataset: str
    signature: dict[str, Any]  # what they agree in
    runs: list[RecordedRun]

    @property
    def recipe(self) -> str:
        """The alphabetically first recipe of its runs."""
        return min(run.recipe for run in self.runs)


def split(runs: Sequence[RecordedRun], free: Collection[str] = ()) -> list[Variant]:
    """Return the variants among the runs of a row.

    Runs of several recipes are first separated by recipe, unless their settings agree. Settings
    are compared within a data set, since recipes have different ones for each. ``free`` holds the
    keys that the table's columns vary. Equal labels are numbered.
    """
    recipes: dict[str, list[Alike]] = {}
    for entry in alike(runs, free):
        recipes.setdefault(entry.recipe, []).append(entry)
    found: list[Variant] = []
    for recipe, entries in sorted(recipes.items()):
        found += _variants(entries, {"recipe": recipe} if len(recipes) > 1 else {})
    order = dict.fromkeys(key for variant in found for key in variant.differences)
    texts = [{k: natural(setting_text(v)) for k, v in one.differences.items()} for one in found]
    places = sorted(range(len(found)), key=lambda n: [texts[n].get(key, []) for key in order])
    total, seen = Counter(variant.label for variant in found), Counter[str]()
    for place in places:
        said = found[place].label
        seen[said] += 1
        if total[said] > 1:
            found[place] = replace(found[place], label=f"{said} ({seen[said]})")
    return [found[place] for place in places]


def _variants(entries: Sequence[Alike], own: Mapping[str, Any]) -> list[Variant]:
    """Return the variants of one recipe, which ``own`` names if there are several recipes.

    A variant with more runs than any other keeps the bare name, such as a whole leaderboard next to
    a few runs of an ablation.
    """
    datasets: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        datasets.setdefault(entry.dataset, []).append(entry.signature)
    varied = {key for signatures in datasets.values() for key in telling(signatures)}
    keys = [k for k in dict.fromkeys(k for e in entries for k in e.signature) if k in varied]
    together: dict[str, tuple[dict[str, Any], list[RecordedRun]]] = {}
    for entry in entries:
        apart = {**own, **{key: entry.signature[key] for key in keys if key in entry.signature}}
        together.setdefault(repr(apart), (apart, []))[1].extend(entry.runs)
    named = list(together.values())
    told = _telling([apart for apart, _ in named], entries)
    most = max(len(members) for _, members in named)
    fullest = [apart for apart, members in named if len(members) == most]
    usual = fullest[0] if len(fullest) == 1 else {}
    return [
        Variant(
            label(
                {
                    key: value
                    for key, value in apart.items()
                    if key in told and (key in own or key not in usual or value != usual[key])
                }
            ),
            apart,
            tuple(members),
        )
        for apart, members in named
    ]


def _telling(named: Sequence[Mapping[str, Any]], entries: Sequence[Alike]) -> set[str]:
    """Return the keys of the differences that labels show.

    Of a method's own settings, only those it declares for labels are shown if they distinguish all
    variants: a preset's name stands for the values it sets.
    """
    keys = {key for apart in named for key in apart}
    declared = {f"hyper.{name}" for entry in entries for run in entry.runs for name in run.labels}
    few = {key for key in keys if not key.startswith("hyper.") or key in declared}
    marks = {repr({key: apart[key] for key in sorted(few & apart.keys())}) for apart in named}
    return few if len(marks) == len(named) else keys


def alike(runs: Iterable[RecordedRun], free: Collection[str]) -> list[Alike]:
    """Return runs by data set and signature; runs with equal settings share an entry.

    Their recipes do not matter. A split file's hash is ignored if each scenario has only one file.
    Images of another size differ.
    """
    free = {*free, "images"} if "data.image_size" in free else free
    groups: dict[tuple[Any, ...], list[RecordedRun]] = {}
    files: dict[tuple[str, str], set[Any]] = {}
    for run in runs:  # runs share their settings object, so this is quick
        mark = (run.dataset, id(run.settings), run.version, run.fingerprint)
        groups.setdefault((*mark, run.method, run.protocol), []).append(run)
        if (file := run.settings.get(SPLIT)) is not None:
            files.setdefault((run.dataset, run.scenario), set()).add(file)
    one_file = all(len(names) == 1 for names in files.values())
    entries: dict[tuple[str, str], Alike] = {}
    for members in groups.values():
        first = members[0]
        named = {**first.settings, "method": first.method, "protocol": first.protocol}
        named |= {"version": first.version, "images": first.images}
        found = {key: value for key, value in named.items() if key not in free}
        if one_file and found.get(SPLIT) is not None:
            found[SPLIT] = "file"
        whole = (first.dataset, repr(sorted(found.items())))
        entries.setdefault(whole, Alike(first.dataset, found, [])).runs.extend(members)
    return list(entries.values())
