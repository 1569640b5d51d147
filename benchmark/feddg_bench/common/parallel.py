"""Work on several cores: threads for reading bytes, processes for heavy computation."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import current_process, forkserver, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from feddg_bench.common.errors import HANGUP, FeddgError, PluginError, in_a_line
from feddg_bench.common.limits import check_address_space

if TYPE_CHECKING:  # Windows lacks the first
    from multiprocessing.context import ForkServerContext, SpawnContext

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
    """Start a process that computes on a device, and begins with `begin_process`.

    A child process that runs the user's script again ends with `RAN_AGAIN`.
    """
    end_if_run_again()
    given = dict(os.environ), target, *arguments
    process = process_context(device).Process(target=begin_process, args=given, daemon=True)
    with interrupts_ignored():
        process.start()
    return process


def end_if_run_again() -> None:
    """End this process with `RAN_AGAIN` if it runs its parent's whole script."""
    if runs_the_script_again():
        os._exit(RAN_AGAIN)  # an exception would reach the script, which may catch it


def process_context(device: str) -> SpawnContext | ForkServerContext:
    """Return the way to start processes that compute on a device.

    For a CPU, where forks are safe, they are forked from one server that imports PyTorch and the
    engine once; otherwise each process would take seconds and 300 MB for that.
    """
    return _server() if device == "cpu" and sys.platform == "linux" else get_context("spawn")


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

    Raises:
        SettingsError: If the address space is too small for PyTorch.
    """
    gpu = Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()
    several = (workers or cores()) > 1 and not current_process().daemon
    cpu = device == "cpu" or (device == "auto" and not gpu)
    check_address_space()
    if sys.platform == "linux" and several and cpu:
        _server()
        with interrupts_ignored(), suppress(OSError):
            forkserver.ensure_running()


def begin_process(
    environment: dict[str, str], then: Callable[..., object] | None = None, *arguments: Any
) -> None:
    """Begin as a worker, whose parent handles Ctrl-C and a closed terminal.

    The process ends at once when its parent is gone; unfinished work is left as it is.

    Args:
        environment: The parent's current one; the fork server has an older one.
        then: Called at the end.
        arguments: Those of ``then``.
    """
    for number in (signal.SIGINT, HANGUP):
        signal.signal(number, signal.SIG_IGN)
    parent = parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # looked up again: TMPDIR may have changed
    if then is not None:
        then(*arguments)


def end_pool(pool: ProcessPoolExecutor) -> list[int]:
    """End a pool's processes, also in the middle of a call, and return their exit statuses."""
    processes = [*(pool._processes or {}).values()]  # Python 3.14 has `kill_workers`
    for process in processes:
        process.kill()
    answers: Any = pool._result_queue
    if answers:  # the last end for writing: a thread of the pool may wait for half an answer
        answers._writer.close()
    pool.shutdown(cancel_futures=True)
    return [process.exitcode or 0 for process in processes]


@contextmanager
def portable_errors() -> Iterator[None]:
    """Let only errors leave the block that another process can receive.

    Raises:
        PluginError: In place of an exception that cannot be pickled, or ends a process.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) and _is_portable(error):
            raise
        other = PluginError(in_a_line(error))
        for note in getattr(error, "__notes__", ()):
            other.add_note(note)
        raise other from error


def _is_portable(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301 - our own
    except Exception:
        return False


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
    given = (dict(os.environ),)
    pool = ProcessPoolExecutor(size, get_context("spawn"), begin_process, given)
    able = False
    try:
        data = pickle.dumps(make)  # our own object for our own children
        with interrupts_ignored():
            made = [pool.submit(_try, data) for _ in range(size)]
        wait(made)
        able = not any(future.exception() for future in made)
    except Exception:
        return None
    finally:
        if not able:
            end_pool(pool)
    return _share(pool, data, numbers) if able else None


def _share(pool: ProcessPoolExecutor, data: bytes, numbers: Sequence[int]) -> Iterator[Any]:
    try:
        for future in as_completed([pool.submit(_do, data, number) for number in numbers]):
            yield future.result()
    except BrokenExecutor as error:
        raise FeddgError(
            "a helper process died, most likely because memory ran out; the same "
            "command goes on where it stopped"
        ) from error
    finally:
        end_pool(pool)


@cache
def _made(data: bytes) -> Callable[[int], Any]:
    """Return what ``make`` of `in_processes` made in this process."""
    work: Callable[[int], Any] = pickle.loads(data)()  # noqa: S301 - our own parent's
    return work


def _try(data: bytes) -> None:
    _made(data)


def _do(data: bytes, number: int) -> Any:
    with portable_errors():
        return _made(data)(number)
