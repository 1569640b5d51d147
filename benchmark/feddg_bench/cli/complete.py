"""Completion in shells: names and settings, from the lists and without PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from feddg_bench.common.errors import FeddgError
from feddg_bench.common.files import shipped_names
from feddg_bench.config.layers import dotted_fields, full_key, kind_of
from feddg_bench.config.reading import listed
from feddg_bench.config.recipes import recipe_names
from feddg_bench.config.schema import BACKBONE_NAMES
from feddg_bench.data.protocols import MOST_DOMAINS, PROTOCOLS, scenarios
from feddg_bench.plugins import make_dataset, names, outline, plugin_name
from feddg_bench.records.sources import FOLDERS
from feddg_bench.runs.request import Request

if TYPE_CHECKING:
    from feddg_bench.data.dataset import DomainDataset

Given = Mapping[str, Any]
"""Name of a parameter -> what was given for it before, not yet checked."""


def names_of(find: Callable[[Given], Iterable[str]], *, several: bool = False) -> Any:
    """Return a completer for the names that ``find`` returns, ``several`` separated by commas."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",") if several else ("", "", "")
        with suppress(FeddgError, OSError):  # the command will tell what is wrong
            taken = before.split(",")
            return [f"{before}{comma}{name}" for name in find(ctx.params) if name not in taken]
        return []

    return complete


def choices(*values: str, several: bool = False) -> Any:
    """Return a completer for fixed values."""
    return names_of(lambda _: values, several=several)


def _dataset(given: Given) -> DomainDataset:
    name = plugin_name("data set", given.get("dataset") or Request.dataset)
    root = given.get("data_root")
    return make_dataset(name, Path(root) if root else None)


def _scenarios(given: Given) -> Iterator[str]:
    """Yield the default scenarios, the domains that test, and then all other scenarios."""
    dataset = _dataset(given)
    yield from ("all", *dataset.domains[:MOST_DOMAINS])
    for select in (None, "all"):
        for protocol in listed(given.get("protocol") or dataset.default_protocol):
            named = (protocol, dataset.domains, dataset.letters, select)
            yield from (each.name for each in scenarios(*named, official=dataset.official))


def _settings(given: Given) -> dict[str, str]:
    """Return the settings of a run by key, with the kind of their values."""
    kinds = {key: kind_of(field) for key, field in dotted_fields()}
    kinds |= {"backbone.name": " | ".join(BACKBONE_NAMES), "method": "text", "dataset": "text"}
    with suppress(FeddgError):
        kinds |= {
            key: kind_of(field) for key, field in dotted_fields(_dataset(given).Settings, "world.")
        }
    for name in listed(given.get("method") or given.get("name") or str(Request.method)):
        with suppress(FeddgError):
            own = outline(plugin_name("method", name)).own.settings
            kinds |= {f"hyper.{key}": setting.kind for key, setting in own.items()}
    return {key: kind for key, kind in kinds.items() if kind != "null"}  # a removed one


_KINDS = ("text", "number", "int")


def pairs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete ``KEY=VALUE``: the key, and the value if there are few."""
    key, equals, _ = incomplete.partition("=")
    kinds = _settings(ctx.params)
    if not equals:
        ends = [
            end for section, _, end in (k.rpartition(".") for k in kinds) if section != "engine"
        ]
        short = [end for end in ends if key and ends.count(end) == 1]  # as `full_key` accepts
        return [f"{key}=" for key in dict.fromkeys([*kinds, *short])]
    with suppress(FeddgError):
        values = re.split(r" \| | or ", kinds.get(full_key(key), "").removesuffix(" or null"))
        few = len(values) > 1 and all(re.fullmatch(r"[\w.-]+", value) for value in values)
        return [f"{key}={value}" for value in values if few and value not in _KINDS]
    return []


def _unfinished(given: Given) -> Iterator[str]:
    """Yield the keys of runs with a checkpoint."""
    place = Path(given.get("results") or FOLDERS[0], "checkpoints")
    yield from sorted(path.stem for path in place.glob("*.safetensors"))


METHODS = names_of(lambda _: (*names("method"), "all"), several=True)
METHOD = names_of(lambda _: names("method"))
DATASET = names_of(lambda _: names("data set"))
PROTOCOL_NAMES = choices(*PROTOCOLS, several=True)
SCENARIOS = names_of(lambda given: dict.fromkeys(_scenarios(given)), several=True)
UNFINISHED = names_of(_unfinished)
RECIPE = names_of(lambda _: recipe_names())
SWEEP = names_of(lambda _: shipped_names("sweeps", "*.yaml", "tune/*.yaml"))
TABLE = names_of(lambda _: ("all", "generic", "claims", *shipped_names("sweeps/tables")))
