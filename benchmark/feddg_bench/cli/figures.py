"""``feddg-bench figures``: pictures of records, of partitions, and of models trained for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from feddg_bench.analysis.figures.drawing import FORMATS, save
from feddg_bench.cli.figure_models import (
    gradcam_command,
    landscape_command,
    partition_command,
    styles_command,
    tsne_command,
)
from feddg_bench.cli.options import Folders, command, record_folders
from feddg_bench.common.errors import DataError
from feddg_bench.common.terminal import say
from feddg_bench.config.reading import known_name, listed, read_names
from feddg_bench.extensions import extensions
from feddg_bench.plugins import names
from feddg_bench.records.runs import RecordedRun

if TYPE_CHECKING:
    from feddg_bench.analysis.figures.drawing import Picture
    from feddg_bench.analysis.figures.series import Selection
    from feddg_bench.records.rules import Rule

OF_RECORDS = {
    "all": "Draw every figure that the records are enough for.",
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
    help="Draw figures as PNG. With the numbers beside it where there are some: from records "
    f"({', '.join(OF_RECORDS)}), of a partition, or of models that are trained for it (styles, "
    "tsne, gradcam, landscape).",
)

Listed = Annotated[str | None, typer.Option(help="Comma-separated; default: all with records.")]
One = Annotated[str | None, typer.Option(help="Default: all that have records.")]


@dataclass(frozen=True)
class Records:
    """Which records are drawn, what is drawn of them, and where it goes."""

    results: Folders = None
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; default RESULTS/figures.")
    ] = None
    dataset: One = None
    protocol: One = None
    scenario: Listed = None
    method: Listed = None
    recipe: One = None
    split: Annotated[str, typer.Option(help="test, val, id_test or id_val.")] = "test"
    select: Annotated[
        str,
        typer.Option(help="Rounds that count: last, mean_last_5, best_by_val ...; see `tables`."),
    ] = "last"
    format: Annotated[str, typer.Option(help="Comma-separated: png, pdf.")] = "png"

    def choice(self) -> Selection:
        """Return the selection of records that the options ask for."""
        from feddg_bench.analysis.figures.series import Selection

        return Selection(
            tuple(record_folders(self.results)[0]),
            self.dataset,
            self.protocol,
            None if self.scenario is None else tuple(listed(self.scenario)),
            None if self.method is None else tuple(_known(self.method)),
            self.recipe,
            self.split,
            cast("Rule", self.select),
        )


def _known(methods: str) -> Iterator[str]:
    """Yield methods by their registered names; records may hold others, of plugins elsewhere."""
    known = names("method")
    return (known_name(name, known) for name in listed(methods))


def _pictures(name: str, runs: list[RecordedRun], choice: Selection) -> Iterable[Picture | str]:
    """Yield the figures called ``name``, or why there is none."""
    from feddg_bench.analysis.figures import (
        generalisation,
        noise,
        overhead,
        rankings,
        scores,
    )
    from feddg_bench.analysis.tables.generic import frames

    if name in scores.SWEEPS:
        drawn = scores.swept(runs, name, choice)
        yield from drawn or (_unswept(name, choice),)
        return
    if name == "noise":
        yield from noise.noise(runs, choice)
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
        "generalisation": generalisation.generalisation,
        "leaderboard": scores.leaderboard,
        "profiles": rankings.profiles,
        "overhead": overhead.overhead,
    }
    draw = draws[name]
    for frame in frames(runs):
        also = " and on id_test" if name == "generalisation" else ""
        yield draw(frame, choice) or f"{frame.name}: no round was evaluated on {choice.split}{also}"


def _unswept(name: str, choice: Selection) -> str:
    """Return the message that there are no two values to compare, and which command makes some."""
    on = f" dataset={choice.dataset}" if choice.dataset not in (None, "digits4") else ""
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
    say(f"{len(runs)} runs of {record_folders(records.results)[1]}")
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
figures_app.command("partition")(partition_command)
figures_app.command("styles")(styles_command)
figures_app.command("tsne")(tsne_command)
figures_app.command("gradcam")(gradcam_command)
figures_app.command("landscape")(landscape_command)
