"""Observer of runs: base class of progress, W&B, figures, profiles and cards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feddg_bench.core.loop import RoundResult
    from feddg_bench.core.messages import Reply, Task
    from feddg_bench.records.record import RunRecord
    from feddg_bench.runs.request import Plan
    from feddg_bench.runs.setup import Run


class Observer:
    """Observes runs and changes nothing. This base class does nothing: override what you need."""

    def decoding(self, done: int, total: int) -> None:
        """``done`` of the data set's ``total`` images are decoded into the store."""

    def already(self, plan: Plan, record: RunRecord) -> None:
        """A run is skipped because it is already recorded."""

    def begin(self, run: Run) -> None:
        """A run starts, or continues after ``run.done`` rounds."""

    def replied(self, run: Run, task: Task, reply: Reply[Any]) -> None:
        """A client replied; ``task.memory`` is its memory before the task."""

    def round(self, run: Run, result: RoundResult) -> None:
        """A round ended; round 0 is the phase before the first."""

    def stopped(self, run: Run) -> None:
        """An error or a signal is about to end the run before its last round."""

    def end(self, run: Run) -> None:
        """The last round ended, and the record, if there is one, is saved."""
