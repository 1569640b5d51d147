"""Commands with all options, from their declarations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from feddg_bench import cli
from feddg_bench.cli.help import PANELS, Command
from generators import Page, table


def pages() -> Iterator[Page]:
    """Yield one page of all commands."""
    text = "# Commands\n\n`feddg-bench COMMAND --help` prints the usual options of a command, and "
    text += "`--help --all` every option.\n\n"
    for name in cli.helps():
        text += "".join(_command(cli._load(name), f"feddg-bench {name}"))
    yield Page("commands.md", text)


def _command(command: Any, path: str) -> Iterator[str]:
    """Yield the section of a command and those of its subcommands."""
    context = typer.Context(command, info_name=path)
    depth = "#" * min(4, path.count(" ") + 1)
    yield f"{depth} {path.removeprefix('feddg-bench ')}\n\n{_paragraphs(command.help)}\n\n"
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    inner = getattr(command, "commands", {})
    words = [path, *(Command._argument(a)[0] for a in arguments)]
    if not inner:
        words += ["[OPTIONS]"] * bool(options)
        yield f"```text\n{' '.join(words)}\n```\n\n"
    rows = [Command._argument(argument) for argument in arguments]
    options.sort(key=lambda o: PANELS.index(getattr(o, "rich_help_panel", None) or ""))
    rows += [Command._option(option, context) for option in options]
    if rows:
        yield (
            table(("argument or option", "meaning"), ((f"`{n}`", text) for n, text in rows)) + "\n"
        )
    if examples := getattr(command, "epilog", None):
        yield f"```console\n{examples}\n```\n\n"
    for name, each in inner.items():
        yield from _command(each, f"{path} {name}")


def _paragraphs(text: str | None) -> str:
    """Return a docstring with each paragraph on one line."""
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))
