"""What a person sees while runs are under way: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rich.box import SIMPLE_HEAD
from rich.progress import TaskID, TimeRemainingColumn
from rich.table import Table as RichTable

from feddg_bench.analysis.tables import Cell, Table
from feddg_bench.common.terminal import Display, text
from feddg_bench.records.metrics import find_metric
from feddg_bench.records.rules import split_metric
from feddg_bench.runs.observer import Observer

if TYPE_CHECKING:
    from feddg_bench.core.loop import RoundResult
    from feddg_bench.records.record import RunRecord
    from feddg_bench.runs.profile import Profile
    from feddg_bench.runs.request import Plan
    from feddg_bench.runs.setup import Run


class ConsoleReport(Display, Observer):
    """Draws the progress of runs, one after the other.

    Args:
        total: Number of runs of the command.
    """

    def __init__(self, total: int) -> None:
        super().__init__(
            text("{task.completed:.0f}/{task.total:.0f}"),
            text("{task.fields[facts]}"),
            TimeRemainingColumn(),
        )
        self.total = total
        self.number = 0
        self.held_out = ""
        self.task: TaskID | None = None

    def decoding(self, done: int, total: int) -> None:
        """Show how far the decoding of images is; it happens once for a data set and a size."""
        if self.console.is_terminal:
            if self.task is None:
                self.task = self.progress.add_task("decoding images", total=total, facts="")
            self.progress.update(self.task, completed=done)
        elif done == total:
            self.say(f"decoded {total} images")

    def already(self, plan: Plan, record: RunRecord) -> None:
        """A run's record is there already."""
        del record
        self.number += 1
        self.say(f"{self._title(plan)}: already done, {plan.key}")

    def begin(self, run: Run) -> None:
        """A run starts, or goes on from a checkpoint."""
        plan, done = run.plan, run.done
        self.number += 1
        self.held_out = ""
        rounds = plan.settings.federation.rounds
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(
            self._title(plan), total=rounds, completed=done or 0, facts=""
        )
        self.started, self.done = time.monotonic(), done or 0
        if done is not None:
            self.say(f"{self._title(plan)}: goes on after round {done}")
        elif not self.console.is_terminal:
            self.say(f"{self._title(plan)}: {rounds} rounds, {plan.key}")

    def round(self, run: Run, result: RoundResult) -> None:
        """A round ended."""
        if not result.round:
            return
        plan, ledger = run.plan, result.ledger
        spent = sum(s for phase, s in ledger.seconds.items() if phase != "evaluation")
        facts = (
            f"{len(result.cohort)} clients  {run.images(result) / max(spent, 1e-9):.0f} images/s"
        )
        loss = ledger.means().get("loss")
        if loss is not None:
            facts = f"loss {loss:.3f}  {facts}"
        if result.evaluation is not None:
            metric = find_metric(plan.dataset.metrics[0], plan.dataset.task)
            parts = [
                f"{split} {metric.text(value, 1)}"
                for split in ("val", "test")
                if (value := split_metric(result.evaluation, split, metric.name)) is not None
            ]
            self.held_out = " ".join(parts) + "  "
        for dropped in ledger.dropped:
            self.say(
                f"{self._title(plan)}: round {result.round} dropped {dropped['client']}, "
                f"NaN or infinity in {dropped['tensor']}"
            )
        if self.console.is_terminal and self.task is not None:
            self.progress.update(self.task, completed=result.round, facts=f"{self.held_out}{facts}")
        elif result.evaluation is not None:
            rounds = plan.settings.federation.rounds
            each = (time.monotonic() - self.started) / (result.round - self.done)
            left = each * (rounds - result.round)
            self.say(
                f"{self._title(plan)}: round {result.round}/{rounds}  {self.held_out}{facts}  "
                f"{left:.0f} s left"
            )

    def _title(self, plan: Plan) -> str:
        return f"[{self.number}/{self.total}] {plan.title}"


def draw(table: Table) -> RichTable:
    """Return the table for a terminal; a published number stands under ours."""
    drawn = RichTable(title=table.title, caption=table.caption, caption_justify="left")
    drawn.add_column("scenario (held out)")
    for split in table.splits:
        drawn.add_column(split, justify="right")
        if _has_published(table, split):
            drawn.add_column(f"{split} published", justify="right")
    for label, cells in table.rows:
        values = [label]
        for split in table.splits:
            cell = cells[split]
            values.append("" if cell is None else cell.text(table.decimals))
            if _has_published(table, split):
                values.append(_published(cell))
        if label == "mean":
            drawn.add_section()
        drawn.add_row(*values)
    return drawn


def draw_profile(measured: Profile) -> RichTable:
    """Return a profile for a terminal."""
    p = measured
    drawn = RichTable(title=f"{p.method} on {p.device}, {p.precision}", show_header=False)
    drawn.add_column()
    drawn.add_column(justify="right")
    drawn.add_column()
    drawn.add_row("once, before round 1", f"{sum(p.once.values()):.3f}", "s")
    for phase, seconds in p.round.items():
        drawn.add_row(f"a round: {phase}", f"{seconds:.3f}", "s")
    drawn.add_row("a round, all", f"{sum(p.round.values()):.3f}", "s")
    drawn.add_row("a client", f"{1000 * p.client:.1f}", "ms")
    drawn.add_section()
    drawn.add_row("clients a round", str(p.clients), f"{p.images} images")
    drawn.add_row("local training", f"{p.images_per_second:.0f}", "images/s")
    drawn.add_row("up a round", f"{p.bytes_up / 1e6:.3f}", "MB")
    drawn.add_row("down a round", f"{p.bytes_down / 1e6:.3f}", "MB")
    drawn.add_section()
    drawn.add_row("work an image", f"{p.flop_per_image / 1e9:.3f}", "GFLOP")
    drawn.add_row("achieved", f"{p.flops / 1e9:.1f}", "GFLOP/s")
    drawn.add_row("peak, matrix product", f"{p.peak_flops / 1e9:.1f}", "GFLOP/s")
    drawn.add_row("share of the peak", f"{100 * p.share_of_peak:.1f}", "%")
    drawn.add_row("bare loop for a round", f"{p.bare_seconds:.3f}", "s")
    drawn.add_row("training / bare loop", f"{p.bare_ratio:.3f}", "x")
    drawn.add_section()
    drawn.add_row("peak memory", f"{p.peak_memory_mib:.0f}", "MiB")
    if p.peak_device_mib is not None:
        drawn.add_row("peak memory, GPU", f"{p.peak_device_mib:.0f}", "MiB")
    return drawn


def draw_overheads(measured: Sequence[Profile]) -> RichTable:
    """Return several methods' seconds a round by phase and bytes, as papers' overhead tables."""
    first = measured[0]
    drawn = RichTable(
        title=f"seconds a round on {first.device}, {first.precision}",
        title_justify="left",
        caption=f"{first.clients} clients a round, medians of {first.rounds} rounds; "
        "x bare: training over forward, backward and step of plain training alone",
        caption_justify="left",
        box=SIMPLE_HEAD,  # with lines between columns it would not fit into 80 characters
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    phases = list(first.round)
    for column in (
        "method",
        "once",
        *(f"{phase[:5]}." for phase in phases),
        "ms a\nclient",
        "x\nbare",
        "MB\nup",
        "MB\ndown",
    ):
        justify: Literal["left", "right"] = "left" if column == "method" else "right"
        drawn.add_column(column, justify=justify, no_wrap=True)
    for p in measured:
        drawn.add_row(
            p.method,
            _short(sum(p.once.values())),
            *(_short(p.round[phase]) for phase in phases),
            _short(1000 * p.client),
            f"{p.bare_ratio:.2f}",
            _short(p.bytes_up / 1e6),
            _short(p.bytes_down / 1e6),
        )
    return drawn


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _has_published(table: Table, split: str) -> bool:
    return any((cell := cells.get(split)) and cell.published is not None for _, cells in table.rows)


def _published(cell: Cell | None) -> str:
    return f"{cell.published:.2f}" if cell and cell.published is not None else ""
