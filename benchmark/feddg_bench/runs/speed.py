"""Estimated time of runs from the records of earlier ones; PyTorch is not needed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from feddg_bench.common.files import from_here
from feddg_bench.common.terminal import duration
from feddg_bench.common.titles import counted
from feddg_bench.plugins import method_title
from feddg_bench.records.runs import read_runs

if TYPE_CHECKING:
    from feddg_bench.runs.request import Plan

_NAMED = 3
"""Maximum number of methods that a text names."""


class Kind(NamedTuple):
    """Runs whose passes over the images of a client take about as long."""

    method: str
    dataset: str
    label: str | None  # name of a user's own data set
    recipe: str
    backbone: str
    image_size: int


@dataclass(frozen=True)
class Work:
    """What a run costs: the passes of clients over their images, and what sets their duration."""

    kind: Kind
    rounds: int
    clients: int  # clients of a round
    epochs: int  # local epochs

    @classmethod
    def of(cls, plan: Plan) -> Work:
        """Return the work of a planned run."""
        s, label = plan.settings, plan.dataset.label or None
        kind = Kind(s.method, s.dataset, label, plan.recipe, s.backbone.name, s.data.image_size)
        clients = s.federation.per_round or s.partition.count(len(plan.scenario.train))
        return cls(kind, s.federation.rounds, clients, s.train.local_epochs)

    @property
    def passes(self) -> int:
        """Number of passes over a client's images."""
        return self.rounds * self.clients * self.epochs


def past_speed(results: Path) -> dict[Kind, tuple[float, int]]:
    """Return seconds per pass, and the number of recorded runs, by kind."""
    seconds: Counter[Kind] = Counter()
    passes: Counter[Kind] = Counter()
    runs: Counter[Kind] = Counter()
    for run in read_runs(results) if results.is_dir() else ():
        spent = run.usage["seconds"]
        clients = run.settings.get("federation.per_round") or run.usage["clients"]
        done = run.rounds * clients * (run.settings.get("train.local_epochs") or 1)
        if spent and spent > 0 and done:  # NaN where it was not measured
            network = run.get("backbone.name"), run.get("data.image_size")
            key = Kind(run.method, run.dataset, run.label or None, run.recipe, *network)
            seconds[key] += spent
            passes[key] += done
            runs[key] += 1
    return {key: (seconds[key] / passes[key], runs[key]) for key in runs}


def forecast(works: Sequence[Work], results: Path) -> Iterator[str]:
    """Yield what pending runs compute, and how long they take at the speed of recorded ones."""
    if not works:
        return
    alike = {(work.rounds, work.clients) for work in works}
    total = sum(work.rounds * work.clients for work in works)
    each = ""
    if len(alike) == 1:
        (rounds, clients) = next(iter(alike))
        each = f" ({counted(rounds, 'round')} x {counted(clients, 'client')} each)"
    runs = counted(len(works), "pending run")
    yield f"{runs}: {counted(total, 'local training')}{each}"
    known = past_speed(results)
    wanted = dict.fromkeys(work.kind for work in works)
    if lacking := [*dict.fromkeys(kind.method for kind in wanted if kind not in known)]:
        methods = ", ".join(map(method_title, lacking[:_NAMED]))
        methods += f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        yield f"no estimate: {from_here(results)}/ has no run of {methods} in this setup"
    else:
        seconds = math.fsum(known[work.kind][0] * work.passes for work in works)
        count = sum(known[key][1] for key in wanted)
        yield (
            f"estimate: about {duration(max(1, seconds))} one after the other, at the speed of "
            f"{counted(count, 'recorded run')}"
        )
