"""Requests of users, and the runs that they result in.

Every run starts from a `Request`: the commands and the Python API all build one, and `plan`
resolves and checks all of it before any image is decoded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from feddg_bench.common.errors import DataError, SettingsError, left_out, short, unknown
from feddg_bench.common.files import cache_dir, from_here
from feddg_bench.common.portable import begin_portable
from feddg_bench.config.keys import canonical_settings, run_key
from feddg_bench.config.layers import (
    Layer,
    dotted,
    load_layer,
    merge,
    nested,
    parse_override,
    read_settings,
    validate,
)
from feddg_bench.config.names import SYMBOLS
from feddg_bench.config.reading import known_name, listed, read_names
from feddg_bench.config.recipes import READINGS, names_in, recipe_names
from feddg_bench.config.schema import (
    DataSettings,
    Resources,
    RunSettings,
    TrainSettings,
)
from feddg_bench.config.settle import Layers, recipe_layers, settle
from feddg_bench.data.feature_store import Encoding, opened
from feddg_bench.data.federated import cautions, spread
from feddg_bench.data.image_folders import ImageFolderDataset
from feddg_bench.data.locations import find_network
from feddg_bench.data.partition import PARTITION_RULES
from feddg_bench.data.protocols import PROTOCOLS, Scenario, scenarios
from feddg_bench.data.splits import scenarios_with_files
from feddg_bench.engine.compatibility import Rate, check_fit, check_image_size, is_rgb
from feddg_bench.models.suitability import check_consistent
from feddg_bench.plugins import (
    check_name,
    make_dataset,
    method_title,
    names,
    outline,
    own_values,
    read_plugins,
)
from feddg_bench.records.record import TunedRecord
from feddg_bench.records.runs import read_folder
from feddg_bench.records.store import open_results
from feddg_bench.records.tuning import TuningLedger, load_ledger

if TYPE_CHECKING:
    from feddg_bench.data.dataset import DomainDataset

logger = logging.getLogger(__name__)

Words = str | Sequence[str]
"""Comma-separated names, or a sequence of them."""

FLAGS = {
    "rounds": "federation.rounds",
    "per_round": "federation.per_round",
    "clients": "partition.clients",
    "heterogeneity": "partition.heterogeneity",
    "split_csv": "data.split_csv",
    "portable": "portable",
}
"""Flags and the settings that they set."""

SEEDS = ("seeds", "seed", "num_seeds")
"""Keys that give the seeds: two for a list, one for a number of seeds."""

NAMES = (
    *("method", "protocol", "dataset", "scenario", "recipe", "readings", "tuned"),
    *("seeds", "num_seeds"),
)
"""Keys that select runs; files and ``KEY=VALUE`` can give them, as flags do."""


MAX_SEEDS = 100_000
"""Maximum number of seeds in a request."""

_WHOLE = (int, np.integer)
"""Types of a seed; the second is that of elements of a NumPy array."""


class Datasets:
    """Data sets by name, each opened once: some read their domains from the disk."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root
        self._opened: dict[str, DomainDataset] = {}

    def __reduce__(self) -> tuple[type[Datasets], tuple[Path | None]]:
        return Datasets, (self.root,)  # another process opens its own

    def open(self, name: str) -> DomainDataset:
        """Return a data set.

        Raises:
            SettingsError: If there is no data set of that name.
            DataError: If it reads its domains or classes from the disk and they cannot be read.
            PluginError: If it cannot be imported, or breaks its contract.
        """
        if name not in self._opened:
            self._opened[name] = make_dataset(name, self.root)
        return self._opened[name]


class Draft(NamedTuple):
    """A run before its settings are resolved."""

    layers: Layers  # all layers of its settings but the seed
    scenario: Scenario  # domains
    recipe: str  # label of the settings' origin
    dataset: DomainDataset  # the data set, opened
    tuned: TunedRecord | None = None  # result of tuning
    root: Path | None = None  # the folder of the data, if the user named one


class Plan(NamedTuple):
    """A run with resolved settings and its key."""

    settings: RunSettings  # resolved settings; `hyper` holds every value of the method
    canonical: Layer  # hashed into the key and kept in the record: files by their content
    scenario: Scenario  # domains
    recipe: str  # label of the settings' origin
    version: int  # the method's version
    key: str  # name of the record
    dataset: DomainDataset  # the data set, opened
    tuned: TunedRecord | None = None  # result of tuning, if the run uses it

    @property
    def title(self) -> str:
        """Human-readable method, scenario and seed."""
        s = self.settings
        return f"{method_title(s.method)} {s.scenario} seed {s.seed}"


@dataclass(frozen=True)
class Request:
    """A request for runs; all defaults are defined here.

    Attributes:
        method: Methods, or ``all`` that suit the data set.
        protocol: Protocols; ``None`` for the data set's default.
        dataset: One data set.
        scenario: Scenarios, ``all``, or ``None`` for those of the protocol or of split files.
        recipe: Name or YAML file; ``None`` for the data set's default.
        seeds: A number of seeds, counted from 0; a sequence of seeds; or a text that lists them and
            can hold ranges, such as ``0,1`` or ``0-2``.
        settings: User settings, by short, dotted or nested key; they override recipe and method.
        resources: Devices, workers and folders; never part of a key.
        readings: For a recipe named after a paper: ``published``, the readings that the paper's
            tables were computed with, or ``corrected``, the papers' own formulas.
        tuned: Whether each method uses the settings that ``feddg-bench tune`` chose for it on the
            same protocol; the name of a protocol uses those chosen on that protocol. They override
            recipe and method.

    Raises:
        SettingsError: If a setting is unknown, or names or seeds cannot be read.
    """

    method: Words = "fedavg"
    protocol: Words | None = None
    dataset: str = "digits4"
    scenario: Words | None = None
    recipe: str | None = None
    seeds: str | int | Sequence[int] = "0"
    settings: Mapping[str, Any] = field(default_factory=dict)
    resources: Resources = field(default_factory=Resources)
    readings: str = READINGS[0]
    tuned: bool | str = False

    def __post_init__(self) -> None:
        for name in ("method", "protocol", "scenario"):
            value = getattr(self, name)
            many = value if isinstance(value, Sequence) else ()
            several = len(many) > 0 and all(isinstance(one, str) for one in many)
            if not several and not (name != "method" and value is None):
                raise SettingsError(_unreadable(name, value))
        for name in ("dataset", "recipe", "readings"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "recipe" and value is None):
                raise SettingsError(f"{name}: {short(value)} cannot be read; expected one name")
        if not isinstance(self.tuned, bool | str):
            raise SettingsError(
                f"tuned: {short(self.tuned)} cannot be read; expected True or a protocol"
            )
        if not isinstance(self.settings, Mapping):
            raise SettingsError(
                f"settings: {short(self.settings)} cannot be read; expected them by key, such as "
                f"{{'rounds': 1}}"
            )
        object.__setattr__(self, "dataset", known_name(self.dataset, names("data set")))
        object.__setattr__(self, "seeds", read_seeds(self.seeds))
        object.__setattr__(self, "settings", read_settings(self.settings))
        for name in {*NAMES, "seed"} & set(self.settings):
            value = self.settings[name]
            given = f"seeds=[{short(value)}]" if name == "seed" else f"{name}={short(value)}"
            raise SettingsError(f"{name} is no setting: give it as {given}")

    @classmethod
    def read(
        cls,
        *,
        config: Iterable[Path] = (),
        flags: Mapping[str, Any] | None = None,
        pairs: Iterable[str] = (),
        resources: Resources | None = None,
        seeds: str = "0",
    ) -> Request:
        """Return a command's request; later values override earlier: files, flags, ``KEY=VALUE``.

        Args:
            config: YAML files of settings and names.
            flags: Keys of `NAMES` and `FLAGS` with their values, ``None`` where not given.
            pairs: ``KEY=VALUE``, of settings and names.
            resources: Devices, workers and folders.
            seeds: Seeds if none are given; ``num_seeds`` counts from the first of them.

        Raises:
            SettingsError: If a file cannot be read, or a key is unknown.
        """
        given = {name: value for name, value in (flags or {}).items() if value is not None}
        pairs = list(pairs)
        if bare := [pair for pair in pairs if "=" not in pair]:
            named = dict(pair.split("=", 1) for pair in pairs if pair not in bare)
            raise SettingsError(_no_pair(bare, given | named))
        command: list[Layer] = [{name: value for name, value in given.items() if name in NAMES}]
        command += [flag_layer(*each) for each in given.items() if each[0] not in NAMES]
        command += [parse_override(pair, NAMES) for pair in pairs]
        if twice := _seeds_twice(name for layer in command for name in layer):
            raise SettingsError(twice)
        layers = [*(file_layer(path) for path in config), *command]
        chosen: dict[str, Any] = {"seeds": seeds}
        for layer in layers:
            if "num_seeds" in layer:
                chosen["seeds"] = counted_seeds(layer.pop("num_seeds"), read_seeds(seeds)[0])
            if "seed" in layer:
                layer["seeds"] = layer.pop("seed")
            for name in NAMES:
                if name in layer:
                    value = layer.pop(name)
                    yes_or_no = name == "tuned" and isinstance(value, bool)
                    chosen[name] = value if yes_or_no else _words(name, value)
        return cls(**chosen, settings=merge(*layers), resources=resources or Resources())

    def plan(self, datasets: Datasets | None = None, *, check: bool = True) -> list[Plan]:
        """Resolve every run and check all that can be checked now; runs are grouped by seed.

        Args:
            datasets: Opened data sets, for a caller with many requests.
            check: Whether to list and partition the images and read the weights of runs without a
                record, so that anything missing or unsuitable is refused.

        Raises:
            SettingsError: If a name or a setting is unknown or out of range, the method does not
                suit the data set, or there are too few images for the clients.
            DataError: If the data set is missing, a split file does not fit, or a class has no
                training image.
        """
        datasets = datasets or Datasets(self.resources.data_root)
        drafts = self.drafts(datasets)
        plans = [_settle(draft, seed) for seed in read_seeds(self.seeds) for draft in drafts]
        if check:
            check_runs(self.to_do(plans))
        return plans

    def to_do(
        self, plans: Iterable[Plan], keep: Collection[str] = (), *, again: bool = False
    ) -> list[Plan]:
        """Return the plans without a record, or without a model to keep; with ``again``, all."""
        store = open_results(self.resources.results)
        done = set() if again else store.keys()
        return [p for p in plans if not (p.key in done and store.has_models(p.key, keep))]

    def drafts(self, datasets: Datasets) -> list[Draft]:
        """Return the runs of one seed, before their settings are resolved.

        Raises:
            SettingsError: If a name, or a setting other than the method's own, is unknown.
            DataError: If the data set reads its domains from the disk and they cannot be read.
        """
        methods = read_plugins("method", self.method, outline)
        everything = "all" in listed(self.method)  # that suits the data set
        if self.protocol is not None:
            read_names("protocol", self.protocol, PROTOCOLS)  # before the disk is read
        dataset = datasets.open(self.dataset)
        protocols = read_names("protocol", self._protocols(dataset), PROTOCOLS)
        recipe = dataset.default_recipe if self.recipe is None else self.recipe
        if recipe not in recipe_names():
            self._check_recipe(recipe)
        given = shared_out(self.settings, methods)
        drafts = []
        for protocol in protocols:
            chosen = self._scenarios(protocol, dataset)
            for method in methods:
                plugin = outline(method)
                frame = recipe_layers(recipe, self.dataset, method, plugin.needs, self.readings)
                if everything and (why := self._unfit(frame, protocol, dataset, recipe)):
                    _say_once(left_out(method, why))
                    continue
                for scenario, splits in chosen:
                    named: Layer = {
                        "method": method,
                        "dataset": self.dataset,
                        "protocol": protocol,
                        "scenario": scenario.name,
                        **splits,
                    }
                    tuned = self._tuned(named, recipe)
                    layers = frame._replace(
                        tuned=read_settings(tuned.settings if tuned else {}),
                        user=given[method],
                        named=named,
                    )
                    settled = settle(layers._replace(needs={}))
                    if idle := _without_effect(settled).keys() & dotted(self.settings).keys():
                        _say_without_effect(idle, settled, layers)
                    if tuned is not None:
                        applicable = {
                            **dotted(settled.model_dump(mode="json")),
                            "readings": self.readings,
                        }
                        other = [p for p in tuned.given or () if not _holds(applicable, p)]
                        tuned = tuned.model_copy(update={"given": other or None})
                    if settled.portable:  # before PyTorch is loaded
                        begin_portable()
                    recipe_name = Path(recipe).stem
                    drafts.append(
                        Draft(layers, scenario, recipe_name, dataset, tuned, datasets.root)
                    )
        if not drafts:
            raise SettingsError(
                f"no method can be run on {self.dataset} with these settings; name one to see why"
            )
        return drafts

    def _unfit(
        self, frame: Layers, protocol: str, dataset: DomainDataset, recipe: str
    ) -> str | None:
        """Return why a method cannot be run on a data set, ``None`` if it can.

        It can be unsuitable for the data, untuned where tuned settings are requested, or without a
        learning rate for its optimizer.

        Raises:
            SettingsError: If the user's settings or the recipe cannot be used with any method.
        """
        method = frame.named["method"]
        plugin = outline(method)
        named = {**frame.named, "protocol": protocol}
        layers = frame._replace(user=dict(self.settings), named=named)
        settings = settle(layers)
        try:
            check_fit(settings, plugin, dataset)
            if plugin.needs_text and not self._has_text(settings, dataset):
                return f"the features by {settings.features.encoder} have no text features"
            ledger = self._ledger(protocol, method, recipe)
            tuned = read_settings(ledger.settings) if ledger else {}
            check_fit(settings, plugin, dataset, _rate(layers._replace(tuned=tuned), recipe))
        except SettingsError as error:  # the advice after the colon is for users who name a method
            return str(error).partition(": ")[0]
        return None

    def _has_text(self, settings: RunSettings, dataset: DomainDataset) -> bool:
        """Return whether the features of a run are there and have those of the classes' names."""
        encoding = Encoding.of(settings)
        if encoding is None:
            return False
        try:
            path = encoding.find(dataset, cache_dir(self.resources.cache_dir))
            with opened(path) as file:
                return "text" in file.keys()  # noqa: SIM118 - no mapping
        except (DataError, SettingsError):
            return False

    @staticmethod
    def _check_recipe(recipe: str) -> None:
        """Refuse unknown names in a user's recipe: a misspelt name would set nothing."""
        for kind, given in zip(("data set", "method"), names_in(recipe), strict=True):
            for name in sorted(given):
                try:
                    check_name(kind, name)
                except SettingsError as error:
                    raise SettingsError(f"recipe {recipe}: {error}") from error

    def _tuned_on(self, protocol: str) -> str:
        """Return the protocol whose ledgers have the tuned settings for runs of a protocol."""
        if isinstance(self.tuned, bool):
            return protocol
        first, *others = read_names("protocol", self.tuned, PROTOCOLS)
        if others:
            raise SettingsError(f"tuned={self.tuned}: tuned settings are those of one protocol")
        return first

    def _ledger(self, protocol: str, method: str, recipe: str) -> TuningLedger | None:
        """Return a method's ledger, ``None`` if the runs use no tuned settings."""
        if not self.tuned:
            return None
        protocol = self._tuned_on(protocol)
        return load_ledger(self.resources.results, self.dataset, protocol, recipe, method)

    def _tuned(self, named: Layer, recipe: str) -> TunedRecord | None:
        """Return the result of tuning a method, ``None`` if the runs do not use it."""
        method, protocol = named["method"], self._tuned_on(named["protocol"])
        ledger = self._ledger(named["protocol"], method, recipe)
        if ledger is None:
            return None
        if both := sorted(set(ledger.seeds).intersection(read_seeds(self.seeds))):
            raise SettingsError(
                f"seed {both[0]} chose the tuned settings of {method}: give other seeds to the "
                f"runs that are compared"
            )
        several = len(ledger.seeds) if len(ledger.seeds) > 1 else None
        other = protocol if protocol != named["protocol"] else None
        return TunedRecord(
            trials=len(ledger.trials),
            settings=ledger.settings,
            seeds=several,
            raced=ledger.rule == "raced" or None,
            protocol=other,
            scenario=ledger.scenario,
            given=[pair for pair in ledger.given if not pair.startswith("evaluation.")],
        )

    def one_scenario(self, datasets: Datasets | None = None) -> Request:
        """Return the request for one scenario: the protocol's first if none is named.

        Raises:
            SettingsError: If the scenario is unknown, or several are named.
        """
        dataset = (datasets or Datasets(self.resources.data_root)).open(self.dataset)
        protocol, *others = listed(self._protocols(dataset))
        if others:
            raise SettingsError(f"this command takes one protocol: give --protocol {protocol}")
        chosen = self._scenarios(protocol, dataset)
        first = chosen[0][0].name
        if self.scenario is not None and len(chosen) > 1:
            raise SettingsError(
                f"this command takes one scenario and {','.join(listed(self.scenario))} names "
                f"{len(chosen)}: give one, such as {first}"
            )
        return replace(self, scenario=first)

    def _protocols(self, dataset: DomainDataset) -> Words:
        return dataset.default_protocol if self.protocol is None else self.protocol

    def _scenarios(self, protocol: str, dataset: DomainDataset) -> list[tuple[Scenario, Layer]]:
        """Return the requested scenarios, each with its split file, if there is one."""
        select = dataset.default_scenario.get(protocol)
        if self.scenario is not None:
            select = ",".join(listed(self.scenario))
        data = self.settings.get("data", {})
        split_csv = validate(DataSettings, data, "data.").split_csv
        if split_csv is None:
            chosen = scenarios(protocol, dataset.domains, dataset.letters, select, dataset.official)
            return [(scenario, {}) for scenario in chosen]
        for key in {"id_val_fraction", "id_test_fraction"} & set(data):
            raise SettingsError(
                f"data.{key} is for splits that are drawn and data.split_csv gives others: leave "
                f"one of them out"
            )
        files = scenarios_with_files(Path(split_csv), protocol, dataset, select)
        return [(scenario, {"data": {"split_csv": str(file)}}) for scenario, file in files]


def owners(names: Iterable[str], methods: Sequence[str]) -> dict[str, list[str]]:
    """Return the methods that have each setting of ``hyper``.

    If only some have it, their names are logged once.

    Raises:
        SettingsError: If no method has it.
    """
    known = {method: outline(method).own.settings for method in methods}
    by_setting = {}
    for name in names:
        able = [method for method in methods if name in known[method]]
        if not able:
            every = [f"hyper.{each}" for fields in known.values() for each in fields]
            if not every:
                raise SettingsError(
                    f"unknown setting 'hyper.{name}': none of the methods {', '.join(methods)} has "
                    f"settings of its own, so leave it out"
                )
            raise SettingsError(unknown("setting", f"hyper.{name}", every))
        if len(able) < len(methods):
            _say_once(f"hyper.{name} applies to {', '.join(able)}; no other method here has it")
        by_setting[name] = able
    return by_setting


def shared_out(settings: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Layer]:
    """Return the settings of each method: all but those of ``hyper`` that only others have.

    A single method gets all, and refuses later those that it lacks.

    Raises:
        SettingsError: See `owners`.
    """
    hyper = settings.get("hyper")
    if len(methods) == 1 or not isinstance(hyper, Mapping):
        return {method: dict(settings) for method in methods}
    able = owners(hyper, methods)
    return {
        method: {**settings, "hyper": {n: v for n, v in hyper.items() if method in able[n]}}
        for method in methods
    }


def _no_pair(words: Sequence[str], given: Mapping[str, Any]) -> str:
    """Return the error about words that are no ``KEY=VALUE``, with the flag they may belong to.

    A flag in ``given`` that takes a list may lack the commas, as in ``--seeds 0 1 2``.
    """
    known: dict[str, Collection[str]] = {
        "method": (*names("method"), "all"),
        "protocol": PROTOCOLS,
        "dataset": names("data set"),
        "recipe": recipe_names(),
    }

    def fits(flag: str, word: str) -> bool:
        if flag in known:
            return {known_name(name, known[flag]) for name in listed(word)} <= {*known[flag]}
        number = not word.strip("0123456789,-")
        return flag in given and number == (flag == "seeds")

    message = f"cannot read {short(words[0])}: expected KEY=VALUE"
    for flag in (*known, "seeds", "scenario"):
        if fits(flag, words[0]):
            several = flag in given and flag not in ("dataset", "recipe")
            more = [word for word in words if fits(flag, word)] if several else words[:1]
            value = ",".join([given[flag], *more] if several else more)
            return f"{message}; did you mean --{flag} {value}?"
    return f"{message}, such as train.lr=0.001, and commas between several values"


def flag_layer(flag: str, value: Any) -> Layer:
    """Return the setting of a flag, by its name in `FLAGS` or a symbol."""
    key = FLAGS.get(flag) or SYMBOLS[flag]
    return nested(key, str(value) if isinstance(value, Path) else value)


def file_layer(path: Path) -> Layer:
    """Return the names and settings of a file, each setting by its full key."""
    layer = load_layer(path)
    if twice := _seeds_twice(layer, apart=True):
        raise SettingsError(f"settings file {path}: {twice}")
    named = {name: layer.pop(name) for name in (*NAMES, "seed") if name in layer}
    try:
        return {**named, **read_settings(layer)}
    except SettingsError as error:
        raise SettingsError(f"settings file {path}: {error}") from error


def _without_effect(settings: RunSettings) -> dict[str, str]:
    """Return the settings without effect, each with the setting that disables it."""
    kind, train = settings.partition.kind, settings.train
    uses: dict[str, list[str]] = {}
    for other, (_, used) in PARTITION_RULES.items():
        for name in used:
            uses.setdefault(name, []).append(other)
    reasons = {
        f"partition.{name}": f"partition.kind={kind}, only with {' or '.join(kinds)}"
        for name, kinds in uses.items()
        if kind not in kinds
    }
    other = {"adam": "momentum", "sgd": "eps"}[train.optimizer]
    reasons[f"train.{other}"] = f"train.optimizer={train.optimizer}"
    if train.schedule != "exponential":
        reasons["train.decay"] = f"train.schedule={train.schedule}"
    return reasons


def _say_without_effect(idle: Iterable[str], settled: RunSettings, layers: Layers) -> None:
    """Warn of a user's settings that have no effect, with or without the method's needs.

    This is no error: a record can hold such a setting, and the command that repeats a run gives all
    settings of the record. A setting that is the same without the user's settings changes no key.
    """
    why, still = _without_effect(settled), _without_effect(settle(layers))
    plain = settle(layers._replace(needs={}, user={}))
    given, before = (dotted(s.model_dump(mode="json")) for s in (settled, plain))
    for key in sorted(idle):
        if key in still and given[key] != before[key]:
            _say_once(f"{key} has no effect with {why[key]}, but the run key has it: leave it out")


@cache
def _say_once(words: str) -> None:
    logger.warning(words)


def _holds(settings: Mapping[str, Any], pair: str) -> bool:
    """Return whether settings by dotted key have the value of a ``KEY=VALUE``."""
    wanted = dotted(parse_override(pair, ("readings",)))
    return all(settings.get(key) == value for key, value in wanted.items())


def _rate(layers: Layers, recipe: str) -> Rate | None:
    """Return the recipe's learning rate; ``None`` if a later layer gives another."""
    if any("lr" in layer.get("train", {}) for layer in (layers.entry, layers.tuned, layers.user)):
        return None
    optimizer = layers.recipe.get("train", {}).get("optimizer", TrainSettings().optimizer)
    return Rate(Path(recipe).stem, optimizer)


def _settle(draft: Draft, seed: int) -> Plan:
    """Merge recipe, the method's needs and the user's settings, and compute the run's key.

    The recipe's entry for this method overrides the method's needs.
    """
    layers, scenario, recipe, dataset, tuned, root = draft
    name = layers.named["method"]
    method = outline(name)
    if files := set(layers.tuned.get("hyper", {})) & set(method.own.files):
        raise SettingsError(f"tuning chooses no files: the ledger of {name} has {files}")
    named = {**layers.named, "seed": seed}
    settings = settle(layers._replace(named=named), partial(own_values, name), dataset.Settings)
    settings = _with_network(settings, root)
    dataset = dataset.adjusted(settings.world)
    check_fit(settings, method, dataset, _rate(layers, recipe))
    dataset.decoded(settings.data)  # refuses settings that the data set cannot follow
    canonical = canonical_settings(settings, method.own, dataset.Settings)
    if dataset.identity:
        canonical["data"]["names"] = {k: list(names) for k, names in dataset.identity.items()}
    order = dataset.reference_domains or (settings.data.split_csv and dataset.domains)
    if settings.partition.rounding == "reference" and order:
        # Records without it predate the use of the reference's own order.
        canonical["partition"]["order"] = list(order)
    if settings.train.precision == "bf16-mixed":
        # Records without it had other gradients of depthwise convolutions on CPUs.
        canonical["train"]["float32"] = ["strided depthwise inputs"]
    key = run_key(canonical, method.version)
    return Plan(settings, canonical, scenario, recipe, method.version, key, dataset, tuned)


def _with_network(settings: RunSettings, root: Path | None) -> RunSettings:
    """Fill in the style network that `data download` made, unless the settings name one."""
    hyper = settings.hyper
    wanted = "style" in hyper and not hyper.get("style_weights", True)
    network = find_network(hyper["style"], root) if wanted else None
    if network is None:
        return settings
    return settings.model_copy(update={"hyper": {**hyper, "style_weights": [str(network)]}})


def check_runs(plans: Sequence[Plan]) -> None:
    """Check the data and the weights of runs before they start, and warn of flaws in the data."""
    say_cautions(plans)
    check_data(plans)
    check_weights(plans)


def check_without_download(plans: Sequence[Plan]) -> str:
    """Check runs as `check_runs` does, without a download, and return the other checks as a text.

    The text is empty if all checks were made. Others need images or files that are not here.
    """
    say_cautions(plans)
    left: dict[str, None] = {}
    here = []
    for plan in plans:
        s = plan.settings
        check_image_size(s.backbone, s.data.image_size)
        try:
            plan.dataset.find()
            here.append(plan)
        except DataError:
            if plan.dataset.data_root is not None:  # the user says that they are here
                raise
            left[f"the images of {plan.dataset.title} and their partition (not found)"] = None
    check_data(here)
    different = {str((p.settings.backbone, p.settings.method, p.settings.hyper)): p for p in plans}
    for plan in different.values():
        backbone = plan.settings.backbone
        if backbone.pretrained:
            from feddg_bench.models.backbones import must_download

            if must_download(backbone):
                left[f"weights of {backbone.name} (downloaded by a run)"] = None
                rest = backbone.model_copy(update={"pretrained": False})
                plan = plan._replace(settings=plan.settings.model_copy(update={"backbone": rest}))
        try:
            check_weights([plan])
        except DataError as error:
            left[f"files ({error})"] = None
    return "; ".join(left)


def check_folders(plans: Iterable[Plan], results: Path) -> None:
    """Refuse runs on a user's own folder that are recorded for other images of this folder.

    Two contents of a folder have two keys. A record of the present images shows that the user knows
    of the change.

    Raises:
        DataError: If there is such a record.
    """
    own = [plan for plan in plans if "files" in plan.dataset.identity]
    runs = read_folder(results)[0] if own and results.is_dir() else []
    paths = {run.key: run.source.path for run in runs}
    for plan in own:
        data, label = plan.canonical["data"], plan.dataset.label
        recorded = [
            run.nested["data"]["names"]
            for run in runs
            if run.label in (label, None) and "files" in run.nested["data"].get("names", ())
        ]
        if data["names"] in recorded:
            continue
        for earlier in recorded:
            if {**earlier, "files": data["names"]["files"]} == data["names"]:
                before = {**plan.canonical, "data": {**data, "names": earlier}}
                if (key := run_key(before, plan.version)) in paths:
                    raise other_images(paths[key], plan.dataset)


def other_images(path: Path, dataset: DomainDataset, what: str = "images") -> DataError:
    """Return the error that a record or a checkpoint is of other images than those here."""
    begun = path.suffix == ".safetensors"
    way = "delete it" if begun else "use `run --again`, which keeps the old record"
    return DataError(
        f"{from_here(path)} was made from other {what} than those of {dataset.title} now: give "
        f"another --results folder or the right --data-root, or {way}"
    )


def check_data(plans: Iterable[Plan]) -> None:
    """Refuse runs whose images cannot be partitioned by their settings; no image is decoded.

    Raises:
        SettingsError: If there are too few images for the clients, or the images' size does not
            suit the backbone.
        DataError: If the data set is missing, a split file does not fit, or a class is missing.
    """
    seen = set()
    for plan in plans:
        s = plan.settings
        check_image_size(s.backbone, s.data.image_size)
        validation = outline(s.method).client_validation
        spreading = (s.protocol, s.scenario, s.seed, s.data, s.partition, s.federation, validation)
        if str(spreading) not in seen:
            seen.add(str(spreading))
            spread(s, plan.dataset, plan.scenario, validation=validation)


def say_cautions(plans: Sequence[Plan]) -> None:
    """Warn, once per process, of a single training domain, and of flaws in a user's own data set.

    Flaws are files that are not read, images in folders inside class folders, tiny test domains,
    and missing or imbalanced classes. No image is decoded.
    """
    single = {plan.scenario for plan in plans if len(plan.scenario.train) == 1}
    if single:
        first = min(single, key=lambda scenario: scenario.name)
        which = f"scenario {first.name} trains"
        if len(single) > 1:
            which = f"{len(single)} scenarios, such as {first.name}, train"
        how = "use --protocol lodo" if first.protocol == "ltdo" else "add a domain"
        _say_once(
            f"{which} on a single domain, which is not domain generalisation from several: {how}"
        )
    tested: dict[ImageFolderDataset, set[str]] = {}
    for plan in plans:
        dataset = plan.dataset
        if isinstance(dataset, ImageFolderDataset) and dataset.identity:  # others are published
            tested.setdefault(dataset, set()).add(plan.scenario.test)
    for dataset, domains in tested.items():
        counts = dataset.count(dataset.records())
        sentences = list(cautions(counts, dataset.domains, dataset.classes, domains))
        for words in filter(None, (dataset.nested(), dataset.skipped(), *sentences)):
            _say_once(f"{dataset.title}: {words}")


def check_weights(plans: Iterable[Plan]) -> None:
    """Refuse runs for which weights of the backbone or of a style network cannot be loaded.

    Raises:
        SettingsError: If a file does not fit, or there is nothing to fetch.
        DataError: If a file is missing or damaged, or cannot be fetched.
    """
    seen = set()
    for plan in plans:
        s, dataset = plan.settings, plan.dataset
        check_consistent(s.backbone, rgb=is_rgb(dataset))
        if s.backbone.pretrained and str(s.backbone) not in seen:
            from feddg_bench.models.backbones import build_backbone

            seen.add(str(s.backbone))
            build_backbone(s.backbone, dataset.channels, rgb=is_rgb(dataset))
        files = outline(s.method).own.files
        if files and str((s.method, s.hyper)) not in seen:
            from feddg_bench.engine.construction import build_method

            seen.add(str((s.method, s.hyper)))
            build_method(s.method, num_classes=len(dataset.classes) or 1, **s.hyper)


def plan_again(
    settings: Layer, recipe: str, datasets: Datasets, tuned: TunedRecord | None = None
) -> Plan:
    """Return the plan for the resolved settings in a checkpoint or a record.

    ``tuned`` is the part of them that tuning chose.

    Raises:
        SettingsError: If the settings can no longer be used.
    """
    dataset = datasets.open(settings["dataset"])
    (scenario,) = scenarios(
        settings["protocol"],
        dataset.domains,
        dataset.letters,
        settings["scenario"],
        dataset.official,
    )
    named = {"method": settings["method"]}
    layers = Layers(needs=outline(settings["method"]).needs, user=settings, named=named)
    draft = Draft(layers, scenario, recipe, dataset)
    return _settle(draft, settings["seed"])._replace(tuned=tuned)


def read_seeds(given: str | int | Sequence[int]) -> tuple[int, ...]:
    """Return the seeds given by a number, a sequence or a text, at most `MAX_SEEDS`.

    Raises:
        SettingsError: If there are none, or too many.

    >>> read_seeds("0, 2,0"), read_seeds("0-2,7"), read_seeds(3), read_seeds([4, 1])
    ((0, 2), (0, 1, 2, 7), (0, 1, 2), (4, 1))
    """
    seeds: Iterable[int]
    if isinstance(given, _WHOLE):
        seeds = range(0 if given is True else int(given))
    elif isinstance(given, str):
        seeds = (seed for part in given.split(",") for seed in _seed_range(part.strip()))
    else:
        seeds = given if isinstance(given, Iterable) and not isinstance(given, bytes) else ()
    read = list(islice(seeds, MAX_SEEDS + 1))  # it can be infinite
    if len(read) > MAX_SEEDS:
        single = isinstance(given, _WHOLE) and given < 2**63
        one = f"; for one seed give [{given}]" if single else ""
        raise SettingsError(f"seeds {short(given)} are more than {MAX_SEEDS:,}: give fewer{one}")
    whole = all(isinstance(s, _WHOLE) and not isinstance(s, bool) and s >= 0 for s in read)
    if not read or not whole:
        raise SettingsError(
            f"cannot read seeds {short(given)}: expected numbers >= 0 of at most 18 digits without "
            f"leading zeros, separated by commas, such as 0,1,2 or 0-2, at most {MAX_SEEDS:,}"
        )
    return tuple(dict.fromkeys(map(int, read)))


def counted_seeds(count: Any, first: int = 0) -> tuple[int, ...]:
    """Return ``count`` seeds that follow each other.

    Raises:
        SettingsError: If ``count`` is no number from 1 to `MAX_SEEDS`.

    >>> counted_seeds(3), counted_seeds(2, 100)
    ((0, 1, 2), (100, 101))
    """
    whole = isinstance(count, _WHOLE) and not isinstance(count, bool)
    if not whole or not 1 <= count <= MAX_SEEDS:
        raise SettingsError(
            f"num_seeds: {short(count)} cannot be read; expected a number of seeds from 1 to "
            f"{MAX_SEEDS:,}"
        )
    return tuple(range(first, first + int(count)))


def one_of_seeds(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the seeds given by one of `SEEDS`, of which the others are ``None``; else seed 0.

    Raises:
        SettingsError: If they are given twice, or cannot be read.
    """
    some = {name: value for name, value in given.items() if value is not None}
    if twice := _seeds_twice(some, apart=True):
        raise SettingsError(twice)
    if "num_seeds" in some:
        return counted_seeds(some["num_seeds"])
    if "seed" in some:
        single = isinstance(some["seed"], _WHOLE)
        return read_seeds([some["seed"]] if single else some["seed"])
    return read_seeds(some.get("seeds", "0"))


def _seeds_twice(names: Iterable[str], *, apart: bool = False) -> str | None:
    """Return an error if the seeds are given by two names of `SEEDS`, ``None`` otherwise.

    ``seed`` and ``seeds`` count as two only if they are ``apart``.
    """
    some = set(names)
    given = [name for name in SEEDS if name in some]
    if len(given) < 2 or (not apart and "num_seeds" not in given):
        return None
    return f"{' and '.join(given)} give the same: leave in only one"


def _seed_range(part: str) -> Sequence[int]:
    number = "(0|[1-9][0-9]{0,17})"  # 010 could mean 8, as it does in YAML
    match = re.fullmatch(f"{number}(?:-{number})?", part)
    if match is None:
        return [-1]
    low, high = int(match[1]), int(match[2] or match[1])
    return range(low, high + 1) if low <= high else [-1]


def _words(name: str, value: Any) -> Any:
    """Return a name's value from YAML or a flag as text, even a scenario such as ``15``."""
    if isinstance(value, bool) or not isinstance(value, (str, int, list)):
        raise SettingsError(_unreadable(name, value))
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)


def _unreadable(name: str, value: Any) -> str:
    return f"{name}: {short(value)} cannot be read; expected a name, or several by commas"
