"""feddg-bench: a benchmark suite for federated domain generalisation.

``import feddg_bench as fb`` takes almost no time: each name below is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_FACE = {
    "run": "api",
    "Request": "runs.request",
    "Resources": "config.schema",
    "Observer": "runs.observer",
    "Run": "runs.setup",
    "tables": "api",
    "table": "api",
    "TableOptions": "analysis.tables.make",
    "load_records": "records.frame",
    "load_model": "runs.kept",
    "open_dataset": "runs.images",
    "build_method": "engine.construction",
    "Method": "core.method",
    "MethodSettings": "config.schema",
    "Client": "core.client",
    "Batch": "core.client",
    "Server": "core.server",
    "LocalUpdate": "core.messages",
    "Reply": "core.messages",
    "Weights": "core.messages",
    "DomainDataset": "data.dataset",
    "FileDataset": "data.dataset",
    "Listing": "data.dataset",
    "ImageFolderDataset": "data.image_folders",
    "FeddgError": "common.errors",
    "heterogeneous_counts": "data.partition",
    "heterogeneous_indices": "data.partition",
    "fold": "core.aggregation",
    "streaming_mean": "core.aggregation",
    "watched": "core.aggregation",
    "weighted_mean": "core.aggregation",
    "torch_generator": "common.streams",
}
"""Public name -> its module."""


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_FACE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_FACE])
