"""The commands of ``feddg-bench figures`` that open a data set, and those that train models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from feddg_bench.analysis.figures.drawing import save
from feddg_bench.cli.options import (
    CacheDir,
    Clients,
    Config,
    DataName,
    DataRoot,
    Lambda,
    Machine,
    Pairs,
    PerRound,
    Recipe,
    Set,
    grouped,
)
from feddg_bench.common.errors import SettingsError, unknown

if TYPE_CHECKING:
    from feddg_bench.analysis.figures.training import Trained
    from feddg_bench.runs.run import Plan, RunData

Methods = Annotated[
    str, typer.Option("--method", "--methods", help="Comma-separated; see `feddg-bench methods`.")
]
Method = Annotated[str, typer.Option("--method", help="See `feddg-bench methods`.")]
Protocol = Annotated[str, typer.Option(help="ltdo, lodo or wilds.")]
Scenario = Annotated[str | None, typer.Option(help="One scenario; default the first.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the run.")]
OutHere = Annotated[Path, typer.Option(help="Folder to write to.")]
FIGURES = Path("results/figures")


@dataclass(frozen=True)
class Experiment:
    """Which runs a figure is about, but for their methods, and where it is written."""

    pairs: Pairs = None
    dataset: DataName = "digits4"
    protocol: Protocol = "ltdo"
    scenario: Scenario = None
    recipe: Recipe = None
    seed: Seed = 0
    clients: Clients = None
    out: OutHere = FIGURES
    config: Config = None
    set_: Set = None

    def plan(
        self, methods: str, machine: Machine, **flags: float | None
    ) -> tuple[list[Plan], RunData]:
        """Return the run of each method, as `feddg-bench run` plans it, and the data set."""
        from feddg_bench.plugins import load_dataset
        from feddg_bench.runs.plans import draft_runs, make_plans, one_scenario, user_layer

        opened = load_dataset(self.dataset)(machine.data_root)
        pairs = [*(self.set_ or ()), *(self.pairs or ())]
        drafts = draft_runs(
            opened,
            self.dataset,
            methods=methods,
            protocols=self.protocol,
            scenario=one_scenario(self.protocol, opened, self.scenario).name,
            recipe=self.recipe,
            seeds=str(self.seed),
            user=user_layer({"clients": self.clients, **flags}, self.config or (), pairs),
        )

        from feddg_bench.runs.run import RunData

        return make_plans(drafts, opened), RunData(opened, machine.cache_dir)


@grouped
def partition_command(
    lambdas: Annotated[
        str | None,
        typer.Option("--heterogeneity", "--lambda", help="Comma-separated, such as 0,0.1,0.5,1."),
    ] = None,
    by: Annotated[str, typer.Option(help="domain or label.")] = "domain",
    experiment: Experiment = Experiment(),
    data_root: DataRoot = None,
    cache_dir: CacheDir = None,
) -> None:
    """Draw which client holds how many images of each domain, or of each class."""
    from feddg_bench.analysis.figures.partition import By

    if by not in get_args(By):
        raise SettingsError(unknown("--by", by, get_args(By)))
    values = [None] if lambdas is None else [_number(part) for part in lambdas.split(",")]
    per_round = None if experiment.clients is None else 1  # nobody trains: K only must not exceed N
    machine = Machine(data_root, cache_dir)
    planned = [
        experiment.plan("fedavg", machine, heterogeneity=value, per_round=per_round)
        for value in values
    ]
    from feddg_bench.analysis.figures.partition import partition_picture

    data = planned[0][1]
    plans = [found for made, _ in planned for found in made]
    save(lambda: [partition_picture(plans, data, cast("By", by))], experiment.out)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingsError(
            f"cannot read --lambda {text!r}: expected numbers in [0, 1], such as 0,0.1,0.5,1"
        ) from None


Rounds = Annotated[
    int | None, typer.Option(min=1, help="Rounds of the run; default is the recipe's.")
]
At = Annotated[
    str | None,
    typer.Option(help="Rounds to look at, such as 1,5,50; 0 is before round 1. Default: the last."),
]


@dataclass(frozen=True)
class Training(Experiment):
    """Which runs a figure needs the models of."""

    per_round: PerRound = None
    heterogeneity: Lambda = None

    def train(
        self, methods: str, at: str | None, machine: Machine, rounds: int | None = None
    ) -> list[Trained]:
        """Train each method in memory up to the last round that is looked at."""
        resources = machine.resources()
        from feddg_bench.engine.compatibility import is_rgb
        from feddg_bench.plugins import load_dataset

        shown = load_dataset(self.dataset)
        if shown.task != "classification" or not is_rgb(shown):
            raise SettingsError(
                f"this figure shows classes of RGB images, and {shown.title} has none: choose "
                f"another --dataset"
            )
        plans, data = self.plan(
            methods,
            machine,
            rounds=rounds,
            per_round=self.per_round,
            heterogeneity=self.heterogeneity,
        )

        from feddg_bench.analysis.figures.training import train, wanted_rounds
        from feddg_bench.cli.progress import ConsoleReport
        from feddg_bench.engine.devices import open_executor

        wanted = [wanted_rounds(at, plan.settings.federation.rounds) for plan in plans]
        executor = open_executor(resources)
        try:
            with ConsoleReport(len(plans)) as report:
                return [
                    train(plan, data, executor, resources, report, upto)
                    for plan, upto in zip(plans, wanted, strict=True)
                ]
        finally:
            executor.close()


@grouped
def tsne_command(
    method: Methods = "fedavg",
    rounds: Rounds = None,
    at: At = None,
    images: Annotated[int, typer.Option(min=1, help="Images of a domain.")] = 100,
    training: Training = Training(),
    machine: Machine = Machine(),
) -> None:
    """Train, and draw t-SNE of the features of held-out images after some rounds."""
    runs = training.train(method, at, machine, rounds=rounds)
    from feddg_bench.analysis.figures.embedding import tsne_picture

    save(lambda: [tsne_picture(runs, images)], training.out)


@grouped
def gradcam_command(
    method: Methods = "fedavg",
    rounds: Rounds = None,
    at: At = None,
    images: Annotated[int, typer.Option(min=1, help="Images of a domain.")] = 2,
    training: Training = Training(),
    machine: Machine = Machine(),
) -> None:
    """Train, and draw by Grad-CAM where models look, for held-out images of each domain."""
    runs = training.train(method, at, machine, rounds=rounds)
    from feddg_bench.analysis.figures.gradcam import gradcam_picture

    save(lambda: [gradcam_picture(runs, images)], training.out)


@grouped
def landscape_command(
    method: Methods = "fedavg",
    rounds: Rounds = None,
    at: Annotated[int | None, typer.Option(min=1, help="Round to draw; default the last.")] = None,
    pair: Annotated[
        str | None,
        typer.Option(help="Two clients of that round; default those whose domains differ most."),
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Training images of a client.")] = 256,
    steps: Annotated[int, typer.Option(min=5, help="Points a side of the grid.")] = 21,
    training: Training = Training(),
    machine: Machine = Machine(),
) -> None:
    """Train, and draw two clients' losses on the plane of the global model and their updates."""
    runs = training.train(method, None if at is None else str(at), machine, rounds=rounds)
    from feddg_bench.analysis.figures.landscape import landscape_picture

    save(
        lambda: [landscape_picture(runs, () if pair is None else pair.split(","), images, steps)],
        training.out,
    )


@grouped
def styles_command(
    method: Methods = "pardon,ccst,fedccrl",
    images: Annotated[int, typer.Option(min=1, help="Images of a domain.")] = 2,
    training: Training = Training(),
    machine: Machine = Machine(),
) -> None:
    """Draw images of each domain as they are, and as methods restyle them in round 1."""
    runs = training.train(method, "1", machine)
    from feddg_bench.analysis.figures.styles import styles_picture

    save(lambda: [styles_picture(runs, images)], training.out)
