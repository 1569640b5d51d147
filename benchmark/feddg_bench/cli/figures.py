"""``feddg-bench figures``: figures of records, of partitions, and of models trained for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from feddg_bench.analysis.figures.drawing import FORMATS, Picture, save
from feddg_bench.cli.options import (
    CacheDir,
    DataRoot,
    Experiment,
    Folders,
    Machine,
    Names,
    Recording,
    command,
    record_folders,
)
from feddg_bench.common.errors import DataError, SettingsError, unknown
from feddg_bench.common.files import check_writable
from feddg_bench.common.terminal import say
from feddg_bench.common.titles import counted
from feddg_bench.config.reading import known_name, listed, read_names
from feddg_bench.engine.compatibility import is_rgb
from feddg_bench.extensions import extensions
from feddg_bench.plugins import names
from feddg_bench.records.sources import FOLDERS
from feddg_bench.runs.request import Datasets, Plan

if TYPE_CHECKING:
    import pandas as pd

    from feddg_bench.analysis.figures.series import Selection
    from feddg_bench.analysis.figures.training import Trained
    from feddg_bench.records.rules import Rule

OF_RECORDS = {
    "all": "Draw every figure for which there are enough runs.",
    "convergence": "Draw the key metric against the round.",
    "generalisation": "Draw the key metric against that on id_test, a curve for each method.",
    "leaderboard": "Draw the key metric of each method, best first. Marks are scenarios.",
    "lambda": "Draw the key metric against the heterogeneity lambda.",
    "clients": "Draw the key metric against K/N, the clients of a round.",
    "strength": "Draw the key metric against Q of a planted world.",
    "profiles": "Draw performance profiles. Which share of a method's runs reaches how much.",
    "ranks": "Draw average ranks over data sets. Bars join ranks that do not differ significantly.",
    "noise": "Draw how far seeds lie apart, and which difference three or five of them can show.",
    "overhead": "Draw the seconds of a round by phase. Those before round 1 are apart.",
    **{name: text for extension in extensions() for name, text in extension.figures.items()},
}
"""Figure -> its help. Most have a picture for each data set, protocol, recipe and federation."""


figures_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Draw figures as PNG. Numbers, if any, are in a CSV file next to the figure. Figures show "
    f"records ({', '.join(OF_RECORDS)}), a partition, or models trained for the figure (styles, "
    "tsne, gradcam, landscape).",
)

Formats = Annotated[str, typer.Option(help="Comma-separated: png, pdf.")]
Listed = Annotated[str | None, typer.Option(help="Comma-separated; default: all with records.")]


@dataclass(frozen=True)
class Records:
    """Options of figures: the records, the metric's split and rounds, and the output."""

    results: Folders = None
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; default RESULTS/figures.")
    ] = None
    dataset: Listed = None
    protocol: Listed = None
    scenario: Listed = None
    method: Listed = None
    recipe: Listed = None
    split: Annotated[
        str, typer.Option(help="unseen (the mean of val and test), test, val, id_test or id_val.")
    ] = "unseen"
    select: Annotated[
        str,
        typer.Option(help="Rounds that count: last, mean_last_5, best_by_val ...; see `tables`."),
    ] = "last"
    format: Formats = "png"

    def choice(self) -> Selection:
        """Return the selection of records that the options ask for."""
        from feddg_bench.analysis.figures.series import Selection

        return Selection(
            tuple(record_folders(self.results)[0]),
            _chosen(self.dataset, names("data set")),
            _chosen(self.protocol),
            _chosen(self.scenario),
            _chosen(self.method, names("method")),
            _chosen(self.recipe),
            self.split,
            cast("Rule", self.select),
        )


def _chosen(text: str | None, known: Sequence[str] = ()) -> tuple[str, ...] | None:
    """Return the names in an option, ``None`` for all of them.

    Those of ``known`` can be in any spelling; others stay, as records can be of other plugins.
    """
    given = [] if text is None else listed(text)
    return None if not given or "all" in given else tuple(known_name(name, known) for name in given)


def _pictures(name: str, runs: pd.DataFrame, choice: Selection) -> Iterable[Picture | str]:
    """Yield the figures called ``name``, or the reason why there is none."""
    from feddg_bench.analysis.figures import overhead, rankings, scores
    from feddg_bench.analysis.tables.generic import frames

    if name in scores.SWEEPS:
        drawn = scores.swept(runs, name, choice)
        yield from drawn or (_unswept(name, choice),)
        return
    if name == "noise":
        yield from rankings.noise(runs, choice)
        return
    for extension in extensions():
        if name in extension.figures:
            yield from extension.draw(name, runs, choice)
            return
    if name == "ranks":
        yield rankings.ranks(runs, choice)
        return
    draws = {
        "convergence": scores.convergence,
        "generalisation": scores.generalisation,
        "leaderboard": scores.leaderboard,
        "profiles": rankings.profiles,
        "overhead": overhead.overhead,
    }
    draw = draws[name]
    for frame in frames(runs):
        also = " and on id_test" if name == "generalisation" else ""
        yield (
            draw(frame, choice)
            or f"{frame.name}: no round was evaluated on {choice.split_of(frame.runs)}{also}"
        )


def _unswept(name: str, choice: Selection) -> str:
    """Return the message that no two values can be compared, with a command that makes some."""
    asked = ",".join(choice.dataset or ())
    on = f" dataset={asked}" if asked not in ("", "digits4") else ""
    what = {"lambda": "lambda", "clients": "K/N", "strength": "Q"}[name]
    return (
        f"{name}: the records hold no two values of {what} that could be compared; make some: "
        f"feddg-bench sweep {name}{on}{choice.into}"
    )


def _command(name: str) -> Callable[..., None]:
    class DrawCommand(Records):
        def __call__(self) -> None:
            _draw(name, self)

    return command(DrawCommand)


def _draw(name: str, records: Records) -> None:
    formats = read_names("format", records.format, FORMATS)
    choice = records.choice()
    runs = choice.runs()
    say(f"Read {counted(len(runs), 'run')} from {record_folders(records.results)[1]}")
    wanted = [figure for figure in OF_RECORDS if figure != "all"] if name == "all" else [name]
    drawn: Iterable[Picture | str] = (
        made for figure in wanted for made in _pictures(figure, runs, choice)
    )
    if name != "all":
        drawn = _at_least_one(drawn)
    save(lambda: drawn, records.out or choice.results[0] / "figures", formats)


def _at_least_one(drawn: Iterable[Picture | str]) -> Iterable[Picture | str]:
    """Yield the pictures, then the reasons why others are missing.

    Raises:
        DataError: If there is no picture.
    """
    reasons: list[str] = []
    empty = True
    for made in drawn:
        if isinstance(made, str):
            reasons.append(made)
        else:
            empty = False
            yield made
    if empty:
        raise DataError(reasons[0])
    yield from reasons


for _name in OF_RECORDS:
    figures_app.command(_name, help=OF_RECORDS[_name])(_command(_name))


@dataclass(frozen=True)
class Output:
    """Output folder and formats of a picture."""

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
        """The folder of the picture."""
        return self.out or self.root / "figures"

    def save(self, draw: Callable[[], Picture]) -> None:
        """Draw a picture and write it."""
        save(lambda: [draw()], self.folder, listed(self.format))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PartitionCommand(Output, Names):
    """Draw the images of each client. By domain or by class."""

    lambdas: Annotated[
        str | None,
        typer.Option("--heterogeneity", "--lambda", help="Comma-separated, such as 0,0.1,0.5,1."),
    ] = None
    by: Annotated[
        str | None,
        typer.Option(help="domain or label; by default domain, and both if labels are skewed."),
    ] = None
    data_root: DataRoot = None
    cache_dir: CacheDir = None

    def __call__(self) -> None:
        """Run the command."""
        from feddg_bench.analysis.figures.partition_map import By

        if self.by is not None and self.by not in get_args(By):
            raise SettingsError(unknown("--by", self.by, get_args(By)))
        values = (
            [None] if self.lambdas is None else [_number(part) for part in self.lambdas.split(",")]
        )
        per_round = None if self.clients is None else 1  # no training: K only must not exceed N
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
        from feddg_bench.data.partition import BY_CLASS
        from feddg_bench.runs.setup import RunData

        data = RunData(self.cache_dir)
        skewed = plans[0].settings.partition.kind in BY_CLASS
        shown = [self.by] if self.by else [*get_args(By)] if skewed else ["domain"]
        save(
            lambda: [partition_picture(plans, data, cast("By", by)) for by in shown],
            self.folder,
            listed(self.format),
        )


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
    """The runs whose models a figure needs, the resources for them, and the figure's output."""

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
        """Load the models that runs kept, or train each method up to the last round in ``at``.

        ``check`` refuses methods for which the figure would show nothing.
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


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GradCamCommand(Training):
    """Draw where models look, by Grad-CAM."""

    at: At = None
    images: Annotated[int, typer.Option(min=1, help="Images of a domain.")] = 2

    def __call__(self) -> None:
        """Run the command."""
        runs = self.train(self.at)
        from feddg_bench.analysis.figures.image_grids import gradcam_picture

        self.save(lambda: gradcam_picture(runs, self.images))


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


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StylesCommand(Training):
    """Draw images before and after restyling by methods."""

    images: Annotated[int, typer.Option(min=1, help="Images of a domain.")] = 2

    def __call__(self) -> None:
        """Run the command."""
        from feddg_bench.analysis.figures.image_grids import check_restyling, styles_picture

        runs = self.train("1", "pardon,ccst,fedccrl", updates=True, check=check_restyling)
        self.save(lambda: styles_picture(runs, self.images))


for _name, _kind in (
    ("partition", PartitionCommand),
    ("styles", StylesCommand),
    ("tsne", TsneCommand),
    ("gradcam", GradCamCommand),
    ("landscape", LandscapeCommand),
):
    figures_app.command(_name)(command(_kind))
