"""Where client work runs: in this process, or in several. Executors keep the clients' memories."""

from __future__ import annotations

import logging
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddg_bench.common.errors import ClientError, FeddgError, SettingsError
from feddg_bench.common.parallel import end_processes, interrupts_ignored
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Task, Weights, decode, encode
from feddg_bench.core.method import Method
from feddg_bench.engine.worker import Worker, WorkerSpec, peak_memory_mib

logger = logging.getLogger(__name__)

Predictions = tuple[np.ndarray, float]
"""Predictions (n,) and summed loss of some images."""


OnReply = Callable[[Task, Reply[Any]], None]
"""Is shown each task, with what its client remembered before it, and the reply."""


class Executor(ABC):
    """Runs tasks and yields replies in the order of the tasks; keeps what clients remember.

    Attributes:
        workers: Processes that run tasks.
        memories: What each client keeps between its tasks.
        on_reply: Looks at every task and its reply before the server does; may not change them.
    """

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self.memories: dict[str, Payload] = {}
        self.on_reply: OnReply | None = None

    @abstractmethod
    def start(self, spec: WorkerSpec, method: Method) -> None:
        """Build the workers of a run and forget what clients kept in an earlier one.

        Args:
            spec: What a worker is built from.
            method: This process's module; a worker in this process uses it, others build theirs.
        """

    def map(self, tasks: Iterable[Task]) -> Iterator[Reply[Any]]:
        """Run the tasks as replies are taken; they share one model and one broadcast."""
        given: deque[Task] = deque()

        def remembering() -> Iterator[Task]:
            for task in tasks:
                given.append(replace(task, memory=self.memories.get(task.client, {})))
                yield given[-1]

        for reply in self.run(remembering()):
            task = given.popleft()
            self.memories[reply.client] = reply.memory
            if self.on_reply is not None and not reply.fault:
                self.on_reply(task, reply)
            yield reply
            del task, reply  # or they would stay while the next client trains

    @abstractmethod
    def run(self, tasks: Iterator[Task]) -> Iterator[Reply[Any]]:
        """Do the work of `map`, with tasks that bring what their clients remember."""

    @abstractmethod
    def evaluate(self, weights: Weights, indices: Sequence[np.ndarray]) -> Iterator[Predictions]:
        """Measure the weights on each index array."""

    def peak_memory_mib(self) -> float:
        """Return the peak resident memory so far, of this process and its workers."""
        return peak_memory_mib()

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of processes and memory."""


class SerialExecutor(Executor):
    """Runs everything in this process, with its only model."""

    def start(self, spec: WorkerSpec, method: Method) -> None:
        """Build the worker.

        Raises:
            SettingsError: If clients have a limit of time, which only another process can keep.
        """
        if spec.settings.federation.client_timeout is not None:
            raise SettingsError(
                "federation.client_timeout ends a client's process, and --workers 1 trains in this "
                "one: give --workers 2 or more"
            )
        self.memories = {}
        self.worker = Worker(spec, method)

    def run(self, tasks: Iterator[Task]) -> Iterator[Reply[Any]]:
        """Run the tasks one by one."""
        return map(self._run, tasks)

    def _run(self, task: Task) -> Reply[Any]:
        try:
            return self.worker.run(task)
        except Exception as error:
            raise _client_error(task, error) from error

    def evaluate(self, weights: Weights, indices: Sequence[np.ndarray]) -> Iterator[Predictions]:
        """Measure the weights on each index array."""
        return (self.worker.evaluate(weights, index) for index in indices)


class ProcessExecutor(Executor):
    """Runs tasks in ``n`` processes, each with its own model; bytes cross, never pickled content.

    The model and the broadcast are sent to a process once for all tasks that share them. Replies
    that came early wait for their turn; at most two a process are under way or waiting.

    A process that dies is replaced and its job repeated, once; one that does not answer within
    ``federation.client_timeout`` is replaced, and its client's reply is a fault.
    """

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._processes = [_Process() for _ in range(n)]
        self._timeout: float | None = None

    def start(self, spec: WorkerSpec, method: Method) -> None:
        """Build a worker in every process, all at the same time."""
        del method  # lives here; every process builds its own
        self.memories = {}
        self._settle()
        self._timeout = spec.settings.federation.client_timeout
        for process in self._processes:
            process.build(spec)
        for process in self._processes:
            process.receive()

    def run(self, tasks: Iterator[Task]) -> Iterator[Reply[Any]]:
        """Spread the tasks over the processes."""
        first = next(tasks, None)
        if first is None:
            return iter(())
        shared = {"weights": dict(first.weights), "broadcast": dict(first.broadcast)}
        jobs = (
            _Job(
                f"{task.client} in round {task.round} ({task.call})",
                {
                    "client": task.client,
                    "call": task.call,
                    "round": task.round,
                    "memory": task.memory,
                    "told": dict(task.told),
                },
            )
            for task in chain([first], tasks)
        )
        return map(_reply, self._share(shared, jobs, self._timeout))

    def evaluate(self, weights: Weights, indices: Sequence[np.ndarray]) -> Iterator[Predictions]:
        """Measure the weights on each index array."""
        jobs = (
            _Job("an evaluation", {"index": torch.from_numpy(np.ascontiguousarray(index))})
            for index in indices
        )
        for answer in self._share({"weights": weights, "broadcast": {}}, jobs):
            yield answer["predictions"].numpy(), answer["loss"]

    def peak_memory_mib(self) -> float:
        """Return the sum of the peaks of this process and its workers; they share the store."""
        self._settle()
        workers = 0.0
        for process in self._processes:
            with suppress(OSError, EOFError):  # one that is gone needs no memory
                process.send({"peak memory": True})
                workers += process.receive()["mib"]
        return round(peak_memory_mib() + workers, 1)

    def close(self) -> None:
        """End the processes; they hold nothing that is not here too."""
        for process in self._processes:
            process.pipe.close()
        end_processes([process.process for process in self._processes])

    def _share(
        self, shared: Payload, jobs: Iterator[_Job], timeout: float | None = None
    ) -> Iterator[Any]:
        """Spread jobs over the processes and yield their answers in order.

        A process gets a job only when it is idle, hence always reading: were both ends to write
        large messages at once, neither would ever finish.
        """
        self._settle()
        data = encode(shared)
        for process in self._processes:
            process.shared = data
        answers: dict[int, Any] = {}
        started = following = 0
        job = next(jobs, None)
        while job is not None or following < started:
            idle = [process for process in self._processes if process.job is None]
            while job is not None and idle and started - following < 2 * len(self._processes):
                job.number = started
                self._give(idle.pop(0), job)
                started += 1
                job = next(jobs, None)
            while following in answers:
                yield answers.pop(following)
                following += 1
            if following < started:
                answers.update(self._collect(timeout))

    def _collect(self, timeout: float | None) -> Iterator[tuple[int, Any]]:
        """Wait for answers; replace processes that died, or took longer than ``timeout``."""
        busy = [(process, process.job) for process in self._processes if process.job is not None]
        longest = time.monotonic() - min(process.since for process, _ in busy)
        left = None if timeout is None else max(0.0, timeout - longest)
        ready = wait([process.pipe for process, _ in busy], left)
        for process, job in busy:
            if process.pipe in ready:
                try:
                    answer = process.receive()
                except (EOFError, OSError):
                    self._bury(process, job)
                    self._give(process, job)
                else:
                    yield job.number, answer
            elif timeout is not None and time.monotonic() - process.since >= timeout:
                logger.warning("%s takes longer than %g s: ended", job.name, timeout)
                process.replace()
                yield job.number, job.payload | {"fault": f"did not come within {timeout:g} s"}

    def _give(self, process: _Process, job: _Job) -> None:
        while True:
            try:
                return process.give(job)
            except OSError:
                self._bury(process, job)

    def _bury(self, process: _Process, job: _Job) -> None:
        """Replace a process that died.

        Raises:
            FeddgError: If it is the second one to die over this job.
        """
        job.deaths += 1
        how = process.end()
        if job.deaths > 1:
            raise FeddgError(
                f"two worker processes died ({how}) over {job.name}, most likely because memory "
                f"ran out; run again with fewer --workers: the run goes on from its last checkpoint"
            )
        logger.warning("a worker process died (%s) over %s, which is repeated", how, job.name)
        process.replace()

    def _settle(self) -> None:
        """Throw away answers that nobody took: of a caller that stopped early, or failed."""
        for process in self._processes:
            try:
                if process.job is not None and process.pipe.poll(self._timeout):
                    process.pipe.recv_bytes()
                    process.job = None
            except (EOFError, OSError):
                pass
            if process.job is not None:
                process.replace()


@dataclass
class _Job:
    """Work for a process.

    Attributes:
        name: What it is, for messages.
        payload: What the process gets.
        number: Place of its answer.
        deaths: Processes that died over it.
    """

    name: str
    payload: Payload
    number: int = 0
    deaths: int = 0


class _Process:
    """A worker process, or the one that replaced it.

    Attributes:
        pipe: To it.
        process: As Python knows it.
        job: What it is doing; ``None`` if it is idle.
        since: When it began with that.
        shared: Model and broadcast of its jobs, encoded.
    """

    def __init__(self) -> None:
        self.shared = b""
        self._spec: WorkerSpec | None = None
        self._begin()

    def _begin(self) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        with interrupts_ignored():
            self.process.start()
        theirs.close()
        self.job: _Job | None = None
        self.since = 0.0
        self._has = b""

    def send(self, payload: Payload) -> None:
        """Send something that it answers."""
        self.pipe.send_bytes(encode(payload))

    def build(self, spec: WorkerSpec) -> None:
        """Let it build its worker."""
        self._spec = spec
        self.send({"start": True})
        self.pipe.send(spec)  # our own object to our own child: the one thing that is pickled

    def give(self, job: _Job) -> None:
        """Give it a job, and what jobs share if it has not got that yet."""
        if self._has is not self.shared:
            self.pipe.send_bytes(self.shared)
            self._has = self.shared
        self.send(job.payload)
        self.job, self.since = job, time.monotonic()

    def receive(self) -> Any:
        """Return its answer, or raise what went wrong there."""
        answer = decode(self.pipe.recv_bytes())
        self.job = None
        if "error" in answer:
            kind = {"client": ClientError, "user": FeddgError}.get(answer["kind"])
            details = RuntimeError(f"in a worker process:\n{answer['traceback']}")
            if kind is None:
                raise details
            raise kind(answer["error"]) from details
        return answer

    def end(self) -> str:
        """End it, and return how it ended."""
        self.process.join(0.1)  # its pipe closes before it is over
        code = self.process.exitcode
        self.pipe.close()
        end_processes([self.process])
        return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"

    def replace(self) -> None:
        """End it and begin anew, with the same worker."""
        self.end()
        self._begin()
        if self._spec is not None:
            self.build(self._spec)
            self.receive()


def _serve(pipe: Connection) -> None:
    """Be a worker process until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker: Worker | None = None
    shared: Payload = {}
    while True:
        try:
            job = decode(pipe.recv_bytes())
            if "start" in job:
                worker = Worker(pipe.recv())
                answer: Payload = {}
            elif "peak memory" in job:
                answer = {"mib": peak_memory_mib()}
            elif "weights" in job:
                shared = job
                continue
            else:
                assert worker is not None  # noqa: S101 - every process is started first
                answer = _answer(worker, shared, job)
            data = encode(answer)
        except (EOFError, ConnectionError):
            return
        except Exception as error:  # sent to the parent, which raises it
            client, user = isinstance(error, ClientError), isinstance(error, FeddgError)
            kind = "client" if client else "user" if user else "other"
            told = {"error": str(error), "kind": kind, "traceback": traceback.format_exc()}
            data = encode(told)
        with suppress(ConnectionError):
            pipe.send_bytes(data)


def _answer(worker: Worker, shared: Payload, job: Payload) -> Payload:
    """Do one job in a worker process."""
    if "index" in job:
        predictions, loss = worker.evaluate(shared["weights"], job["index"].numpy())
        return {"predictions": torch.from_numpy(predictions), "loss": loss}
    task = Task(weights=shared["weights"], broadcast=shared["broadcast"], **job)
    try:
        reply = worker.run(task)
    except Exception as error:
        raise _client_error(task, error) from error
    update = isinstance(reply.value, LocalUpdate)
    value = {"weights": reply.value.weights, "extra": reply.value.extra} if update else reply.value
    return {
        "client": reply.client,
        "num_examples": reply.num_examples,
        "update": update,
        "value": value,
        "metrics": dict(reply.metrics),
        "memory": reply.memory,
        "seconds": dict(reply.seconds),
    }


def _reply(answer: Payload) -> Reply[Any]:
    """Return the reply that `_answer` made into a payload, or that did not come."""
    if "fault" in answer:
        return Reply(answer["client"], 0, None, {}, answer["memory"], fault=answer["fault"])
    if answer.pop("update"):
        answer["value"] = LocalUpdate(**answer["value"])
    return Reply(**answer)


def _client_error(task: Task, error: Exception) -> ClientError:
    """Return an exception that a client's task raised with the names of client and round."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if not isinstance(error, FeddgError):
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {text} ({Path(place.filename).name}, line {place.lineno})"
    return ClientError(f"{task.client} failed in round {task.round} ({task.call}): {text}")
