"""Packages for plugins of your own, written from tested examples."""

from __future__ import annotations

import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from feddg_bench.common.errors import SettingsError, unknown
from feddg_bench.common.files import shipped, write_whole
from feddg_bench.config.reading import known_name
from feddg_bench.plugins import GROUPS, names

EXAMPLES = {
    "server": "fedbound",
    "client": "fedsmooth",
    "style": "fedcolour",
    "messages": "fedmeans",
}
"""Part that a method changes -> the example that is copied; each is tested without changes.

``server``: the aggregation; ``client``: the local loss; ``style``: the images, by statistics that
are exchanged before round 1; ``messages``: additional data that clients send with their models.
"""
_DATA = "shapes"
"""Example of a data set."""
_PROJECT, _PROJECT_OF = "pyproject.toml", EXAMPLES["server"]
"""File that all packages share, and the example that it describes."""


class Package(NamedTuple):
    """A written package."""

    name: str  # of the plugin, its module and the package
    folder: Path
    files: list[Path]


def write_method(name: str, directory: Path | None = None, part: str = "server") -> Package:
    """Write a package with a method that changes a part of `EXAMPLES`; see `write_package`.

    Raises:
        SettingsError: If the part is unknown.
    """
    if part not in EXAMPLES:
        raise SettingsError(unknown("kind of method", part, EXAMPLES))
    return write_package("method", name, EXAMPLES[part], directory)


def write_data_set(name: str, directory: Path | None = None) -> Package:
    """Write a package with a data set of images in folders; see `write_package`."""
    return write_package("data set", name, _DATA, directory)


def write_package(kind: str, given: str, example: str, directory: Path | None = None) -> Package:
    """Write a package with one plugin, its test and its entry point.

    Args:
        kind: A key of `GROUPS`.
        given: Name of the plugin, as in a paper: letters, digits, hyphens and underscores. The
            module has it in lower case, with underscores: ``FedDG-GA`` becomes ``feddg_ga``.
        example: Name of the copied example, and of its module.
        directory: Folder of the package; by default ``./<module>``.

    Raises:
        SettingsError: If the name is taken or cannot name a module, or a file exists already.
        DataError: If a file cannot be written.
    """
    parts = re.split("[-_]+", given)
    name, written = "_".join(parts).lower(), "".join(part[:1].upper() + part[1:] for part in parts)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*([-_]+[A-Za-z0-9]+)*", given):
        raise SettingsError(
            f"{given!r} cannot name a {kind}: use letters, digits, hyphens and underscores, "
            f"beginning with a letter, such as {example}"
        )
    taken = known_name(name, names(kind))
    if taken in names(kind):
        raise SettingsError(f"there is a {kind} {taken!r} already; choose another name")
    directory = directory or Path(name)
    templates = {
        directory / file.replace(example, name): (shipped("tests/example_plugin") / file).read_text(
            encoding="utf-8"
        )
        for file in (f"{example}.py", f"test_{example}.py", _PROJECT)
    }
    if existing := [path for path in templates if path.exists()]:
        raise SettingsError(f"{existing[0]} is there already; choose another --dir or move it away")
    if keyword.iskeyword(name) or find_spec(name) is not None:
        raise SettingsError(
            f"{given!r} is the name of a module or a word of Python, which a file {name}.py would "
            f"hide; choose another, such as my_{name}"
        )
    used = {*re.findall(r"\w+", " ".join(templates.values()))}
    if written in used - {example.capitalize(), _PROJECT_OF.capitalize()}:
        raise SettingsError(
            f"a class {written} would hide a name that its own module uses; choose another name, "
            f"such as my_{name}"
        )
    replaced = {
        f'"{example.capitalize()}"': f'"{given if given != given.lower() else written}"',
        example.capitalize(): written,
        example: name,
        _PROJECT_OF.capitalize(): written,
        _PROJECT_OF: name,
        GROUPS["method"]: GROUPS[kind],
    }
    words = re.compile("|".join(map(re.escape, replaced)))
    for path, text in templates.items():
        write_whole(path, words.sub(lambda match: replaced[match[0]], text).encode())
    return Package(name, directory, list(templates))
