"""Which runs a command means: from names, lists and settings to plans with their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import Layer, load_layer, merge, parse_override, validate
from feddg_bench.config.recipes import load_recipe
from feddg_bench.config.schema import RunSettings
from feddg_bench.data.protocols import Scenario, scenarios, validate_protocol
from feddg_bench.plugins import check_name, names

if TYPE_CHECKING:
    from feddg_bench.data.dataset import DomainDataset
    from feddg_bench.runs.run import Plan


FLAGS = {
    "rounds": "federation.rounds",
    "per_round": "federation.per_round",
    "clients": "partition.clients",
    "heterogeneity": "partition.heterogeneity",
    "split_csv": "data.split_csv",
}
"""Flags that stand for a setting."""


class Draft(NamedTuple):
    """A run before its settings are settled, which needs PyTorch.

    Attributes:
        recipe: Label of where the settings came from.
        base: The recipe's layer, and names.
        user: What the user says, scenario and seed included.
        scenario: Domains.
    """

    recipe: str
    base: Layer
    user: Layer
    scenario: Scenario


def draft_runs(
    dataset: DomainDataset,
    name: str,
    *,
    methods: str,
    protocols: str,
    scenario: str | None,
    recipe: str | None,
    seeds: str,
    user: Layer,
    load: Callable[[str, str, str], Layer] = load_recipe,
) -> list[Draft]:
    """Return the runs that comma-separated lists mean; those of one seed follow each other.

    Args:
        dataset: The data set, opened: some have their domains from the disk.
        name: Its name.
        methods: Methods, or ``all``.
        protocols: Protocols.
        scenario: Scenarios, or ``all``; ``None`` for the protocol's own.
        recipe: Name or file; ``None`` for the data set's own.
        seeds: Seeds.
        user: Settings that the user gives.
        load: Reads a recipe.

    Raises:
        SettingsError: If a name is unknown, or a setting that needs no method is.
    """
    wanted = [
        (*base_layer(method, name, protocol, recipe or dataset.default_recipe, load), chosen)
        for protocol in listed(protocols)
        for method in read_methods(methods)
        for chosen in scenarios(
            protocol, dataset.domains, dataset.letters, scenario, dataset.official
        )
    ]
    drafts = [
        Draft(label, base, merge(user, {"scenario": chosen.name, "seed": seed}), chosen)
        for seed in read_seeds(seeds)
        for label, base, chosen in wanted
    ]
    for draft in drafts[: len(wanted)]:  # the others differ in their seed alone
        validate(RunSettings, merge(draft.base, draft.user))
    return drafts


def make_plans(drafts: Sequence[Draft], dataset: DomainDataset) -> list[Plan]:
    """Settle drafts down to their keys.

    Raises:
        SettingsError: If a method's setting is unknown or out of range, or the method does not suit
            the data set.
    """
    from feddg_bench.engine.compatibility import check_fit
    from feddg_bench.plugins import load_method
    from feddg_bench.runs.run import make_plan

    plans = [make_plan([d.base], [d.user], d.scenario, d.recipe, dataset.identity) for d in drafts]
    for plan in plans:
        check_fit(plan.settings, load_method(plan.settings.method), dataset)
    return plans


def one_scenario(protocol: str, dataset: DomainDataset, select: str | None) -> Scenario:
    """Return the scenario that a command for one shows: the protocol's first if none is named.

    Raises:
        SettingsError: If it is unknown, or several are named.
    """
    found = scenarios(protocol, dataset.domains, dataset.letters, select, dataset.official)
    if select is not None and len(found) > 1:
        raise SettingsError(
            f"this command takes one scenario and {select} names {len(found)}: give one, such as "
            f"{found[0].name}"
        )
    return found[0]


def user_layer(flags: Mapping[str, Any], config: Sequence[Path], pairs: Iterable[str]) -> Layer:
    """Return what the user says: files, flags, ``KEY=VALUE``; later ones win.

    Args:
        flags: Keys of `FLAGS` with their values, ``None`` where the flag was not given.
        config: YAML files.
        pairs: ``KEY=VALUE``.

    Raises:
        SettingsError: If a file cannot be read, or a setting is unknown.
    """
    given = [f"{FLAGS[flag]}={value}" for flag, value in flags.items() if value is not None]
    return merge(*map(load_layer, config), *map(parse_override, [*given, *pairs]))


def base_layer(
    method: str,
    dataset: str,
    protocol: str,
    recipe: str,
    load: Callable[[str, str, str], Layer] = load_recipe,
) -> tuple[str, Layer]:
    """Return a recipe's label, and its layer with the names."""
    validate_protocol(protocol)
    layer = merge(
        load(recipe, dataset, method),
        {"method": method, "dataset": dataset, "protocol": protocol},
    )
    return Path(recipe).stem, layer


def read_methods(text: str) -> list[str]:
    """Return the methods of a comma-separated list."""
    if text == "all":
        return list(names("method"))
    found = listed(text)
    for name in found:
        check_name("method", name)
    return found


def read_seeds(text: str) -> list[int]:
    """Return the seeds of a comma-separated list.

    >>> read_seeds("0, 2,0")
    [0, 2]
    """
    found = listed(text)
    if not all(part.isascii() and part.isdigit() for part in found):
        raise SettingsError(f"cannot read seeds {text!r}: expected numbers >= 0, such as 0,1,2")
    return list(dict.fromkeys(map(int, found)))


def listed(text: str) -> list[str]:
    """Return the parts of a comma-separated list, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",")))
