"""What a person sees of a sweep: runs done, runs under way, failures, time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.progress import TaskID

from feddg_bench.common.terminal import Display, duration, text
from feddg_bench.sweeps.jobs import Job


class Board(Display):
    """Draws all runs and those under way; without a terminal, a line for each that ended.

    ``finished`` returns the jobs that are finished, by any worker, and how many there will be.
    """

    def __init__(
        self, job: Callable[[str], Job | None], finished: Callable[[], tuple[set[str], int]]
    ) -> None:
        super().__init__(
            text("{task.completed:.0f}/{task.total:.0f}"), text("{task.fields[facts]}")
        )
        self.job = job
        self.finished = finished
        self.started: float | None = None
        over, total = finished()
        self.first = len(over)
        self.whole = self.progress.add_task("runs", total=total, completed=self.first, facts="")
        self.bars: dict[str, TaskID] = {}
        self.begun: dict[str, float] = {}
        self.said: set[str] = set()

    def decoding(self, done: int, total: int) -> None:
        """Say when all images are decoded."""
        if done == total:
            self.say(f"decoded {total} images")

    def tell(self, event: str, key: str, *facts: object) -> None:
        """Show what a worker reported: ``begin``, ``round``, ``say``, ``end`` or ``failed``."""
        job = self.job(key)
        title = job.title if job else key
        if event == "begin":
            done, rounds = facts
            self.begun[key] = time.monotonic()
            self.drop(key)  # the bar of a worker that died
            self.started = self.started or self.begun[key]
            self.bars[key] = self.progress.add_task(
                title, total=_number(rounds), completed=_number(done), facts=""
            )
            if done is not None:
                self.say(f"{title}: goes on after round {done}")
        elif event == "round":
            self.progress.update(self.bars[key], completed=_number(facts[0]))
        elif event == "say":
            line = str(facts[0])
            if line not in self.said:  # every worker notices that W&B cannot be reached
                self.said.add(line)
                self.say(line)
        else:
            self.drop(key)
            spent = time.monotonic() - self.begun.pop(key, time.monotonic())
            done, total, left = self._count()
            what = f"{spent:.1f} s" if event == "end" else f"FAILED: {facts[0]}"
            if event == "failed" or not self.console.is_terminal:
                self.say(f"[{done}/{total}] {title}: {what}{left}")

    def drop(self, key: str) -> None:
        """Remove the bar of a run that is no longer under way."""
        if key in self.bars:
            self.progress.remove_task(self.bars.pop(key))

    def _count(self) -> tuple[int, int, str]:
        """Update the bar; return the numbers of finished and of all jobs, and the time left."""
        over, total = self.finished()
        done = len(over - self.begun.keys())  # others may be finished whose end is still to be told
        here = done - self.first
        left = ""
        if self.started is not None and here > 0 and total > done:
            seconds = (time.monotonic() - self.started) / here * (total - done)
            left = f", {duration(seconds)} left"
        self.progress.update(self.whole, total=total, completed=done, facts=left.lstrip(", "))
        return done, total, left


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def failures_text(errors: Mapping[str, str], title: Callable[[str], str]) -> str:
    """Return the failures of a sweep as text, those with equal errors together."""
    by_error: dict[str, list[str]] = {}
    for key, error in errors.items():
        by_error.setdefault(error, []).append(f"{title(key)} ({key})")
    return "\n".join(
        f"{len(who)} failed: {error}\n  {', '.join(who[:5])}{', ...' if len(who) > 5 else ''}"
        for error, who in by_error.items()
    )
