"""Lightning's loggers of runs: CSV, TensorBoard, MLflow, or a logger object of the user."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddg_bench.common.errors import SettingsError, in_a_line
from feddg_bench.config.schema import Resources
from feddg_bench.records.store import open_results
from feddg_bench.runs.observer import Observer
from feddg_bench.tracking.tracker import config, metrics, run_title

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

    from feddg_bench.core.loop import RoundResult
    from feddg_bench.records.record import RunRecord
    from feddg_bench.runs.setup import Run

EXPERIMENT = "feddg-bench"
"""MLflow experiment, unless ``MLFLOW_EXPERIMENT_NAME`` names another."""

Make = Callable[[Path, "RunRecord"], "Logger"]
"""Returns a new logger for a run, given the folder of its kind of log."""


class Loggers(Observer):
    """An observer that passes settings and the metrics of each round to Lightning's loggers.

    The log of a run is in ``logs/KIND/KEY`` of the results folder. The log of a resumed run is
    written again from its first round. Loggers run in this process, so training waits for them. A
    logger that raises is left out from then on.

    Args:
        resources: Names of loggers, and the results folder.
        say: Called with one sentence about each logger that fails.
        own: Loggers of the user. Each holds one run.
    """

    def __init__(
        self, resources: Resources, say: Callable[[str], None], own: Iterable[Logger] = ()
    ) -> None:
        self.folder = open_results(resources.results).root.absolute() / "logs"
        self._say = say
        self._logs = [_Log(kind, _MAKERS[kind]) for kind in resources.logger]
        self._logs += [_Log(type(one).__name__, lambda *_, one=one: one) for one in own]

    def begin(self, run: Run) -> None:
        """Open a log for the run, with its settings and the rounds that are already finished."""
        record = run.record
        assert record is not None  # noqa: S101 - only recorded runs are logged
        if self._logs:
            from lightning.fabric.utilities.rank_zero import rank_zero_only

            vars(rank_zero_only)["rank"] = 0  # Slurm may set another, for which loggers do nothing

        def open_log(log: _Log) -> None:
            log.logger = log.make(self.folder / log.kind, record)
            log.logger.log_hyperparams(config(run.plan))
            for entry in record.rounds:
                log.logger.log_metrics(metrics(entry), entry.round)

        self._each(open_log)

    def round(self, run: Run, result: RoundResult) -> None:
        """Log the round that was last added to the record."""
        if result.round and run.record is not None:
            entry = run.record.rounds[-1]
            self._each(lambda log: log.opened.log_metrics(metrics(entry), entry.round))

    def end(self, run: Run) -> None:
        """Close the logs of a finished run."""
        self._close("success")

    def stopped(self, run: Run) -> None:
        """Close the logs of a run that fails or is stopped."""
        self._close("failed")

    def _close(self, status: str) -> None:
        def close(log: _Log) -> None:
            logger, log.logger = log.logger, None
            if logger is not None:  # an error may precede `begin`
                logger.finalize(status)

        self._each(close)

    def _each(self, do: Callable[[_Log], object]) -> None:
        for log in [*self._logs]:
            try:
                do(log)
            except Exception as error:
                self._logs.remove(log)
                self._say(
                    f"the logger {log.kind} failed, and training goes on without it: "
                    f"{in_a_line(error)}"
                )


@dataclass(eq=False)
class _Log:
    kind: str
    make: Make
    logger: Logger | None = None

    @property
    def opened(self) -> Logger:
        assert self.logger is not None  # noqa: S101 - a logger whose `begin` failed is left out
        return self.logger


def check_own(given: Any) -> Logger:
    """Return an object that is a logger.

    Raises:
        SettingsError: If it is not.
    """
    needed = ("log_hyperparams", "log_metrics", "finalize")
    if isinstance(given, type) or not all(hasattr(given, name) for name in needed):
        raise SettingsError(
            f"{given!r} is no logger: give names, as in logger='csv,tensorboard', or objects, as "
            f"in logger=CSVLogger('logs')"
        )
    logger: Logger = given
    return logger


# ----------------------------------------------------------------------------- loggers by name


def _csv(folder: Path, record: RunRecord) -> Logger:
    from lightning.pytorch.loggers import CSVLogger

    shutil.rmtree(folder / record.key, ignore_errors=True)
    return CSVLogger(folder, name=None, version=record.key, flush_logs_every_n_steps=1)


def _tensorboard(folder: Path, record: RunRecord) -> Logger:
    from lightning.pytorch.loggers import TensorBoardLogger

    shutil.rmtree(folder / record.key, ignore_errors=True)  # else a round would appear twice
    return TensorBoardLogger(folder, name=None, version=record.key, default_hp_metric=False)


def _mlflow(folder: Path, record: RunRecord) -> Logger:
    """Return a logger for a new MLflow run; the unfinished one of the same record is deleted."""
    from filelock import FileLock
    from lightning.pytorch.loggers import MLFlowLogger
    from mlflow.tracking import MlflowClient

    folder.mkdir(parents=True, exist_ok=True)
    address, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
    if not address:
        address, artifacts = f"sqlite:///{folder / 'mlflow.db'}", str(folder / "artifacts")
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    with FileLock(folder / "lock"):  # workers of a sweep would create tables at the same time
        client = MlflowClient(address)
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            client.create_experiment(name, artifacts)
        else:
            same = f"tags.`feddg_bench.key` = '{record.key}' and attributes.status != 'FINISHED'"
            for run in client.search_runs([experiment.experiment_id], same):
                if run.data.tags.get("feddg_bench.results") == str(folder):
                    client.delete_run(run.info.run_id)
    tags = {"feddg_bench.key": record.key, "feddg_bench.results": str(folder)}
    return MLFlowLogger(name, run_title(record), address, tags)


_MAKERS: dict[str, Make] = {"csv": _csv, "tensorboard": _tensorboard, "mlflow": _mlflow}
