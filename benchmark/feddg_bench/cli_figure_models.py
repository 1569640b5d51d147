"""The commands of ``feddg-bench figures`` that open a data set, and those that train models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from feddg_bench.cli_options import (
    CacheDir,
    Clients,
    Config,
    DataName,
    DataRoot,
    Device,
    Lambda,
    Pairs,
    PerRound,
    Recipe,
    Set,
    Threads,
    Workers,
)
from feddg_bench.errors import SettingsError
from feddg_bench.figures.drawing import save
from feddg_bench.settings import Resources, unknown, validate

if TYPE_CHECKING:
    from feddg_bench.figures.training import Trained
    from feddg_bench.run import Plan, RunData

Methods = Annotated[
    str, typer.Option("--method", "--methods", help="Comma-separated; see `feddg-bench methods`.")
]
Method = Annotated[str, typer.Option("--method", help="See `feddg-bench methods`.")]
Protocol = Annotated[str, typer.Option(help="ltdo, lodo or wilds.")]
Scenario = Annotated[str | None, typer.Option(help="One scenario; default the first.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the run.")]
OutHere = Annotated[Path, typer.Option(help="Folder to write to.")]
FIGURES = Path("results/figures")


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
    save(lambda: [partition_picture(plans, data, cast("By", by))], out)


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
    from feddg_bench.plans import draft_runs, make_plans, one_scenario, user_layer
    from feddg_bench.registry import check_name, load_dataset

    check_name("data set", dataset)
    opened = load_dataset(dataset)(data_root)
    drafts = draft_runs(
        opened,
        dataset,
        methods=method,
        protocols=protocol,
        scenario=one_scenario(protocol, opened, scenario).name,
        recipe=recipe,
        seeds=str(seed),
        user=user_layer(flags, config or (), pairs),
    )

    from feddg_bench.run import RunData

    return make_plans(drafts, opened), RunData(opened, cache_dir)


Rounds = Annotated[
    int | None, typer.Option(min=1, help="Rounds of the run; default is the recipe's.")
]
At = Annotated[
    str | None,
    typer.Option(help="Rounds to look at, such as 1,5,50; 0 is before round 1. Default: the last."),
]


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

    save(lambda: [tsne_picture(runs, images)], out)


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

    save(lambda: [gradcam_picture(runs, images)], out)


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

    save(
        lambda: [landscape_picture(runs, () if pair is None else pair.split(","), images, steps)],
        out,
    )


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

    save(lambda: [styles_picture(runs, images)], out)


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
