"""Work on several cores: threads for reading bytes, processes for heavy computation."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import current_process, forkserver, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from feddg_bench.common.errors import FeddgError

T = TypeVar("T")

_GRACE = 2.0
"""Seconds that a process has to end after it is asked to."""

GUARD = "put what the script does under `if __name__ == '__main__':`"
"""Remedy for a script that is run again by the processes it starts."""

RAN_AGAIN = 76
"""Exit status of a process that runs the script again and is about to start more processes."""

_AHEAD = 512
"""Calls that `in_threads` submits at a time."""


def cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(
    function: Callable[[int], T],
    numbers: Sequence[int],
    size: int = 0,
    stop: threading.Event | None = None,
) -> Iterator[T]:
    """Yield the function's value for every number, in order, computed by threads.

    Few results are held at a time, however many numbers there are.

    Args:
        function: Called by the threads.
        numbers: Its arguments.
        size: Number of threads; 0 is one per core.
        stop: Set when results are no longer needed, such as after Ctrl-C. Long calls should check
            it from time to time, because the pool waits for its threads.
    """
    with ThreadPoolExecutor(size or cores()) as pool:
        try:
            for start in range(0, len(numbers), _AHEAD):
                yield from pool.map(function, numbers[start : start + _AHEAD])
        finally:
            if stop is not None:
                stop.set()


def script_is_no_file() -> bool:
    """Return whether this process runs a script that its child processes cannot import.

    This is so for a script that was read from standard input.
    """
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    named = getattr(main, "__spec__", None) is not None
    return not named and path is not None and not Path(path).exists()


def runs_the_script_again() -> bool:
    """Return whether this is a child process that now runs its parent's whole script.

    Each child imports the script of its parent; `GUARD` keeps it from doing more.
    """
    return bool(getattr(current_process(), "_inheriting", False))


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Let processes started in the block ignore Ctrl-C from the start: the parent handles it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def start_process(
    target: Callable[..., object], arguments: tuple[Any, ...], device: str
) -> BaseProcess:
    """Start a process that computes on a device, ends with this one, and ignores Ctrl-C.

    For a CPU, where forks are safe, it is forked from one server that imports PyTorch and the
    engine once; otherwise each process would take seconds and 300 MB for that.

    A child process that runs the user's script again ends with `RAN_AGAIN`.
    """
    if runs_the_script_again():
        os._exit(RAN_AGAIN)  # an exception would reach the script, which may catch it

    def start(way: SpawnContext | ForkServerContext) -> BaseProcess:
        given = target, arguments, dict(os.environ)
        process = way.Process(target=_with_environment, args=given, daemon=True)
        with interrupts_ignored():
            process.start()
        return process

    if device == "cpu" and sys.platform == "linux":
        with suppress(OSError, EOFError):  # the server died, or its socket was removed from /tmp
            return start(_server())
    return start(get_context("spawn"))


def _server() -> ForkServerContext:
    server = get_context("forkserver")
    server.set_forkserver_preload(["feddg_bench.engine.executors"])
    return server


def prepare_processes(device: str, workers: int) -> None:
    """Let the server of `start_process`, if needed, import PyTorch while this process does.

    As PyTorch is not loaded yet, a GPU is detected by its device file.

    Args:
        device: As given by the user.
        workers: Processes that will be started; 0 is one per core.
    """
    gpu = Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()
    several = (workers or cores()) > 1 and not current_process().daemon
    cpu = device == "cpu" or (device == "auto" and not gpu)
    if sys.platform == "linux" and several and cpu:
        _server()
        with interrupts_ignored(), suppress(OSError):
            forkserver.ensure_running()


def _with_environment(
    target: Callable[..., object], arguments: tuple[Any, ...], environment: dict[str, str]
) -> None:
    """Run ``target`` in the parent's current environment; the fork server keeps an older one."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # looked up again: TMPDIR may have changed
    target(*arguments)


def end_processes(processes: Sequence[BaseProcess], grace: float = _GRACE) -> None:
    """End processes; kill those that take more than ``grace`` seconds."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + grace
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():  # such as one that is stopped
            process.kill()
            process.join(_GRACE)


def in_processes(
    make: Callable[[], Callable[[int], T]], numbers: Sequence[int], size: int
) -> Iterator[T] | None:
    """Share numbered pieces of work among processes, which always end with this one.

    Each process calls ``make`` once, and then the result for every number that it gets.

    Returns:
        Each result when its work is done; or ``None`` if processes cannot do it: if this one may
        not start others, or if they cannot import a part of ``make``, such as a class from a
        notebook.

    Raises:
        FeddgError: If the work raised it, or if a process died.
        OSError: If the work raised it.
    """
    if current_process().daemon or script_is_no_file():
        return None
    context = get_context("spawn")
    team: dict[Connection, BaseProcess] = {}
    able = False
    try:
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            with interrupts_ignored():
                process.start()
            team[ours] = process
            theirs.close()
        for pipe in team:
            pipe.send(make)  # our own object to our own child
        able = all(pipe.recv() for pipe in team)
    except Exception:
        return None
    finally:
        if not able:
            _end(team)
    return _share(team, numbers) if able else None


def _share(team: Mapping[Connection, BaseProcess], numbers: Sequence[int]) -> Iterator[Any]:
    waiting = iter(numbers)
    running: set[Connection] = set()
    idle = list(team)
    done: list[Any] = []
    try:
        while idle:
            for pipe, number in zip(idle, waiting, strict=False):
                pipe.send(number)
                running.add(pipe)
            yield from done
            ready = wait(list(running)) if running else []
            idle = [pipe for pipe in running if pipe in ready]
            done = [pipe.recv() for pipe in idle]
            running.difference_update(idle)
            for result in done:
                if isinstance(result, Exception):
                    raise result
    except (EOFError, ConnectionError) as error:
        raise FeddgError(
            "a helper process died, most likely because memory ran out; the same "
            "command goes on where it stopped"
        ) from error
    finally:
        _end(team)


def _end(team: Mapping[Connection, BaseProcess]) -> None:
    for pipe in team:
        pipe.close()
    end_processes(list(team.values()))


def _serve(pipe: Connection) -> None:
    """Work as a process of `in_processes` until the pipe closes."""
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
                result = work(number)
            except (FeddgError, OSError) as error:
                pipe.send(error)
            except Exception:  # raised by the parent
                pipe.send(RuntimeError(f"in a process that decodes:\n{traceback.format_exc()}"))
            else:
                pipe.send(result)
