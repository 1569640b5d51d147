"""W&B in a separate process: whatever happens here, training neither waits for it nor fails.

`feddg_bench.tracking.tracker` starts this file and writes one JSON document per line to its
standard input: first a description of the run, then each round's metrics with their ``step``, then
an ``exit_code``. The process reports on its standard output in the same form. It imports nothing
from this project.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from wandb import Run, Settings

_Tell = Callable[..., None]


def _track(lines: Iterable[str], tell: _Tell) -> None:
    """Process the messages; if they end before an ``exit_code``, the run has crashed.

    Args:
        lines: JSON documents.
        tell: Called with ``ready`` before the network is used, ``offline`` with the reason if
            W&B cannot be reached, ``started`` with the run's folder and address, and ``done``.
    """
    import wandb

    messages = map(json.loads, lines)
    run = begin(next(messages), tell)
    for message in messages:
        if "step" in message:
            run.log(message["values"], step=message["step"], commit=True)
            continue
        try:
            run.summary.update(message["summary"])
            if message["record"] is not None:
                path = Path(message["record"])
                artifact = wandb.Artifact(f"record-{path.stem}", type="record")
                # A record never changes: W&B can read it in place and need not copy it.
                artifact.add_file(str(path), policy="immutable", skip_cache=True)
                run.log_artifact(artifact)
        finally:
            run.finish(exit_code=message["exit_code"])
        tell(done=True)
        return
    run.finish(exit_code=1)


def begin(start: dict[str, Any], tell: _Tell) -> Run:
    """Start the run: online if asked for and possible, else offline."""
    import wandb

    def init(mode: Literal["online", "offline"]) -> Run:
        return wandb.init(**start["run"], mode=mode, reinit="create_new", settings=settings(start))

    run = None
    if start["mode"] == "online":
        try:
            wandb.setup(wandb.Settings(silent=True))
            if wandb.login(prompt=False, verify=False):
                tell(ready=True)
                run = init("online")
                tell(started=str(Path(run.dir).parent), url=run.url)
            else:
                tell(offline="no API key is configured (`wandb login`, or WANDB_API_KEY)")
        except Exception as error:
            tell(offline=_sentence(error))
        if run is None:
            wandb.teardown()  # it ends the attempt: the same name is used again
    if run is None:
        run = init("offline")
        tell(started=str(Path(run.dir).parent), url=None)
    return run


def settings(start: dict[str, Any]) -> Settings:
    """Return settings that make W&B print nothing, use time limits and monitor training."""
    import wandb

    parent = os.getppid()

    def stop() -> None:
        """Act like Ctrl-C when stop is pressed on W&B's page: the checkpoint stays."""
        if os.getppid() == parent:  # else it has ended, and another process may have its id
            os.kill(parent, signal.SIGINT)

    wanted = {
        "silent": True,
        "console": "off",
        "program": "feddg-bench",
        "init_timeout": start["init_timeout"],
        "finish_timeout": start["finish_timeout"],
        "finish_timeout_raises": True,
        "x_stats_pid": parent,
        "x_stats_track_process_tree": True,
        "stop_fn": stop,
    }
    known = wandb.Settings.model_fields
    return wandb.Settings(**{key: value for key, value in wanted.items() if key in known})


def _sentence(error: BaseException) -> str:
    """Return an error's first line with its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def serve() -> None:
    """Run as a process of `feddg_bench.tracking.tracker`, which alone decides when it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # output of W&B and its own process is discarded
    os.dup2(quiet, 2)

    def tell(**answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")

    code = 0
    try:
        _track(sys.stdin, tell)
    except (Exception, SystemExit) as error:  # reported to the tracker, which goes on without W&B
        tell(error=_sentence(error))
        code = 1
    with suppress(Exception, SystemExit):
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()
    os._exit(code)  # all is reported; W&B's telemetry may still wait for an unresponsive server


if __name__ == "__main__":
    serve()
