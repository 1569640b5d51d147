"""The format of records, from the classes that read and write them."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from feddg_bench.config.layers import paragraph
from feddg_bench.records import record
from feddg_bench.records.frame import COLUMNS
from generators import Page, table


def pages() -> Iterator[Page]:
    """Yield one page about the fields of a record."""
    text = """# Record format

A record is one JSON document, `RESULTS/runs/KEY.json`. `feddg-bench results pack` writes many of
them into one file of `RESULTS/records`, one a line. Fields that early records lack may be absent,
and readers keep fields that they do not know. [`load_records`](api.md) turns records into a pandas
`DataFrame`.

"""
    for part in _parts(record.RunRecord):
        text += f"## {part.__name__}\n\n{paragraph(part.__doc__)}\n\n{_fields(part)}\n"
    text += (
        "## Runs as a DataFrame\n\nTables, claims, figures and the report read one row per run.\n\n"
    )
    text += table(("column", "content"), ((f"`{k}`", v) for k, v in COLUMNS.items()))
    yield Page("record.md", text)


def _parts(part: type[BaseModel], seen: list[Any] | None = None) -> list[type[BaseModel]]:
    """Return a record's class and the classes of its parts."""
    seen = [] if seen is None else seen
    seen.append(part)
    for field in part.model_fields.values():
        for inner in _classes(field.annotation):
            if inner not in seen:
                _parts(inner, seen)
    return seen


def _classes(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _classes(inner)


def _fields(part: type[BaseModel]) -> str:
    comments = {k: v for base in reversed(part.__mro__[:-1]) for k, v in _comments(base).items()}
    rows = []
    for name, field in part.model_fields.items():
        kind, meaning = comments.get(name, ("", ""))
        inner = [paragraph(each.__doc__) for each in _classes(field.annotation)]
        meaning = meaning or " ".join(inner) or ("optional" if kind.startswith("Later[") else "")
        rows.append((f"`{name}`", f"`{_kind(kind)}`", meaning))
    return table(("field", "type", "meaning"), iter(rows))


ALIASES = {
    r"^Later\[(.*)\]$": r"\1",
    r"Annotated\[(.*), (Field|BeforeValidator)\(.*\)\]": r"\1",
    r"\bNamed\[": "dict[str, ",
    r"\bSeveral\[": "list[",
    r"\b(Count|_Whole)\b": "int",
    r"\b(Number|Positive)\b": "float",
    r"\bHash\b": "str",
    r"\b(_Part|Measurements)\b": "dict",
}
"""Names in the annotations of records -> types of Python."""


def _kind(annotation: str) -> str:
    """Return the type of a field as Python names it."""
    for name, known in ALIASES.items():
        annotation = re.sub(name, known, annotation)
    return annotation


def _comments(part: type) -> dict[str, tuple[str, str]]:
    """Return the type and the comment, behind or above it, of each field of a class."""
    if not part.__module__.startswith("feddg_bench"):
        return {}
    source = inspect.cleandoc("\n" + inspect.getsource(part))
    lines = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0]] = token.string.lstrip("# "), token.line.lstrip().startswith("#")
    found = {}
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            said, first = [lines[node.lineno][0]] if node.lineno in lines else [], node.lineno - 1
            while first in lines and lines[first][1]:
                said.insert(0, lines[first][0])
                first -= 1
            found[node.target.id] = ast.unparse(node.annotation), " ".join(said)
    return found
