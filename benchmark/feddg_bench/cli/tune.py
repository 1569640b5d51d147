"""``feddg-bench tune``: the same number of trials for every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from feddg_bench.cli.options import Names, command
from feddg_bench.cli.sweep import SweepRecording, finish, listing
from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import from_here
from feddg_bench.common.terminal import say, terminal, text_table
from feddg_bench.records.metrics import Metric, find_metric
from feddg_bench.records.tuning import FOLDER, TuningLedger, ledger_path
from feddg_bench.runs.request import Datasets


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TuneCommand(SweepRecording, Names):
    """Try the same number of settings for every method and write down which won.

    It tries the learning rate first, then the method's own ranges, on one scenario and seeds that
    no table uses (default 100-102). The recipe's settings stay unless others lead by more than
    noise over at least three seeds. Only held-out images of the training domains decide. It goes
    on where it was stopped, and can share the work as `sweep` does. RESULTS/tuning holds the trials
    and the ledgers that `run --tuned` reads.
    """

    trials: Annotated[int, typer.Option(min=1, max=1000, help="Trials of each method.")] = 8
    ranges: Annotated[
        Path | None,
        typer.Option(help="Folder of METHOD.yaml, sweep files with ranges. Default sweeps/tune."),
    ] = None
    dry_run: Annotated[bool, typer.Option(help="List the trials and compute nothing.")] = False
    retry_failed: Annotated[bool, typer.Option(help="Make trials again that failed.")] = False

    def __call__(self) -> None:
        """Run the command."""
        from feddg_bench.sweeps.trials import SEEDS, open_tuning

        resources = self.resources()
        if resources.engine == "slurm":
            raise SettingsError(
                "tune takes no --engine slurm: start the same command in several jobs"
            )
        seeds = SEEDS if self.seeds is None else self.seeds
        tunings, search = open_tuning(
            self.request(resources, seeds=seeds), self.trials, self.ranges
        )
        inner = resources.model_copy(update={"results": resources.results / FOLDER})
        if self.dry_run:
            say(
                listing(f"{len(tunings)} methods, {self.trials} trials each", search, inner.results)
            )
            return
        datasets = Datasets(resources.data_root)
        try:
            failed = finish(search, datasets, inner, retry_failed=self.retry_failed)
        finally:  # stopped or not, finished ledgers are saved
            ledgers = [t.ledger(inner.results) for t in tunings if t.is_done(inner.results)]
            for ledger in ledgers:
                ledger.save(resources.results)
        first = ledgers[0]
        frame = first.dataset, first.protocol, first.recipe
        place = ledger_path(resources.results, *frame, first.method).parent
        _show(ledgers, find_metric(first.metric, tunings[0].plan.dataset.task), place)
        if failed:
            say("trials that failed can be made again with --retry-failed")
            raise typer.Exit(1)


tune_command = command(TuneCommand)


def _show(ledgers: Sequence[TuningLedger], metric: Metric, place: Path) -> None:
    """Print a table of each method's tuning."""
    from feddg_bench.records.differences import assignments

    first = ledgers[0]
    rows = []
    for ledger in ledgers:
        values = [
            None if t.id_val is None else f"{metric.display(t.id_val):.2f}" for t in ledger.trials
        ]
        seconds = sum(trial.seconds or 0 for trial in ledger.trials)
        settings = ", ".join(assignments(ledger.settings)) or "the recipe's own"
        won = None if ledger.chosen is None else ledger.trials[ledger.chosen]
        chosen = "-" if ledger.chosen is None else values[ledger.chosen]
        result = "every trial failed" if won is None else settings
        lead = "-"
        if won and won.lead is not None and won.standard_error is not None:
            shown = metric.display(won.lead), metric.display(won.standard_error)
            lead = "{:+.2f} ± {:.2f}".format(*shown)
        rows.append(
            (ledger.method, values[0] or "-", chosen or "-", lead, result, f"{seconds:.0f}")
        )
    seeds = f"seed{'s' * (len(first.seeds) > 1)} {', '.join(map(str, first.seeds))}"
    title = f"{first.dataset}, {first.protocol} {first.scenario}, recipe {first.recipe}"
    drawn = text_table(
        f"{title}, {seeds}: {len(first.trials)} trials each",
        ("method", "recipe", "tuned", "lead", "settings", "seconds"),
        rows,
        caption=f"{metric.title} on held-out images of the training domains, mean of the last "
        f"rounds. Settings replace the recipe's if they lead by more than noise (lead ± standard "
        f"error). `run --tuned` takes them: {from_here(place)}",
        right=("recipe", "tuned", "lead", "seconds"),
        whole=("method",),
    )
    terminal().print(drawn, highlight=False)
