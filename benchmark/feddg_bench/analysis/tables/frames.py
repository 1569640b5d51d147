"""Whether runs were made in the frame of a paper's table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from feddg_bench.common.errors import FeddgError
from feddg_bench.config.recipes import recipe_names, unpublished
from feddg_bench.config.settle import recipe_layers, settle
from feddg_bench.plugins import outline
from feddg_bench.records.runs import RecordedRun, flatten
from feddg_bench.records.variants import SHORT, setting_text

RECIPES = {"pardon": "pardon", "fisc": "pardon", "fedccrl": "fedccrl", "ppdg": "ppdg"}
"""Paper -> the recipe with its frame."""

FRAME = (
    "backbone.name",
    "backbone.pretrained",
    "backbone.projection",
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
"""Settings that make up a frame."""

FILES = ("data.split_csv", "backbone.weights")
"""Settings whose record holds a hash, not the path that a command needs."""

SELECT = "select"
"""What stands for the selection rule, which is no setting, among what a paper does not publish."""

SAID = {**SHORT, "backbone.name": "backbone", SELECT: "selection rule"}
"""Setting -> its name in texts; others go by the last part of their key."""


@cache
def is_shipped(recipe: str) -> bool:
    """Return whether a recipe comes with the package."""
    return recipe in recipe_names()


@cache
def usual_settings(recipe: str, dataset: str, method: str = "") -> Mapping[str, Any] | None:
    """Return the settings, by dotted key, that a recipe's runs have unless the user sets others.

    Those of the method's own, presets resolved, are among them if a method is named. ``None`` if
    the recipe is not a shipped one, since a name in a record is no path, if it has nothing for the
    data set, or if the method is not installed, since what it needs is unknown.
    """
    if not is_shipped(recipe):
        return None
    try:
        plugin = outline(method) if method else None
        settings = settle(recipe_layers(recipe, dataset, method, plugin), plugin)
    except FeddgError:
        return None
    return flatten(settings.model_dump(mode="json"))


def departing(run: RecordedRun, aside: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings in which a run departs from its recipe; none if that is not at hand.

    Tuned settings, files and the settings ``aside`` are left out.
    """
    usual = usual_settings(run.recipe, run.dataset, run.method) or {}
    tuned = run.tuned.settings if run.tuned else {}
    return {
        key: value
        for key, value in run.settings.items()
        if key in usual and value != usual[key] and key not in (*FILES, *tuned, *aside)
    }


def unlike_recipe(run: RecordedRun) -> dict[str, Any]:
    """Return the method's settings for captions in which a run departs from its recipe."""
    told = {f"hyper.{name}" for name in run.labels}
    return {key: value for key, value in departing(run).items() if key in told}


@cache
def own_choices(recipe: str, dataset: str) -> tuple[str, ...]:
    """Return what a paper does not publish of its frame and its recipe sets, such as ``rounds=60``.

    The selection rule is only named: captions say which it is. There is nothing for a recipe that
    has none for the data set.
    """
    usual = usual_settings(recipe, dataset)
    if usual is None:
        return ()
    return tuple(
        SAID[key]
        if key == SELECT
        else f"{SAID.get(key, key.rpartition('.')[2])}={setting_text(usual[key])}"
        for key in unpublished(recipe, dataset)
    )


def departures(
    settings: Mapping[str, Any],
    recipe: str,
    dataset: str,
    method: str,
    where: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Return what sets a run apart from a paper's frame, such as ``rounds=30 for 50``.

    Args:
        settings: The run's settings, by dotted key.
        recipe: Recipe with the paper's frame.
        dataset: The run's data set.
        method: The run's method.
        where: Settings that a table's cell asks for, which replace the recipe's.
    """
    frame = usual_settings(recipe, dataset, method)
    if frame is None:
        return (f"recipe {recipe} has no frame for {dataset}",)
    wanted = {key: frame.get(key) for key in FRAME}
    wanted |= {k: v for k, v in (where or {}).items() if k in FRAME and not isinstance(v, list)}
    return tuple(
        f"{SAID.get(key, key.rpartition('.')[2])}={setting_text(settings.get(key))} for "
        f"{setting_text(value)}"
        for key, value in wanted.items()
        if settings.get(key) != value
    )
