"""Recorder of a run: its record, a checkpoint until it ends, and models on request."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import feddg_bench
from feddg_bench.common.errors import DataError
from feddg_bench.common.files import write_whole
from feddg_bench.common.portable import describe_cpu
from feddg_bench.config.schema import Resources
from feddg_bench.core.loop import RoundResult
from feddg_bench.core.messages import Reply, Task, copied
from feddg_bench.data.feature_store import Encoding
from feddg_bench.engine.devices import find_devices
from feddg_bench.engine.flop import Tally
from feddg_bench.engine.gpu import device_name
from feddg_bench.models.weights import digest
from feddg_bench.records.metrics import PERSONAL
from feddg_bench.records.record import Costs, EnvironmentRecord, RoundRecord, RunRecord, TimeRecord
from feddg_bench.records.rules import best_round, one_class_splits
from feddg_bench.records.store import open_results
from feddg_bench.runs.checkpoints import (
    Checkpoint,
    CheckpointWriter,
    going_on,
    load_checkpoint,
    tidy,
)
from feddg_bench.runs.code import code_digest, has_changed
from feddg_bench.runs.kept import save_model
from feddg_bench.runs.observer import Observer
from feddg_bench.runs.setup import Run, RunData

logger = logging.getLogger(__name__)

_AND = " and "
"""Separator of the kinds of CPU that computed parts of one run."""
_CHOOSING = ("val", "id_val")
"""Splits that can choose the best model: the first of them that the run measures is used."""


class Recorder(Observer):
    """Writes the record, checkpoints, and the models to keep.

    The run continues from its checkpoint if there is one, which also lists models to keep.
    ``keep`` and ``again`` are as in `feddg_bench.runs.driver.execute`.

    Raises:
        DataError: If the checkpoint cannot be used.
    """

    def __init__(
        self,
        run: Run,
        data: RunData,
        resources: Resources,
        keep: Collection[str] = (),
        *,
        again: bool = False,
    ) -> None:
        assert run.record is not None  # noqa: S101 - only runs on a data set are recorded
        self.record = run.record
        self.store = open_results(resources.results)
        self.resources = resources
        self.keep = set(keep)
        self.again = again
        self.started = _now()
        self.began = time.monotonic()  # setting the clock during a run affects only dates
        self.seconds_before = self.peak = 0.0
        self.tally = Tally()
        self.untrained = trained_digest(run)
        self.path = self.store.checkpoint(run.plan.key)
        self.writer = CheckpointWriter(self.path, resources.checkpoint_every)
        if self.path.exists():
            kept = load_checkpoint(self.path)
            data.check_same(
                run.plan.dataset, Encoding.of(run.plan.settings), kept.record, self.path
            )
            with going_on(self.path):
                if has_changed(kept.record):
                    raise DataError(f"the code of {kept.record.method} changed after it was made")
                run.server.restore(kept.server)
            # The plan defines the run, the checkpoint its progress.
            done = {name: getattr(kept.record, name) for name in ("once", "rounds", "time")}
            done["environment"] = kept.record.environment
            self.record = run.record = run.record.model_copy(update=done)
            self.keep |= set(kept.keep)
            best, model = best_so_far(self.record), self.store.model(run.plan.key, "best")
            if "best" in self.keep and best is not None and not model.exists():
                logger.warning(
                    "the model of round %d, the best so far, was not kept: --keep best keeps one "
                    "only if a later round is better",
                    best,
                )
            self.seconds_before = self.record.time.seconds
            self.tally = Tally(self.record.time.flop)  # `None` from a version that did not count
            run.done = run.server.round

    def begin(self, run: Run) -> None:
        """Record the environment, the code's digest, and the partition."""
        before = self.record.environment.cpu
        made_on = environment(
            self.resources,
            run.executor.workers,
            device=run.executor.device_name,
            portable=run.plan.settings.portable,
        )
        if (
            run.done and before and made_on.cpu and before != made_on.cpu
        ):  # numbers of both are in it
            kinds = {*before.split(_AND), made_on.cpu}
            made_on = made_on.model_copy(update={"cpu": _AND.join(sorted(kinds))})
        self.record.environment = made_on
        self.record.code = code_digest(type(run.method))
        path = self.store.partitions / f"{self.record.partition.hash[:16]}.json"
        if not path.exists():
            write_whole(path, json.dumps(run.partition()).encode())

    def replied(self, run: Run, task: Task, reply: Reply[Any]) -> None:
        """Count the operations of the client's work."""
        self.tally.add(task, reply)

    def round(self, run: Run, result: RoundResult) -> None:
        """Add the round to the record, keep the model if it is the best, and write a checkpoint."""
        record, ledger = self.record, result.ledger
        costs: dict[str, Any] = {
            "bytes": dict(ledger.bytes),
            "dropped": list(ledger.dropped),
            # More digits are noise, which does not compress.
            "seconds": {phase: float(f"{value:.3g}") for phase, value in ledger.seconds.items()},
            "protection": ledger.protection or None,
        }
        if result.round == 0:
            record.once = Costs(**costs)
        if result.round or result.evaluation:
            entry = RoundRecord(
                round=result.round,
                cohort=list(result.cohort),
                skipped=result.skipped,
                train=ledger.means(),
                evaluation=result.evaluation,
                **costs,
            )
            record.rounds.append(entry)
        if result.evaluation or not result.round:  # asking the system takes as long as ten steps
            self.peak = run.executor.peak_memory_mib()
        record.time = TimeRecord(
            started=record.time.started or self.started,
            finished=_now(),
            seconds=round(self.seconds_before + time.monotonic() - self.began, 3),
            peak_memory_mib=self.peak,
            flop=self.tally.flop,
        )
        if "best" in self.keep and best_so_far(record) == result.round:
            save_model(self.store.model(record.key, "best"), run, result.round)
        last = result.round == run.plan.settings.federation.rounds
        if not last:
            self.writer.offer(result.round, self._checkpoint(run))

    def _checkpoint(self, run: Run) -> Callable[[], Checkpoint]:
        """Return a function that makes a checkpoint of the present state, even if called later."""
        state = run.server.state()
        clients = dict(state.pop("clients"))  # a client's state is replaced, never changed
        server = copied(state) | {"clients": clients}
        record = self.record.model_copy(update={"rounds": [*self.record.rounds]})
        root, keep = self.resources.data_root, sorted(self.keep)
        return lambda: Checkpoint(
            server=server,
            record=record,
            settings=run.plan.settings.model_dump(mode="json"),
            recipe=run.plan.recipe,
            data_root=str(root) if root else None,
            keep=keep,
        )

    def stopped(self, run: Run) -> None:
        """Write a checkpoint of the last finished round."""
        try:
            self.writer.finish(write=True)
        except DataError as error:
            logger.warning("%s", error)

    def end(self, run: Run) -> None:
        """Save the record, and remove the checkpoint."""
        evaluation = self.record.rounds[-1].evaluation if self.record.rounds else None
        if splits := one_class_splits(evaluation or {}, None):
            logger.warning(
                "%s (run %s): after the last round its model predicts a single class on %s; try "
                "a smaller train.lr than %s, or more rounds",
                run.plan.title,
                self.record.key,
                ", ".join(splits),
                run.plan.settings.train.lr,
            )
        learns = run.server.round and run.method.state.trainable
        if learns and trained_digest(run) == self.untrained:
            logger.warning(
                "%s (run %s): nothing was learnt: the global weights after the last round equal "
                "those before the first bit for bit; check that the loss depends on the model, and "
                "that run_round assigns server.weights",
                run.plan.title,
                self.record.key,
            )
        if "last" in self.keep:
            save_model(self.store.model(self.record.key, "last"), run, run.server.round)
        kept = sorted(run.executor.memories.items())
        personal = {name: memory[PERSONAL] for name, memory in kept if PERSONAL in memory}
        self.record.personal = personal or None
        self.record = self.record.sealed()
        if self.again:
            self.store.set_aside(self.record.key)
        if self.again or self.store.load(self.record.key) is None:  # else only a model was wanted
            self.store.save(self.record)
        with suppress(DataError):  # the checkpoint is no longer needed
            self.writer.finish(write=False)
        tidy(self.store, self.record.key)


def best_so_far(record: RunRecord) -> int | None:
    """Return the evaluated round with the best key metric on the validation domain.

    ``id_val`` is used if no domain is held out for validation. The earliest of equal rounds is
    returned; ``None`` if no round was evaluated.
    """
    evaluations = {entry.round: entry.evaluation for entry in record.rounds if entry.evaluation}
    for split in _CHOOSING:
        place = best_round(list(evaluations.values()), split, record.metric.name)
        if place is not None:
            return list(evaluations)[place]
    return None


def trained_digest(run: Run) -> str:
    """Return the digest of the global weights that take gradients: statistics change without."""
    weights = run.server.weights
    return digest("", {name: weights[name].cpu() for name in run.method.state.trainable})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment(
    resources: Resources, workers: int, *, device: str | None = None, portable: bool = False
) -> EnvironmentRecord:
    """Return the environment that can affect rounding, and nothing that identifies a machine."""
    versions = {"python": platform.python_version(), "feddg_bench": feddg_bench.__version__}
    versions |= {"torch": str(torch.__version__)}
    versions |= {name: version(name) for name in ("torchvision", "lightning")}
    return EnvironmentRecord(
        versions=versions,
        system=f"{platform.system()} {platform.machine()}",
        cpu=describe_cpu(),
        portable=portable or None,
        device=device or device_name(find_devices(resources.device)[0]),
        threads=resources.threads,
        workers=workers,
        commit=_commit(),
    )


@cache
def _commit() -> str | None:
    """Return the commit of the source tree this runs from, with ``+`` if it has changes."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() or None
