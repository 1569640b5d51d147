"""The help of commands: short, grouped, one line per option, in a pipe and in a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from feddg_bench import cli
from feddg_bench.cli.help import EXAMPLES
from tests.environment import in_terminal

Run = Callable[..., Any]
RARE = ("--readings", "--set ", "--split-csv", "--address", "--wandb-project")


@pytest.mark.parametrize(
    ("command", "most"),
    [
        ("run", 62),
        ("tune", 62),
        ("profile", 62),
        ("attack", 62),
        ("sweep", 45),
        ("runs", 30),
        ("resume", 30),
    ],
)
def test_help_is_short_and_grouped(
    feddg: Run, monkeypatch: pytest.MonkeyPatch, command: str, most: int
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = feddg(command, "--help")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) <= most
    assert max(map(len, lines)) <= 80
    options = [line for line in lines if line.startswith("  --")]
    heads = [line.rstrip(":") for line in lines if line.endswith(":") and line[0] != " "]
    order = ("Arguments", "What to run", "Setup", "Data", "Where it runs", "Output", "Examples")
    assert heads == [head for head in order if head in heads]
    assert len(heads) > 2
    # one line each, without the negative halves of switches
    assert [line for line in lines if line.startswith(" " * 10)] == []
    assert [line for line in options if " / " in line or "--no-" in line] == []


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys\n"
        "from feddg_bench import cli\n"
        "sys.argv = ['feddg-bench', '--help']\n"
        "try:\n"
        "    cli.main()\n"
        "finally:\n"
        "    slow = {'torch', 'pydantic', 'numpy', 'feddg_bench.config.schema'}\n"
        "    print(*sorted(slow & {*sys.modules}), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []
    for name, line in cli.helps().items():
        assert f"  {name} " in done.stdout
        assert cli._command().commands[name].get_short_help_str(99) == line


def _words(command: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of a command and of all commands below it."""
    yield before
    for name, inner in getattr(command, "commands", {}).items():
        yield from _words(inner, (*before, name))


def test_every_command_has_help_within_80_columns(
    feddg: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    every = [*_words(cli._command())]
    assert len(every) > 40
    for words in every:
        done = feddg(*words, "--help")
        assert (done.code, done.err) == (0, ""), words
        assert max(map(len, done.out.splitlines())) <= 80, words


def test_rare_options_are_shown_with_all(feddg: Run) -> None:
    brief, whole = feddg("run", "--help"), feddg("run", "--help", "--all")
    assert feddg("run", "--all", "--help").out == whole.out
    assert [name for name in RARE if name in brief.out] == []
    assert [name for name in RARE if name not in whole.out] == []
    assert "--help --all also shows 7 rare options." in brief.out
    assert "rare option" not in whole.out
    refused = feddg("run", "--all", "--dry-run")
    assert (refused.code, refused.out) == (2, "")
    assert "there is no option --all" in refused.err


def test_negative_halves_are_accepted(feddg: Run) -> None:
    words = ("--scenario", "ip-o-c", "--no-again", "--no-verbose", "--dry-run")
    assert feddg("run", *words).code == 0


LINES = [line for text in EXAMPLES.values() for line in text.splitlines()]
PLANS_700_RUNS = "feddg-bench sweep lambda rounds=5 --workers 2"  # as another example does


@pytest.mark.parametrize(
    "line", [pytest.param(x, marks=[pytest.mark.nightly] * (x == PLANS_700_RUNS)) for x in LINES]
)
def test_examples_of_the_help_are_valid(feddg: Run, line: str) -> None:
    name, command, *words = line.split()
    assert (name, len(line) <= 76) == ("feddg-bench", True)
    if command in ("run", "sweep", "tune"):
        done = feddg(command, *words, "--dry-run")
        assert done.code == 0, done.err
    else:
        assert "there is no option" not in feddg(command, *words, "--no-such").err.replace(
            "there is no option --no-such", ""
        )


def test_help_is_the_same_in_a_terminal() -> None:
    words = [sys.executable, "-m", "feddg_bench", "run", "--help"]
    environment = os.environ | {"COLUMNS": "80", "TERM": "xterm"}
    piped = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert in_terminal(words, environment) == (0, piped.stdout)


def test_messages_are_wrapped_in_a_terminal_and_lines_of_a_log() -> None:
    words = [sys.executable, "-m", "feddg_bench", "run", "--data-root", "/no/folder-of-that-name"]
    words += ["--dataset", "folder", "--scenario", "a", "--recipe", "quick", "--rounds", "1"]
    environment = os.environ | {"COLUMNS": "60"}
    piped = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert piped.stderr.count("\n") == 1
    code, shown = in_terminal(words, environment)
    assert code == piped.returncode == 2
    assert max(map(len, shown.splitlines())) <= 60
    assert " ".join(shown.split()) == piped.stderr.strip()
    assert "/no/folder-of-that-name" in shown
