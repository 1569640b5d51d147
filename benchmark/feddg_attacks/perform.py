"""From a request to an attack's record: make the run, capture its messages, attack them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from feddg_attacks.attack import OnStep, Scene, load_attack, silent
from feddg_attacks.capture import Capture
from feddg_attacks.judges import NOBODY, Judges
from feddg_attacks.kinds.gradient_inversion import DRAWS
from feddg_attacks.kinds.membership import MOST_ROUNDS, few_clients
from feddg_attacks.records import (
    Attacker,
    AttackRecord,
    attack_key,
    attack_path,
    find_attack,
    save_attack,
)
from feddg_bench.common.errors import DataError, SettingsError, unknown
from feddg_bench.common.files import check_writable, write_whole
from feddg_bench.common.streams import generator
from feddg_bench.config.layers import merge
from feddg_bench.config.schema import MANY, Resources, RunSettings
from feddg_bench.config.settle import own_settings
from feddg_bench.data.federated import Federation, spread
from feddg_bench.data.partition import PARTITION_RULES
from feddg_bench.engine.devices import open_executor
from feddg_bench.plugins import load_method
from feddg_bench.records.rules import split_metric
from feddg_bench.runs.driver import train
from feddg_bench.runs.request import Datasets, Plan, Request
from feddg_bench.runs.setup import RunData, open_federation, start

if TYPE_CHECKING:
    from feddg_bench.core.loop import RoundResult
    from feddg_bench.core.messages import Task
    from feddg_bench.runs.setup import Run

ATTACKED: dict[str, Any] = {
    "federation": {"rounds": 2, "per_round": None},
    "evaluation": {"every": 1_000_000},
}
"""Default settings of an attacked run: every client takes part."""
WITHHELD: dict[str, Any] = {"data": {"id_val_fraction": 0.25, "id_test_fraction": 0.25}}
"""Shares of the training domains that are withheld from clients: the attacker's public images, and
the non-members that members are compared with."""


def attack_plans(
    request: Request, kind: str, datasets: Datasets, sizes: Sequence[int] = ()
) -> list[Plan]:
    """Plan the runs to attack, with clients of each size if sizes are given.

    Methods with one client, such as ERM, are left out.

    Raises:
        SettingsError: If there is no such kind, a setting cannot be used, or no method is left.
        DataError: If the data set is missing or cannot be spread over clients like this.
    """
    attack = load_attack(kind)
    own = WITHHELD if request.settings.get("data", {}).get("split_csv") is None else {}
    layers = (ATTACKED, own, attack.overrides, request.settings)
    settings = merge(*layers)
    asked = replace(request, settings=settings).plan(datasets)
    plans = [
        plan
        for plan in asked
        if plan.settings.partition.clients > 1 and plan.settings.partition.kind != "pooled"
    ]
    if any(plan.settings.features.encoder for plan in plans):
        raise SettingsError(
            "attacks judge images, and a run on features has none: leave out features.encoder, or "
            "freeze the network with backbone.trainable=head"
        )
    if not plans:
        raise SettingsError(
            f"{asked[0].settings.method} has one client here, and an attack compares the messages "
            f"of two or more: choose another --method, or more clients"
        )
    images = {plan.key: check_withheld(plan) for plan in plans}
    kind_of = plans[0].settings.partition.kind
    given = "clients" in request.settings.get("partition", {})
    if sizes and (given or "clients" not in PARTITION_RULES[kind_of][1]):
        why = "their number is given" if given else f"partition.kind={kind_of} does not take it"
        raise SettingsError(
            f"--sizes says how many images a client holds by the number of clients, and {why}: "
            f"leave one of them out"
        )
    sizes = sizes or attack.sizes
    if not sizes or given:
        return plans
    return [
        same
        for size in sizes
        for plan in plans
        for same in replace(
            request,
            method=plan.settings.method,
            protocol=plan.settings.protocol,
            scenario=plan.settings.scenario,
            seeds=(plan.settings.seed,),
            settings=merge(settings, {"partition": {"clients": max(1, images[plan.key] // size)}}),
        ).plan(datasets)
    ]


def check_items(items: Set[str], plans: Sequence[Plan]) -> None:
    """Refuse items that no method of these runs declares.

    Raises:
        SettingsError: If there is such an item; the message names the nearest known one.
    """
    known = {"weights"}
    for plan in plans:
        method = load_method(plan.settings.method)
        hyper = own_settings(method.Settings, plan.settings)
        known.update(method.downlink, *method.sends(hyper).values())
    for item in sorted(items - known):
        raise SettingsError(unknown("item", item, known))


def check_withheld(plan: Plan) -> int:
    """Check that images are withheld for the attack; return the number that clients hold.

    No image is decoded.

    Raises:
        DataError: If a training domain has no public images or no non-members.
    """
    parts = spread(plan.settings, plan.dataset, plan.scenario)
    domains = plan.dataset.records().domains
    for split, what in (("id_val", "public images"), ("id_test", "images that no client holds")):
        covered = set(domains[parts.splits.get(split, [])].tolist())
        if missing := sorted(set(domains[parts.splits["train"]].tolist()) - covered):
            raise DataError(
                f"there are no {what} of the domain {plan.dataset.domains[missing[0]]}, without "
                f"which there is no attack: raise data.{split}_fraction"
            )
    return sum(map(len, parts.clients.values()))


def looked_at(settings: RunSettings, federation: Federation) -> Callable[[Task], bool]:
    """Return a function that tells whether an attack uses the update that answers a task.

    If all clients are asked in each round, attacks use a random subset of them, or the first ones.
    """
    names, asked = list(federation.clients), settings.federation.per_round
    drawn = few_clients(names, generator(settings.seed, "attack", "clients"))
    some = {*drawn, *names[:DRAWS]}
    every = asked is None or asked >= len(names)
    return lambda task: not every or (task.client in some and task.round <= MOST_ROUNDS)


class _Last(Capture):
    """Also keeps the last evaluation, and reports the run's progress."""

    def __init__(self, step: OnStep, settings: RunSettings, federation: Federation) -> None:
        super().__init__(looked_at(settings, federation))
        self.step = step
        self.measured: dict[str, float] = {}

    def round(self, run: Run, result: RoundResult) -> None:
        """Report progress, and note the key metric of the last model."""
        self.step("training", result.round, run.plan.settings.federation.rounds)
        if result.evaluation is not None:
            metric = run.plan.dataset.metrics[0]
            metrics = {s: split_metric(result.evaluation, s, metric) for s in result.evaluation}
            self.measured = {s: value for s, value in metrics.items() if value is not None}


class Lab:
    """Makes runs and attacks them; successive attacks on one run share it.

    Args:
        resources: Devices, threads and folders, including the folder of records.
        step: Called with the progress.
        judges: Networks that judge pictures; attacks recorded without them are repeated.
    """

    def __init__(
        self, resources: Resources, step: OnStep = silent, judges: Judges = NOBODY
    ) -> None:
        self.resources, self.step, self.judges = resources, step, judges
        self._data = RunData(self.resources.cache_dir)
        self._made: tuple[str, Federation, _Last] | None = None

    def attack(
        self,
        plan: Plan,
        kind: str,
        attacker: Attacker,
        *,
        items: Set[str] = frozenset(),
        again: bool = False,
    ) -> AttackRecord:
        """Attack a run and record the results, unless they are recorded already.

        With ``items``, only these and those already in the record are attacked.

        Raises:
            SettingsError: If an attack of this kind can read none of the messages.
            DataError: If there are no public images, or a record cannot be written.
        """
        root, attack = self.resources.results, load_attack(kind)()
        key = attack_key(kind, attack.version_of(attacker), attacker, plan.key)
        record = find_attack(root, key)
        digests = dict(self.judges.digests) if attack.judged else {}
        judged = record is not None and digests.items() <= record.judges.items()
        if record is not None and not judged and (lost := record.judges.keys() - digests.keys()):
            raise SettingsError(
                f"attack {key} was judged by {', '.join(sorted(lost))}, too, which would be lost: "
                f"give --{' and --'.join(sorted(lost))} as well"
            )
        if record is not None and not again and judged and record.has(items):
            return record
        method = load_method(plan.settings.method)
        hyper = own_settings(method.Settings, plan.settings)
        attack.check(plan.settings, attacker, method.sends(hyper), items)
        if record is not None:  # its items are attacked again
            both = items and record.items
            items = frozenset(record.items).union(items) if both else frozenset()
        check_writable(attack_path(root, key).parent)
        federation, seen = self._run(plan)
        scene = Scene(
            plan.settings,
            federation,
            seen.exchanges,
            attacker,
            self.step,
            self.judges,
            items,
            self.resources.workers,
        )
        torch.set_num_threads(1)  # one core per search, and the same bits on every machine
        begun = time.perf_counter()
        results = list(attack.measure(scene))
        s = plan.settings
        record = AttackRecord(
            key=key,
            kind=kind,
            version=attack.version_of(attacker),
            attacker=attacker,
            run_key=plan.key,
            method=s.method,
            dataset=s.dataset,
            protocol=s.protocol,
            scenario=s.scenario,
            seed=s.seed,
            recipe=plan.recipe,
            labels={k: str(s.hyper[k]) for k in method.Settings.labels},
            settings=plan.canonical,
            clients=len(federation.clients),
            images=round(statistics.median(map(len, federation.clients.values()))),
            public=len(scene.part("id_val", MANY)),
            rounds=s.federation.rounds,
            measured=seen.measured,
            seconds=round(time.perf_counter() - begun, 3),
            pictures=[f"{key}-{name}.png" for name in attack.pictures],
            judges=digests,
            items=sorted(items),
            results=results,
        )
        for name, picture in attack.pictures.items():
            write_whole(root / "attacks" / f"{key}-{name}.png", picture)
        save_attack(root, record)  # last, so that the pictures that it names exist
        return record

    def _run(self, plan: Plan) -> tuple[Federation, _Last]:
        """Make a run, unless it is the previous one; return its federation and its messages."""
        if self._made is None or self._made[0] != plan.key:
            self._made = None  # its messages may be large
            federation, _, _ = open_federation(plan, self._data)
            executor = open_executor(self.resources)
            seen = _Last(self.step, plan.settings, federation)
            try:
                train(start(plan, federation, executor, self.resources), seen)
            finally:
                executor.close()
            self._made = plan.key, federation, seen
        return self._made[1:]
