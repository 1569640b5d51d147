"""``feddg-bench figures``: pictures of records, of partitions, and of models trained for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from feddg_bench.analysis.figures.drawing import save
from feddg_bench.cli.figure_models import (
    gradcam_command,
    landscape_command,
    partition_command,
    styles_command,
    tsne_command,
)
from feddg_bench.cli.options import grouped
from feddg_bench.common.errors import DataError, SettingsError, unknown

if TYPE_CHECKING:
    from feddg_bench.analysis.figures.drawing import Picture
    from feddg_bench.analysis.figures.series import Frame, Wanted
    from feddg_bench.records.rules import Rule
    from feddg_bench.records.runs import Run

figures_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Draw figures, each as PNG and PDF, with the numbers beside it where there are some: from "
    "records (all, convergence, lambda, clients, leaderboard, overhead), of a partition, or of "
    "models that are trained for it (styles, tsne, gradcam, landscape).",
)

Split = Annotated[str, typer.Option(help="test, val, id_test or id_val.")]
Select = Annotated[
    str, typer.Option(help="Round that counts: last, best_by_val, best_by_id_val or oracle.")
]


@dataclass(frozen=True)
class Records:
    """Where records are, which of them are drawn, and where to."""

    results: Annotated[Path, typer.Option(help="Folder of records.")] = Path("results")
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; default RESULTS/figures.")
    ] = None
    dataset: Annotated[str | None, typer.Option(help="Default: all that have records.")] = None
    protocol: Annotated[str | None, typer.Option(help="Default: all that have records.")] = None

    @property
    def folder(self) -> Path:
        """Where figures go."""
        return self.out or self.results / "figures"

    def wanted(self) -> Wanted:
        """Return what is asked for."""
        from feddg_bench.analysis.figures.series import Wanted

        return Wanted(self.dataset, self.protocol)

    def read(self, split: str = "test", select: str = "last") -> tuple[Wanted, list[Run], Rule]:
        """Return what is asked for, its runs, and the selection rule.

        Raises:
            SettingsError: If there is no such split or rule.
            DataError: If there is no such run, or a record is damaged.
        """
        from feddg_bench.analysis.figures import series as records
        from feddg_bench.records.rules import RULES
        from feddg_bench.records.runs import read_runs

        if split not in records.SPLITS:
            raise SettingsError(unknown("split", split, records.SPLITS))
        if select not in RULES:
            raise SettingsError(unknown("selection rule", select, RULES))
        wanted = self.wanted()
        return wanted, records.select(read_runs(self.results), wanted, self.results), select


@dataclass(frozen=True)
class SomeRecords(Records):
    """The same, down to scenarios, methods and a recipe."""

    scenario: Annotated[
        str | None, typer.Option(help="Comma-separated; default is the mean over all.")
    ] = None
    method: Annotated[
        str | None,
        typer.Option("--method", "--methods", help="Comma-separated; up to six share one plot."),
    ] = None
    recipe: Annotated[str | None, typer.Option(help="Default: all that have records.")] = None

    def wanted(self) -> Wanted:
        """Return what is asked for."""
        return replace(
            super().wanted(),
            scenarios=_listed(self.scenario),
            methods=_listed(self.method),
            recipe=self.recipe,
        )


@figures_app.command("all")
@grouped
def all_command(
    records: Records = Records(), split: Split = "test", select: Select = "last"
) -> None:
    """Draw every figure that the records are enough for, for each data set, protocol and recipe."""
    from feddg_bench.analysis.figures.overhead import overhead
    from feddg_bench.analysis.figures.scores import SWEEPS, convergence, leaderboard, swept

    wanted, runs, rule = records.read(split, select)

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

    save(pictures, records.folder)


@figures_app.command("convergence")
@grouped
def convergence_command(records: SomeRecords = SomeRecords(), split: Split = "test") -> None:
    """Draw accuracy, or another key metric, against the round.

    It is the mean over scenarios; lines and bands are mean and deviation over seeds.
    """
    from feddg_bench.analysis.figures.scores import convergence

    wanted, runs, _ = records.read(split)
    _each_frame(lambda f: convergence(f, wanted, split), runs, split, records.folder)


@figures_app.command("leaderboard")
@grouped
def leaderboard_command(
    records: SomeRecords = SomeRecords(), split: Split = "test", select: Select = "last"
) -> None:
    """Draw the key metric of each method, best first, with that of single scenarios."""
    from feddg_bench.analysis.figures.scores import leaderboard

    wanted, runs, rule = records.read(split, select)
    _each_frame(lambda f: leaderboard(f, wanted, split, rule), runs, split, records.folder)


@figures_app.command("overhead")
@grouped
def overhead_command(records: SomeRecords = SomeRecords()) -> None:
    """Draw the seconds of a round by phase for each method, and those before round 1."""
    from feddg_bench.analysis.figures.overhead import overhead

    wanted, runs, _ = records.read()
    _each_frame(lambda f: overhead(f, wanted), runs, "test", records.folder)


@figures_app.command("lambda")
@grouped
def lambda_command(
    records: SomeRecords = SomeRecords(), split: Split = "test", select: Select = "last"
) -> None:
    """Draw accuracy, or another key metric, against the heterogeneity lambda."""
    _sweep("lambda", *records.read(split, select), split, records.folder)


@figures_app.command("clients")
@grouped
def clients_command(
    records: SomeRecords = SomeRecords(), split: Split = "test", select: Select = "last"
) -> None:
    """Draw accuracy, or another key metric, against K/N: the clients of a round out of all."""
    _sweep("clients", *records.read(split, select), split, records.folder)


def _listed(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _frames(runs: list[Run]) -> list[Frame]:
    from feddg_bench.analysis.figures.series import frames

    return frames(runs)


def _each_frame(
    draw: Callable[[Frame], Picture | None], runs: list[Run], split: str, folder: Path
) -> None:
    save(
        lambda: (
            draw(frame) or f"{frame.name}: no round was evaluated on {split}"
            for frame in _frames(runs)
        ),
        folder,
    )


def _sweep(
    name: str, wanted: Wanted, runs: list[Run], rule: Rule, split: str, folder: Path
) -> None:
    from feddg_bench.analysis.figures.scores import SWEEPS, swept

    def pictures() -> Iterable[Picture]:
        found = swept(runs, SWEEPS[name], wanted, split, rule)
        if not found:
            raise DataError(_unswept(name, wanted))
        return found

    save(pictures, folder)


def _unswept(name: str, wanted: Wanted) -> str:
    """Say that records hold one value of a setting only, and which command makes others."""
    on = f" dataset={wanted.dataset}" if wanted.dataset not in (None, "digits4") else ""
    what = "lambda" if name == "lambda" else "K/N"
    return (
        f"{name}: the records hold no two values of {what} that could be compared; make some: "
        f"feddg-bench sweep sweeps/{name}.yaml{on}"
    )


figures_app.command("partition")(partition_command)
figures_app.command("styles")(styles_command)
figures_app.command("tsne")(tsne_command)
figures_app.command("gradcam")(gradcam_command)
figures_app.command("landscape")(landscape_command)
