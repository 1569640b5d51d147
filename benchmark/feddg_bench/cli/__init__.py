"""The ``feddg-bench`` command. PyTorch is imported only where something is computed."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import typer

from feddg_bench.cli.data import data_app
from feddg_bench.cli.download import download_command
from feddg_bench.cli.figures import figures_app
from feddg_bench.cli.lists import datasets_command, methods_app, recipes_command
from feddg_bench.cli.profile import profile_command
from feddg_bench.cli.report import report_command
from feddg_bench.cli.run import resume_command, run_command
from feddg_bench.cli.sweep import sweep_command
from feddg_bench.cli.tables import tables_command
from feddg_bench.common.errors import FeddgError, RunInterruptedError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help answers in half the time
    help="Federated domain generalisation: one loop, every method a plugin, numbers that repeat.",
)
app.command("run")(run_command)
app.command("resume")(resume_command)
app.command("sweep")(sweep_command)
app.command("tables")(tables_command)
app.add_typer(figures_app, name="figures")
app.command("report")(report_command)
app.command("profile")(profile_command)
app.add_typer(methods_app, name="methods")
app.command("datasets")(datasets_command)
app.command("recipes")(recipes_command)
data_app.command("download")(download_command)
app.add_typer(data_app, name="data")


def main() -> None:
    """Run the command; a user's error becomes one sentence and exit status 2."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except FeddgError as error:
        print(f"feddg-bench: error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except RunInterruptedError as stop:
        print("feddg-bench: stopped", file=sys.stderr)  # noqa: T201
        sys.exit(128 + stop.signal_number)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not cut the ending short
    raise RunInterruptedError(number)
