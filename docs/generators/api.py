"""The public names of the Python interface, from their docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import feddg_bench
from feddg_bench import testing
from generators import Page

PARTS = {
    "Runs": ("run", "Request", "Resources", "Observer", "Run"),
    "Records, tables and models": (
        "load_records",
        "table",
        "tables",
        "TableOptions",
        "load_model",
    ),
    "Methods": (
        "Method",
        "MethodSettings",
        "build_method",
        "Client",
        "Batch",
        "Server",
        "LocalUpdate",
        "Reply",
        "Weights",
        "torch_generator",
    ),
    "Aggregation": ("weighted_mean", "streaming_mean", "fold", "watched"),
    "Data sets": (
        "open_dataset",
        "ImageFolderDataset",
        "FileDataset",
        "Listing",
        "DomainDataset",
        "heterogeneous_counts",
        "heterogeneous_indices",
    ),
    "Errors": ("FeddgError",),
}
"""Heading -> public names; `pages` refuses to leave one out."""
PREDICTOR = "feddg_bench.models.predictor.Predictor"
"""Base of `Method`; its members are not among those that Sphinx finds there."""
GIVEN = {
    "feddg_bench.records.record.RunRecord": "evaluation, score, as_json",
    "feddg_bench.analysis.tables.make.MadeTable": "frame, to_markdown, to_latex, notes",
    "feddg_bench.runs.images.DomainImages": "",
    "feddg_bench.runs.request.Plan": "title",
    "feddg_bench.core.loop.RoundResult": "",
    "feddg_bench.core.messages.Task": "",
}
"""Class of objects that calls return or observers receive -> its methods for users."""


def pages() -> Iterator[Page]:
    """Yield one page of all public names."""
    given = [name for names in PARTS.values() for name in names]
    if missing := {*feddg_bench._FACE} ^ {*given}:
        raise ValueError(f"the API page and the public names differ in {sorted(missing)}")
    text = """# Python API

`import feddg_bench as fb` takes almost no time: each name is imported on first use. Other modules
may change without notice.

"""
    for heading, names in PARTS.items():
        text += f"## {heading}\n\n"
        text += "".join(_described(feddg_bench, "feddg_bench", name) for name in names)
        if heading == "Methods":
            text += _directive(
                "autoclass",
                PREDICTOR,
                "   :members: classes, accepts, transform, predict, predict_step\n",
            )
    text += "## Objects that calls return and observers receive\n\n"
    for name, methods in GIVEN.items():
        text += _directive("autoclass", name, f"   :members: {methods}\n" if methods else "")
    text += "## Tests of your own method or data set\n\n"
    text += "".join(_described(testing, "feddg_bench.testing", name) for name in testing.__all__)
    yield Page("api.md", text)


def _described(module: Any, path: str, name: str) -> str:
    value = getattr(module, name)
    if not isinstance(value, type | FunctionType):
        return f"```{{eval-rst}}\n.. py:data:: {path}.{name}\n\n   ``{value}``\n```\n\n"
    if inspect.isclass(value):
        return _directive("autoclass", f"{path}.{name}", "   :members:\n")
    return _directive("autofunction", f"{path}.{name}")


def _directive(directive: str, name: str, options: str = "") -> str:
    return f"```{{eval-rst}}\n.. {directive}:: {name}\n{options}```\n\n"
