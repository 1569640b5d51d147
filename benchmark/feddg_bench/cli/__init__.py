"""The ``feddg-bench`` command. PyTorch is imported only for computations."""

from __future__ import annotations

import atexit
import difflib
import io
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import pairwise
from types import FrameType
from typing import Annotated, Any

import typer
import typer.core

import feddg_bench
from feddg_bench.cli.help import EXAMPLES, Command
from feddg_bench.cli.shells import own_scripts
from feddg_bench.common.errors import (
    HANGUP,
    FeddgError,
    RunInterruptedError,
    SettingsError,
    short,
    told,
    unknown,
)
from feddg_bench.common.limits import limit_sentence
from feddg_bench.common.notices import Notices, tell
from feddg_bench.common.startup import SWITCH
from feddg_bench.config.names import meant
from feddg_bench.extensions import extensions

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""click's UsageError, whether Typer bundles click or depends on it."""

COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("run:run_command", "Train methods, record every run and print a table."),
    "resume": ("run:resume_command", "Resume an interrupted run from its last checkpoint."),
    "runs": ("run_list:runs_command", "List runs: finished, interrupted and failed ones."),
    "predict": ("predict:predict_command", "Print the class and its probability for each image."),
    "sweep": ("sweep:sweep_command", "Run a W&B sweep file, without an account or a network."),
    "tune": (
        "sweep:tune_command",
        "Try equally many settings for every method and record the best.",
    ),
    "tables": ("tables:tables_command", "Make tables from records."),
    "figures": ("figures:figures_app", "Draw figures as PNG."),
    "report": ("tables:report_command", "Make one HTML page of all records."),
    "results": ("tables:results_app", "List, check, pack, unpack."),
    "profile": ("run:profile_command", "Profile a method's time."),
    "methods": ("lists:methods_app", "List the methods with their settings."),
    "datasets": ("lists:datasets_app", "List the data sets with their domains."),
    "recipes": ("lists:recipes_app", "List the recipes with their data sets."),
    "settings": ("lists:settings_command", "Show every setting of a run."),
    "data": ("data:data_app", "List, check, decode, show and locate data sets."),
}
"""Command -> its object in a module of this package, imported when it is called; and its help."""


def helps() -> dict[str, str]:
    """Return the line of help about each command, those of extensions last."""
    ours = {name: line for name, (_, line) in COMMANDS.items()}
    return ours | {name: line for each in extensions() for name, line in each.commands.items()}


@cache
def _load(name: str) -> Any:
    """Return a command, or a group of commands; imports its module."""
    if name in COMMANDS:
        module, _, part = COMMANDS[name][0].partition(":")
        found = getattr(import_module(f"{__name__}.{module}"), part)
    else:
        found = next(each for each in extensions() if name in each.commands).command(name)
    # plain help takes half the time; `_wrong_usage` makes suggestions
    made = typer.Typer(rich_markup_mode=None, suggest_commands=False)
    if isinstance(found, typer.Typer):
        made.add_typer(found, name=name)
    else:
        made.command(name, cls=Command, epilog=EXAMPLES.get(name))(found)
    return typer.main.get_group(made).commands[name]


class _Commands(Mapping[str, Any]):
    """The commands by name; looking one up imports its module."""

    def __iter__(self) -> Iterator[str]:
        return iter(helps())

    def __len__(self) -> int:
        return len(helps())

    def __getitem__(self, name: str) -> Any:
        if name not in helps():
            raise KeyError(name)
        return _load(name)


class _Group(typer.core.TyperGroup):
    """The command ``feddg-bench``; its help imports no other command."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.commands: Any = _Commands()

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the name of a command without importing any."""
        whole = self.commands
        self.commands = {n: typer.core.TyperCommand(n, help=line) for n, line in helps().items()}
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self.commands = whole

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a line about each command."""
        with formatter.section("Commands"):
            formatter.write_dl([*helps().items()])


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    suggest_commands=False,
    rich_markup_mode=None,
    help="Federated domain generalisation: one loop, every method a plugin, numbers that repeat.",
)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"feddg-bench {feddg_bench.__version__}")
        raise typer.Exit


@cache
def _command() -> Any:
    """Return the command built from `app`."""
    own_scripts()
    return typer.main.get_command(app)


_received: list[int] = []
"""Signals that asked this process to stop."""

TWICE = 0.3
"""Seconds within which a second signal counts as the first: terminal and parent both send it."""


def main() -> None:
    """Run the command; a user's error becomes one sentence and exit status 2.

    After a signal the process ends without taking all modules down, which takes seconds: most of
    all after a run on Ray, and while other processes compute.
    """
    try:
        _main()
    except SystemExit as stop:
        if not _received:
            raise
        atexit._run_exitfuncs()
        with suppress(OSError):  # the terminal may be closed
            sys.stdout.flush()
        os._exit(int(stop.code or 0))


def _main() -> None:
    os.environ[SWITCH] = "1"
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(HANGUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(HANGUP, _interrupt)  # the terminal or connection was closed
    # Child processes of a notebook inherit its backend, which may not be installed here. Figures
    # are drawn without one, but Matplotlib refuses to be imported.
    os.environ.pop("MPLBACKEND", None)
    logging.lastResort = Notices(logging.WARNING)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may know only ASCII
            stream.reconfigure(errors="replace")
    try:
        _refuse_nothing(sys.argv[1:])
        sys.exit(_command()(sys.argv[1:], standalone_mode=False))
    except (FeddgError, UsageError) as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error, file=sys.stderr)
        else:
            text = told(error) if isinstance(error, FeddgError) else _wrong_usage(error)
            tell(f"feddg-bench: error: {text}")
        sys.exit(2)
    except RunInterruptedError as stop:
        print("feddg-bench: stopped", file=sys.stderr)
        sys.exit(128 + stop.signal_number)
    except BrokenPipeError:  # the reader of our output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if not (text := limit_sentence(error)):
            raise
        tell(f"feddg-bench: error: {text}")
        sys.exit(2)


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
        if extra := re.match(r"Got unexpected extra argument.* \((.+)\)$", sentence):
            sentence = (
                f"{short(extra[1])} belongs to no option, whose values are separated by commas"
            )
        if errors := getattr(error.__cause__, "errors", None):  # Pydantic read the value
            first = errors()[0]
            expected = first["msg"].partition(",")[0].lower()
            named = "/".join(error.param.opts)
            sentence = f"{named} {short(first['input'])} is not valid: {expected}"
        sentence = sentence[:1].lower() + sentence[1:]
    see = f"see `{context.command_path} --help`" if context else "see --help"
    return f"{sentence} {see.capitalize()}" if sentence[-1] == "?" else f"{sentence}; {see}"


def _nearest(word: str, params: Sequence[Any]) -> str:
    """Return a suggestion for an unknown option: the nearest option or setting, or nothing."""
    options = {name.strip("-").replace("-", "_"): name for p in params for name in p.opts}
    settings: dict[str, str] = {}
    keys: Sequence[str] = ()
    if any(param.name == "pairs" for param in params):  # the command takes settings
        from feddg_bench.config.layers import dotted_keys

        keys = dotted_keys()
    for key in keys:
        settings.setdefault(key.rpartition(".")[2], f"{key}=VALUE")
    if option := meant(word, options):
        return f", did you mean {options[option]}?"
    if found := meant(word, keys):
        return f", did you mean {found}=VALUE?"
    for known, cutoff in ((settings, 1.0), (options, 0.7), (settings, 0.6), (options, 0.6)):
        for near in difflib.get_close_matches(word, known, n=1, cutoff=cutoff):
            return f", did you mean {known[near]}?"
    return ""


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _received.append(number)
    first = time.monotonic()

    def at_once(number: int, _frame: FrameType | None) -> None:
        if time.monotonic() - first > TWICE:
            from multiprocessing import active_children

            for child in active_children():
                child.kill()
            os._exit(128 + number)

    signal.signal(number, at_once)
    raise RunInterruptedError(number)
