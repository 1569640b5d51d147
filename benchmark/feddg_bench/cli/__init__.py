"""The ``feddg-bench`` command. PyTorch is imported only for computations."""

from __future__ import annotations

import difflib
import errno
import io
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from types import FrameType
from typing import Annotated, Any

import typer

import feddg_bench
from feddg_bench.cli.data import data_app
from feddg_bench.cli.figures import figures_app
from feddg_bench.cli.help import EXAMPLES, Command
from feddg_bench.cli.lists import datasets_app, methods_app, recipes_app, settings_command
from feddg_bench.cli.predict import predict_command
from feddg_bench.cli.run import profile_command, resume_command, run_command
from feddg_bench.cli.run_list import runs_command
from feddg_bench.cli.sweep import sweep_command, tune_command
from feddg_bench.cli.tables import report_command, results_app, tables_command
from feddg_bench.common.errors import (
    FeddgError,
    RunInterruptedError,
    SettingsError,
    printable,
    told,
    unknown,
)
from feddg_bench.common.files import kept_here
from feddg_bench.common.startup import SWITCH
from feddg_bench.config.layers import dotted_keys
from feddg_bench.config.names import meant
from feddg_bench.extensions import extensions

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""click's UsageError, whether Typer bundles click or depends on it."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # `_wrong_usage` does
    rich_markup_mode=None,  # plain help takes half the time
    help="Federated domain generalisation: one loop, every method a plugin, numbers that repeat.",
)


def _add(name: str, function: Callable[..., None]) -> None:
    app.command(name, cls=Command, epilog=EXAMPLES.get(name))(function)


_add("run", run_command)
_add("resume", resume_command)
_add("predict", predict_command)
_add("sweep", sweep_command)
_add("tune", tune_command)
_add("runs", runs_command)
_add("tables", tables_command)
app.add_typer(figures_app, name="figures")
_add("report", report_command)
app.add_typer(results_app, name="results")
_add("profile", profile_command)
for _extension in extensions():
    for _name, _further in _extension.commands().items():
        _add(_name, _further)
app.add_typer(methods_app, name="methods")
app.add_typer(datasets_app, name="datasets")
app.add_typer(recipes_app, name="recipes")
_add("settings", settings_command)
app.add_typer(data_app, name="data")


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"feddg-bench {feddg_bench.__version__}")
        raise typer.Exit


@cache
def _command() -> Any:
    """Return the command built from `app`; building it takes a while."""
    return typer.main.get_command(app)


_OUTSIDE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENOSPC)
"""Errors of the operating system that a user can fix, such as an unreadable folder."""

TWICE = 0.3
"""Seconds within which a second signal counts as the first: terminal and parent both send it."""


def main() -> None:
    """Run the command; a user's error becomes one sentence and exit status 2."""
    os.environ[SWITCH] = "1"
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, _interrupt)  # the terminal or connection was closed
    # Child processes of a notebook inherit its backend, which may not be installed here. Figures
    # are drawn without one, but Matplotlib refuses to be imported.
    os.environ.pop("MPLBACKEND", None)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may know only ASCII
            stream.reconfigure(errors="replace")
    try:
        _refuse_nothing(sys.argv[1:])
        sys.exit(_command()([*map(_kept_here, sys.argv[1:])], standalone_mode=False))
    except (FeddgError, UsageError) as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error, file=sys.stderr)
        else:
            text = told(error) if isinstance(error, FeddgError) else _wrong_usage(error)
            print(f"feddg-bench: error: {printable(text)}", file=sys.stderr)
        sys.exit(2)
    except RunInterruptedError as stop:
        print("feddg-bench: stopped", file=sys.stderr)
        sys.exit(128 + stop.signal_number)
    except BrokenPipeError:  # the reader of our output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ImportError, MemoryError, SystemError) as error:  # mapping a library can fail, too
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        library = not isinstance(error, ImportError) or "map segment" in str(error)
        if limit == resource.RLIM_INFINITY or not library:
            raise
        print(
            f"feddg-bench: error: memory ran out within the limit of the address space, "
            f"{limit / 2**30:.1f} GiB: PyTorch needs about 6; raise it (ulimit -v unlimited, or "
            f"the batch system's limit of virtual memory)",
            file=sys.stderr,
        )
        sys.exit(2)
    except OSError as error:
        if error.errno not in (*_OUTSIDE, errno.EMFILE):
            raise
        where = f"{error.filename}: " if error.filename else ""
        text = f"cannot use {where}{error.strerror}; mend that or name another place"
        if error.errno == errno.EMFILE:
            text = "too many open files: raise the limit, such as by ulimit -n 1024"
        print(f"feddg-bench: error: {printable(text)}", file=sys.stderr)
        sys.exit(2)


def _kept_here(word: str) -> str:
    """Return an argument in which a path such as ``./~name`` stays below the working folder."""
    option, equals, path = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{option}{equals}{kept_here(path)}"


def _refuse_nothing(words: Sequence[str]) -> None:
    """Refuse an empty argument, such as an unset shell variable: as a path it is this folder.

    Raises:
        SettingsError: If there is one.
    """
    for before, word in pairwise(["feddg-bench", *words]):
        if not word or re.fullmatch("--[a-z-]+=", word):
            raise SettingsError(
                f"there is nothing after {word.rstrip('=') or before}: give a value"
            )


def _wrong_usage(error: Any) -> str:
    """Return one sentence about a wrong option, argument or subcommand, with the nearest valid one.

    A setting given as an option, such as ``--lr 0.1``, is shown in its correct form.
    """
    context, given = error.ctx, getattr(error, "option_name", None)
    command = getattr(context, "command", None)
    commands = getattr(command, "commands", {})
    if given is not None and command is not None:
        word = given.strip("-").replace("-", "_")
        sentence = f"there is no option {given}{_nearest(word, command.params)}"
    elif commands and (name := re.search("'(.+)'", error.message)):
        sentence = unknown("command", name[1], commands)
    else:
        sentence = error.format_message().strip().rstrip(".")
        sentence = sentence[:1].lower() + sentence[1:]
    see = f"see `{context.command_path} --help`" if context else "see --help"
    return f"{sentence} {see.capitalize()}" if sentence[-1] == "?" else f"{sentence}; {see}"


def _nearest(word: str, params: Sequence[Any]) -> str:
    """Return a suggestion for an unknown option: the nearest option or setting, or nothing."""
    options = {name.strip("-").replace("-", "_"): name for p in params for name in p.opts}
    settings: dict[str, str] = {}
    takes_settings = any(param.name == "pairs" for param in params)
    if takes_settings:
        for each in dotted_keys():
            settings.setdefault(each.rpartition(".")[2], f"{each}=VALUE")
    if option := meant(word, options):
        return f", did you mean {options[option]}?"
    if takes_settings and (key := meant(word, [*dotted_keys()])):
        return f", did you mean {key}=VALUE?"
    for known, cutoff in ((settings, 1.0), (options, 0.7), (settings, 0.5), (options, 0.5)):
        for near in difflib.get_close_matches(word, known, n=1, cutoff=cutoff):
            return f", did you mean {known[near]}?"
    return ""


def _interrupt(number: int, _frame: FrameType | None) -> None:
    first = time.monotonic()

    def at_once(number: int, _frame: FrameType | None) -> None:
        if time.monotonic() - first > TWICE:
            from multiprocessing import active_children

            for child in active_children():
                child.kill()
            os._exit(128 + number)

    signal.signal(number, at_once)
    raise RunInterruptedError(number)
