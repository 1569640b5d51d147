"""Estimated time of runs from the records of earlier ones; PyTorch is not needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from feddg_bench.common.files import from_here
from feddg_bench.common.terminal import duration
from feddg_bench.common.titles import counted
from feddg_bench.config.schema import RunSettings
from feddg_bench.plugins import method_title
from feddg_bench.records.runs import read_runs


@dataclass(frozen=True)
class Work:
    """What a run costs: the passes of clients over their images, and what sets their duration."""

    method: str
    dataset: str
    recipe: str
    rounds: int
    clients: int  # clients of a round
    epochs: int  # local epochs

    @classmethod
    def of(cls, settings: RunSettings, recipe: str) -> Work:
        """Return the work of a run."""
        s = settings
        clients = s.federation.per_round or s.partition.clients
        rounds, epochs = s.federation.rounds, s.train.local_epochs
        return cls(s.method, s.dataset, recipe, rounds, clients, epochs)

    @property
    def passes(self) -> int:
        """Number of passes over a client's images."""
        return self.rounds * self.clients * self.epochs


def past_speed(results: Path) -> dict[tuple[str, str, str], tuple[float, int]]:
    """Return seconds per pass, and the number of runs, by method, data set and recipe."""
    seconds: Counter[tuple[str, str, str]] = Counter()
    passes: Counter[tuple[str, str, str]] = Counter()
    runs: Counter[tuple[str, str, str]] = Counter()
    for run in read_runs(results) if results.is_dir() else ():
        spent = run.usage["seconds"]
        clients = run.settings.get("federation.per_round") or run.usage["clients"]
        done = run.rounds * clients * (run.settings.get("train.local_epochs") or 1)
        if spent and spent > 0 and done:  # NaN where it was not measured
            key = run.method, run.dataset, run.recipe
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
    wanted = dict.fromkeys((work.method, work.dataset, work.recipe) for work in works)
    lacking = [key for key in wanted if key not in known]
    if lacking:
        methods = ", ".join(dict.fromkeys(method_title(method) for method, *_ in lacking))
        yield f"no estimate: {from_here(results)}/ has no run of {methods} on this data and recipe"
    else:
        seconds = sum(
            known[work.method, work.dataset, work.recipe][0] * work.passes for work in works
        )
        count = sum(known[key][1] for key in wanted)
        yield (
            f"estimate: about {duration(max(1, seconds))} one after the other, at the speed of "
            f"{counted(count, 'recorded run')}"
        )
