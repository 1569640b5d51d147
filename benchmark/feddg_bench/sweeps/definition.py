"""Sweep files in W&B's format, and the points drawn from them."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from itertools import accumulate, islice, product
from pathlib import Path
from typing import Any

from feddg_bench import plugins
from feddg_bench.common.errors import FeddgError, SettingsError, unknown
from feddg_bench.common.files import find_yaml
from feddg_bench.common.streams import generator
from feddg_bench.config.layers import Layer, dotted_fields, full_key, kind_of, load_layer
from feddg_bench.config.names import SYMBOLS
from feddg_bench.config.reading import listed, read_names
from feddg_bench.records.metrics import METRICS
from feddg_bench.records.record import RunRecord
from feddg_bench.records.rules import split_metric
from feddg_bench.runs.request import NAMES, SEEDS, Request, owners

logger = logging.getLogger(__name__)

Point = dict[str, Any]
"""Parameter -> value."""

METHODS = ("grid", "random", "bayes")
_HEAD = ("name", "description", "project", "entity", "program", "command")
_KEYS = (*_HEAD, "method", "metric", "parameters", "run_cap")
_LISTED = ("constant", "categorical", "categorical_w_probabilities")
_DISTRIBUTIONS = (*_LISTED, "uniform", "int_uniform", "q_uniform", "log_uniform_values")
_MACRO = "${args_no_hyphens}"
_READ_BY_RUN = ("method", "protocol", "scenario", *SEEDS)  # as lists, with 0-2 and all
_ONE_VALUE = ("[", "{", '"', "'")  # what starts a list, a mapping or a quoted text in YAML
TARGETS = tuple(
    f"{split}/{name}" for split in ("val", "id_val") for name, m in METRICS.items() if m.tasks
)
"""Split and metric, over all of the split's images, after the last round."""
MAX_POINTS = 10_000
"""Maximum number of points in a sweep: more are a mistake, and planning them would take hours."""


@dataclass(frozen=True)
class Choice:
    """A choice from a list of values; a fixed value is a choice of one."""

    values: tuple[Any, ...]  # values to choose from
    probabilities: tuple[float, ...] | None = None  # of the values, in a random search

    def draw(self, uniform: float) -> Any:
        """Return the value at ``uniform``, a number in [0, 1)."""
        n = len(self.values)
        ends = accumulate(self.probabilities or (1 / n,) * n)
        reached = (value for value, end in zip(self.values, ends, strict=True) if uniform < end)
        return next(reached, self.values[-1])


@dataclass(frozen=True)
class Range:
    """A number between two bounds, both included."""

    low: float  # lower bound
    high: float  # upper bound
    log: bool = False  # whether its logarithm is uniform
    step: float | None = None  # values are its multiples; `None` for any value
    integer: bool = False  # whether only whole numbers are drawn

    def count(self) -> int:
        """Return the number of values of an integer range; 1 for any other range."""
        return int(self.high) - int(self.low) + 1 if self.integer else 1

    def rounded(self, number: float) -> float:
        """Return the multiple of the step that is nearest, with the step's decimals."""
        if self.step is None:
            return number
        return float(Decimal(repr(self.step)) * round(number / self.step))

    def draw(self, uniform: float) -> float:
        """Return the number at ``uniform``, a number in [0, 1)."""
        if self.integer:
            return int(self.low) + int(uniform * (int(self.high) - int(self.low) + 1))
        if self.log:
            return float(self.low * (self.high / self.low) ** uniform)
        return self.rounded(self.low + uniform * (self.high - self.low))


@dataclass(frozen=True)
class Objective:
    """A metric and its direction of improvement."""

    name: str  # one of `TARGETS`
    maximize: bool  # whether a larger value is better

    def value(self, record: RunRecord) -> float:
        """Return the metric of a finished run; NaN for a loss that overflowed.

        Raises:
            SettingsError: If the run has no images of the split, or does not measure the metric.
        """
        split, metric = self.name.split("/")
        evaluation = record.evaluation()
        value = split_metric(evaluation, split, metric)
        if value is None and evaluation.get(split):
            raise SettingsError(
                f"run {record.key} does not measure {metric} over all of {split}; "
                f"choose by {split}/{record.metric.name}"
            )
        if value is None:
            raise SettingsError(
                f"run {record.key} has no {split} images, as {record.protocol} has none; "
                f"choose by id_val/{metric}"
            )
        return value


@dataclass(frozen=True)
class Sweep:
    """Content of a sweep file."""

    name: str  # human-readable name
    method: str  # `grid`, `random` or `bayes`
    fixed: tuple[str, ...]  # `KEY=VALUE` of the file's command
    parameters: Mapping[str, Choice | Range]  # by name, in the order of the file
    objective: Objective | None  # criterion by which points are compared
    run_cap: int | None  # maximum number of points; `None` for a whole grid

    @property
    def id(self) -> str:
        """Hash of the search; it depends neither on the name nor on ``run_cap``."""
        space = {name: repr(parameter) for name, parameter in self.parameters.items()}
        text = json.dumps([self.method, self.fixed, space, repr(self.objective)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def pairs(self, point: Point) -> list[str]:
        """Return the arguments of ``feddg-bench run`` for a point, as W&B's agent writes them.

        In a sweep over methods, settings of ``hyper`` that the point's method lacks are left out,
        so that points which differ only in them are the same.

        Raises:
            SettingsError: If a method is unknown, or no method of the sweep has a setting.
        """
        pairs = [*self.fixed, *(f"{name}={value}" for name, value in point.items())]
        keys = {pair: pair.partition("=")[0].strip() for pair in pairs}
        hyper = {pair: key.split(".")[1] for pair, key in keys.items() if key.startswith("hyper.")}
        swept = self.parameters.get("method")
        if not hyper or not isinstance(swept, Choice) or len(swept.values) < 2:
            return pairs
        own, every = (
            plugins.read_plugins("method", ",".join(map(str, values)), plugins.outline)
            for values in ([point["method"]], swept.values)
        )
        able = owners(hyper.values(), every)
        return [pair for pair in pairs if pair not in hyper or {*own} & {*able[hyper[pair]]}]

    def points(self) -> Iterator[Point]:
        """Yield the points of a grid or of a random search, the first ``run_cap`` if that is set.

        Point i of a random search depends on i and on the names and ranges of the parameters, so a
        search with a higher ``run_cap`` begins with the points of one with a lower.
        """
        names = list(self.parameters)
        if self.method == "grid":
            values = [_listed(name, p) for name, p in self.parameters.items()]
            few = [islice(listed, self.run_cap) for listed in values]  # `product` reads all of them
            for chosen in islice(product(*few), self.run_cap):
                yield dict(zip(names, chosen, strict=True))
            return
        for i in range(self.run_cap or 0):
            yield {
                name: p.draw(generator(0, "sweep", i, name).random())
                for name, p in self.parameters.items()
            }


def load_sweep(path: Path, pairs: Iterable[str] = ()) -> Sweep:
    """Read a sweep file.

    ``path`` can be the name of a sweep that comes with the package, such as ``ltdo``. ``pairs``,
    each ``KEY=VALUE``, override the file's values of their keys. Commas part several values, except
    in a list or a quoted text of YAML.

    Raises:
        SettingsError: If the sweep cannot run here, with a one-sentence message that names the key.
    """
    path = find_yaml("sweep", "sweeps", str(path), "*.yaml", "tune/*.yaml")
    layer, parameters = _read(path)
    method = layer.get("method")
    if method is None:
        raise SettingsError(f"{path}: method is missing: give method: {' or '.join(METHODS)}")
    if method not in METHODS:
        raise SettingsError(f"{path}: {unknown('method of a sweep', str(method), METHODS)}")
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise SettingsError(
                f"cannot read {pair!r}: expected KEY=VALUE, such as seed=0, and commas between "
                f"several values"
            )
        key = SYMBOLS.get(key.strip(), key)
        if "num_seeds" in (key, *parameters) and key in SEEDS:
            parameters = {name: p for name, p in parameters.items() if name not in SEEDS}
        meant = _full_name(key)
        same = [n for n in parameters if n.endswith(f".{key}") or _full_name(n) == meant]
        whole = key in _READ_BY_RUN or value.startswith(_ONE_VALUE)
        values = (value,) if whole else tuple(listed(value))
        parameters[same[0] if len(same) == 1 else key] = Choice(values)
    objective = _objective(path, layer.get("metric"))
    cap = layer.get("run_cap")
    if cap is not None and (not isinstance(cap, int) or isinstance(cap, bool) or cap < 1):
        raise SettingsError(f"{path}: run_cap must be a number of points >= 1, not {cap!r}")
    if method != "grid" and cap is None:
        raise SettingsError(f"{path}: a {method} search never ends by itself; add run_cap: 30")
    if method == "bayes" and objective is None:
        raise SettingsError(
            f"{path}: a bayes search needs metric: {{name: val/accuracy, goal: maximize}}"
        )
    sizes = [len(p.values) if isinstance(p, Choice) else p.count() for p in parameters.values()]
    points = min(cap or math.inf, math.prod(sizes) if method == "grid" else math.inf)
    if points > MAX_POINTS:
        raise SettingsError(
            f"{path}: a sweep of {points:,} points is more than {MAX_POINTS:,}: give fewer values, "
            f"or run_cap: {MAX_POINTS} for the first of them"
        )
    name = str(layer.get("name") or path.stem)
    fixed = _fixed(path, layer.get("command"))
    if method != "grid":
        named: dict[str, Any] = dict(pair.split("=", 1) for pair in fixed)
        named |= {n: p.values for n, p in parameters.items() if isinstance(p, Choice)}
        _say_whole(path, layer, parameters, named)
    return Sweep(name, method, fixed, parameters, objective, cap)


def load_ranges(path: Path) -> dict[str, Choice | Range]:
    """Return the parameters of a sweep file, which can lack everything else.

    Raises:
        SettingsError: If they cannot be read, with a one-sentence message that names the key.
    """
    layer, parameters = _read(path)
    _say_whole(path, layer, parameters, {"method": path.stem})
    return parameters


def _say_whole(
    path: Path, layer: Layer, parameters: Mapping[str, Choice | Range], named: Mapping[str, Any]
) -> None:
    """Warn of whole bounds, from which W&B infers integers, of a setting that takes fractions.

    ``named`` holds the methods and data sets of the runs, one or several each.
    """
    kinds = {key: kind_of(field) for key, field in dotted_fields()}
    sections = (("hyper", "method", _method_kinds), ("world", "data set", _world_kinds))
    for section, kind, load in sections:
        field = kind.replace(" ", "")
        given = named.get(field, getattr(Request, field))
        given = given if isinstance(given, str) else ",".join(map(str, given))
        with suppress(FeddgError):  # refused later
            for name in read_names(kind, given, plugins.names(kind), every=True):
                kinds |= {f"{section}.{key}": kind for key, kind in load(name).items()}
    for name, spec in layer["parameters"].items():
        key = _full_name(name)
        parameter = parameters.get(SYMBOLS.get(name, name))
        whole = isinstance(parameter, Range) and parameter.integer and "distribution" not in spec
        if whole and "number" in kinds.get(key, ""):
            logger.warning(
                "%s: the bounds of %s are whole, so W&B and `sweep` draw whole numbers only; for "
                "all numbers from %s to %s add distribution: uniform",
                *(path, name, spec["min"], spec["max"]),
            )


def _method_kinds(name: str) -> dict[str, str]:
    return {key: setting.kind for key, setting in plugins.outline(name).own.settings.items()}


def _world_kinds(name: str) -> dict[str, str]:
    fields = plugins.load_dataset(name).Settings.model_fields
    return {key: kind_of(field) for key, field in fields.items()}


def _read(path: Path) -> tuple[Layer, dict[str, Choice | Range]]:
    """Return the content of a sweep file, and its parameters by name."""
    layer = load_layer(path, "sweep file")
    for key in layer:
        if key == "early_terminate":
            raise SettingsError(f"{path}: early_terminate works on W&B's servers only; remove it")
        if key not in _KEYS:
            raise SettingsError(f"{path}: {unknown('key', str(key), _KEYS)}")
    given = layer.get("parameters")
    if not isinstance(given, dict) or not given:
        raise SettingsError(f"{path}: parameters must hold NAME: {{values: [...]}} lines")
    words = layer.get("command") if isinstance(layer.get("command"), list) else []
    fixed = [str(word).partition("=")[0] for word in words or () if "=" in str(word)]
    meant: dict[str, str] = {}
    for name in (*fixed, *given):
        key = _full_name(name)
        if key in meant:
            raise SettingsError(f"{path}: {meant[key]} and {name} set the same: leave one out")
        meant[key] = name
    return layer, {
        SYMBOLS.get(name, name): _parameter(path, name, spec)
        for name, spec in ((str(name), spec) for name, spec in given.items())
    }


def _full_name(name: str) -> str:
    """Return the full key of a parameter; an unknown one is refused when a run is planned."""
    try:
        return "seeds" if name in SEEDS else full_key(name, NAMES)
    except SettingsError:
        return name


def _objective(path: Path, metric: Any) -> Objective | None:
    """Return the objective in a file's ``metric``: a validation metric with a goal."""
    if metric is None:
        return None
    if not isinstance(metric, dict) or not isinstance(metric.get("name"), str):
        raise SettingsError(f"{path}: metric must be {{name: val/accuracy, goal: maximize}}")
    name, goal = metric["name"], metric.get("goal")
    if "test" in name.lower():
        raise SettingsError(
            f"{path}: {name} is a test metric, which must not choose anything; "
            f"name one of {', '.join(TARGETS)}"
        )
    if name not in TARGETS:
        raise SettingsError(f"{path}: {unknown('metric', name, TARGETS)}")
    if goal not in ("maximize", "minimize"):
        raise SettingsError(f"{path}: metric {name} needs goal: maximize or goal: minimize")
    return Objective(name, goal == "maximize")


def _fixed(path: Path, command: Any) -> tuple[str, ...]:
    """Return the ``KEY=VALUE`` of a command such as ``[feddg-bench, run, ${args_no_hyphens}]``.

    A file can lack it, unless ``wandb agent`` runs the sweep: W&B's own default command would pass
    ``--KEY=VALUE``.
    """
    if command is None:
        return ()
    expected = f'command: ["${{env}}", feddg-bench, run, "{_MACRO}"]'
    if not isinstance(command, list) or _MACRO not in command or "run" not in command:
        raise SettingsError(f"{path}: the command must hand KEY=VALUE to `run`: {expected}")
    words = [str(word) for word in command[command.index("run") + 1 :]]
    fixed = []
    skip = False
    for word in words:
        if skip or word == _MACRO:
            skip = False
        elif word.startswith(("--wandb", "--logger")):
            skip = "=" not in word  # where numbers are sent does not change them
        elif word.startswith(("-", "$")) or "=" not in word:
            raise SettingsError(
                f"{path}: the command has {word!r} where KEY=VALUE is expected: {expected}"
            )
        else:
            fixed.append(word)
    return tuple(fixed)


def _parameter(path: Path, name: str, spec: Any) -> Choice | Range:
    """Return the parameter that W&B's description defines."""
    where = f"{path}: parameter {name}"
    if not isinstance(spec, dict):
        raise SettingsError(f"{where} must be {{value: ...}}, {{values: [...]}} or {{min:, max:}}")
    if "parameters" in spec:
        raise SettingsError(f"{where} is nested, which `run` cannot read; write {name}.NAME")
    kind = spec.get("distribution")
    if kind == "log_uniform":  # its min and max are exponents of e in W&B
        raise SettingsError(
            f"{where}: distribution log_uniform is not known here; write log_uniform_values, with "
            f"min and max as the values themselves"
        )
    if kind is not None and kind not in _DISTRIBUTIONS:
        raise SettingsError(f"{where}: {unknown('distribution', str(kind), _DISTRIBUTIONS)}")
    if "value" in spec or "values" in spec:
        values = [spec["value"]] if "value" in spec else spec["values"]
        if not isinstance(values, list) or not values:
            raise SettingsError(
                f"{where}: values must be a list with something in it, not {values!r}"
            )
        for value in values:
            if value is None or isinstance(value, dict):
                raise SettingsError(
                    f"{where}: {value!r} does not survive W&B's KEY=VALUE; leave it out"
                )
        return Choice(tuple(values), _probabilities(where, spec, len(values)))
    low: Any = spec.get("min")
    high: Any = spec.get("max")
    if not _number(low) or not _number(high) or low > high:
        raise SettingsError(f"{where}: expected value, values, or numbers min <= max")
    if not math.isfinite(float(high) - float(low)):
        raise SettingsError(f"{where}: min {low} and max {high} are too far apart")
    if kind in (None, "int_uniform") and isinstance(low, int) and isinstance(high, int):
        return Range(low, high, integer=True)
    if kind == "int_uniform":
        raise SettingsError(f"{where}: min and max of int_uniform must be whole numbers")
    if kind == "log_uniform_values":
        if low <= 0:
            raise SettingsError(f"{where}: min of log_uniform_values must be above 0, not {low}")
        if not math.isfinite(high / low):
            raise SettingsError(f"{where}: min {low} and max {high} are too far apart")
        return Range(float(low), float(high), log=True)
    if kind == "q_uniform":
        q = spec.get("q", 1.0)
        if not _number(q) or q <= 0 or (high - low) / q > 2**53:
            raise SettingsError(f"{where}: q must be a step above 0 that fits the range, not {q!r}")
        return Range(float(low), float(high), step=float(q))
    return Range(float(low), float(high))


def _probabilities(where: str, spec: Mapping[str, Any], n: int) -> tuple[float, ...] | None:
    given = spec.get("probabilities")
    if given is None:
        return None
    numbers = isinstance(given, list) and all(_number(p) and p >= 0 for p in given)
    if not numbers or len(given) != n or abs(math.fsum(given) - 1) > 1e-6:
        raise SettingsError(f"{where}: probabilities must be {n} numbers >= 0 with the sum 1")
    return tuple(map(float, given))


def _listed(name: str, parameter: Choice | Range) -> Sequence[Any]:
    if isinstance(parameter, Choice):
        return parameter.values
    if parameter.integer:
        return range(int(parameter.low), int(parameter.high) + 1)
    raise SettingsError(f"parameter {name} has no list of values for a grid; give values: [...]")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
