"""From the ``KEY=VALUE`` of a point to the runs that ``feddg-bench run`` makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from feddg_bench.runs.request import NAMES, Datasets, Request


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


def jobs(pairs: Sequence[str], datasets: Datasets) -> list[Job]:
    """Return the jobs of a point's pairs.

    Raises:
        FeddgError: If a name or a setting is unknown or out of range, or the data set needs a
            folder and has none.
    """
    asked = Request.read(pairs=pairs)
    keys = [(pair.partition("=")[0].strip(), pair) for pair in pairs]
    settings = [pair for key, pair in keys if key not in (*NAMES, "seed")]
    group = [pair for key, pair in keys if key not in ("scenario", "seed", "seeds")]
    made = []
    for plan in asked.plan(datasets, check=False):
        s = plan.settings
        own = {name: getattr(s, name) for name in ("method", "protocol", "dataset", "scenario")}
        own["seed"] = s.seed
        if asked.recipe is not None:
            own["recipe"] = asked.recipe
        made.append(
            Job(
                key=plan.key,
                pairs=(*(f"{name}={value}" for name, value in own.items()), *settings),
                title=f"{s.method} {s.protocol} {s.scenario} seed {s.seed}",
                group=" ".join(group),
                dataset=s.dataset,
                image_size=s.data.image_size,
                rounds=s.federation.rounds,
                has_val=plan.scenario.val is not None,
            )
        )
    return made
