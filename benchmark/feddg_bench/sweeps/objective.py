"""What a search looks at: a validation metric of a record, never one of the test images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddg_bench.common.errors import SettingsError, unknown
from feddg_bench.records.metrics import METRICS
from feddg_bench.records.record import RunRecord
from feddg_bench.records.rules import split_metric

TARGETS = tuple(f"{split}/{metric}" for split in ("val", "id_val") for metric in METRICS)
"""Split and metric, over all of the split's images, after the last round."""


@dataclass(frozen=True)
class Objective:
    """A metric and which way is better."""

    name: str  # one of `TARGETS`
    maximize: bool  # whether a larger value is better

    def value(self, record: RunRecord) -> float:
        """Return the metric of a finished run; NaN for a loss that overflowed.

        Raises:
            SettingsError: If the run has no images of the split, or does not measure the metric.
        """
        split, metric = self.name.split("/")
        evaluation = record.evaluation()
        value = split_metric(evaluation, split, metric)
        if value is None and evaluation.get(split):
            raise SettingsError(
                f"run {record.key} does not measure {metric} over all of {split}; "
                f"choose by {split}/{record.metric.name}"
            )
        if value is None:
            raise SettingsError(
                f"run {record.key} has no {split} images, as {record.protocol} has none; "
                f"choose by id_val/{metric}"
            )
        return value


def read_objective(path: Path, metric: Any) -> Objective | None:
    """Return the objective of a sweep file's ``metric``.

    Raises:
        SettingsError: If it is not a validation metric with a goal.
    """
    if metric is None:
        return None
    if not isinstance(metric, dict) or not isinstance(metric.get("name"), str):
        raise SettingsError(f"{path}: metric must be {{name: val/accuracy, goal: maximize}}")
    name, goal = metric["name"], metric.get("goal")
    if "test" in name.lower():
        raise SettingsError(
            f"{path}: {name} is a test metric, which must not choose anything; "
            f"name one of {', '.join(TARGETS)}"
        )
    if name not in TARGETS:
        raise SettingsError(f"{path}: {unknown('metric', name, TARGETS)}")
    if goal not in ("maximize", "minimize"):
        raise SettingsError(f"{path}: metric {name} needs goal: maximize or goal: minimize")
    return Objective(name, goal == "maximize")
