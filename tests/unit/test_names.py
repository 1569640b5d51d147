"""Each public name is defined once."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_public_function_or_class_is_defined_twice() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for folder in ("benchmark", "methods", "datasets"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
                    found[node.name].append(str(path.relative_to(ROOT)))
    assert found
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_no_two_modules_of_the_core_have_one_name() -> None:
    core = ROOT / "benchmark" / "feddg_bench"
    times = Counter(path.name for path in core.rglob("*.py") if path.name != "__init__.py")
    assert times
    assert {name for name, count in times.items() if count > 1} == set()
