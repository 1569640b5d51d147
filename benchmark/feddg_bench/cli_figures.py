"""``feddg-bench figures``: pictures of records, of partitions, and of models trained for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from feddg_bench.errors import SettingsError
from feddg_bench.settings import Resources, RunSettings, merge, unknown, validate

if TYPE_CHECKING:
    from feddg_bench.figures.drawing import Picture
    from feddg_bench.figures.records import Frame, Wanted
    from feddg_bench.figures.training import Trained
    from feddg_bench.run import Plan, RunData
    from feddg_bench.tables.records import Run
    from feddg_bench.tables.rules import Rule

figures_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Draw figures, each as PNG and PDF, with the numbers beside it where there are some: from "
    "records (all, convergence, lambda, clients, leaderboard, overhead), of a partition, or of "
    "models that are trained for it (styles, tsne, gradcam, landscape).",
)

Results = Annotated[Path, typer.Option(help="Folder of records.")]
Out = Annotated[Path | None, typer.Option(help="Folder to write to; default RESULTS/figures.")]
Recorded = Annotated[str | None, typer.Option("--dataset", help="Default: all that have records.")]
RecordedProtocol = Annotated[
    str | None, typer.Option("--protocol", help="Default: all that have records.")
]
RecordedScenario = Annotated[
    str | None, typer.Option("--scenario", help="Comma-separated; default is the mean over all.")
]
RecordedMethods = Annotated[
    str | None,
    typer.Option("--method", "--methods", help="Comma-separated; up to six share one plot."),
]
RecordedRecipe = Annotated[
    str | None, typer.Option("--recipe", help="Default: all that have records.")
]
Split = Annotated[str, typer.Option(help="test, val, id_test or id_val.")]
Select = Annotated[
    str, typer.Option(help="Round that counts: last, best_by_val, best_by_id_val or oracle.")
]
RESULTS = Path("results")


@figures_app.command("all")
def all_command(
    results: Results = RESULTS,
    out: Out = None,
    dataset: Recorded = None,
    protocol: RecordedProtocol = None,
    split: Split = "test",
    select: Select = "last",
) -> None:
    """Draw every figure that the records are enough for, for each data set, protocol and recipe."""
    from feddg_bench.figures.accuracy import SWEEPS, convergence, leaderboard, swept
    from feddg_bench.figures.overhead import overhead

    wanted, runs, rule = _records(results, dataset, protocol, None, None, None, split, select)

    def pictures() -> Iterable[Picture | str]:
        for frame in _frames(runs):
            missing = f"{frame.name}: no round was evaluated on {split}"
            yield convergence(frame, wanted, split) or missing
            yield leaderboard(frame, wanted, split, rule) or missing
            yield overhead(frame, wanted)
        for sweep in SWEEPS.values():
            found = swept(runs, sweep, wanted, split, rule)
            yield from found
            if not found:
                yield _unswept(sweep.name, wanted)

    _save(pictures, out or results / "figures")


@figures_app.command("convergence")
def convergence_command(
    results: Results = RESULTS,
    out: Out = None,
    dataset: Recorded = None,
    protocol: RecordedProtocol = None,
    scenario: RecordedScenario = None,
    method: RecordedMethods = None,
    recipe: RecordedRecipe = None,
    split: Split = "test",
) -> None:
    """Draw accuracy against the round: mean over scenarios, mean and deviation over seeds."""
    from feddg_bench.figures.accuracy import convergence

    wanted, runs, _ = _records(results, dataset, protocol, scenario, method, recipe, split, "last")
    _each_frame(lambda f: convergence(f, wanted, split), runs, split, out or results / "figures")


@figures_app.command("leaderboard")
def leaderboard_command(
    results: Results = RESULTS,
    out: Out = None,
    dataset: Recorded = None,
    protocol: RecordedProtocol = None,
    scenario: RecordedScenario = None,
    method: RecordedMethods = None,
    recipe: RecordedRecipe = None,
    split: Split = "test",
    select: Select = "last",
) -> None:
    """Draw the accuracy of each method, best first, with that of single scenarios."""
    from feddg_bench.figures.accuracy import leaderboard

    wanted, runs, rule = _records(
        results, dataset, protocol, scenario, method, recipe, split, select
    )
    folder = out or results / "figures"
    _each_frame(lambda f: leaderboard(f, wanted, split, rule), runs, split, folder)


@figures_app.command("overhead")
def overhead_command(
    results: Results = RESULTS,
    out: Out = None,
    dataset: Recorded = None,
    protocol: RecordedProtocol = None,
    scenario: RecordedScenario = None,
    method: RecordedMethods = None,
    recipe: RecordedRecipe = None,
) -> None:
    """Draw the seconds of a round by phase for each method, and those before round 1."""
    from feddg_bench.figures.overhead import overhead

    wanted, runs, _ = _records(results, dataset, protocol, scenario, method, recipe, "test", "last")
    _each_frame(lambda f: overhead(f, wanted), runs, "test", out or results / "figures")


@figures_app.command("lambda")
def lambda_command(
    results: Results = RESULTS,
    out: Out = None,
    dataset: Recorded = None,
    protocol: RecordedProtocol = None,
    scenario: RecordedScenario = None,
    method: RecordedMethods = None,
    recipe: RecordedRecipe = None,
    split: Split = "test",
    select: Select = "last",
) -> None:
    """Draw accuracy against the heterogeneity lambda."""
    chosen = _records(results, dataset, protocol, scenario, method, recipe, split, select)
    _sweep("lambda", *chosen, split, out or results / "figures")


@figures_app.command("clients")
def clients_command(
    results: Results = RESULTS,
    out: Out = None,
    dataset: Recorded = None,
    protocol: RecordedProtocol = None,
    scenario: RecordedScenario = None,
    method: RecordedMethods = None,
    recipe: RecordedRecipe = None,
    split: Split = "test",
    select: Select = "last",
) -> None:
    """Draw accuracy against K/N: the clients of a round out of all."""
    chosen = _records(results, dataset, protocol, scenario, method, recipe, split, select)
    _sweep("clients", *chosen, split, out or results / "figures")


def _records(
    results: Path,
    dataset: str | None,
    protocol: str | None,
    scenario: str | None,
    method: str | None,
    recipe: str | None,
    split: str,
    select: str,
) -> tuple[Wanted, list[Run], Rule]:
    """Return what is asked for, its runs, and the selection rule."""
    from feddg_bench.figures import records
    from feddg_bench.tables.records import read_runs
    from feddg_bench.tables.rules import RULES

    if split not in records.SPLITS:
        raise SettingsError(unknown("split", split, records.SPLITS))
    if select not in RULES:
        raise SettingsError(unknown("selection rule", select, RULES))
    wanted = records.Wanted(dataset, protocol, _listed(scenario), _listed(method), recipe)
    return wanted, records.select(read_runs(results), wanted, results), select


def _listed(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _frames(runs: list[Run]) -> list[Frame]:
    from feddg_bench.figures.records import frames

    return frames(runs)


def _each_frame(
    draw: Callable[[Frame], Picture | None], runs: list[Run], split: str, folder: Path
) -> None:
    _save(
        lambda: (
            draw(frame) or f"{frame.name}: no round was evaluated on {split}"
            for frame in _frames(runs)
        ),
        folder,
    )


def _sweep(
    name: str, wanted: Wanted, runs: list[Run], rule: Rule, split: str, folder: Path
) -> None:
    from feddg_bench.errors import DataError
    from feddg_bench.figures.accuracy import SWEEPS, swept

    def pictures() -> Iterable[Picture]:
        found = swept(runs, SWEEPS[name], wanted, split, rule)
        if not found:
            raise DataError(_unswept(name, wanted))
        return found

    _save(pictures, folder)


def _unswept(name: str, wanted: Wanted) -> str:
    """Say that records hold one value of a setting only, and which command makes others."""
    on = f" dataset={wanted.dataset}" if wanted.dataset not in (None, "digits4") else ""
    what = "lambda" if name == "lambda" else "K/N"
    return (
        f"{name}: the records hold no two values of {what} that could be compared; make some: "
        f"feddg-bench sweep sweeps/{name}.yaml{on}"
    )


def _save(make: Callable[[], Iterable[Picture | str]], folder: Path) -> None:
    """Draw pictures and write them as they come; a text stands for one that cannot be drawn."""
    from feddg_bench.figures.drawing import styled

    with styled():
        for made in make():
            if isinstance(made, str):
                print(made)  # noqa: T201
                continue
            paths = made.save(folder)
            for note in made.notes:
                print(f"{made.name}: {note}")  # noqa: T201
            print(f"wrote {', '.join(map(str, paths))}")  # noqa: T201


# -------------------------------------------------------------------------- of settings

Methods = Annotated[
    str, typer.Option("--method", "--methods", help="Comma-separated; see `feddg-bench methods`.")
]
Method = Annotated[str, typer.Option("--method", help="See `feddg-bench methods`.")]
DataName = Annotated[str, typer.Option(help="See `feddg-bench datasets`.")]
Protocol = Annotated[str, typer.Option(help="ltdo, lodo or wilds.")]
Scenario = Annotated[str | None, typer.Option(help="One scenario; default the first.")]
Recipe = Annotated[
    str | None,
    typer.Option(help="A recipe's name or a YAML file; default is the data set's own."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the run.")]
Clients = Annotated[int | None, typer.Option(help="N, all clients.")]
PerRound = Annotated[int | None, typer.Option(help="K, the clients sampled each round.")]
Lambda = Annotated[
    float | None, typer.Option("--heterogeneity", "--lambda", help="lambda in [0, 1].")
]
DataRoot = Annotated[
    Path | None, typer.Option(help="Folder of the data; else $FEDDG_DATA or the settings file.")
]
CacheDir = Annotated[
    Path | None, typer.Option(help="Folder of decoded images; else $FEDDG_CACHE or ~/.cache.")
]
Set = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, such as train.lr=0.001.")]
Pairs = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings.")]
Config = Annotated[list[Path] | None, typer.Option("--config", help="YAML file of settings.")]
OutHere = Annotated[Path, typer.Option(help="Folder to write to.")]
FIGURES = Path("results/figures")


@figures_app.command("partition")
def partition_command(
    pairs: Pairs = None,
    dataset: DataName = "digits4",
    protocol: Protocol = "ltdo",
    scenario: Scenario = None,
    recipe: Recipe = None,
    seed: Seed = 0,
    clients: Clients = None,
    lambdas: Annotated[
        str | None,
        typer.Option("--heterogeneity", "--lambda", help="Comma-separated, such as 0,0.1,0.5,1."),
    ] = None,
    by: Annotated[str, typer.Option(help="domain or label.")] = "domain",
    out: OutHere = FIGURES,
    data_root: DataRoot = None,
    cache_dir: CacheDir = None,
    config: Config = None,
    set_: Set = None,
) -> None:
    """Draw which client holds how many images of each domain, or of each class."""
    from feddg_bench.figures.partition import By

    if by not in get_args(By):
        raise SettingsError(unknown("--by", by, get_args(By)))
    values = [None] if lambdas is None else [_number(part) for part in lambdas.split(",")]
    per_round = None if clients is None else 1  # nobody trains: K must only not exceed N
    planned = [
        _plans(
            "fedavg",
            dataset,
            protocol,
            scenario,
            recipe,
            {"clients": clients, "heterogeneity": value, "per_round": per_round},
            seed,
            data_root,
            cache_dir,
            config,
            [*(set_ or ()), *(pairs or ())],
        )
        for value in values
    ]
    from feddg_bench.figures.spreads import partition_picture

    data = planned[0][1]
    plans = [found for made, _ in planned for found in made]
    _save(lambda: [partition_picture(plans, data, cast("By", by))], out)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingsError(
            f"cannot read --lambda {text!r}: expected numbers in [0, 1], such as 0,0.1,0.5,1"
        ) from None


def _plans(
    method: str,
    dataset: str,
    protocol: str,
    scenario: str | None,
    recipe: str | None,
    flags: dict[str, float | None],
    seed: int,
    data_root: Path | None,
    cache_dir: Path | None,
    config: list[Path] | None,
    pairs: list[str],
) -> tuple[list[Plan], RunData]:
    """Return the run of each method, as `feddg-bench run` plans it, and the data set."""
    from feddg_bench import cli  # it registers the commands of this module
    from feddg_bench.registry import check_name, load_dataset

    check_name("data set", dataset)
    opened = load_dataset(dataset)(data_root)
    chosen = cli._scenarios(protocol, opened, scenario)[0]
    own = {"scenario": chosen.name, "seed": seed}
    layers = [
        cli._layers(name, dataset, protocol, recipe, flags, config, None, pairs)
        for name in cli._methods(method)
    ]
    for _, base, user in layers:
        validate(RunSettings, merge(base, user, own))

    from feddg_bench.run import RunData, make_plan

    plans = [
        make_plan([base], [user, own], chosen, label, opened.identity)
        for label, base, user in layers
    ]
    return plans, RunData(opened, cache_dir)


# ---------------------------------------------------------------------------- of models

Rounds = Annotated[
    int | None, typer.Option(min=1, help="Rounds of the run; default is the recipe's.")
]
At = Annotated[
    str | None,
    typer.Option(help="Rounds to look at, such as 1,5,50; 0 is before round 1. Default: the last."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Workers = Annotated[
    int, typer.Option(help="Processes that train clients; 0 is one a core, or one on a GPU.")
]
Threads = Annotated[int, typer.Option(help="CPU threads of each worker.")]


@figures_app.command("tsne")
def tsne_command(
    pairs: Pairs = None,
    method: Methods = "fedavg",
    dataset: DataName = "digits4",
    protocol: Protocol = "ltdo",
    scenario: Scenario = None,
    recipe: Recipe = None,
    seed: Seed = 0,
    rounds: Rounds = None,
    at: At = None,
    images: Annotated[int, typer.Option(min=1, help="Images of a domain.")] = 100,
    clients: Clients = None,
    per_round: PerRound = None,
    heterogeneity: Lambda = None,
    out: OutHere = FIGURES,
    data_root: DataRoot = None,
    cache_dir: CacheDir = None,
    device: Device = "auto",
    workers: Workers = 0,
    threads: Threads = 1,
    config: Config = None,
    set_: Set = None,
) -> None:
    """Train, and draw t-SNE of the features of held-out images after some rounds."""
    runs = _trained(
        method, dataset, protocol, scenario, recipe, seed, rounds, at, clients, per_round,
        heterogeneity, data_root, cache_dir, device, workers, threads, config, set_, pairs,
    )  # fmt: skip
    from feddg_bench.figures.studies import tsne_picture

    _save(lambda: [tsne_picture(runs, images)], out)


@figures_app.command("gradcam")
def gradcam_command(
    pairs: Pairs = None,
    method: Methods = "fedavg",
    dataset: DataName = "digits4",
    protocol: Protocol = "ltdo",
    scenario: Scenario = None,
    recipe: Recipe = None,
    seed: Seed = 0,
    rounds: Rounds = None,
    at: At = None,
    images: Annotated[int, typer.Option(min=1, help="Images of a domain.")] = 2,
    clients: Clients = None,
    per_round: PerRound = None,
    heterogeneity: Lambda = None,
    out: OutHere = FIGURES,
    data_root: DataRoot = None,
    cache_dir: CacheDir = None,
    device: Device = "auto",
    workers: Workers = 0,
    threads: Threads = 1,
    config: Config = None,
    set_: Set = None,
) -> None:
    """Train, and draw by Grad-CAM where models look, for held-out images of each domain."""
    runs = _trained(
        method, dataset, protocol, scenario, recipe, seed, rounds, at, clients, per_round,
        heterogeneity, data_root, cache_dir, device, workers, threads, config, set_, pairs,
    )  # fmt: skip
    from feddg_bench.figures.studies import gradcam_picture

    _save(lambda: [gradcam_picture(runs, images)], out)


@figures_app.command("landscape")
def landscape_command(
    pairs: Pairs = None,
    method: Methods = "fedavg",
    dataset: DataName = "digits4",
    protocol: Protocol = "ltdo",
    scenario: Scenario = None,
    recipe: Recipe = None,
    seed: Seed = 0,
    rounds: Rounds = None,
    at: Annotated[int | None, typer.Option(min=1, help="Round to draw; default the last.")] = None,
    pair: Annotated[
        str | None,
        typer.Option(help="Two clients of that round; default those whose domains differ most."),
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Training images of a client.")] = 256,
    steps: Annotated[int, typer.Option(min=5, help="Points a side of the grid.")] = 21,
    clients: Clients = None,
    per_round: PerRound = None,
    heterogeneity: Lambda = None,
    out: OutHere = FIGURES,
    data_root: DataRoot = None,
    cache_dir: CacheDir = None,
    device: Device = "auto",
    workers: Workers = 0,
    threads: Threads = 1,
    config: Config = None,
    set_: Set = None,
) -> None:
    """Train, and draw two clients' losses on the plane of the global model and their updates."""
    runs = _trained(
        method, dataset, protocol, scenario, recipe, seed, rounds, None if at is None else str(at),
        clients, per_round, heterogeneity, data_root, cache_dir, device, workers, threads, config,
        set_, pairs,
    )  # fmt: skip
    from feddg_bench.figures.studies import landscape_picture

    _save(lambda: [landscape_picture(runs, _listed(pair) or (), images, steps)], out)


@figures_app.command("styles")
def styles_command(
    pairs: Pairs = None,
    method: Methods = "pardon,ccst,fedccrl",
    dataset: DataName = "digits4",
    protocol: Protocol = "ltdo",
    scenario: Scenario = None,
    recipe: Recipe = None,
    seed: Seed = 0,
    images: Annotated[int, typer.Option(min=1, help="Images of a domain.")] = 2,
    clients: Clients = None,
    per_round: PerRound = None,
    heterogeneity: Lambda = None,
    out: OutHere = FIGURES,
    data_root: DataRoot = None,
    cache_dir: CacheDir = None,
    device: Device = "auto",
    workers: Workers = 0,
    threads: Threads = 1,
    config: Config = None,
    set_: Set = None,
) -> None:
    """Draw images of each domain as they are, and as methods restyle them in round 1."""
    runs = _trained(
        method, dataset, protocol, scenario, recipe, seed, None, "1", clients, per_round,
        heterogeneity, data_root, cache_dir, device, workers, threads, config, set_, pairs,
    )  # fmt: skip
    from feddg_bench.figures.studies import styles_picture

    _save(lambda: [styles_picture(runs, images)], out)


def _trained(
    method: str,
    dataset: str,
    protocol: str,
    scenario: str | None,
    recipe: str | None,
    seed: int,
    rounds: int | None,
    at: str | None,
    clients: int | None,
    per_round: int | None,
    heterogeneity: float | None,
    data_root: Path | None,
    cache_dir: Path | None,
    device: str,
    workers: int,
    threads: int,
    config: list[Path] | None,
    set_: list[str] | None,
    pairs: list[str] | None,
) -> list[Trained]:
    """Train each method in memory up to the last round that is looked at."""
    where = {"device": device, "workers": workers, "threads": threads}
    resources = validate(Resources, {**where, "data_root": data_root, "cache_dir": cache_dir})
    flags = {
        "rounds": rounds,
        "clients": clients,
        "per_round": per_round,
        "heterogeneity": heterogeneity,
    }
    plans, data = _plans(
        method, dataset, protocol, scenario, recipe, flags, seed, data_root, cache_dir, config,
        [*(set_ or ()), *(pairs or ())],
    )  # fmt: skip
    from rich.console import Console

    from feddg_bench.figures.training import train, wanted_rounds
    from feddg_bench.progress import ConsoleReport
    from feddg_bench.run import open_executor

    wanted = [wanted_rounds(at, plan.settings.federation.rounds) for plan in plans]
    executor = open_executor(resources)
    try:
        with ConsoleReport(Console(stderr=True), len(plans)) as report:
            return [
                train(plan, data, executor, resources, report, rounds_)
                for plan, rounds_ in zip(plans, wanted, strict=True)
            ]
    finally:
        executor.close()
