"""Lightning's loggers of runs: CSV, TensorBoard, MLflow, or a logger object of the user."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddg_bench.common.errors import SettingsError, in_a_line
from feddg_bench.config.schema import Resources
from feddg_bench.records.store import open_results
from feddg_bench.runs.observer import Observer
from feddg_bench.tracking.tracker import Tracker, config, metrics, run_title

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

    from feddg_bench.core.loop import RoundResult
    from feddg_bench.records.record import RunRecord
    from feddg_bench.runs.setup import Run

EXPERIMENT = "feddg-bench"
"""MLflow experiment, unless ``MLFLOW_EXPERIMENT_NAME`` names another."""

Make = Callable[[Path, "RunRecord"], "Logger"]
"""Returns a new logger for a run, given the folder of its kind of log."""


def trackers(
    resources: Resources, say: Callable[[str], None], own: Iterable[Logger] = ()
) -> list[Observer]:
    """Return the observers that track runs, W&B's and one for each other logger.

    Args:
        resources: Mode of W&B, names of loggers, and the results folder.
        say: Called with one sentence about each that fails.
        own: Loggers of the user. Each holds one run.

    Raises:
        SettingsError: If W&B is requested and not installed.
    """
    folder = open_results(resources.results).root.absolute() / "logs"
    found: list[Observer] = [Tracker(resources, say)]
    found += [Log(kind, partial(_MAKERS[kind], folder / kind), say) for kind in resources.logger]
    return found + [Log(type(one).__name__, lambda *_, one=one: one, say) for one in own]


@dataclass(eq=False)
class Log(Observer):
    """An observer that passes settings and the metrics of each round to one of Lightning's loggers.

    The log of a run is in ``logs/KIND/KEY`` of the results folder. The log of a resumed run is
    written again from its first round. The logger runs in this process, so training waits for it.
    If it raises, ``say`` is called with one sentence that names its ``kind``, and it is left out
    from then on.
    """

    kind: str
    make: Callable[[RunRecord], Logger]
    say: Callable[[str], None]
    failed: bool = False
    logger: Logger | None = None

    def begin(self, run: Run) -> None:
        """Open a log for the run, with its settings and the rounds that are already finished."""
        from lightning.fabric.utilities.rank_zero import rank_zero_only

        vars(rank_zero_only)["rank"] = 0  # Slurm may set another, for which loggers do nothing
        record = run.record
        assert record is not None  # noqa: S101 - only recorded runs are logged
        if self.failed:
            return
        with self._watched():
            self.logger = self.make(record)
            self.logger.log_hyperparams(config(run.plan))
            for entry in record.rounds:
                self.logger.log_metrics(metrics(entry), entry.round)

    def round(self, run: Run, result: RoundResult) -> None:
        """Log the round that was last added to the record."""
        if result.round and run.record is not None and self.logger is not None:
            entry = run.record.rounds[-1]
            with self._watched():
                self.logger.log_metrics(metrics(entry), entry.round)

    def end(self, run: Run) -> None:
        """Close the log of a finished run."""
        self._close("success")

    def stopped(self, run: Run) -> None:
        """Close the log of a run that fails or is stopped."""
        self._close("failed")

    def _close(self, status: str) -> None:
        logger, self.logger = self.logger, None
        if logger is not None:  # an error may precede `begin`
            with self._watched():
                logger.finalize(status)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failed, self.logger = True, None
            why = in_a_line(error.__cause__ or error)  # Lightning wraps it
            self.say(f"the logger {self.kind} failed, and training goes on without it: {why}")


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
