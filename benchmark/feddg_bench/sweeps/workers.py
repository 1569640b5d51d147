"""Equal workers of a sweep: processes of this machine, tasks on Ray, or jobs of Slurm.

All are copies of one worker on a common results folder, whose leases distribute the runs.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import Pipe, connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from feddg_bench.common.errors import (
    DataError,
    FeddgError,
    RunInterruptedError,
    SettingsError,
    in_a_line,
    told,
)
from feddg_bench.common.parallel import end_processes, start_process
from feddg_bench.common.terminal import say
from feddg_bench.common.titles import counted
from feddg_bench.config.schema import Resources
from feddg_bench.records.store import open_results
from feddg_bench.runs.observer import Observer
from feddg_bench.runs.request import Datasets, Plan
from feddg_bench.sweeps.jobs import Failures, Job
from feddg_bench.sweeps.leases import Lease, Leases
from feddg_bench.sweeps.search import Search
from feddg_bench.tracking.loggers import trackers

if TYPE_CHECKING:
    from submitit import Executor

    from feddg_bench.core.loop import RoundResult
    from feddg_bench.runs.setup import Run

GRACE = 20.0
"""Seconds for a worker to release its run when asked."""
NOTICE = 120
"""Seconds before its time limit at which a job releases its run."""
AGAIN = 1000
"""Maximum number of times that a job is queued again after a notice."""
_LISTS = ("setup", "teardown", "srun_args")
_SWITCHES = ("use_srun", "stderr_to_stdout")
"""Parameters of submitit that are no options of ``sbatch``."""
POLL = 2.0
"""Seconds between two checks of runs that other workers compute."""

MAX_DEATHS = 3
"""Deaths of workers on one run, without a new round in between, at which the run fails."""

Tell = Callable[..., None]
"""Called with ``begin``, ``round``, ``say``, ``end`` or ``failed``, the job's key, and details."""


# --------------------------------------------------------------------------------- one worker


class SweepWorker:
    """Computes jobs in this process.

    Training also runs in it, so ``workers`` must be 1.
    """

    def __init__(self, resources: Resources, tell: Tell) -> None:
        from feddg_bench.engine.executors import SerialExecutor
        from feddg_bench.runs.setup import RunData

        self.resources = resources
        self.tell = tell
        self.store = open_results(resources.results)
        self.failures = Failures(resources.results)
        self.leases = Leases.of(resources.results)
        self.executor = SerialExecutor()
        self.datasets = Datasets(resources.data_root)
        say: Callable[[str], None] = lambda text: tell("say", self.key, text)  # noqa: E731
        self.trackers = trackers(resources, say)
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
        others = False
        for job in search.jobs():
            if job.key in finished:
                continue
            lease = self.leases.take(job.key)
            if lease is None:
                others = True
                continue
            with lease:
                results = (self.store.path(job.key), self.failures.path(job.key))
                if any(path.exists() for path in results):  # the listing was outdated
                    pass
                elif lease.deaths < MAX_DEATHS:
                    self._run(job, lease)
                else:
                    self._fail(
                        job,
                        f"{counted(lease.deaths, 'worker')} died, most likely because memory ran "
                        f"out; run it again with fewer --workers and --retry-failed",
                    )
            return True, others
        return False, others

    def _run(self, job: Job, lease: Lease) -> None:
        from feddg_bench.runs.driver import execute

        self.key = job.key
        try:
            plan = self._plan(job)
            observers = (_Report(job.key, lease, self.tell), *self.trackers)
            execute(plan, self._data, self.executor, self.resources, *observers)
        except Exception as error:  # saved, and the other runs continue
            if isinstance(error, FeddgError):
                self._fail(job, told(error))
            else:
                self._fail(job, in_a_line(error), traceback.format_exc())
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
    """Reports a run's progress."""

    def __init__(self, key: str, lease: Lease, tell: Tell) -> None:
        self.key = key
        self.lease = lease
        self.tell = tell

    def begin(self, run: Run) -> None:
        """A run starts, or continues from a checkpoint."""
        self.tell("begin", self.key, run.done, run.plan.settings.federation.rounds)

    def round(self, run: Run, result: RoundResult) -> None:
        """A round ended."""
        if result.round:
            self.lease.survive(result.round)
            self.tell("round", self.key, result.round)


# ------------------------------------------------------------------------------ equal workers


@dataclass(frozen=True)
class Copy:
    """One of the equal workers; picklable.

    Attributes:
        search: The sweep's runs.
        resources: Devices, workers and folders; one run at a time.
    """

    search: Search
    resources: Resources

    def work(self, tell: Tell) -> None:
        """Work until every run is recorded or has failed, by this worker or by another."""
        SweepWorker(self.resources, tell).work(self.search)

    def __call__(self, number: int) -> None:
        """Work on a cluster, and print the events."""
        with _between_runs():
            self.work(lambda *event: say(" ".join(map(str, event))))

    def checkpoint(self, number: int) -> Any:
        """Return the submission that continues the job later; its progress is on the disk."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, number)


# ------------------------------------------------------------------------------ this machine


def work_in_processes(copy: Copy, places: Sequence[str], tell: Tell) -> None:
    """Finish a sweep with equal workers, one process for each device in ``places``.

    A worker that dies is replaced. Its run is free at once, and fails after `MAX_DEATHS`.

    Raises:
        FeddgError: If a worker cannot continue, for example because nothing can be written.
    """
    running: dict[connection.Connection, tuple[str, BaseProcess]] = {}
    free = list(places)
    silent = 0  # deaths since the last event of a worker
    try:
        while free or running:
            while free:
                ours, theirs = Pipe(duplex=False)
                resources = copy.resources.model_copy(update={"device": free[0]})
                given = theirs, replace(copy, resources=resources)
                running[ours] = free[0], start_process(_serve, given, free.pop(0))
                theirs.close()
            for pipe in connection.wait(list(running)):
                assert isinstance(pipe, connection.Connection)  # noqa: S101 - all are pipes
                try:
                    event, *facts = pipe.recv()
                except (EOFError, OSError):
                    place, process = running.pop(pipe)
                    pipe.close()
                    process.join()
                    if process.exitcode:
                        silent += 1
                        free.append(place)
                    continue
                silent = 0
                if event == "stop":
                    raise FeddgError(*facts)
                tell(event, *facts)
            if silent > MAX_DEATHS * len(places):
                raise FeddgError(
                    f"{silent} worker processes died, and none reached a run: their error is "
                    f"printed above, or memory ran out; run again with fewer --workers"
                )
    finally:  # each releases its run, whose checkpoint stays
        end_processes([process for _, process in running.values()], GRACE)
        for pipe in running:
            pipe.close()


def _serve(pipe: connection.Connection, copy: Copy) -> None:
    """Run as a worker process."""
    signal.signal(signal.SIGTERM, _interrupt)
    one_at_a_time = threading.Lock()  # W&B's messages come in a thread of their own

    def tell(*event: object) -> None:
        try:
            with one_at_a_time:
                pipe.send(event)
        except OSError:  # the parent is gone, which is no failure of the run
            os._exit(1)

    try:
        copy.work(tell)
    except RunInterruptedError:
        pass
    except FeddgError as error:
        tell("stop", str(error))


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise RunInterruptedError(number)


# ---------------------------------------------------------------------------------- clusters


@contextmanager
def _between_runs() -> Iterator[None]:
    """Let submitit queue this job again only after the current run is released.

    Its handler ends the program where the signal arrives, possibly in a client's code, where
    exceptions count as errors of that client.
    """
    from submitit.core.job_environment import JobEnvironment

    notice = JobEnvironment._usr_sig()
    queue_again = signal.getsignal(notice)
    if not callable(queue_again):  # not a job of submitit
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        raise RunInterruptedError(number)

    signal.signal(notice, stop)
    try:
        yield
    except RunInterruptedError as stopped:
        queue_again(stopped.signal_number, None)
        raise
    finally:
        signal.signal(notice, queue_again)


def slurm_parameters(
    *, jobs: int, threads: int, gpus: int, time: str, partition: str | None, options: Iterable[str]
) -> dict[str, Any]:
    """Return the request to Slurm under submitit's names; Slurm reads times and options itself.

    Args:
        jobs: Number of workers, each a job with one run at a time.
        threads: CPUs of each job.
        gpus: GPUs of each job.
        time: Time limit of each job in Slurm's format, such as ``D-HH:MM:SS``.
        partition: Slurm's partition; ``None`` for the cluster's default.
        options: Other options of ``sbatch`` or parameters of submitit, ``KEY`` or ``KEY=VALUE``;
            those of `_LISTS` can be repeated.
    """
    others: dict[str, str | bool] = {}
    own: dict[str, Any] = {}
    for key, sign, value in (option.partition("=") for option in options):
        if key in _LISTS:
            own.setdefault(key, []).append(value)
        elif key in _SWITCHES:
            own[key] = value != "false"
        else:
            others[key] = value if sign else True
    return {
        "job_name": "feddg-bench",
        "partition": partition,
        "gpus_per_node": gpus or None,
        "ntasks_per_node": 1,
        "cpus_per_task": threads,
        "array_parallelism": jobs,
        "signal_delay_s": NOTICE,
        "wckey": None,
        # submitit's own time is a number of minutes, by which it counts time limits: see `AGAIN`.
        "additional_parameters": {"requeue": True, "time": time, **others},
        **own,
    }


def slurm_script(parameters: Mapping[str, Any], folder: Path) -> str:
    """Return the script that would be submitted; logs go to ``folder``."""
    command = shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(folder)])
    count = parameters["array_parallelism"]
    write = _submitit().slurm.slurm._make_sbatch_string
    text: str = write(command, folder, map_count=count, **parameters)
    return text


def slurm_executor(parameters: Mapping[str, Any], folder: Path) -> Executor:
    """Return submitit's executor for this cluster.

    Raises:
        SettingsError: If Slurm is not available here.
    """
    try:
        executor: Executor = _submitit().SlurmExecutor(folder, max_num_timeout=AGAIN)
    except RuntimeError as error:
        raise SettingsError(
            "there is no Slurm here, srun is not found: submit on a cluster's login node; "
            "--dry-run shows the script anywhere"
        ) from error
    executor.update_parameters(**parameters)
    return executor


def submit(executor: Executor, worker: Copy, count: int) -> list[str]:
    """Submit ``count`` equal workers and return the ids of their jobs.

    Raises:
        SettingsError: If ``sbatch`` refuses them.
    """
    from submitit.core.utils import FailedJobError

    try:
        return [job.job_id for job in executor.map_array(worker, range(count))]
    except FailedJobError as error:  # submitit has printed the message of sbatch
        raise SettingsError(
            "sbatch refused the jobs and says above why: correct the options and try again"
        ) from error


def shared(resources: Resources) -> Resources:
    """Return resources with absolute folders, the same wherever a worker starts."""
    from feddg_bench.common.files import cache_dir

    folders = {"results": resources.results, "cache_dir": cache_dir(resources.cache_dir)}
    if resources.data_root is not None:
        folders["data_root"] = resources.data_root
    return resources.model_copy(update={name: path.resolve() for name, path in folders.items()})


def work_on_ray(
    copy: Copy, say: Callable[[str], None], done: Callable[[], tuple[set[str], int]]
) -> None:
    """Finish a sweep with equal workers on a Ray cluster, distributed as in `RayCluster`.

    Args:
        copy: The worker; its resources give number, devices, and the cluster's address.
        say: Called with a sentence on the sweep's progress.
        done: Returns the finished runs, and the total number of runs.

    Raises:
        SettingsError: If Ray or the cluster is missing, or the cluster is too small.
    """
    from feddg_bench.engine.devices import load_ray

    asked, told = copy.resources, done()
    ray = load_ray()
    share = asked.workers, asked.device, asked.threads, asked.address
    with closing(ray.RayCluster(*share)) as cluster:
        one = {"workers": 1, "device": cluster.device}
        worker = replace(copy, resources=shared(asked).model_copy(update=one))
        left = told[1] - len(told[0])
        running = {cluster.call(worker, number) for number in range(min(cluster.count, left))}
        while running:
            over, running = wait(running, 5, FIRST_COMPLETED)
            for future in over:
                future.result()
            if done() != told:
                told = done()
                say(f"{len(told[0])} of {counted(told[1], 'run')} finished")


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise SettingsError(
            "--engine slurm needs submitit: pip install 'feddg-bench[slurm]'"
        ) from error
    return submitit
