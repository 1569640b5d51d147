"""W&B tracking: one W&B run per training run, in a process whose failure does no harm."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import feddg_bench
from feddg_bench.common.errors import RunInterruptedError, SettingsError
from feddg_bench.config.reading import composed
from feddg_bench.config.schema import Resources
from feddg_bench.records.measured import Evaluation, tabulate
from feddg_bench.records.record import RoundRecord, RunRecord
from feddg_bench.records.rules import RULES, choose_evaluation, chosen_rounds, pooled_metric
from feddg_bench.records.store import open_results
from feddg_bench.runs.observer import Observer

if TYPE_CHECKING:
    from feddg_bench.core.loop import RoundResult
    from feddg_bench.runs.request import Plan
    from feddg_bench.runs.setup import Run

READY = 20.0
"""Seconds in which W&B must say whether it has an API key; training waits for the answer."""
INIT = 60.0
"""Seconds in which W&B's server must answer; training continues meanwhile."""
FINISH = 60.0
"""Seconds to upload the remaining data at the end of a run."""
MARGIN = 20.0
"""Extra seconds for W&B's other work, after which its process is killed."""
_GRACE = 10.0
"""Seconds to let W&B know that a run was stopped."""


class Tracker(Observer):
    """An observer that reports to W&B.

    A run's W&B id is its run key, so a resumed run stays the same W&B run. W&B ignores rounds that
    it already knows; since results are reproducible, nothing is lost. Under ``wandb agent`` the
    agent sets the id. If W&B cannot be reached, runs are kept offline; if it fails, the run
    continues without it.

    Args:
        resources: Mode (``off`` disables tracking), project and results folder.
        say: Called once with each sentence for the user.

    Raises:
        SettingsError: If tracking is requested and W&B is not installed.
    """

    def __init__(self, resources: Resources, say: Callable[[str], None]) -> None:
        self.mode: str = resources.wandb
        self.project = resources.wandb_project
        self.store = open_results(resources.results)
        self.in_sweep = self.mode != "off" and bool(os.environ.get("WANDB_SWEEP_ID"))
        self._say_all = say
        self._said: set[str] = set()
        self._complained = False
        self._joined = False
        self._process: _Process | None = None
        if self.mode != "off":
            spec = importlib.util.find_spec("wandb")
            if spec is None or spec.origin is None:  # no origin: a folder that W&B wrote here
                raise SettingsError(
                    f"--wandb {self.mode} needs the package wandb, which is not installed: "
                    f"pip install wandb, or leave --wandb out"
                )

    def already(self, plan: Plan, record: RunRecord) -> None:
        """Report a recorded run if W&B's agent requested it: its sweep waits for the results."""
        if self.in_sweep:
            self._begin(plan, record)
            self._end(record)

    def begin(self, run: Run) -> None:
        """Start the W&B run, and log the rounds that are already finished."""
        assert run.record is not None  # noqa: S101 - only recorded runs are tracked
        self._begin(run.plan, run.record)

    def round(self, run: Run, result: RoundResult) -> None:
        """Log the round that was last added to the record."""
        if result.round and self._process is not None and run.record is not None:
            entry = run.record.rounds[-1]
            self._process.send({"step": entry.round, "values": metrics(entry)})

    def end(self, run: Run) -> None:
        """Send the summary and the record, and wait for W&B with a time limit."""
        if run.record is not None:
            self._end(run.record)

    def stopped(self, run: Run) -> None:
        """Let W&B know that the run fails or is stopped, and wait with a time limit."""
        if self._process is not None:
            why = sys.exception()
            signal = why.signal_number if isinstance(why, RunInterruptedError) else None
            code = 1 if signal is None else 128 + signal
            self._process.send({"summary": {}, "record": None, "exit_code": code})
            self._close(FINISH + MARGIN if signal is None else _GRACE)

    def _begin(self, plan: Plan, record: RunRecord) -> None:
        if self.mode == "off":
            return
        if self.in_sweep and self._joined:
            self._say("W&B's agent counts one run a call: only the first is tracked")
            return
        self._joined = True
        name = run_title(record)
        try:
            self._process = _Process(name, self._heard)
        except OSError as error:  # no memory or no process left
            self._failed(name, str(error))
            return
        self._process.send(
            {
                "mode": self.mode,
                "run": identity(record, name, None if self.in_sweep else self.project)
                | {"dir": str(self.store.root.absolute()), "config": config(plan)},
                "init_timeout": INIT,
                "finish_timeout": FINISH,
            }
        )
        for entry in record.rounds:
            self._process.send({"step": entry.round, "values": metrics(entry)})
        if self.mode == "online":
            self._process.ready.wait(READY)

    def _end(self, record: RunRecord) -> None:
        if self._process is not None:
            path = str(self.store.path(record.key).absolute())
            self._process.send({"summary": run_summary(record), "record": path, "exit_code": 0})
            self._close((0 if self._process.folder else INIT) + FINISH + MARGIN)

    def _close(self, seconds: float) -> None:
        process, self._process = self._process, None
        if process is None or process.end(seconds):
            return
        self.mode = "offline" if self.mode == "online" else "off"
        where = f"; what it has is in {process.folder}" if process.folder else ""
        self._failed(process.name, f"no answer within {seconds:.0f} s{where}")

    def _heard(self, process: _Process, answer: Mapping[str, Any]) -> None:
        """Handle an answer of W&B's process; called in a separate thread."""
        if "offline" in answer:
            self.mode = "offline"
            self._say(f"W&B online is not possible, so runs are kept offline: {answer['offline']}")
        elif "error" in answer:
            self._failed(process.name, answer["error"])
        elif "started" in answer:
            if answer["url"]:
                self._say(f"{process.name}: {answer['url']}")
            else:
                folder = Path(answer["started"]).parent
                self._say(f"W&B offline: send it later with: wandb sync {folder}/offline-run-*")

    def _failed(self, name: str, why: str) -> None:
        if not self._complained:
            self._complained = True
            self._say(f"W&B failed, and {name} goes on without it: {why}")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say_all(text)


class _Process:
    """W&B's process for one run; writing to it never blocks."""

    def __init__(self, name: str, heard: Callable[[_Process, Mapping[str, Any]], None]) -> None:
        self.name = name
        self.folder = ""  # folder of the W&B run, once it has started
        self.ready = threading.Event()  # set by the first answer, or when none can follow
        self._heard = heard
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        program = str(Path(__file__).with_name("process.py"))
        self._popen = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", program],  # -P: a folder `wandb` here is not the package
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # Without the W&B service of a run in this process, such as one in a notebook.
            env={name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},
            start_new_session=True,  # Ctrl-C does not reach it
        )
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue one message to be written soon."""
        self._lines.put(json.dumps(message) + "\n")

    def end(self, seconds: float) -> bool:
        """Wait until the process ends, else kill it; return whether it ended by itself."""
        self._lines.put(None)
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        else:
            return True
        finally:
            self._popen.kill()  # also if a signal interrupted the wait
            self._popen.wait()
            for thread in self._threads:
                thread.join()

    def _write(self) -> None:
        assert self._popen.stdin is not None  # noqa: S101 - a pipe
        with suppress(OSError), self._popen.stdin as pipe:
            while (line := self._lines.get()) is not None:
                pipe.write(line)
                pipe.flush()

    def _read(self) -> None:
        assert self._popen.stdout is not None  # noqa: S101 - a pipe
        told = False
        with self._popen.stdout as pipe:
            for line in pipe:
                answer = json.loads(line)
                self.folder = answer.get("started", self.folder)
                told = told or "error" in answer or "done" in answer
                self._heard(self, answer)
                self.ready.set()
        self.ready.set()
        if not told and self._popen.wait() >= 0:  # negative if killed, which `_close` reports
            self._heard(self, {"error": "its process ended"})


# ------------------------------------------------------------------ data sent to W&B


def metrics(entry: RoundRecord) -> dict[str, float]:
    """Return a round's metrics by name, from its entry in the record.

    Examples are ``train/loss``, ``seconds/training``, ``bytes/up`` and ``dropped``. An evaluated
    round also has each metric of each domain, such as ``test/<domain>/accuracy``, and of all images
    of a split if that value exists, such as ``test/accuracy``. Shares are in [0, 1].
    """
    values = {f"train/{name}": value for name, value in entry.train.items()}
    values |= {f"seconds/{phase}": value for phase, value in entry.seconds.items()}
    values |= {"bytes/up": entry.bytes.up, "bytes/down": entry.bytes.down}
    values |= {"dropped": len(entry.dropped), "skipped": int(entry.skipped)}
    return values | _measured(entry.evaluation or {})


def run_summary(record: RunRecord) -> dict[str, float]:
    """Return the result of each selection rule: the last round it chooses, and its metrics.

    Rules that use test images are left out, and so are rules whose split the run lacks.
    """
    table = tabulate([(e.round, e.evaluation) for e in record.rounds if e.evaluation is not None])
    values: dict[str, float] = {}
    for rule in RULES:
        if rule == "oracle":
            continue
        places = chosen_rounds(table, rule, record.metric.name)
        chosen = choose_evaluation(table, rule, record.metric.name)
        if chosen is None:
            continue
        values[f"{rule}/round"] = table.rounds[places[-1]]
        values |= {f"{rule}/{n}": v for n, v in _measured(chosen).items()}
    values |= {f"once/seconds/{p}": s for p, s in record.once.seconds.items()}
    return values | {
        "once/bytes/up": record.once.bytes.up,
        "once/bytes/down": record.once.bytes.down,
    }


def _measured(evaluation: Evaluation) -> dict[str, float]:
    values: dict[str, float] = {}
    for split, domains in evaluation.items():
        for metric in dict.fromkeys(name for measured in domains.values() for name in measured):
            if metric in ("images", "worst_group_name", "only_class"):
                continue
            by_domain = {name: part[metric] for name, part in domains.items() if metric in part}
            known = {domain: value for domain, value in by_domain.items() if math.isfinite(value)}
            values |= {f"{split}/{composed(name)}/{metric}": v for name, v in known.items()}
            if (
                known == by_domain
                and (whole := pooled_metric(evaluation, split, metric)) is not None
            ):
                values[f"{split}/{metric}"] = whole
    return values


def run_title(record: RunRecord) -> str:
    """Return a run's name for people."""
    return f"{record.method} {record.dataset} {record.scenario.name} seed {record.seed}"


def identity(record: RunRecord, name: str, project: str | None) -> dict[str, Any]:
    """Return id and names of the W&B run; without a project, the agent's environment sets the id.

    W&B always chooses the entity (``WANDB_ENTITY``).
    """
    tags = (record.method, record.dataset, record.protocol, record.scenario.name, record.recipe)
    own = {} if project is None else {"project": project, "id": record.key, "resume": "allow"}
    return own | {
        "name": composed(name)[:128],
        "group": composed(f"{record.dataset} {record.protocol} {record.recipe}")[:128],
        "tags": list(dict.fromkeys(composed(tag)[:64] for tag in tags)),  # W&B's limit
    }


def config(plan: Plan) -> dict[str, Any]:
    """Return the settings that determine the results, and other facts that distinguish runs."""
    more = {
        "recipe": plan.recipe,
        "key": plan.key,
        "method_version": plan.version,
        "feddg_bench": feddg_bench.__version__,
    }
    return plan.canonical | more
