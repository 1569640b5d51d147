"""Code behind a record: a digest of the plugin's source that ignores comments."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from feddg_bench.common.errors import SettingsError
from feddg_bench.core.method import Method
from feddg_bench.plugins import harmless, load_method
from feddg_bench.records.record import RunRecord

CORE = ("feddg_bench",)
"""Packages whose code belongs to the suite, not to a plugin."""
TEXTS = ("citation", "DEVIATIONS", "group", "singles", "toy")
"""Names of attributes that only fill a card, refuse runs or are for checks: no number of a run
depends on them."""


def code_digest(method: type[Method]) -> str:
    """Return the SHA-256 of a method's source: 64 hexadecimal digits.

    It covers the modules that define the class and its bases, and what these import from their own
    package, but nothing from the suite's core. Comments, docstrings, layout and the texts of a card
    do not change it.
    """
    digests: dict[str, str] = {}
    for base in method.__mro__:
        package = base.__module__.partition(".")[0]
        if issubclass(base, Method) and package not in CORE:
            _collect(base.__module__, digests)
    text = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()


def check_same_code(record: RunRecord) -> None:
    """Refuse a record whose method has changed since it was made, without a new version.

    Raises:
        SettingsError: If the code has changed.
    """
    if has_changed(record):
        raise SettingsError(
            f"the code of {record.method} changed after run {record.key} was recorded, and its "
            f"version is still {record.method_version}: raise `version` in the method, or repeat "
            f"the run with --again"
        )


def has_changed(record: RunRecord) -> bool:
    """Return whether the code of a record's method has changed since the record was made.

    A record without a digest is accepted, as is one whose digest is listed as giving the same
    numbers (`harmless`).
    """
    if record.code is None:
        return False
    method = load_method(record.method)
    now = code_digest(method)
    return record.code != now and not {record.code, now} <= harmless(record.method, method.version)


def _collect(name: str, digests: dict[str, str]) -> None:
    """Add the digests of a module and of what it imports from its own top-level package."""
    path = None if name in digests else _source(name)
    if path is None:
        return
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    digests[name], imported = _read(path, package, path.stat().st_mtime_ns)
    for module in imported:
        if module.partition(".")[0] == name.partition(".")[0]:
            _collect(module, digests)


@cache
def _read(path: Path, package: str, _changed: int) -> tuple[str, tuple[str, ...]]:
    """Return the digest of a source file of a package, and the modules that it can import."""
    tree = ast.parse(path.read_bytes())
    imported: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join(filter(None, [*(above if node.level else ()), node.module]))
            imported += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
    return hashlib.sha256("".join(_tokens(tree)).encode()).hexdigest(), tuple(imported)


def _source(name: str) -> Path | None:
    """Return a module's Python source file, ``None`` if there is none."""
    module = sys.modules.get(name)
    try:
        spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    origin = getattr(module, "__file__", None) if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _tokens(node: object) -> Iterator[str]:
    """Yield the content of a syntax tree; empty fields are skipped, as newer Pythons add some."""
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(value, list):
                value = [child for child in value if not _is_text(child)]
            if value is not None and value != [] and name not in ("ctx", "kind", "type_comment"):
                yield f" {name}="
                yield from _tokens(value)
        yield ")"
    elif isinstance(node, list):
        for child in node:
            yield from _tokens(child)
            yield ","
    else:
        yield repr(node)


def _is_text(node: ast.stmt) -> bool:
    """Return whether a statement is a docstring, or assigns nothing but `TEXTS`."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    assigned = isinstance(node, (ast.Assign, ast.AnnAssign))
    return assigned and all(isinstance(t, ast.Name) and t.id in TEXTS for t in targets)
