"""Several workers: processes that share the store of images, watched and replaced if they die."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType

from feddg_bench.common.errors import FeddgError, RunInterruptedError
from feddg_bench.common.parallel import start_process
from feddg_bench.config.schema import Resources
from feddg_bench.sweeps.failures import Failures
from feddg_bench.sweeps.jobs import Job
from feddg_bench.sweeps.search import Search
from feddg_bench.sweeps.work import SweepWorker, Tell

MAX_DEATHS = 3
"""Processes that may die over one run before it is given up."""

GRACE = 20.0
"""Seconds in which a worker must let go of its run when asked."""


def run_in_processes(
    places: Sequence[str],
    search: Search,
    resources: Resources,
    tell: Tell,
    job: Callable[[str], Job | None],
) -> None:
    """Let worker processes, one for each device in ``places``, work until all jobs are finished.

    ``job`` finds a job by its key.

    Raises:
        FeddgError: If a worker cannot go on, for example because nothing can be written.
    """
    pool = _Pool(search, resources)
    deaths: Counter[str] = Counter()
    try:
        for place in places:
            pool.start(place)
        while pool.members:
            for pipe in wait(list(pool.members)):
                assert isinstance(pipe, Connection)  # noqa: S101 - we wait for nothing else
                try:
                    event, key, *facts = pipe.recv()
                except (EOFError, OSError):
                    lost, place = pool.bury(pipe)
                    if lost is None:
                        continue
                    deaths[lost] += 1
                    _mourn(lost, deaths[lost], job(lost), resources, tell)
                    pool.start(place)
                    continue
                if event == "stop":
                    raise FeddgError(key)
                if event != "say":
                    pool.current[pipe] = key if event in ("begin", "round") else ""
                tell(event, key, *facts)
    finally:
        pool.close()


def _mourn(key: str, times: int, job: Job | None, resources: Resources, tell: Tell) -> None:
    """Give up a run whose processes keep dying."""
    if times < MAX_DEATHS:
        return
    sentence = (
        f"{times} worker processes died, most likely because memory ran out; "
        f"run it again with fewer --workers and --retry-failed"
    )
    if job is None:
        raise FeddgError(sentence)
    Failures(resources.results).save(job, sentence)
    tell("failed", key, sentence)


class _Pool:
    """The worker processes, by the pipe on which each reports."""

    def __init__(self, search: Search, resources: Resources) -> None:
        self.search = search
        self.resources = resources
        self.members: dict[Connection, BaseProcess] = {}
        self.current: dict[Connection, str] = {}
        self.places: dict[Connection, str] = {}

    def start(self, place: str) -> None:
        """Start one more process, on a device."""
        own = self.resources.model_copy(update={"device": place})
        ours, theirs = Pipe(duplex=False)
        process = start_process(_serve, (theirs, self.search, own), place)
        theirs.close()
        self.members[ours] = process
        self.current[ours], self.places[ours] = "", place

    def bury(self, pipe: Connection) -> tuple[str | None, str]:
        """Forget a process that ended.

        Returns:
            The key of the run it died over, ``None`` if it ended normally; and its device.
        """
        process = self.members.pop(pipe)
        process.join()
        pipe.close()
        key, place = self.current.pop(pipe), self.places.pop(pipe)
        return key if process.exitcode else None, place

    def close(self) -> None:
        """End the processes; each lets go of its run, whose checkpoint stays."""
        for process in self.members.values():
            process.terminate()
        for process in self.members.values():
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.members:
            pipe.close()


def _serve(pipe: Connection, search: Search, resources: Resources) -> None:
    """Run as a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    signal.signal(signal.SIGTERM, _interrupt)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    one_at_a_time = threading.Lock()  # W&B's messages come in a thread of their own

    def tell(*event: object) -> None:
        with one_at_a_time:
            pipe.send(event)

    try:
        SweepWorker(resources, tell).work(search)
    except RunInterruptedError:
        pass
    except FeddgError as error:
        tell("stop", str(error))


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise RunInterruptedError(number)


def _end_with_parent() -> None:
    """End at once when the parent is gone; unfinished work is left as after any other kill."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
