"""Whether runs were made in the frame of a paper's table."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from feddg_bench.common.errors import FeddgError
from feddg_bench.config.layers import merge, validate
from feddg_bench.config.recipes import load_recipe
from feddg_bench.config.schema import RunSettings
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

SAID = {**SHORT, "backbone.name": "backbone"}
"""Setting -> its name in texts; others go by the last part of their key."""


@cache
def _frame(recipe: str, dataset: str, method: str) -> Mapping[str, Any] | None:
    """Return the frame's settings for a method; ``None`` if the recipe has none or cannot be read.

    It is also ``None`` for methods that are not installed here, since what they need is unknown.
    """
    try:
        base, own = load_recipe(recipe, dataset, method)
        needs = outline(method).needs
    except FeddgError:
        return None
    named = {"method": method, "dataset": dataset, "scenario": ""}
    settings = validate(RunSettings, merge(base, needs, own, named))
    return flatten(settings.model_dump(mode="json"))


def unlike_recipe(run: RecordedRun) -> dict[str, Any]:
    """Return the method's settings for captions in which a run departs from its recipe.

    What a recipe does not set has the method's default. There are none where the recipe or the
    method is not at hand, and tuned settings are left out.
    """
    frame = _frame(run.recipe, run.dataset, run.method)
    if frame is None:
        return {}
    fields = outline(run.method).Settings.model_fields
    tuned = run.tuned.settings if run.tuned else {}
    found = {}
    for name in run.labels:
        key, default = f"hyper.{name}", fields[name].default if name in fields else None
        wanted = frame.get(key, default)
        if wanted is not None and key not in tuned and run.settings.get(key, wanted) != wanted:
            found[key] = run.settings[key]
    return found


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
    frame = _frame(recipe, dataset, method)
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
