"""Executors run client work in this process or in several, and keep the clients' memories."""

from __future__ import annotations

import logging
import math
import os
import pickle
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from concurrent.futures import Executor as Pool
from dataclasses import dataclass, fields, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddg_bench.common.errors import FeddgError, SettingsError, WorkerDeathError
from feddg_bench.common.limits import check_open_files
from feddg_bench.common.parallel import (
    GUARD,
    RAN_AGAIN,
    begin_process,
    end_if_run_again,
    end_pool,
    interrupts_ignored,
    portable_errors,
    process_context,
)
from feddg_bench.core.messages import (
    LocalUpdate,
    Payload,
    Reply,
    Task,
    Weights,
    decode,
    decode_file,
    encode,
)
from feddg_bench.core.method import Method
from feddg_bench.engine.gpu import check_gpus
from feddg_bench.engine.worker import Predictions, Worker, WorkerSpec, peak_memory_mib

logger = logging.getLogger(__name__)

OnReply = Callable[[Task, Reply[Any]], None]
"""Called with each task, which holds its client's memory before it, and the reply."""


class Executor(ABC):
    """Runs tasks and yields replies in the order of the tasks; keeps the clients' memories.

    Attributes:
        workers: Processes that run tasks.
        memories: State that each client keeps between its tasks.
        device_name: Model of the workers' GPUs or ``cpu``; ``None`` if they run on this machine.
        on_reply: Called with every task and its reply before the server sees them; must not change
            them.
    """

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self.memories: dict[str, Payload] = {}
        self.on_reply: OnReply | None = None
        self.device_name: str | None = None

    @abstractmethod
    def start(self, spec: WorkerSpec, method: Method) -> None:
        """Build the workers of a run and clear the clients' memories of an earlier run.

        Args:
            spec: What a worker is built from.
            method: This process's module; a worker in this process uses it, others build their own.
        """

    def map(self, tasks: Iterable[Task]) -> Iterator[Reply[Any]]:
        """Run the tasks lazily, as replies are taken; all share one model and one broadcast."""
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
        """Run tasks for `map`; each task holds its client's memory."""

    @abstractmethod
    def evaluate(self, weights: Weights, indices: Sequence[np.ndarray]) -> Iterator[Predictions]:
        """Evaluate the weights on the images of each index array."""

    def peak_memory_mib(self) -> float:
        """Return the peak resident memory so far of this process and its workers, in MiB."""
        return peak_memory_mib()

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release processes and memory."""


class SerialExecutor(Executor):
    """Runs everything in this process, with its only model."""

    def start(self, spec: WorkerSpec, method: Method) -> None:
        """Build the worker."""
        self.memories = {}
        self.worker = Worker(spec, method)

    def run(self, tasks: Iterator[Task]) -> Iterator[Reply[Any]]:
        """Run the tasks one by one."""
        for task in tasks:
            yield self.worker.run_counted(task)
            del task  # or its client's memory would stay while the next client trains

    def evaluate(self, weights: Weights, indices: Sequence[np.ndarray]) -> Iterator[Predictions]:
        """Evaluate the weights on the images of each index array."""
        return (self.worker.evaluate(weights, index) for index in indices)


@dataclass
class Posted:
    """Data that all workers can read while this object lives.

    Attributes:
        key: Name of the data, of which there is no other.
        place: Where workers read it; picklable.
    """

    key: str
    place: Any


@dataclass
class _Job:
    """An encoded task or evaluation, and its answer once it is submitted."""

    data: bytes
    answer: Future[bytes] | None = None

    def is_lost(self) -> bool:
        """Return whether a pool must still run the job, once the earlier pool has ended."""
        answer = self.answer
        return answer is None or (answer.done() and isinstance(answer.exception(), BrokenExecutor))


class FuturesExecutor(Executor):
    """Runs tasks in a pool of `concurrent.futures`, whose processes build a `Worker` each.

    The settings and data of a run, and the model and broadcast of a round, are posted once and read
    once by each process. Replies are never pickled. At most two jobs per worker are in progress or
    wait for their turn.

    When a process dies, a pool is opened again and the jobs are repeated, once in each run.

    Args:
        workers: Number of processes.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._mib: dict[str, float] = {}
        self._pool: Pool | None = None
        self._open()

    @abstractmethod
    def open_pool(self) -> Pool:
        """Return a pool whose `submit` calls `work` in a process of its own."""

    @abstractmethod
    def end_pool(self, pool: Any) -> str:
        """End a pool's processes, also in the middle of a job; return how the first one died."""

    def placed(self, spec: WorkerSpec) -> list[WorkerSpec]:
        """Return the `WorkerSpec` of each worker."""
        return [spec] * self.workers

    def post(self, data: bytes) -> Posted:
        """Let all workers read the data."""
        return _File(data)

    def built(self, facts: Payload) -> None:
        """Check what a worker reports when it is built."""

    def start(self, spec: WorkerSpec, method: Method) -> None:
        """Build all workers in parallel."""
        del method  # lives here; every worker builds its own
        self.memories = {}
        # Only the specs are pickled: our own objects for our own workers. All else is plain bytes.
        self._specs = self.post(pickle.dumps(self.placed(spec)))
        self._mended = False
        if self._pool is None:
            self._open()
        deque(self._share({}, ({} for _ in range(self.workers))), maxlen=0)

    def run(self, tasks: Iterator[Task]) -> Iterator[Reply[Any]]:
        """Spread the tasks over the workers."""
        first = next(tasks, None)
        if first is None:
            return iter(())
        shared = {"weights": dict(first.weights), "broadcast": dict(first.broadcast)}
        own = "client", "call", "round", "memory", "told"
        jobs = ({name: getattr(task, name) for name in own} for task in chain([first], tasks))
        return map(_received, self._share(shared, jobs))

    def evaluate(self, weights: Weights, indices: Sequence[np.ndarray]) -> Iterator[Predictions]:
        """Evaluate the weights on the images of each index array."""
        jobs = ({"index": torch.from_numpy(np.ascontiguousarray(index))} for index in indices)
        for answer in self._share({"weights": weights}, jobs):
            outputs = answer["outputs"]
            yield Predictions(
                answer["predictions"].numpy(),
                answer["loss"],
                None if outputs is None else outputs.numpy(),
            )

    def peak_memory_mib(self) -> float:
        """Return the sum of the peaks of this process and its workers, which share the store."""
        return round(peak_memory_mib() + math.fsum(self._mib.values()), 1)

    def close(self) -> None:
        """End the processes; all that they hold is in this process too."""
        pool, self._pool = self._pool, None
        if pool is not None:
            self.end_pool(pool)

    def _open(self) -> None:
        self._mib.clear()
        self._pool = self.open_pool()

    def _share(self, shared: Payload, jobs: Iterator[Payload]) -> Iterator[Any]:
        """Spread jobs over the workers and yield their answers in order."""
        posted = self.post(encode(shared))
        running: deque[_Job] = deque()
        try:
            while True:
                for job in islice(jobs, 2 * self.workers - len(running)):
                    running.append(_Job(encode(job)))
                    del job  # or its client's memory would stay while the next client trains
                if not running:
                    return
                answer = self._next(running, posted)
                yield answer
                del answer  # or it would stay while the next client trains
        finally:  # the caller may have stopped early, or a client failed
            for left in running:
                if left.answer is not None:
                    left.answer.cancel()

    def _next(self, running: deque[_Job], posted: Posted) -> Any:
        """Submit the jobs that no pool runs; return the first one's answer, or raise its error."""
        where = (self._specs.key, self._specs.place), (posted.key, posted.place)
        while True:
            assert self._pool is not None  # noqa: S101 - it is open during a run
            try:
                for job in running:
                    if job.is_lost():
                        job.answer = self._pool.submit(work, *where, job.data)
            except (BrokenExecutor, OSError, EOFError) as error:
                self._mend(error)
                continue
            answer = running[0].answer
            assert answer is not None  # noqa: S101 - it was submitted
            try:
                found = decode(answer.result())
            except BrokenExecutor as error:
                self._mend(error)
                continue
            running.popleft()
            self._mib[found["process"]] = found["mib"]
            if found["facts"]:
                self.built(found["facts"])
            return found["answer"]

    def _mend(self, error: BaseException) -> None:
        """Open a pool in place of one in which a process died.

        Raises:
            FeddgError: If this happened before in this run, or each process runs a script again.
        """
        pool, self._pool = self._pool, None
        how = self.end_pool(pool) or str(error)
        if how == f"exit status {RAN_AGAIN}":
            raise FeddgError(
                f"a worker process ended as it began: {GUARD}, because each process imports it"
            ) from None
        if self._mended:
            raise death(how) from None
        logger.warning("a worker process died (%s): its work is repeated by another one", how)
        self._mended = True
        self._open()


def death(how: str) -> WorkerDeathError:
    """Return the error for a second worker that died."""
    why = (
        "their error is printed above"
        if how.startswith("exit")
        else "most likely because memory ran out; run again with fewer --workers: "
        "the run goes on from its last checkpoint"
    )
    return WorkerDeathError(f"two worker processes died ({how}), {why}")


class ProcessExecutor(FuturesExecutor):
    """Runs tasks in ``n`` processes of this machine.

    Args:
        n: Number of processes.
        places: Device of each process; by default the CPU.

    Raises:
        SettingsError: If the devices are GPUs of several models.
    """

    def __init__(self, n: int, places: Sequence[str] = ()) -> None:
        end_if_run_again()
        self._places = list(places) or ["cpu"] * n
        check_gpus(self._places)
        super().__init__(len(self._places))

    def open_pool(self) -> ProcessPoolExecutor:
        """Start the processes."""
        check_open_files(self.workers)
        context = process_context(self._places[0])
        try:
            numbers = context.SimpleQueue()
        except OSError as error:  # its semaphore lies in /dev/shm
            raise SettingsError(
                f"processes cannot share memory here ({error.strerror}): /dev/shm has to be there "
                f"and writable; set --workers 1, or mount it"
            ) from error
        for number in range(self.workers):
            numbers.put(number)
        begin = dict(os.environ), _begin, numbers
        pool = ProcessPoolExecutor(self.workers, context, begin_process, begin)
        with interrupts_ignored():  # by the processes, one of which starts at each call
            for _ in self._places:
                pool.submit(os.getpid)
        return pool

    def end_pool(self, pool: ProcessPoolExecutor) -> str:
        """End the processes; return how the first one died."""
        ended = -15, -9  # SIGTERM and SIGKILL: also how the pool and we end the others
        codes = [code for code in end_pool(pool) if code]
        code = next((code for code in codes if code not in ended), max(codes, default=0))
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def placed(self, spec: WorkerSpec) -> list[WorkerSpec]:
        """Return the `WorkerSpec` of each worker, with its device."""
        places = self._places
        return [replace(spec, device=place, sharing=places.count(place)) for place in places]


class _File(Posted):
    """A file in memory, which ends with this process, or a temporary one where there are none."""

    _numbers = count()

    def __init__(self, data: bytes) -> None:
        if hasattr(os, "memfd_create"):
            file: Any = os.fdopen(os.memfd_create("feddg-bench"), "wb")
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        else:
            file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - lives as long as this object
            path = file.name
        file.write(data)
        file.flush()
        weakref.finalize(self, file.close)
        super().__init__(str(next(self._numbers)), path)  # a path is used again


# ---------------------------------------------------------------------------- in a worker process


class WorkerEnd:
    """The end of a `FuturesExecutor` in a worker process: it reads what is posted.

    Args:
        number: Number of this worker.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.name = str(os.getpid())
        self._worker: tuple[str, Worker] | None = None
        self._shared: tuple[str, Payload] = "", {}

    def specs(self, place: Any) -> list[WorkerSpec]:
        """Return the posted specs of all workers."""
        specs: list[WorkerSpec] = pickle.loads(Path(place).read_bytes())  # noqa: S301 - our own
        return specs

    def payload(self, place: Any) -> Payload:
        """Return a posted payload."""
        found: Payload = decode_file(place)
        return found

    def facts(self, spec: WorkerSpec) -> Payload:
        """Return facts about this process for `FuturesExecutor.built`."""
        del spec
        return {}

    def work(self, specs: tuple[str, Any], shared: tuple[str, Any], data: bytes) -> bytes:
        """Do a job, and return the encoded answer; what is known from an earlier job is not read.

        Args:
            specs: Name and place of all workers' specs.
            shared: Name and place of the model and the broadcast.
            data: The encoded job: a task, an evaluation, or nothing, to build the worker.
        """
        with portable_errors():
            facts: Payload = {}
            if self._worker is None or self._worker[0] != specs[0]:
                self._worker = None  # its memory is free before the new one is built
                spec = self.specs(specs[1])[self.number]
                facts = self.facts(spec)
                self._worker = specs[0], Worker(spec)
            if self._shared[0] != shared[0]:
                self._shared = "", {}
                self._shared = shared[0], self.payload(shared[1])
            answer = _answer(self._worker[1], self._shared[1], decode(data))
            about = {"process": self.name, "mib": peak_memory_mib(), "facts": facts}
            return encode({"answer": answer, **about})


_end: WorkerEnd


def _begin(numbers: Any) -> None:
    """Begin as a process of a `ProcessExecutor`."""
    global _end
    _end = WorkerEnd(numbers.get())


def work(specs: tuple[str, Any], shared: tuple[str, Any], data: bytes) -> bytes:
    """Do a job in this process (see `WorkerEnd`)."""
    return _end.work(specs, shared, data)


def _answer(worker: Worker, shared: Payload, job: Payload) -> Payload:
    if not job:
        return {}
    if "index" in job:
        predictions, loss, outputs = worker.evaluate(shared["weights"], job["index"].numpy())
        return {
            "predictions": torch.from_numpy(predictions),
            "loss": loss,
            "outputs": None if outputs is None else torch.from_numpy(outputs),
        }
    reply = worker.run_counted(Task(**shared, **job))
    sent = {f.name: getattr(reply, f.name) for f in fields(reply)}
    if isinstance(reply.value, LocalUpdate):
        sent["value"] = {"weights": reply.value.weights, "extra": reply.value.extra}
    return {**sent, "update": isinstance(reply.value, LocalUpdate)}


def _received(sent: Payload) -> Reply[Any]:
    if sent.pop("update"):
        sent["value"] = LocalUpdate(**sent["value"])
    return Reply(**sent)
