"""Where client work runs: in this process, or in several. Executors keep the clients' memories."""

from __future__ import annotations

import signal
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

from feddg_bench.common.errors import FeddgError
from feddg_bench.common.parallel import interrupts_ignored
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Task, Weights, decode, encode
from feddg_bench.core.method import Method
from feddg_bench.engine.worker import Worker, WorkerSpec, peak_memory_mib

_DIED = (
    "a worker process died, most likely because memory ran out; run again with fewer --workers: "
    "the run goes on from its last checkpoint"
)

Measured = tuple[np.ndarray, float]
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
            if self.on_reply is not None:
                self.on_reply(task, reply)
            yield reply
            del task, reply  # or they would stay while the next client trains

    @abstractmethod
    def run(self, tasks: Iterator[Task]) -> Iterator[Reply[Any]]:
        """Do the work of `map`, with tasks that bring what their clients remember."""

    @abstractmethod
    def evaluate(self, weights: Weights, indices: Sequence[np.ndarray]) -> Iterator[Measured]:
        """Measure the weights on each index array."""

    def peak_memory_mib(self) -> float:
        """Return the peak resident memory so far, of this process and its workers."""
        return peak_memory_mib()

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of processes and memory."""


class SerialExecutor(Executor):
    """Runs everything in this process, with its only model."""

    def start(self, spec: WorkerSpec, method: Method) -> None:
        """Build the worker."""
        self.memories = {}
        self.worker = Worker(spec, method)

    def run(self, tasks: Iterator[Task]) -> Iterator[Reply[Any]]:
        """Run the tasks one by one."""
        return map(self.worker.run, tasks)

    def evaluate(self, weights: Weights, indices: Sequence[np.ndarray]) -> Iterator[Measured]:
        """Measure the weights on each index array."""
        return (self.worker.evaluate(weights, index) for index in indices)


class ProcessExecutor(Executor):
    """Runs tasks in ``n`` processes, each with its own model; bytes cross, never pickled content.

    The model and the broadcast are sent to a process once for all tasks that share them. Replies
    that came early wait for their turn; at most two a process are under way or waiting.
    """

    def __init__(self, n: int) -> None:
        super().__init__(n)
        context = get_context("spawn")
        self._pipes: list[Connection] = []
        self._running: dict[Connection, int] = {}
        self._processes = []
        for _ in range(n):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            with interrupts_ignored():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def start(self, spec: WorkerSpec, method: Method) -> None:
        """Build a worker in every process, all at the same time."""
        del method  # lives here; every process builds its own
        self.memories = {}
        self._settle()
        for pipe in self._pipes:
            self._send(pipe, encode({"start": True}))
            pipe.send(spec)  # our own object to our own child: the one thing that is pickled
        for pipe in self._pipes:
            self._receive(pipe)

    def run(self, tasks: Iterator[Task]) -> Iterator[Reply[Any]]:
        """Spread the tasks over the processes."""
        first = next(tasks, None)
        if first is None:
            return iter(())
        shared = {"weights": dict(first.weights), "broadcast": dict(first.broadcast)}
        jobs = (
            {
                "client": task.client,
                "call": task.call,
                "round": task.round,
                "memory": task.memory,
                "told": dict(task.told),
            }
            for task in chain([first], tasks)
        )
        return map(_reply, self._share(shared, jobs))

    def evaluate(self, weights: Weights, indices: Sequence[np.ndarray]) -> Iterator[Measured]:
        """Measure the weights on each index array."""
        jobs = ({"index": torch.from_numpy(np.ascontiguousarray(index))} for index in indices)
        for answer in self._share({"weights": weights, "broadcast": {}}, jobs):
            yield answer["predictions"].numpy(), answer["loss"]

    def peak_memory_mib(self) -> float:
        """Return the sum of the peaks of this process and its workers; they share the store."""
        self._settle()
        for pipe in self._pipes:
            self._send(pipe, encode({"peak memory": True}))
        workers: list[float] = [self._receive(pipe)["mib"] for pipe in self._pipes]
        return round(peak_memory_mib() + sum(workers), 1)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()  # it holds nothing that is not here too
            process.join()

    def _share(self, shared: Payload, jobs: Iterator[Payload]) -> Iterator[Any]:
        """Spread jobs over the processes and yield their answers in order.

        A process gets a job only when it is idle, hence always reading: were both ends to write
        large messages at once, neither would ever finish.
        """
        self._settle()
        model = encode(shared)
        for pipe in self._pipes:
            self._send(pipe, model)
        idle = list(self._pipes)
        running = self._running
        answers: dict[int, Any] = {}
        started = following = 0
        job = next(jobs, None)
        while job is not None or following < started:
            while job is not None and idle and started - following < 2 * len(self._pipes):
                pipe = idle.pop(0)
                self._send(pipe, encode(job))
                running[pipe] = started
                started += 1
                job = next(jobs, None)
            while following in answers:
                yield answers.pop(following)
                following += 1
            if running and following < started:
                ready = wait(list(running))
                for pipe in [pipe for pipe in running if pipe in ready]:
                    number = running.pop(pipe)
                    answers[number] = self._receive(pipe)
                    idle.append(pipe)

    def _settle(self) -> None:
        """Throw away answers that nobody took: of a caller that stopped early, or failed."""
        for pipe in self._running:
            with suppress(EOFError, ConnectionError):
                pipe.recv_bytes()
        self._running.clear()

    def _send(self, pipe: Connection, data: bytes) -> None:
        try:
            pipe.send_bytes(data)
        except ConnectionError as error:
            raise FeddgError(_DIED) from error

    def _receive(self, pipe: Connection) -> Any:
        """Return a process's answer, or raise what went wrong there."""
        try:
            answer = decode(pipe.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise FeddgError(_DIED) from error
        if "error" in answer:
            if answer["user"]:
                raise FeddgError(answer["error"])
            raise RuntimeError(f"in a worker process:\n{answer['error']}")
        return answer


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
            pipe.send_bytes(encode(answer))
        except (EOFError, ConnectionError):
            return
        except Exception as error:  # sent to the parent, which raises it
            user = isinstance(error, FeddgError)
            text = str(error) if user else traceback.format_exc()
            pipe.send_bytes(encode({"error": text, "user": user}))


def _answer(worker: Worker, shared: Payload, job: Payload) -> Payload:
    """Do one job in a worker process."""
    if "index" in job:
        predictions, loss = worker.evaluate(shared["weights"], job["index"].numpy())
        return {"predictions": torch.from_numpy(predictions), "loss": loss}
    task = Task(weights=shared["weights"], broadcast=shared["broadcast"], **job)
    reply = worker.run(task)
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
    """Return the reply that `_answer` made into a payload."""
    update = answer.pop("update")
    if update:
        answer["value"] = LocalUpdate(**answer["value"])
    return Reply(**answer)
