"""Runs that ``feddg-bench run`` makes from the ``KEY=VALUE`` of a point, and failed runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddg_bench.common.files import write_whole
from feddg_bench.config.layers import Layer, parse_override
from feddg_bench.config.reading import write_yaml
from feddg_bench.config.schema import DataSettings, Resources
from feddg_bench.data.feature_store import Encoding
from feddg_bench.plugins import method_title
from feddg_bench.records.differences import setting_name
from feddg_bench.records.record import TunedRecord
from feddg_bench.runs.request import NAMES, SEEDS, Datasets, Plan, Request
from feddg_bench.runs.speed import Work


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    key: str  # its run key
    pairs: tuple[str, ...]  # `KEY=VALUE` that define exactly this run
    title: str  # human-readable method, scenario and seed
    group: str  # the point's settings except scenario and seed; runs of a group are averaged
    dataset: str  # name of the data set
    world: Mapping[str, Any]  # the data set's own settings
    data: DataSettings  # how its images are decoded
    encoding: Encoding | None  # what its features are, if it uses features instead of images
    rounds: int  # number of rounds
    has_val: bool  # whether a domain is held out for model selection
    work: Work  # what it costs
    tuned: TunedRecord | None = None  # result of tuning, if the run uses it

    def plan(self, datasets: Datasets, results: Path) -> Plan:
        """Return the plan of the run; ``results`` is the folder of its record."""
        asked = Request.read(pairs=self.pairs, resources=Resources(results=results))
        (plan,) = asked.plan(datasets, check=False)
        return plan


def jobs(pairs: Sequence[str], datasets: Datasets, results: Path = Path("runs")) -> list[Job]:
    """Return the jobs of a point's pairs; ``results`` is the folder of their records.

    Raises:
        FeddgError: If a name or a setting is unknown or out of range, or the data set needs a
            folder and has none.
    """
    asked = Request.read(pairs=pairs, resources=Resources(results=results))
    keys = [(pair.partition("=")[0].strip(), pair) for pair in pairs]
    settings = [pair for key, pair in keys if key not in (*NAMES, "seed")]
    group = [pair for key, pair in keys if key not in ("scenario", *SEEDS)]
    made = []
    for plan in asked.plan(datasets, check=False):
        s = plan.settings
        own = {name: getattr(s, name) for name in ("method", "protocol", "dataset", "scenario")}
        own["seed"] = s.seed
        if asked.recipe is not None:
            own["recipe"] = asked.recipe
        if asked.readings != Request.readings:
            own["readings"] = asked.readings
        if asked.tuned:
            own["tuned"] = asked.tuned
        made.append(
            Job(
                key=plan.key,
                pairs=(
                    *(f"{name}={write_yaml(value)}" for name, value in own.items()),
                    *_owned(settings, s.hyper),
                ),
                title=f"{method_title(s.method)} {s.protocol} {s.scenario} seed {s.seed}",
                group=" ".join(group),
                dataset=s.dataset,
                world=s.world,
                data=s.data,
                encoding=Encoding.of(s),
                rounds=s.federation.rounds,
                has_val=plan.scenario.val is not None,
                work=Work.of(plan),
                tuned=plan.tuned,
            )
        )
    return made


_SHOWN = ("method", "protocol", "scenario", "seed")
"""Keys whose values are in every title."""


def swept_settings(made: Sequence[Job]) -> dict[str, tuple[str, ...]]:
    """Return by key the settings of each job that others lack, such as ``lambda=0``.

    Method, protocol, scenario and seed are left out.
    """
    alike = set.intersection(*(set(job.pairs) for job in made)) if made else set()
    return {
        job.key: tuple(
            f"{setting_name(key)}={value}"
            for key, _, value in (pair.partition("=") for pair in job.pairs if pair not in alike)
            if key not in _SHOWN
        )
        for job in made
    }


def titles(made: Sequence[Job]) -> dict[str, str]:
    """Return a title for each key that tells all jobs apart."""
    own = swept_settings(made)
    return {job.key: " ".join((job.title, *own[job.key])) for job in made}


def _owned(pairs: Iterable[str], hyper: Layer) -> Iterator[str]:
    """Yield pairs without settings of ``hyper`` that belong to other methods of the point."""
    for pair in pairs:
        given = parse_override(pair).get("hyper") if pair.lstrip().startswith("hyper") else None
        if not isinstance(given, Mapping) or given.keys() <= hyper.keys():
            yield pair
        else:
            yield from (f"hyper.{n}={write_yaml(v)}" for n, v in given.items() if n in hyper)


class Failures:
    """The failed runs of a results folder, one file ``failed/KEY.json`` each."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "failed"

    def keys(self) -> set[str]:
        """Return the keys of all failures."""
        return {path.stem for path in self.folder.glob("*.json")}

    def path(self, key: str) -> Path:
        """Return the path of a key's failure."""
        return self.folder / f"{key}.json"

    def save(self, job: Job, error: str, details: str = "") -> None:
        """Save a failure.

        ``details`` is the traceback, if the error is not the user's.
        """
        value = {"key": job.key, "run": list(job.pairs), "error": error, "details": details}
        write_whole(self.path(job.key), json.dumps(value, indent=1).encode() + b"\n")

    def forget(self, keys: Iterable[str]) -> None:
        """Remove the failures of some keys."""
        for key in keys:
            self.path(key).unlink(missing_ok=True)

    def error(self, key: str) -> str:
        """Return a failure's error message, or one that says that its file cannot be read."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            failure: dict[str, Any] = json.loads(self.path(key).read_bytes())
            return str(failure["error"])
        return f"{self.path(key)} cannot be read"
