"""From the ``KEY=VALUE`` of a point to the runs that ``feddg-bench run`` makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from feddg_bench.config.layers import Layer, merge, parse_override
from feddg_bench.config.recipes import load_recipe
from feddg_bench.plugins import load_dataset
from feddg_bench.runs.plans import draft_runs, make_plans

if TYPE_CHECKING:
    from feddg_bench.data.dataset import DomainDataset
    from feddg_bench.runs.run import Plan

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


class Datasets:
    """The data sets of a sweep, each opened once: some have their domains from the disk.

    Args:
        root: Folder of the data, as the user gave it.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root
        self._opened: dict[str, DomainDataset] = {}

    def __reduce__(self) -> tuple[type[Datasets], tuple[Path | None]]:
        return Datasets, (self.root,)  # another process opens its own

    def open(self, name: str) -> DomainDataset:
        """Return a data set.

        Raises:
            SettingsError: If there is none of the name.
            DataError: If its domains or classes are on a disk where they cannot be read.
        """
        if name not in self._opened:
            self._opened[name] = load_dataset(name)(self.root)
        return self._opened[name]


def plans(pairs: Sequence[str], datasets: Datasets) -> list[Plan]:
    """Return the runs of ``feddg-bench run`` with these pairs.

    Raises:
        FeddgError: If a name or a setting is unknown or out of range, or the data set needs a
            folder and has none.
    """
    chosen, settings = split_pairs(pairs)
    name = chosen.get("dataset", "digits4")
    dataset = datasets.open(name)
    drafts = draft_runs(
        dataset,
        name,
        methods=chosen.get("method", "fedavg"),
        protocols=chosen.get("protocol", "ltdo"),
        scenario=chosen.get("scenario"),
        recipe=chosen.get("recipe"),
        seeds=chosen.get("seeds", "0"),
        user=merge(*(parse_override(text) for text in settings)),
        load=_read_recipe,
    )
    return make_plans(drafts, dataset)


def jobs(pairs: Sequence[str], datasets: Datasets) -> list[Job]:
    """Return the jobs of a point's pairs; raises as `plans` does."""
    chosen, settings = split_pairs(pairs)
    shown = [f"{k}={v}" for k, v in chosen.items() if k not in ("scenario", "seeds")]
    made = []
    for plan in plans(pairs, datasets):
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
def _read_recipe(recipe: str, dataset: str, method: str) -> Layer:
    """Read a recipe once: a sweep asks for the same one for all its points."""
    return load_recipe(recipe, dataset, method)
