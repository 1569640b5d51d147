"""Code behind a record: a digest of the plugin's source that ignores comments."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.reading import known_name
from feddg_bench.core.method import Method
from feddg_bench.plugins import give_method, harmless, load_method, names
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
    do not change it. Of a script or a notebook it covers only the classes, functions and constants
    that the class uses.
    """
    digests: dict[str, str] = {}
    for base in method.__mro__:
        package = base.__module__.partition(".")[0]
        if issubclass(base, Method) and package not in CORE:
            if is_loose(base):
                _collect_definition(base, digests)
            else:
                _collect(base.__module__, digests)
    text = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()


def is_loose(method: type[Method]) -> bool:
    """Return whether a class is defined in a script or a notebook, not in a module's file."""
    return method.__module__ == "__main__" or _source(method.__module__) is None


def has_source(method: type[Method]) -> bool:
    """Return whether the source of a class can be read, from a file or from cells of a notebook."""
    return not is_loose(method) or _definition(method) is not None


def give(method: type[Method], *, processes: bool) -> str:
    """Return the name of a method's class in runs of this process, and make it known here.

    A plugin has its own name. Any other class has its name and eight digits of its `code_digest`,
    so that each edit is another method with runs of its own.

    Args:
        method: The class.
        processes: Whether clients train in other processes, which import the class.

    Raises:
        SettingsError: If the class has the name of a plugin, its source cannot be read, or other
            processes cannot import it.
    """
    name = method.__name__
    same = known_name(name, names("method"))
    if same in names("method"):
        if load_method(same) is method:
            return same
        raise SettingsError(
            f"the class {name} has the name of the method {same}: give the class another name, or "
            f"name the method as {same!r}"
        )
    package = "`feddg-bench methods new` makes a package for it"
    if not has_source(method):
        raise SettingsError(
            f"the source of the class {name} cannot be read, and it decides which runs are the "
            f"same: define it in a file or in a cell of a notebook; {package}"
        )
    if processes and (is_loose(method) or "<locals>" in method.__qualname__):
        raise SettingsError(
            f"other processes cannot import the class {name} from {method.__module__}: give "
            f"workers=1, or define it in a module of its own; {package}"
        )
    named = f"{name}@{code_digest(method)[:8]}"
    give_method(named, method)
    return named


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


def _collect_definition(thing: Any, digests: dict[str, str]) -> None:
    """Add the digests of a class or function, and of what it uses from its own module.

    Names are those of the module when the digest is computed: cells of a notebook have no order.
    """
    name = f"{thing.__module__}:{thing.__qualname__}"
    node = None if name in digests else _definition(thing)
    if node is None:
        return
    digests[name] = hashlib.sha256("".join(_tokens(node)).encode()).hexdigest()
    here = vars(sys.modules[thing.__module__])
    for used in sorted({n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & here.keys()):
        value = here[used]
        if getattr(value, "__module__", None) == thing.__module__ and callable(value):
            _collect_definition(value, digests)
        else:
            with suppress(Exception):  # no constant
                if ast.literal_eval(repr(value)) == value:
                    digests[f"{thing.__module__}:{used}"] = repr(value)


def _definition(thing: Any) -> ast.AST | None:
    """Return the syntax tree of a class or a function, ``None`` if there is no source to read.

    `inspect.getsource` finds no classes of a notebook, but cells are in `linecache`, under the file
    name that the code of their functions has.
    """
    parts = [thing, *(vars(thing).values() if inspect.isclass(thing) else ())]
    plain = (getattr(part, "__func__", getattr(part, "fget", part)) for part in parts)
    for function in filter(inspect.isfunction, plain):
        code = inspect.unwrap(function).__code__
        with suppress(SyntaxError):
            tree = ast.parse("".join(linecache.getlines(code.co_filename)))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == thing.__name__:
                    first = min(n.lineno for n in (node, *node.decorator_list))
                    if first <= code.co_firstlineno <= (node.end_lineno or first):
                        return node
    with suppress(OSError, TypeError, SyntaxError):
        return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    return None


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
