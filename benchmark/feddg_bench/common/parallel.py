"""Work for several cores: threads where bytes are read, processes where much is computed."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from feddg_bench.common.errors import FeddgError

T = TypeVar("T")

_GRACE = 2.0
"""Seconds that a process has to end when it is asked to."""

_AHEAD = 512
"""Calls that `in_threads` makes before it hands on their results."""


def cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(function: Callable[[int], T], numbers: Sequence[int]) -> Iterator[T]:
    """Yield the function's value for every number, in order, computed by a thread a core.

    Few results wait at a time, whatever the number of numbers.
    """
    with ThreadPoolExecutor(cores()) as pool:
        for start in range(0, len(numbers), _AHEAD):
            yield from pool.map(function, numbers[start : start + _AHEAD])


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Start processes that ignore Ctrl-C from their first instruction: the parent decides."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def end_processes(processes: Sequence[BaseProcess]) -> None:
    """End processes, in the middle of their work if need be, within a few seconds."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _GRACE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():  # such as one that is stopped
            process.kill()
            process.join(_GRACE)


class Team:
    """Processes that share numbered pieces of work; they end with this process, however it ends."""

    def __init__(self, pipes: list[Connection], processes: list[SpawnProcess]) -> None:
        self._pipes = pipes
        self._processes = processes

    @classmethod
    def start(cls, make: Callable[[], Callable[[int], Any]], size: int) -> Team | None:
        """Start processes that call ``make`` once and what it returns for every number.

        Returns:
            The team, or nothing where processes cannot do it: in one that may have none, or where
            they cannot import what ``make`` is made of, such as a class from a notebook.
        """
        if current_process().daemon:
            return None
        context = get_context("spawn")
        team = cls([], [])
        try:
            for _ in range(size):
                ours, theirs = context.Pipe()
                team._pipes.append(ours)
                process = context.Process(target=_serve, args=(theirs,), daemon=True)
                with interrupts_ignored():
                    process.start()
                team._processes.append(process)
                theirs.close()
            for pipe in team._pipes:
                pipe.send(make)  # our own object to our own child
            if all(pipe.recv() for pipe in team._pipes):
                return team
        except BaseException as error:
            team.close()
            if not isinstance(error, Exception):
                raise
            return None
        team.close()
        return None

    def share(self, numbers: Sequence[int]) -> Iterator[int]:
        """Yield each number when its work is done, then end the processes.

        Raises:
            FeddgError: What the work raised, or if a process died.
            OSError: What the work raised.
        """
        waiting = iter(numbers)
        running: dict[Connection, int] = {}
        try:
            for pipe in self._pipes:
                self._next(pipe, waiting, running)
            while running:
                for pipe in [pipe for pipe in wait(list(running)) if pipe in running]:
                    assert isinstance(pipe, Connection)  # noqa: S101 - for the type checker
                    error = pipe.recv()
                    if error is not None:
                        raise error
                    done = running.pop(pipe)
                    self._next(pipe, waiting, running)
                    yield done
        except (EOFError, ConnectionError) as error:
            raise FeddgError(
                "a process that decodes images died, most likely because memory ran out; the same "
                "command goes on where it stopped"
            ) from error
        finally:
            self.close()

    @staticmethod
    def _next(pipe: Connection, waiting: Iterator[int], running: dict[Connection, int]) -> None:
        number = next(waiting, None)
        if number is not None:
            pipe.send(number)
            running[pipe] = number

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        end_processes(self._processes)


def _serve(pipe: Connection) -> None:
    """Be a process of a team until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, ConnectionError):
        try:
            work = pipe.recv()()
        except (AttributeError, ImportError):  # a class that only the parent can see
            pipe.send(False)
            return
        pipe.send(True)
        while True:
            number = pipe.recv()
            try:
                work(number)
            except (FeddgError, OSError) as error:
                pipe.send(error)
            except Exception:  # raised by the parent
                pipe.send(RuntimeError(f"in a process that decodes:\n{traceback.format_exc()}"))
            else:
                pipe.send(None)
