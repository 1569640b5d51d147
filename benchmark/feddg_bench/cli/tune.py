"""``feddg-bench tune``: the same number of trials for every method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from feddg_bench.cli.options import Names, with_groups
from feddg_bench.cli.sweep import SweepRecording, finish, listing
from feddg_bench.common.errors import SettingsError
from feddg_bench.common.terminal import table, terminal
from feddg_bench.records.metrics import Metric, find_metric
from feddg_bench.records.tuning import FOLDER, TuningLedger, ledger_path
from feddg_bench.runs.request import Datasets


@with_groups
def tune_command(
    names: Names = Names(),
    trials: Annotated[int, typer.Option(min=1, max=1000, help="Trials of each method.")] = 8,
    ranges: Annotated[
        Path | None,
        typer.Option(help="Folder of METHOD.yaml, sweep files with ranges. Default sweeps/tune."),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="List the trials and compute nothing.")] = False,
    retry_failed: Annotated[bool, typer.Option(help="Make trials again that failed.")] = False,
    recording: SweepRecording = SweepRecording(),
) -> None:
    """Try the same number of settings for every method and write down which won.

    It tries the learning rate first, then the method's own ranges, on one scenario and a seed that
    no table uses (default 100; of several the mean counts). Only held-out images of the training
    domains decide. It goes on where it was stopped, and can share the work as `sweep` does.
    RESULTS/tuning holds the trials and the ledgers that `run --tuned` reads.
    """
    from feddg_bench.sweeps.tuning import SEED, open_tuning

    resources = recording.resources()
    if resources.engine == "slurm":
        raise SettingsError("tune takes no --engine slurm: start the same command in several jobs")
    seeds = str(SEED) if names.seeds is None else names.seeds
    tunings, search = open_tuning(names.request(resources, seeds=seeds), trials, ranges)
    inner = resources.model_copy(update={"results": resources.results / FOLDER})
    if dry_run:
        print(listing(f"{len(tunings)} methods, {trials} trials each", search, inner.results))
        return
    datasets = Datasets(resources.data_root)
    try:
        failed = finish(search, datasets, inner, retry_failed=retry_failed)
    finally:  # stopped or not, finished ledgers are saved
        ledgers = [t.ledger(inner.results) for t in tunings if t.is_done(inner.results)]
        for ledger in ledgers:
            ledger.save(resources.results)
    first = ledgers[0]
    frame = first.dataset, first.protocol, first.recipe
    place = ledger_path(resources.results, *frame, first.method).parent
    _show(ledgers, find_metric(first.metric, tunings[0].plan.dataset.task), place)
    if failed:
        print("trials that failed can be made again with --retry-failed")
        raise typer.Exit(1)


def _show(ledgers: Sequence[TuningLedger], metric: Metric, place: Path) -> None:
    """Print a table of each method's tuning."""
    from feddg_bench.records.variants import assignments

    first = ledgers[0]
    rows = []
    for ledger in ledgers:
        values = [
            None if t.id_val is None else f"{metric.display(t.id_val):.2f}" for t in ledger.trials
        ]
        seconds = sum(trial.seconds or 0 for trial in ledger.trials)
        settings = ", ".join(assignments(ledger.settings)) or "the recipe's own"
        chosen = "-" if ledger.chosen is None else values[ledger.chosen]
        said = "every trial failed" if ledger.chosen is None else settings
        rows.append((ledger.method, values[0] or "-", chosen or "-", said, f"{seconds:.0f}"))
    seeds = f"seed{'s' * (len(first.seeds) > 1)} {', '.join(map(str, first.seeds))}"
    title = f"{first.dataset}, {first.protocol} {first.scenario}, recipe {first.recipe}"
    drawn = table(
        f"{title}, {seeds}: {len(first.trials)} trials each",
        ("method", "recipe", "tuned", "settings", "seconds"),
        rows,
        caption=f"{metric.title} on held-out images of the training domains, "
        f"mean of the last rounds. `run --tuned` takes these settings: {place}",
        right=("recipe", "tuned", "seconds"),
        whole=("method",),
    )
    terminal().print(drawn, highlight=False)
