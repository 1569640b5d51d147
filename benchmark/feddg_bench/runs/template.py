"""A new method's package: what ``feddg-bench methods new`` writes."""

from __future__ import annotations

import keyword
import re
from importlib.util import find_spec
from pathlib import Path

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import shipped, write_whole
from feddg_bench.plugins import names

_EXAMPLE = "fedclip"
"""Name of the package that is copied: it is tested as it stands."""


def write_plugin(name: str, directory: Path) -> list[Path]:
    """Write a package with one method, its test and its entry point.

    The name may hold lower case letters, digits and underscores.

    Returns:
        The files written.

    Raises:
        SettingsError: If the name is taken or cannot name a module, or a file is there already.
        DataError: If a file cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise SettingsError(
            f"{name!r} cannot name a method: use lower case letters, digits and underscores, "
            f"such as fedclip"
        )
    if keyword.iskeyword(name) or find_spec(name) is not None:
        raise SettingsError(
            f"{name!r} is the name of a module or a word of Python, which a file {name}.py would "
            f"hide; choose another, such as my_{name}"
        )
    if name in names("method"):
        raise SettingsError(f"there is a method {name!r} already; choose another name")
    title = "".join(part.capitalize() for part in name.split("_"))
    files = {
        directory / template.replace(_EXAMPLE, name): template
        for template in (f"{_EXAMPLE}.py", f"test_{_EXAMPLE}.py", "pyproject.toml")
    }
    there = [path for path in files if path.exists()]
    if there:
        raise SettingsError(f"{there[0]} is there already; choose another --dir or move it away")
    said = {_EXAMPLE: name, _EXAMPLE.capitalize(): title}
    for path, template in files.items():
        text = (shipped("tests/example_plugin") / template).read_text(encoding="utf-8")
        write_whole(path, re.sub("|".join(said), lambda found: said[found[0]], text).encode())
    return list(files)
