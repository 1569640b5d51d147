"""The Python interface: `run`, `tables` and `table` of ``import feddg_bench as fb``."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddg_bench.common.errors import SettingsError, short, unknown
from feddg_bench.config.layers import dotted, dotted_keys, full_key, merge, read_settings, validate
from feddg_bench.config.names import SYMBOLS, meant
from feddg_bench.config.reading import read_names
from feddg_bench.config.schema import KEEP, Resources
from feddg_bench.runs.request import (
    FLAGS,
    NAMES,
    SEEDS,
    Request,
    Words,
    check_folders,
    check_runs,
    file_layer,
    flag_layer,
    one_of_seeds,
)

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

    from feddg_bench.analysis.tables.make import MadeTable
    from feddg_bench.core.method import Method
    from feddg_bench.records.record import RunRecord
    from feddg_bench.runs.observer import Observer


def run(
    method: Words | type[Method] | Sequence[str | type[Method]] = Request.method,
    *,
    protocol: Words | None = None,
    dataset: str = Request.dataset,
    scenario: Words | None = None,
    recipe: str | None = None,
    seeds: str | int | Sequence[int] | None = None,
    num_seeds: int | None = None,
    config: str | Path | Sequence[str | Path] = (),
    settings: Mapping[str, Any] | None = None,
    readings: str = Request.readings,
    tuned: bool | str = Request.tuned,
    results: str | Path = "runs",
    keep: Words = (),
    again: bool = False,
    quiet: bool = False,
    observers: Sequence[Observer] = (),
    logger: str | Logger | Sequence[str | Logger] = (),
    **more: Any,
) -> list[RunRecord]:
    """Execute the runs that are not recorded yet, and return the records of all runs.

    Args:
        method: One or several methods, or ``all``. Each is a name or a subclass of
            `feddg_bench.Method`, whose runs are named after the class and a digest of its source.
        protocol: One or several of ``ltdo``, ``lodo`` and ``wilds``; ``None`` for the data set's
            default, ``ltdo``, or ``lodo`` for ``folder``.
        dataset: Name of a data set.
        scenario: One or several scenarios, ``all``, or ``None`` for the protocol's default.
        recipe: Name of a recipe or path of a YAML file; ``None`` for the data set's default.
        seeds: Number of seeds, counted from 0; a list of seeds; or text such as ``"0-2"``. Seed 0
            by default.
        num_seeds: Number of seeds, counted from 0, in place of ``seeds``.
        config: YAML files of settings; later ones take precedence, ``settings`` over all.
        settings: Settings by short, dotted or nested key, such as ``{"rounds": 1, "hyper.mu":
            0.1}``.
        readings: Variant of a paper's recipe: ``"published"`` or ``"corrected"`` (see `Request`).
        tuned: Use the settings chosen by ``feddg-bench tune`` on the same protocol, or on the named
            one.
        results: Folder of records and checkpoints.
        keep: Global models to keep in addition to the record: ``"last"``, ``"best"``.
        again: Repeat recorded runs; old records are set aside.
        quiet: Show no progress.
        observers: Additional observers of the runs (`feddg_bench.Observer`).
        logger: Names of loggers, ``csv``, ``tensorboard`` or ``mlflow``, whose logs are under
            ``logs`` in ``results``. Or objects of Lightning's loggers, for a call of one run.
        more: Settings that have a flag on the command line: ``rounds``, ``per_round``,
            ``clients``, ``heterogeneity``, ``split_csv`` and ``portable``; ``seed``, one seed; and
            fields of `feddg_bench.Resources`, such as ``data_root`` or ``workers``.

    Raises:
        FeddgError: With a message of one sentence, if something is unknown, missing or unsuitable.
    """
    flags = {name: more.pop(name) for name in (*FLAGS, *SYMBOLS) if name in more}
    of_seeds = {"seeds": seeds, "num_seeds": num_seeds, "seed": more.pop("seed", None)}
    for name in more:
        if name not in Resources.model_fields:
            raise SettingsError(_no_argument(name, more[name]))
    for name, switch in (("again", again), ("quiet", quiet)):
        if not isinstance(switch, bool):
            raise SettingsError(f"{name}: {switch!r} cannot be read; expected True or False")
    kept = read_names("model to keep", keep, KEEP)
    from feddg_bench.tracking.loggers import check_own, trackers

    loggers = [logger] if isinstance(logger, str) or not isinstance(logger, Iterable) else logger
    named = ",".join(one for one in loggers if isinstance(one, str)) or None
    own = [check_own(one) for one in loggers if not isinstance(one, str)]
    fixed = {"results": results, "logger": named}
    where = validate(Resources, {"workers": 1, **more, **fixed})
    chosen = _layers(config, flags, {} if settings is None else settings)
    counted = one_of_seeds(of_seeds)
    runs = _names(method, processes=where.workers != 1 or where.engine != "processes")
    request = Request(
        *(runs, protocol, dataset, scenario, recipe, counted, chosen, where),
        readings,
        tuned,
    )
    from feddg_bench.runs import observer

    looking_on = tuple(observers) if isinstance(observers, Iterable) else (observers,)
    for given in looking_on:
        if not isinstance(given, observer.Observer):
            raise SettingsError(
                f"{given!r} cannot observe runs: give objects of a subclass of "
                f"feddg_bench.Observer, as in observers=[Mine()]"
            )
    plans = request.plan(check=False)
    to_do = request.to_do(plans, kept, again=again)
    if own and len(to_do) > 1:
        raise SettingsError(
            f"a logger object holds one run, and {len(to_do)} are to do: give names, as in "
            f"logger='csv', or call run once for each"
        )
    check_runs(to_do)
    if not again:
        check_folders(to_do, where.results)

    from feddg_bench.cli.display import ConsoleReport
    from feddg_bench.runs.driver import execute_all

    with ExitStack() as stack:
        shown = [] if quiet else [stack.enter_context(ConsoleReport(len(plans)))]
        say = shown[0].say if shown else logging.getLogger(__name__).warning
        looking = (*shown, *trackers(where, say, own), *looking_on)
        return list(execute_all(plans, where, *looking, keep=kept, again=again))


def _names(method: Any, *, processes: bool) -> Any:
    """Return methods with names in the place of classes; `Request` refuses what is neither."""
    several = isinstance(method, list | tuple)
    if not any(inspect.isclass(one) for one in (method if several else [method])):
        return method
    from feddg_bench.core.method import Method
    from feddg_bench.runs.code import give

    named = []
    for one in method if several else [method]:
        if inspect.isclass(one):
            if not issubclass(one, Method) or one is Method:
                raise SettingsError(f"method: {one!r} is no subclass of feddg_bench.Method")
            one = give(one, processes=processes)
        named.append(one)
    return named


def _no_argument(name: str, value: Any) -> str:
    """Return the error for an unknown argument of `run`."""
    known = {*inspect.signature(run).parameters, "seed", *FLAGS, *Resources.model_fields} - {"more"}
    other = meant(name, known)
    if other is None:
        with suppress(SettingsError):
            key = meant(name, dotted_keys()) or full_key(name)
            return f"{name} is a setting: give it as settings={{{key!r}: {short(value)}}}"
    return unknown("argument of run", name, known, other)


def _layers(
    config: str | Path | Sequence[str | Path],
    flags: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Return the settings of files, of arguments with the names of flags, and of ``settings``.

    Raises:
        SettingsError: If a file cannot be read or selects runs, or a setting is given twice.
    """
    paths = [config] if isinstance(config, str | Path) else config
    if not isinstance(paths, Iterable) or not all(isinstance(p, str | Path) for p in paths):
        raise SettingsError(f"config: {short(config)} cannot be read; expected paths of YAML files")
    layers = []
    for path in paths:
        layer = file_layer(Path(path))
        for name in {*NAMES, *SEEDS} & set(layer):
            raise SettingsError(
                f"settings file {path} has {name}, which is an argument in Python: take it out of "
                f"the file and give {name}={short(layer[name])}"
            )
        layers.append(layer)
    if not isinstance(settings, Mapping):
        return settings  # `Request` refuses it
    own = read_settings(settings)
    named = merge(*(flag_layer(name, value) for name, value in flags.items()))
    for key in sorted({*dotted(own)} & {*dotted(named)}):
        raise SettingsError(f"setting {key} is given twice, by two names: leave one out")
    return merge(*layers, named, own)


def tables(
    *names: str, results: str | Path | Sequence[str | Path] | None = None, **selection: Any
) -> dict[str, MadeTable]:
    """Make tables from records, by name; notebooks show them, ``.frame()`` returns their cells.

    Args:
        names: ``generic`` (the default), ``all``, papers' tables such as ``pardon-1``, YAML files.
        results: Folders of records; by default the first of ``runs`` and ``results`` with records.
        selection: Fields of `feddg_bench.TableOptions`: ``recipe``, ``select``, ``against``,
            ``metric``, ``others``, ``variants`` and ``bold``.

    Raises:
        FeddgError: With a message of one sentence, if a name is unknown or records are unreadable.
    """
    from feddg_bench.analysis.tables.make import MadeTable, TableOptions, make_tables
    from feddg_bench.records.sources import asked_folders

    for name in names:
        if not isinstance(name, str):
            raise SettingsError(f"the table {name!r} cannot be read; expected its name, or a path")
    folders, chosen = asked_folders(results), TableOptions.of(**selection)
    made = make_tables(names or ("generic",), folders, chosen)
    return {grid.name: MadeTable(grid) for grid in made.grids}


def table(
    rows: Sequence[str] = (),
    columns: str = "scenario",
    *,
    results: str | Path | Sequence[str | Path] | None = None,
    **selection: Any,
) -> MadeTable:
    """Make one table of methods, with a column for each scenario or for each value of a setting.

    Args:
        rows: Methods; by default all methods with runs.
        columns: A field of a run, such as ``scenario``, or a setting, such as
            ``partition.heterogeneity``.
        results: Folders of records, as for `tables`.
        selection: As for `tables`, plus ``dataset`` and ``protocol``, which are required if there
            are several and the columns do not distinguish them.

    Raises:
        FeddgError: With a message of one sentence, if a name is unknown or no run matches.
    """
    from feddg_bench.analysis.tables.make import MadeTable, TableOptions, make_table
    from feddg_bench.records.sources import asked_folders

    folders, chosen = asked_folders(results), TableOptions.of(**selection)
    return MadeTable(make_table(rows, columns, folders, chosen).grids[0])
