"""Run records with made-up numbers, in the form in which the suite writes them.

``python -m tests.fabricate_records DIR COUNT [ROUNDS]`` fills a results folder; `record` and
`save` are the same for tests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from feddg_bench.config.layers import merge
from feddg_bench.config.recipes import load_recipe
from feddg_bench.records.checks import is_evaluated
from feddg_bench.records.record import RunRecord
from feddg_bench.records.store import ResultsStore
from tests import helpers
from tests.helpers import entry, images_of, make_record

SCENARIOS = {
    ("digits4", "ltdo"): helpers.SCENARIOS,
    ("digits4", "lodo"): {
        "ipo-c": (("ink", "poster", "outline"), None, "chalk"),
        "ioc-p": (("ink", "outline", "chalk"), None, "poster"),
    },
    ("pacs", "ltdo"): {
        "cs-a-p": (("cartoon", "sketch"), "art_painting", "photo"),
        "ps-c-a": (("photo", "sketch"), "cartoon", "art_painting"),
    },
}
IMAGES = 449
ENVIRONMENT = {
    "versions": {"python": "3.11.7", "torch": "2.15.0"},
    "system": "Linux x86_64",
    "device": "cpu",
    "threads": 1,
    "workers": 2,
    "commit": "0123456789ab",
}
METHODS = ("fedavg", "pardon", "fedprox", "ccst", "moon")


def record(
    method: str = "fedavg",
    dataset: str = "digits4",
    protocol: str = "ltdo",
    scenario: str = "ip-o-c",
    seed: int = 0,
    *,
    rounds: int = 4,
    every: int = 1,
    domains: tuple[tuple[str, ...], str | None, str] | None = None,
    recipe: str = "quick",
    better: bool = False,
    settings: dict[str, Any] | None = None,
    entries: dict[int, dict[str, Any]] | None = None,
    environment: dict[str, Any] | None = None,
) -> RunRecord:
    """Return a record with rising random accuracies; names and seed fix the draws.

    Args:
        method: Any text.
        dataset: Any text, if `domains` is given.
        protocol: As recorded.
        scenario: Of `SCENARIOS`, if `domains` is not given.
        seed: Seed.
        rounds: Rounds.
        every: Evaluate after every n-th.
        domains: Training domains, validation domain, test domain.
        recipe: Name of the recipe.
        better: Every accuracy is above those of other records.
        settings: Sections of settings that are not the defaults.
        entries: Round, -1 for the last -> keys of its entry to replace.
        environment: Replaces the usual one.
    """
    train, val, test = where = domains or SCENARIOS[dataset, protocol][scenario]
    names = {"method": method, "dataset": dataset, "protocol": protocol, "scenario": scenario}
    fitting = {"federation": {"rounds": rounds}, "evaluation": {"every": every}}
    own = merge(fitting, settings or {})
    rounds, every = own["federation"]["rounds"], own["evaluation"]["every"]
    start = own["evaluation"].get("start", 1)
    made = make_record(
        merge(names, {"seed": seed}, own),
        domains=where,
        recipe=recipe,
        partition={"hash": "0a", "clients": 20, "sizes": [1, 1, 1]},
        environment=environment or ENVIRONMENT,
        time={
            "started": "2026-01-01T00:00:00+00:00",
            "finished": "2026-01-01T00:01:00+00:00",
            "seconds": 60.5,
            "peak_memory_mib": 1000.25,
        },
    )
    rng = np.random.default_rng([int(made.key[:8], 16), seed])
    held = {"id_val": train, "id_test": train, "val": (val,) if val else (), "test": (test,)}
    listed = []
    own_entries = {n % (rounds + 1): dict(one) for n, one in (entries or {}).items()}
    changed = [n for n, one in own_entries.items() if "evaluation" in one]
    for number in range(1, rounds + 1):
        evaluation = {}
        for split, names_ in held.items():
            if names_:
                evaluation[split] = {
                    domain: {
                        "accuracy": _hits(rng, number / rounds, better=better) / IMAGES,
                        "loss": float(rng.random()),
                        "images": IMAGES,
                    }
                    for domain in names_
                }
        due = is_evaluated(number, rounds=rounds, every=every, start=start)
        shown = evaluation if due else None
        if number in changed and len(changed) < rounds:  # other rounds have all parts of this size
            own = own_entries[number]["evaluation"]
            sized = {
                split: {domain: {**part, "images": IMAGES} for domain, part in parts.items()}
                for split, parts in own.items()
            }
            own_entries[number]["evaluation"] = evaluation | sized
        seconds = {"training": 3.0, "aggregation": 0.25, "communication": 0.01}
        train_loss = float(rng.random())
        one = entry(number, shown, train={"loss": train_loss}, seconds=seconds)
        listed.append(one | own_entries.get(number, {}))
    values = made.as_json()
    values["data"]["images"] = images_of(listed, made.scenario)
    return RunRecord.model_validate(values | {"rounds": listed})


def _hits(rng: np.random.Generator, done: float, *, better: bool) -> int:
    low, high = (IMAGES - 20, IMAGES) if better else (100 + int(250 * done), IMAGES - 20)
    return int(rng.integers(low, high))


def in_frame(recipe: str, dataset: str, method: str) -> dict[str, Any]:
    """Return a recipe's sections of settings as a run of it has them, PARDON without ablation."""
    own = {"hyper": {"ablation": "v5"}} if method == "pardon" else {}
    return merge(own, *load_recipe(recipe, dataset, method))


def save(root: Path, *records: RunRecord) -> None:
    """Write records into a results folder."""
    store = ResultsStore(root)
    for one in records:
        store.save(one)


def population(root: Path, count: int, rounds: int = 50) -> None:
    """Write many records over methods, data sets, protocols, scenarios and seeds.

    The learning rate changes every 200 records (five values), then the heterogeneity.
    """
    where = [(d, p, s) for (d, p), scenarios in SCENARIOS.items() for s in scenarios]
    cells = [(seed, method, *place) for seed in range(5) for method in METHODS for place in where]
    for number in range(count):
        seed, method, dataset, protocol, scenario = cells[number % len(cells)]
        sweep = number // len(cells)
        one = record(
            method,
            dataset,
            protocol,
            scenario,
            seed,
            rounds=rounds,
            every=max(1, rounds // 5),
            better=method == "pardon",
            settings={
                "train": {"lr": (sweep % 5 + 1) / 1000},
                "partition": {"heterogeneity": 0.1 * (sweep // 5 % 10 + 1)},
            },
        )
        save(root, one)


if __name__ == "__main__":
    population(Path(sys.argv[1]), int(sys.argv[2]), *map(int, sys.argv[3:]))
