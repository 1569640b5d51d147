"""``feddg-bench run`` and ``resume``: train, record, print tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from feddg_bench.cli.options import (
    Clients,
    Config,
    DataName,
    Json,
    Lambda,
    Methods,
    Pairs,
    PerRound,
    Recipe,
    Recording,
    Rounds,
    Set,
    grouped,
    print_json,
)
from feddg_bench.common.errors import RunInterruptedError, SettingsError
from feddg_bench.config.layers import Layer
from feddg_bench.config.schema import Resources
from feddg_bench.plugins import load_dataset
from feddg_bench.runs.plans import draft_runs, make_plans, one_scenario, user_layer

if TYPE_CHECKING:
    from feddg_bench.records.record import RunRecord
    from feddg_bench.runs.run import Plan, RunData


@grouped
def run_command(
    pairs: Pairs = None,
    method: Methods = "fedavg",
    protocol: Annotated[str, typer.Option(help="Comma-separated: ltdo, lodo, wilds.")] = "ltdo",
    dataset: DataName = "digits4",
    scenario: Annotated[
        str | None,
        typer.Option(help="Comma-separated, such as ac-p-s; `all` for every pair."),
    ] = None,
    recipe: Recipe = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated.")] = "0",
    rounds: Rounds = None,
    clients: Clients = None,
    per_round: PerRound = None,
    heterogeneity: Lambda = None,
    split_csv: Annotated[
        Path | None, typer.Option(help="Split file; replaces our own splits.")
    ] = None,
    recording: Recording = Recording(),
    config: Config = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Train methods under protocols, record every run, print a table of each.

    Runs whose record is there already are not repeated; interrupted ones go on from their
    checkpoint.
    """
    from feddg_bench.sweeps.jobs import split_pairs

    named, pairs = split_pairs([*(set_ or ()), *(pairs or ())])
    method, protocol = named.get("method", method), named.get("protocol", protocol)
    dataset, scenario = named.get("dataset", dataset), named.get("scenario", scenario)
    recipe, seeds = named.get("recipe", recipe), named.get("seeds", seeds)
    flags = {
        "rounds": rounds,
        "clients": clients,
        "per_round": per_round,
        "heterogeneity": heterogeneity,
        "split_csv": None if split_csv is None else str(split_csv),
    }
    resources = recording.resources()
    opened = load_dataset(dataset)(resources.data_root)
    drafts = draft_runs(
        opened,
        dataset,
        methods=method,
        protocols=protocol,
        scenario=scenario,
        recipe=recipe,
        seeds=seeds,
        user=user_layer(flags, config or (), pairs),
    )

    from feddg_bench.runs.run import RunData

    _run_all(
        make_plans(drafts, opened), RunData(opened, resources.cache_dir), resources, as_json=json_
    )


@grouped
def resume_command(
    run: Annotated[str, typer.Argument(help="A run's key, or the first part of it.")],
    recording: Recording = Recording(),
    json_: Json = False,
) -> None:
    """Go on with an interrupted run from its last checkpoint."""
    from feddg_bench.records.store import ResultsStore

    store = ResultsStore(recording.results)
    key = Path(run).stem
    found = sorted(store.checkpoints.glob(f"{key}*.safetensors"))
    if not found:
        done = sorted(store.runs.glob(f"{key}*.json"))
        hint = (
            f"it is finished: {done[0]}"
            if done
            else f"unfinished runs there: {_listing(store.checkpoints.glob('*.safetensors'))}"
        )
        raise SettingsError(f"no checkpoint of run {run!r} in {store.checkpoints}; {hint}")
    if len(found) > 1:
        raise SettingsError(f"{run!r} is ambiguous: it begins {_listing(iter(found))}")

    from feddg_bench.runs.checkpoints import load_checkpoint
    from feddg_bench.runs.run import RunData, make_plan

    state = load_checkpoint(found[0])
    settings: Layer = state["plan"]["settings"]
    root = recording.data_root or (Path(state["data_root"]) if state["data_root"] else None)
    opened = load_dataset(settings["dataset"])(root)
    chosen = one_scenario(settings["protocol"], opened, settings["scenario"])
    plan = make_plan([], [settings], chosen, state["plan"]["recipe"], opened.identity)
    if plan.key != found[0].stem:
        raise SettingsError(
            f"checkpoint {found[0]} was made by another version of {plan.settings.method} or with "
            f"other file contents; delete it and run the original command again"
        )
    resources = replace(recording, data_root=root).resources()
    data = RunData(opened, resources.cache_dir)
    _run_all([plan], data, resources, as_json=json_)


def _run_all(plans: list[Plan], data: RunData, resources: Resources, *, as_json: bool) -> None:
    """Run what is not recorded yet, then print the table."""
    from feddg_bench.analysis.tables import summary
    from feddg_bench.cli.progress import ConsoleReport, draw
    from feddg_bench.common.terminal import terminal
    from feddg_bench.engine.devices import open_executor
    from feddg_bench.records.store import ResultsStore
    from feddg_bench.runs.run import run
    from feddg_bench.tracking.tracker import Reports, Tracker

    store = ResultsStore(resources.results)
    store.check_writable()
    records: list[RunRecord] = []
    current: Plan | None = None
    executor = None
    try:
        with (
            ConsoleReport(len(plans)) as report,
            Tracker(resources, report.say) as tracker,
        ):
            for plan in plans:
                record = store.load(plan.key)
                if record is not None:
                    data.check_same(record, store.path(plan.key))
                    report.already(plan)
                    tracker.already(plan, record)
                    records.append(record)
                    continue
                current = plan
                executor = executor or open_executor(resources)
                records.append(run(plan, data, executor, resources, Reports(report, tracker)))
    except RunInterruptedError as stop:
        key = current.key if current else ""
        where = "" if resources.results == Path("results") else f" --results {resources.results}"
        if resources.wandb != "off":
            where += f" --wandb {resources.wandb} --wandb-project {resources.wandb_project}"
        hint = (
            f"go on with: feddg-bench resume {key}{where} (or the same command again)"
            if store.checkpoint(key).exists()
            else "no round was finished; the same command starts this run again"
        )
        print(f"feddg-bench: stopped; {hint}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(128 + stop.signal_number) from stop
    finally:
        if executor is not None:
            executor.close()
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        groups.setdefault((record.protocol, record.method), []).append(record)
    tables = [summary(group) for group in groups.values()]
    if as_json:
        print_json(
            {
                "tables": [table.as_json() for table in tables],
                "runs": [r.model_dump(mode="json", exclude={"rounds"}) for r in records],
                "files": [str(store.path(r.key)) for r in records],
            }
        )
        return
    console = terminal()
    for table in tables:
        console.print(draw(table))
    console.print(f"Records: {store.runs}", highlight=False, soft_wrap=True)


def _listing(paths: Iterator[Path]) -> str:
    return ", ".join(sorted(path.stem for path in paths)) or "none"
