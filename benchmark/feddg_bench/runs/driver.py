"""Driver: takes runs through the federated loop and notifies observers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from feddg_bench.common.errors import WorkerDeathError
from feddg_bench.config.schema import Resources
from feddg_bench.core.loop import federate
from feddg_bench.core.messages import Reply, Task
from feddg_bench.data.dataset import DomainDataset
from feddg_bench.data.feature_store import Encoding
from feddg_bench.engine.devices import open_executor
from feddg_bench.engine.evaluation import evaluate
from feddg_bench.engine.executors import Executor
from feddg_bench.records.record import RunRecord, TunedRecord
from feddg_bench.records.store import ResultsStore, open_results
from feddg_bench.runs.checkpoints import tidy
from feddg_bench.runs.code import check_same_code
from feddg_bench.runs.observer import Observer
from feddg_bench.runs.recorder import Recorder
from feddg_bench.runs.request import Plan
from feddg_bench.runs.setup import Run, RunData, open_run


def train(run: Run, *observers: Observer, until: int | None = None) -> None:
    """Train and evaluate a run, and notify the observers in order.

    A run restored from a checkpoint continues from there. With ``until``, the run stops after that
    round.
    """
    settings = run.plan.settings
    curious = [o for o in observers if type(o).replied is not Observer.replied]
    if curious:

        def show(task: Task, reply: Reply[Any]) -> None:
            for observer in curious:
                observer.replied(run, task, reply)

        run.executor.on_reply = show
    results = federate(
        run.method,
        run.server,
        lambda weights: evaluate(
            run.executor, run.federation, weights, chunk=settings.evaluation.batch_size
        ),
        rounds=settings.federation.rounds,
        per_round=settings.federation.per_round,
        every=settings.evaluation.every,
        start=settings.evaluation.start,
    )
    try:
        for observer in observers:
            observer.begin(run)
        for result in results:
            for observer in observers:
                observer.round(run, result)
            if until is not None and result.round >= until:
                break
        for observer in observers:
            observer.end(run)
    except BaseException:
        for observer in observers:
            observer.stopped(run)
        raise


def execute(
    plan: Plan,
    data: RunData,
    executor: Executor,
    resources: Resources,
    *observers: Observer,
    keep: Collection[str] = (),
    again: bool = False,
) -> RunRecord:
    """Train, evaluate and record one run, from its checkpoint if there is one.

    ``keep`` lists the global models to keep with the record, ``last`` or ``best``; with ``again``,
    an existing record is set aside for the new one.

    Raises:
        FeddgError: If the data, a file or a setting cannot be used.
    """

    def decoding(done: int, total: int) -> None:
        for observer in observers:
            observer.decoding(done, total)

    run = open_run(plan, data, executor, resources, decoding)
    recorder = Recorder(run, data, resources, keep, again=again)
    train(run, recorder, *observers)  # recorder first: a round that was shown is not lost
    return recorder.record


def recorded(
    store: ResultsStore,
    data: RunData,
    dataset: DomainDataset,
    encoding: Encoding | None,
    key: str,
    tuned: TunedRecord | None,
) -> RunRecord | None:
    """Return a run's record if there is one, with ``tuned`` added to it.

    Raises:
        FeddgError: If it was made from other images, or by other code of the same version.
    """
    record = store.load(key)
    if record is None:
        return None
    data.check_same(dataset, encoding, record, store.path(key))
    check_same_code(record)
    return store.note_tuned(record, tuned)


def execute_all(
    plans: Iterable[Plan],
    resources: Resources,
    *observers: Observer,
    keep: Collection[str] = (),
    again: bool = False,
) -> Iterator[RunRecord]:
    """Execute the runs that are not recorded yet, one after the other, and yield every record.

    A run over which workers die does not keep the others from being done.

    A recorded run that lacks a model to keep is repeated; for ``keep`` and ``again`` see
    `execute`.

    Raises:
        WorkerDeathError: After all other runs, if workers died over one.
        FeddgError: If the data, a file or a setting cannot be used.
    """
    store = open_results(resources.results)
    data = RunData(resources.cache_dir)
    executor: Executor | None = None
    died: list[WorkerDeathError] = []
    try:
        for plan in plans:
            record = None
            if not again:
                encoding = Encoding.of(plan.settings)
                record = recorded(store, data, plan.dataset, encoding, plan.key, plan.tuned)
            if record is not None and store.has_models(plan.key, keep):
                tidy(store, plan.key)
                for observer in observers:
                    observer.already(plan, record)
                yield record
                continue
            if executor is None:
                store.check_writable()
                executor = open_executor(resources)
            try:
                record = execute(
                    plan, data, executor, resources, *observers, keep=keep, again=again
                )
            except WorkerDeathError as error:
                died.append(error)
                died[0].add_note(plan.title)
                continue
            yield record
    finally:
        if executor is not None:
            executor.close()
    if died:
        raise died[0]
