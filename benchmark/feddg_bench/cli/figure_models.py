"""The commands of ``feddg-bench figures`` that open a data set, and those that train models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from feddg_bench.analysis.figures.drawing import FORMATS, Picture, save
from feddg_bench.cli.options import (
    CacheDir,
    DataRoot,
    Experiment,
    Machine,
    Names,
    Recording,
    command,
)
from feddg_bench.common.errors import SettingsError, unknown
from feddg_bench.common.files import check_writable
from feddg_bench.config.reading import listed, read_names
from feddg_bench.engine.compatibility import is_rgb
from feddg_bench.records.sources import FOLDERS
from feddg_bench.runs.request import Datasets, Plan

if TYPE_CHECKING:
    from feddg_bench.analysis.figures.training import Trained

Formats = Annotated[str, typer.Option(help="Comma-separated: png, pdf.")]


@dataclass(frozen=True)
class Output:
    """Where a picture goes, and in which formats."""

    out: Annotated[
        Path | None, typer.Option(help="Folder to write to. Default figures, beside the records.")
    ] = None
    format: Formats = "png"

    def __post_init__(self) -> None:
        read_names("format", self.format, FORMATS)  # before anything is trained

    @property
    def root(self) -> Path:
        """The results folder that holds ``figures``."""
        return FOLDERS[0]

    @property
    def folder(self) -> Path:
        """Where the picture goes."""
        return self.out or self.root / "figures"

    def save(self, draw: Callable[[], Picture]) -> None:
        """Draw a picture and write it."""
        save(lambda: [draw()], self.folder, listed(self.format))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PartitionCommand(Output, Names):
    """Draw what each client holds. Images of each domain, or of each class."""

    lambdas: Annotated[
        str | None,
        typer.Option("--heterogeneity", "--lambda", help="Comma-separated, such as 0,0.1,0.5,1."),
    ] = None
    by: Annotated[str, typer.Option(help="domain or label.")] = "domain"
    data_root: DataRoot = None
    cache_dir: CacheDir = None

    def __call__(self) -> None:
        """Run the command."""
        from feddg_bench.analysis.figures.partition_map import By

        if self.by not in get_args(By):
            raise SettingsError(unknown("--by", self.by, get_args(By)))
        values = (
            [None] if self.lambdas is None else [_number(part) for part in self.lambdas.split(",")]
        )
        per_round = None if self.clients is None else 1  # nobody trains: K only must not exceed N
        resources = Machine(self.data_root, self.cache_dir).resources()
        datasets = Datasets(self.data_root)
        plans = [
            plan
            for value in values
            for plan in self.request(resources, heterogeneity=value, per_round=per_round)
            .one_scenario(datasets)
            .plan(datasets)
        ]
        from feddg_bench.analysis.figures.partition_map import partition_picture
        from feddg_bench.runs.setup import RunData

        data = RunData(self.cache_dir)
        self.save(lambda: partition_picture(plans, data, cast("By", self.by)))


partition_command = command(PartitionCommand)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingsError(
            f"cannot read --lambda {text!r}: expected numbers in [0, 1], such as 0,0.1,0.5,1"
        ) from None


At = Annotated[
    str | None,
    typer.Option(help="Rounds to look at, such as 1,5,50; 0 is before round 1. Default: the last."),
]


@dataclass(frozen=True)
class Training(Output, Recording, Experiment):
    """The runs whose models a figure needs, where they are computed, and where the figure goes."""

    @property
    def root(self) -> Path:
        """The folder of their records."""
        return self.results

    def train(
        self,
        at: str | None,
        method: str | None = None,
        *,
        updates: bool = False,
        check: Callable[[Sequence[Plan]], None] = lambda _plans: None,
    ) -> list[Trained]:
        """Take the models that runs kept, or train each method up to the last round looked at.

        ``check`` refuses methods of which the figure shows nothing.
        """
        resources = self.resources()
        datasets = Datasets(resources.data_root)
        instead = {} if method is None or self.method is not None else {"method": method}
        request = self.request(resources, **instead)
        shown = datasets.open(request.dataset)
        if shown.task != "classification" or not is_rgb(shown):
            raise SettingsError(
                f"this figure shows classes of RGB images, and {shown.title} has none: choose "
                f"another --dataset"
            )
        plans = request.one_scenario(datasets).plan(datasets)
        check(plans)
        check_writable(self.folder)

        from feddg_bench.analysis.figures.training import trained_runs
        from feddg_bench.cli.display import ConsoleReport

        with ConsoleReport(len(plans)) as report:
            return trained_runs(plans, resources, at, report, updates=updates)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TsneCommand(Training):
    """Draw t-SNE of the features of held-out images."""

    at: At = None
    images: Annotated[int, typer.Option(min=1, help="Images of a domain.")] = 100

    def __call__(self) -> None:
        """Run the command."""
        runs = self.train(self.at)
        from feddg_bench.analysis.figures.embedding import tsne_picture

        self.save(lambda: tsne_picture(runs, self.images))


tsne_command = command(TsneCommand)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GradCamCommand(Training):
    """Draw where models look, by Grad-CAM."""

    at: At = None
    images: Annotated[int, typer.Option(min=1, help="Images of a domain.")] = 2

    def __call__(self) -> None:
        """Run the command."""
        runs = self.train(self.at)
        from feddg_bench.analysis.figures.gradcam import gradcam_picture

        self.save(lambda: gradcam_picture(runs, self.images))


gradcam_command = command(GradCamCommand)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LandscapeCommand(Training):
    """Draw the losses of two clients around the global model. On the plane of their updates."""

    at: Annotated[int | None, typer.Option(min=1, help="Round to draw; default the last.")] = None
    pair: Annotated[
        str | None,
        typer.Option(help="Two clients of that round; default those whose domains differ most."),
    ] = None
    images: Annotated[int, typer.Option(min=1, help="Training images of a client.")] = 256
    steps: Annotated[int, typer.Option(min=5, help="Points a side of the grid.")] = 21

    def __call__(self) -> None:
        """Run the command."""
        runs = self.train(None if self.at is None else str(self.at), updates=True)
        from feddg_bench.analysis.figures.landscape import landscape_picture

        clients = () if self.pair is None else self.pair.split(",")
        self.save(lambda: landscape_picture(runs, clients, self.images, self.steps))


landscape_command = command(LandscapeCommand)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StylesCommand(Training):
    """Draw images as they are and as methods restyle them."""

    images: Annotated[int, typer.Option(min=1, help="Images of a domain.")] = 2

    def __call__(self) -> None:
        """Run the command."""
        from feddg_bench.analysis.figures.styles import check_restyling, styles_picture

        runs = self.train("1", "pardon,ccst,fedccrl", updates=True, check=check_restyling)
        self.save(lambda: styles_picture(runs, self.images))


styles_command = command(StylesCommand)
