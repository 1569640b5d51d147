"""A new method's package: what ``feddg-bench methods new`` writes."""

from __future__ import annotations

import re
from pathlib import Path

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import write_whole
from feddg_bench.plugins import names

METHOD = '''"""{title}: say in one line what it does."""

from collections.abc import Iterable

from pydantic import Field

from feddg_bench import Method, MethodSettings, Server
from feddg_bench.core.messages import LocalUpdate, Reply, Weights


class {title}Settings(MethodSettings):
    """Settings of this method; on the command line hyper.<name>=VALUE."""

    bound: float = Field(1.0, ge=0)
    """Largest change of a weight in a round."""


class {title}(Method):
    """FedAvg whose server moves no weight farther than the bound (cite your paper here)."""

    Settings = {title}Settings
    settings: {title}Settings
    version = 1  # raise it with every change that can move results: old records then stay apart
    citation = "Authors, title, venue and year"

    # The client half is FedAvg's. To change it, override training_step(batch, batch_idx).

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        new = super().aggregate(server, updates)
        bound = self.settings.bound
        for name in self.trainable:
            old = server.weights[name]
            new[name] = old + (new[name] - old).clamp(-bound, bound)
        return new
'''

TEST = '''"""The contract of all methods, and what is this one's own."""

from {name} import {title}

from feddg_bench.testing import contract_tests, start_toy_run


def test_contract():
    contract_tests({title})


def test_no_weight_moves_farther_than_the_bound():
    run = start_toy_run({title}, {{"hyper": {{"bound": 0.001}}}})
    before = {{name: run.server.weights[name].clone() for name in run.method.trainable}}
    run.rounds(1)
    moved = [(run.server.weights[name] - before[name]).abs().max() for name in before]
    assert 0 < max(moved) <= 0.00101
'''

PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
dependencies = ["feddg-bench"]

[project.entry-points."feddg_bench.methods"]
{name} = "{name}:{title}"

[tool.hatch.build.targets.wheel]
include = ["{name}.py"]
"""


def write_plugin(name: str, directory: Path) -> list[Path]:
    """Write a package with one method, its test and its entry point.

    A name is of lower case letters, digits and underscores.

    Returns:
        The files written.

    Raises:
        SettingsError: If the name is taken or not a module's, or a file is there already.
        DataError: If a file cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise SettingsError(
            f"{name!r} cannot name a method: use lower case letters, digits and underscores, "
            f"such as fedclip"
        )
    if name in names("method"):
        raise SettingsError(f"there is a method {name!r} already; choose another name")
    title = "".join(part.capitalize() for part in name.split("_"))
    files = {
        directory / f"{name}.py": METHOD,
        directory / f"test_{name}.py": TEST,
        directory / "pyproject.toml": PROJECT,
    }
    there = [path for path in files if path.exists()]
    if there:
        raise SettingsError(f"{there[0]} is there already; choose another --dir or move it away")
    for path, template in files.items():
        write_whole(path, template.format(name=name, title=title).encode())
    return list(files)
