"""From the ``KEY=VALUE`` of a point to the runs that ``feddg-bench run`` makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from feddg_bench.errors import SettingsError
from feddg_bench.protocols import scenarios
from feddg_bench.registry import check_name, load_dataset, load_recipe, names
from feddg_bench.settings import Layer, merge, parse_override

if TYPE_CHECKING:
    from feddg_bench.run import Plan

RUN_KEYS = ("method", "protocol", "dataset", "scenario", "recipe", "seed", "seeds")
"""Keys that say which runs there are, as the flags of ``run`` do; all others are settings."""


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes:
        key: Its run key.
        pairs: ``KEY=VALUE`` that give this run and no other.
        title: Method, scenario and seed, for people.
        group: What the point set, without scenario and seed: runs whose mean is compared.
        dataset: Name of the data set.
        image_size: Side of its images in pixels.
        rounds: Number of rounds.
        has_val: Whether a held-out domain only chooses models.
    """

    key: str
    pairs: tuple[str, ...]
    title: str
    group: str
    dataset: str
    image_size: int
    rounds: int
    has_val: bool


def split_pairs(pairs: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return the pairs that say which runs there are, by key, and those that are settings.

    >>> split_pairs(["method=fedprox", "hyper.mu=0.1", "seed=1"])
    ({'method': 'fedprox', 'seeds': '1'}, ['hyper.mu=0.1'])
    """
    chosen: dict[str, str] = {}
    settings = []
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if equals and key.strip() in RUN_KEYS:
            chosen["seeds" if key.strip() == "seed" else key.strip()] = value.strip()
        else:
            settings.append(pair)
    return chosen, settings


def plans(pairs: Sequence[str]) -> list[Plan]:
    """Return the runs of ``feddg-bench run`` with these pairs.

    Raises:
        SettingsError: If a name or a setting is unknown or out of range.
    """
    from feddg_bench.run import make_plan

    chosen, settings = split_pairs(pairs)
    dataset = chosen.get("dataset", "digits4")
    check_name("data set", dataset)
    found = load_dataset(dataset)
    recipe = chosen.get("recipe") or found.default_recipe
    user = merge(*(parse_override(text) for text in settings))
    methods = chosen.get("method", "fedavg")
    made = []
    for protocol in _listed(chosen.get("protocol", "ltdo")):
        picked = scenarios(protocol, found.domains, found.letters, chosen.get("scenario"))
        for method in names("method") if methods == "all" else _listed(methods):
            check_name("method", method)
            base = merge(
                _recipe(recipe, dataset, method),
                {"method": method, "dataset": dataset, "protocol": protocol},
            )
            made += [
                make_plan([base], [user, {"scenario": s.name, "seed": seed}], s, Path(recipe).stem)
                for s in picked
                for seed in _seeds(chosen.get("seeds", "0"))
            ]
    return made


def jobs(pairs: Sequence[str]) -> list[Job]:
    """Return the jobs of a point's pairs."""
    chosen, settings = split_pairs(pairs)
    shown = [f"{k}={v}" for k, v in chosen.items() if k not in ("scenario", "seeds")]
    made = []
    for plan in plans(pairs):
        s = plan.settings
        own = {
            "method": s.method,
            "protocol": s.protocol,
            "dataset": s.dataset,
            "scenario": s.scenario,
            "seed": str(s.seed),
        }
        if "recipe" in chosen:
            own["recipe"] = chosen["recipe"]
        made.append(
            Job(
                key=plan.key,
                pairs=(*(f"{k}={v}" for k, v in own.items()), *settings),
                title=f"{s.method} {s.protocol} {s.scenario} seed {s.seed}",
                group=" ".join((*shown, *settings)),
                dataset=s.dataset,
                image_size=s.data.image_size,
                rounds=s.federation.rounds,
                has_val=plan.scenario.val is not None,
            )
        )
    return made


@cache
def _recipe(recipe: str, dataset: str, method: str) -> Layer:
    """Read a recipe once: a sweep asks for the same one for all its points."""
    return load_recipe(recipe, dataset, method)


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def _seeds(text: str) -> list[int]:
    found = _listed(text)
    if not all(part.isascii() and part.isdigit() for part in found):
        raise SettingsError(f"cannot read seed={text}: expected numbers >= 0, such as 0,1,2")
    return [int(part) for part in found]
