"""One worker: it takes a run that nobody has, computes it and records it, until none is left."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from feddg_bench.common.errors import DataError, FeddgError
from feddg_bench.config.schema import Resources
from feddg_bench.records.store import open_results
from feddg_bench.runs.observer import Observer
from feddg_bench.runs.request import Datasets, Plan
from feddg_bench.sweeps.failures import Failures
from feddg_bench.sweeps.jobs import Job
from feddg_bench.sweeps.leases import Lease, Leases
from feddg_bench.sweeps.search import Search
from feddg_bench.tracking.tracker import Tracker

if TYPE_CHECKING:
    from feddg_bench.core.loop import RoundResult
    from feddg_bench.runs.setup import Run

POLL = 2.0
"""Seconds between two looks at runs that other workers compute."""

MAX_DEATHS = 3
"""Workers that may die over one run, without one more round, before it is given up."""

Tell = Callable[..., None]
"""Called with ``begin``, ``round``, ``say``, ``end`` or ``failed``, the job's key, and facts."""


class LeaseLostError(Exception):
    """Another worker took this run over while this one stood still."""


class SweepWorker:
    """Computes jobs in this process.

    It also trains here, so ``workers`` must be 1.
    """

    def __init__(self, resources: Resources, tell: Tell) -> None:
        from feddg_bench.engine.executors import SerialExecutor
        from feddg_bench.runs.setup import RunData

        self.resources = resources
        self.tell = tell
        self.store = open_results(resources.results)
        self.failures = Failures(resources.results)
        self.leases = Leases(resources.results / "claims")
        self.executor = SerialExecutor()
        self.datasets = Datasets(resources.data_root)
        self.tracker = Tracker(resources, lambda text: tell("say", self.key, text))
        self.key = ""
        self._data = RunData(resources.cache_dir)

    def work(self, search: Search, poll: float = POLL) -> None:
        """Work until every job is recorded or has failed, by this worker or by another."""
        while True:
            taken, others = self._one(search)
            if taken or search.grow():
                continue
            if not others and not search.left():
                return
            time.sleep(poll)

    def _one(self, search: Search) -> tuple[bool, bool]:
        """Compute the first free job; return whether there was one, and whether any is leased."""
        finished = self.store.keys() | self.failures.keys()
        held = self.leases.held()
        others = False
        for job in search.jobs():
            if job.key in finished:
                continue
            lease = self.leases.take(job.key, held.get(job.key))
            if lease is None:
                others = True
                continue
            with lease:
                results = (self.store.path(job.key), self.failures.path(job.key))
                if any(path.exists() for path in results):  # the listing was old
                    pass
                elif lease.deaths < MAX_DEATHS:
                    self._run(job, lease)
                else:
                    self._fail(
                        job,
                        f"{lease.deaths} workers died, most likely because memory ran out; "
                        f"run it again with fewer --workers and --retry-failed",
                    )
            return True, others
        return False, others

    def _run(self, job: Job, lease: Lease) -> None:
        from feddg_bench.runs.driver import execute

        self.key = job.key
        try:
            plan = self._plan(job)
            report = _Report(job.key, lease, self.tell)
            with self.tracker:
                execute(plan, self._data, self.executor, self.resources, report, self.tracker)
        except LeaseLostError:
            return
        except Exception as error:  # kept, and the other runs go on
            user = isinstance(error, FeddgError)
            sentence = str(error) if user else f"{type(error).__name__}: {error}"
            self._fail(job, sentence, "" if user else traceback.format_exc())
            return
        self.failures.forget([job.key])
        self.tell("end", job.key)

    def _fail(self, job: Job, sentence: str, details: str = "") -> None:
        self.failures.save(job, sentence, details)
        self.tell("failed", job.key, sentence)

    def _plan(self, job: Job) -> Plan:
        """Return a job's plan, which must still have the job's key."""
        plan = job.plan(self.datasets, self.store.root)
        if plan.key != job.key:
            raise DataError(
                f"{plan.settings.method} or a file it reads changed while the sweep ran; "
                f"run the same command again"
            )
        return plan


class _Report(Observer):
    """Passes a run's progress on, and stops a run that another worker took over."""

    def __init__(self, key: str, lease: Lease, tell: Tell) -> None:
        self.key = key
        self.lease = lease
        self.tell = tell

    def begin(self, run: Run) -> None:
        """A run starts, or goes on from a checkpoint."""
        self.tell("begin", self.key, run.done, run.plan.settings.federation.rounds)

    def round(self, run: Run, result: RoundResult) -> None:
        """A round ended."""
        if self.lease.lost:
            raise LeaseLostError
        if result.round:
            self.lease.survive()
            self.tell("round", self.key, result.round)
