"""Progress of runs for users: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import TaskID, TimeRemainingColumn
from rich.table import Table as RichTable

from feddg_bench.analysis.tables.grid import Entry, Grid, Line
from feddg_bench.common.terminal import Display, duration, terminal, text, text_table
from feddg_bench.common.titles import counted
from feddg_bench.plugins import method_title
from feddg_bench.records.metrics import find_metric
from feddg_bench.records.rules import split_metric
from feddg_bench.runs.observer import Observer
from feddg_bench.runs.request import Plan

if TYPE_CHECKING:
    from feddg_bench.core.loop import RoundResult
    from feddg_bench.records.record import RunRecord
    from feddg_bench.runs.setup import Run
    from feddg_bench.runs.time_profile import Profile


class ConsoleReport(Display, Observer):
    """Draws the progress of runs, one after the other."""

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
        self.decoded: TaskID | None = None

    def decoding(self, done: int, total: int) -> None:
        """Show the progress of decoding, which happens once for each data set and image size."""
        if self.console.is_terminal:
            if self.decoded is None:
                self.decoded = self.progress.add_task("decoding images", total=total, facts="")
            self.progress.update(self.decoded, completed=done)
            if done == total:
                self.progress.remove_task(self.decoded)
                self.decoded = None
        elif done == total:
            self.say(f"decoded {counted(total, 'image')}")

    def already(self, plan: Plan, record: RunRecord) -> None:
        """Say that a run is not repeated, because it is recorded."""
        del record
        self.number += 1
        self.say(f"{self._title(plan)}: already done, {plan.key}")

    def begin(self, run: Run) -> None:
        """Show that a run starts, or resumes from a checkpoint."""
        plan, done = run.plan, run.done
        self.number += 1
        self.held_out = ""
        rounds = plan.settings.federation.rounds
        if self.task is not None:
            self.progress.remove_task(self.task)
        title, most = self._title(plan), self.console.width // 2 - 8
        if len(title) > most:
            title = f"{title[: most - 1]}…"
        # Columns left on the line by title, bar, count and time.
        self.room = self.console.width - len(title) - self.bar - len(f"{rounds}/{rounds}") - 12
        self.task = self.progress.add_task(title, total=rounds, completed=done or 0, facts="")
        self.started, self.done = time.monotonic(), done or 0
        if done is not None:
            self.say(f"{self._title(plan)}: resuming after round {done}")
        elif not self.console.is_terminal:
            self.say(f"{self._title(plan)}: {counted(rounds, 'round')}, {plan.key}")

    def round(self, run: Run, result: RoundResult) -> None:
        """Show the progress after a round."""
        if not result.round:
            return
        plan, ledger = run.plan, result.ledger
        spent = sum(s for phase, s in ledger.seconds.items() if phase != "evaluation")
        facts = [f"{run.images(result) / max(spent, 1e-9):.0f} images/s"]
        facts.append(counted(len(result.cohort), "client"))
        loss = ledger.means().get("loss")
        if loss is not None:
            facts.insert(0, f"loss {loss:.3f}")
        if result.evaluation is not None:
            metric = find_metric(plan.dataset.metrics[0], plan.dataset.task)
            parts = [
                f"{split} {metric.text(value, 1)}"
                for split in ("val", "test")
                if (value := split_metric(result.evaluation, split, metric.name)) is not None
            ]
            self.held_out = " ".join(parts)
        if self.held_out:
            facts.insert(0, self.held_out)
        for dropped in ledger.dropped:
            self.say(
                f"{self._title(plan)}: round {result.round} dropped {dropped['client']}, "
                f"its {dropped['tensor']} {dropped['reason']}"
            )
        if self.console.is_terminal and self.task is not None:
            shown = _fitting(facts, self.room)
            self.progress.update(self.task, completed=result.round, facts=shown)
        elif result.evaluation is not None:
            rounds = plan.settings.federation.rounds
            each = (time.monotonic() - self.started) / (result.round - self.done)
            left = duration(each * (rounds - result.round))
            line = f"{self._title(plan)}: round {result.round}/{rounds}, {left} left  "
            self.say(line + _fitting(facts, self.console.width - len(line)))

    def _title(self, plan: Plan) -> str:
        return f"[{self.number}/{self.total}] {plan.title}"


def _fitting(facts: Sequence[str], room: int) -> str:
    """Return the facts, first the most important, that fit into some columns."""
    shown = ""
    for fact in facts:
        longer = f"{shown}  {fact}".strip()
        shown = longer if len(longer) <= room else shown
    return shown


def print_grid(grid: Grid, head: str) -> None:
    """Print a table, in parts one below the other if it is too wide.

    Published numbers stand below measured ones; ``head`` is the heading of the labels.
    """
    console = terminal()

    def fits(places: Sequence[int], *, narrow: bool = True) -> bool:
        groups = {grid.columns[n].group for n in places}
        if len(groups) > 1 and len({grid.columns[n].head for n in places}) < len(places):
            return False  # only the group tells two heads apart
        drawn = _part(grid, head, places, narrow=narrow)
        return Console(width=10_000).measure(drawn).maximum <= console.width

    console.print(grid.title, highlight=False)
    blocks = grid.blocks(fits)
    for places in blocks:
        console.print(_part(grid, head, places, narrow=not fits(places, narrow=False)))
    console.print(grid.caption, highlight=False)
    shown = {n for places in blocks for n in places}
    parts = [p for one in grid.lines for p in (one, *(one.entries[n] for n in shown)) if p]
    for number, note in enumerate(grid.footnotes, 1):
        if any(note in part.footnotes for part in parts):
            console.print(f"{_raised(number)} {note}.", highlight=False, markup=False)


def _raised(number: int) -> str:
    return "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(number))


def _marked(grid: Grid, text: str, part: Line | Entry) -> str:
    """Return a text with the numbers of its footnotes."""
    return f"{text} {','.join(map(_raised, grid.numbers(part.footnotes)))}".rstrip()


def _part(grid: Grid, head: str, places: Sequence[int], *, narrow: bool) -> RichTable:
    """Return some columns; if ``narrow``, deviations and intervals get their own line."""
    rows: list[list[str] | None] = []
    for line in grid.lines:
        entries = [line.entries[n] for n in places]
        texts = ["" if entry is None else _marked(grid, entry.text, entry) for entry in entries]
        if line.kind == "ours":
            rows += [None] * (line.label == "mean")
            rows.append([_marked(grid, line.label, line), *texts])
        elif under := rows[-1]:
            under[1:] = [
                "\n".join(filter(None, pair)) for pair in zip(under[1:], texts, strict=True)
            ]
    for row in filter(None, rows) if narrow else ():
        row[1:] = [cell.replace(" ±", "\n±").replace(" [", "\n[") for cell in row[1:]]
    heads = [grid.columns[n].head for n in places]
    whole = (head,) if head == "method" else ()
    group = grid.columns[places[0]].group if len(places) < len(grid.columns) else ""
    return text_table(group, (head, *heads), rows, right=heads, whole=whole)


def draw_profile(measured: Profile) -> RichTable:
    """Return a profile for a terminal."""
    p = measured
    rows: list[tuple[str, str, str] | None] = [
        ("once, before round 1", f"{sum(p.once.values()):.3f}", "s"),
        *((f"a round: {phase}", f"{seconds:.3f}", "s") for phase, seconds in p.round.items()),
        ("a round, all", f"{sum(p.round.values()):.3f}", "s"),
        ("a client", f"{1000 * p.client:.1f}", "ms"),
        None,
        ("clients a round", str(p.clients), counted(p.images, "image")),
        ("local training", f"{p.images_per_second:.0f}", "images/s"),
        ("up a round", f"{p.bytes_up / 1e6:.3f}", "MB"),
        ("down a round", f"{p.bytes_down / 1e6:.3f}", "MB"),
        None,
        ("work an image", f"{p.flop_per_image / 1e9:.3f}", "GFLOP"),
        ("peak, matrix product", f"{p.peak_flops / 1e9:.1f}", "GFLOP/s"),
        *((f"achieved: {phase}", f"{r / 1e9:.1f}", "GFLOP/s") for phase, r in p.flops.items()),
        *(
            (f"share of the peak: {phase}", f"{100 * share:.1f}", "%")
            for phase, share in p.share_of_peak.items()
        ),
        ("bare loop for a round", f"{p.bare_seconds:.3f}", "s"),
        ("training / bare loop", f"{p.bare_ratio:.3f}", "x"),
        None,
        ("peak memory", f"{p.peak_memory_mib:.0f}", "MiB"),
    ]
    if p.peak_device_mib is not None:
        rows.append(("peak memory, GPU", f"{p.peak_device_mib:.0f}", "MiB"))
    title = f"{method_title(p.method)} on {p.device}, {p.precision}"
    return text_table(title, ("what", "value", "unit"), rows, right=("value",))


def draw_overheads(measured: Sequence[Profile]) -> RichTable:
    """Return the overheads of methods as in papers: seconds a round by phase, and bytes."""
    first = measured[0]
    phases = list(first.round)
    numbers = ("once", *(f"{phase[:5]}." for phase in phases))
    numbers += ("ms a\nclient", "x\nbare", "MB\nup", "MB\ndown")
    rows = [
        (
            method_title(p.method),
            _short(sum(p.once.values())),
            *(_short(p.round[phase]) for phase in phases),
            _short(1000 * p.client),
            f"{p.bare_ratio:.2f}",
            _short(p.bytes_up / 1e6),
            _short(p.bytes_down / 1e6),
        )
        for p in measured
    ]
    return text_table(
        f"seconds a round on {first.device}, {first.precision}",
        ("method", *numbers),
        rows,
        caption=f"{counted(first.clients, 'client')} a round, medians of "
        f"{counted(first.rounds, 'round')}; "
        "x bare: training over forward, backward and step of plain training alone",
        right=numbers,
        whole=("method",),
        gap=1,
    )


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


class Board(Display):
    """Draws a bar for all runs and for each running one; without a terminal, a line per ended run.

    ``title`` returns the title of a key; ``finished`` the jobs finished by any worker, and the
    total number of jobs.
    """

    def __init__(
        self, title: Callable[[str], str], finished: Callable[[], tuple[set[str], int]]
    ) -> None:
        super().__init__(
            text("{task.completed:.0f}/{task.total:.0f}"), text("{task.fields[facts]}")
        )
        self.title = title
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
            self.say(f"decoded {counted(total, 'image')}")

    def tell(self, event: str, key: str, *facts: object) -> None:
        """Show what a worker reported: ``begin``, ``round``, ``say``, ``end`` or ``failed``."""
        title = self.title(key)
        if event == "begin":
            done, rounds = facts
            self.begun[key] = time.monotonic()
            self.drop(key)  # the bar of a worker that died
            self.started = self.started or self.begun[key]
            self.bars[key] = self.progress.add_task(
                title, total=_number(rounds), completed=_number(done), facts=""
            )
            if done is not None:
                self.say(f"{title}: resuming after round {done}")
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
        """Remove the bar of a run that is no longer running."""
        if key in self.bars:
            self.progress.remove_task(self.bars.pop(key))

    def _count(self) -> tuple[int, int, str]:
        """Update the bar; return the numbers of finished and of all jobs, and the time left."""
        over, total = self.finished()
        done = len(over - self.begun.keys())  # without jobs whose end is not reported yet
        here = done - self.first
        left = ""
        if self.started is not None and here > 0 and total > done:
            seconds = (time.monotonic() - self.started) / here * (total - done)
            left = f", {duration(seconds)} left"
        self.progress.update(self.whole, total=total, completed=done, facts=left.lstrip(", "))
        return done, total, left


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
