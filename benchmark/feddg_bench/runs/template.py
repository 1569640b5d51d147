"""A new method's package: what ``feddg-bench methods new`` writes."""

from __future__ import annotations

import keyword
import re
from importlib.util import find_spec
from pathlib import Path

from feddg_bench.common.errors import SettingsError, unknown
from feddg_bench.common.files import shipped, write_whole
from feddg_bench.plugins import names

KINDS = {"server": "fedclip", "client": "fedsmooth", "style": "fedcolour", "messages": "fedmeans"}
"""What a method changes -> the example of it that is copied; each is tested as it stands.

``server``: the aggregation; ``client``: the local loss; ``style``: the images, by statistics that
are exchanged before round 1; ``messages``: what clients send with their models.
"""


def write_plugin(name: str, directory: Path, kind: str = "server") -> list[Path]:
    """Write a package with one method of a kind of `KINDS`, its test and its entry point.

    The name may hold lower case letters, digits and underscores.

    Returns:
        The files written.

    Raises:
        SettingsError: If the kind is unknown, the name is taken or cannot name a module, or a file
            is there already.
        DataError: If a file cannot be written.
    """
    if kind not in KINDS:
        raise SettingsError(unknown("kind of method", kind, KINDS))
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
    example = KINDS[kind]
    replaced = {example: name, example.capitalize(): title, KINDS["server"]: name}
    files = {
        directory / template.replace(example, name): template
        for template in (f"{example}.py", f"test_{example}.py", "pyproject.toml")
    }
    existing = [path for path in files if path.exists()]
    if existing:
        raise SettingsError(f"{existing[0]} is there already; choose another --dir or move it away")
    for path, template in files.items():
        text = (shipped("tests/example_plugin") / template).read_text(encoding="utf-8")
        write_whole(
            path, re.sub("|".join(replaced), lambda match: replaced[match[0]], text).encode()
        )
    return list(files)
