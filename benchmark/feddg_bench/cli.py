"""The ``feddg-bench`` command. PyTorch is imported only where something is computed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddg_bench.cli_data import data_app
from feddg_bench.cli_download import download_command
from feddg_bench.cli_figures import figures_app
from feddg_bench.cli_report import report_command
from feddg_bench.cli_sweep import sweep_command
from feddg_bench.cli_tables import tables_command
from feddg_bench.errors import FeddgError, RunInterruptedError, SettingsError
from feddg_bench.plans import draft_runs, make_plans, one_scenario, user_layer
from feddg_bench.registry import check_name, load_dataset, names, recipe_names
from feddg_bench.settings import (
    Layer,
    Resources,
    load_layer,
    validate,
)

if TYPE_CHECKING:
    from feddg_bench.results import RunRecord
    from feddg_bench.run import Plan, RunData

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help answers in half the time
    help="Federated domain generalisation: one loop, every method a plugin, numbers that repeat.",
)

Where = Annotated[Path, typer.Option(help="Folder of records and checkpoints.")]
Methods = Annotated[
    str,
    typer.Option(
        "--method",
        "--methods",
        help="Comma-separated, or `all`; see `feddg-bench methods`.",
    ),
]
DataName = Annotated[str, typer.Option(help="See `feddg-bench datasets`.")]
Recipe = Annotated[
    str | None,
    typer.Option(help="A recipe's name or a YAML file; default is the data set's own."),
]
DataRoot = Annotated[
    Path | None, typer.Option(help="Folder of the data; else $FEDDG_DATA or the settings file.")
]
CacheDir = Annotated[
    Path | None, typer.Option(help="Folder of decoded images; else $FEDDG_CACHE or ~/.cache.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Workers = Annotated[
    int, typer.Option(help="Processes that train clients; 0 is one a core, or one on a GPU.")
]
Threads = Annotated[
    int, typer.Option(help="CPU threads of each worker; the numbers' last bits depend on it.")
]
Rounds = Annotated[int | None, typer.Option(help="Rounds of a run.")]
Clients = Annotated[int | None, typer.Option(help="N, all clients.")]
PerRound = Annotated[int | None, typer.Option(help="K, the clients sampled each round.")]
Lambda = Annotated[
    float | None,
    typer.Option(
        "--heterogeneity", "--lambda", help="lambda in [0, 1]; 1 is the same mixture for all."
    ),
]
Wandb = Annotated[
    str, typer.Option(help="W&B tracking: online, offline (no account needed) or off.")
]
WandbProject = Annotated[str, typer.Option(help="W&B project; the entity is $WANDB_ENTITY.")]
Config = Annotated[list[Path] | None, typer.Option("--config", help="YAML file of settings.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, such as train.lr=0.001.")]
Pairs = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def main() -> None:
    """Run the command; a user's error becomes one sentence and exit status 2."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except FeddgError as error:
        print(f"feddg-bench: error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except RunInterruptedError as stop:
        print("feddg-bench: stopped", file=sys.stderr)  # noqa: T201
        sys.exit(128 + stop.signal_number)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not cut the ending short
    raise RunInterruptedError(number)


# ---------------------------------------------------------------------------------- run


@app.command("run")
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
    data_root: DataRoot = None,
    cache_dir: CacheDir = None,
    results: Where = Path("results"),
    device: Device = "auto",
    workers: Workers = 0,
    threads: Threads = 1,
    checkpoint_every: Annotated[int, typer.Option(help="Rounds between checkpoints.")] = 1,
    wandb: Wandb = "off",
    wandb_project: WandbProject = "feddg-bench",
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
    resources = _resources(
        device=device,
        workers=workers,
        threads=threads,
        data_root=data_root,
        cache_dir=cache_dir,
        results=results,
        checkpoint_every=checkpoint_every,
        wandb=wandb,
        wandb_project=wandb_project,
    )
    check_name("data set", dataset)
    opened = load_dataset(dataset)(data_root)
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

    from feddg_bench.run import RunData

    _run_all(make_plans(drafts, opened), RunData(opened, cache_dir), resources, as_json=json_)


@app.command("resume")
def resume_command(
    run: Annotated[str, typer.Argument(help="A run's key, or the first part of it.")],
    data_root: DataRoot = None,
    cache_dir: CacheDir = None,
    results: Where = Path("results"),
    device: Device = "auto",
    workers: Workers = 0,
    threads: Threads = 1,
    checkpoint_every: Annotated[int, typer.Option(help="Rounds between checkpoints.")] = 1,
    wandb: Wandb = "off",
    wandb_project: WandbProject = "feddg-bench",
    json_: Json = False,
) -> None:
    """Go on with an interrupted run from its last checkpoint."""
    from feddg_bench.results import ResultsStore

    store = ResultsStore(results)
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

    from feddg_bench.checkpoints import load_checkpoint
    from feddg_bench.run import RunData, make_plan

    state = load_checkpoint(found[0])
    settings: Layer = state["plan"]["settings"]
    root = data_root or (Path(state["data_root"]) if state["data_root"] else None)
    opened = load_dataset(settings["dataset"])(root)
    chosen = one_scenario(settings["protocol"], opened, settings["scenario"])
    plan = make_plan([], [settings], chosen, state["plan"]["recipe"], opened.identity)
    if plan.key != found[0].stem:
        raise SettingsError(
            f"checkpoint {found[0]} was made by another version of {plan.settings.method} or with "
            f"other file contents; delete it and run the original command again"
        )
    resources = _resources(
        device=device,
        workers=workers,
        threads=threads,
        data_root=root,
        cache_dir=cache_dir,
        results=results,
        checkpoint_every=checkpoint_every,
        wandb=wandb,
        wandb_project=wandb_project,
    )
    data = RunData(opened, cache_dir)
    _run_all([plan], data, resources, as_json=json_)


def _run_all(plans: list[Plan], data: RunData, resources: Resources, *, as_json: bool) -> None:
    """Run what is not recorded yet, then print the table."""
    from rich.console import Console

    from feddg_bench.progress import ConsoleReport, draw
    from feddg_bench.results import ResultsStore
    from feddg_bench.run import open_executor, run
    from feddg_bench.tables import summary
    from feddg_bench.tracking import Reports, Tracker

    store = ResultsStore(resources.results)
    store.check_writable()
    records: list[RunRecord] = []
    current: Plan | None = None
    executor = None
    try:
        with (
            ConsoleReport(Console(stderr=True), len(plans)) as report,
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
        _print_json(
            {
                "tables": [table.as_json() for table in tables],
                "runs": [r.model_dump(mode="json", exclude={"rounds"}) for r in records],
                "files": [str(store.path(r.key)) for r in records],
            }
        )
        return
    console = Console()
    for table in tables:
        console.print(draw(table))
    console.print(f"Records: {store.runs}", highlight=False, soft_wrap=True)


def _resources(**where: Any) -> Resources:
    return validate(Resources, where)


def _listing(paths: Iterator[Path]) -> str:
    return ", ".join(sorted(path.stem for path in paths)) or "none"


@app.command("profile")
def profile_command(
    pairs: Pairs = None,
    method: Methods = "fedavg",
    protocol: Annotated[str, typer.Option(help="ltdo or lodo.")] = "ltdo",
    dataset: DataName = "digits4",
    scenario: Annotated[str | None, typer.Option(help="One scenario; default the first.")] = None,
    recipe: Recipe = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to measure, after one more.")] = 3,
    clients: Clients = None,
    per_round: PerRound = None,
    heterogeneity: Lambda = None,
    synthetic: Annotated[
        int | None,
        typer.Option(min=1, help="Use random images, this many a client, instead of the data."),
    ] = None,
    data_root: DataRoot = None,
    cache_dir: CacheDir = None,
    results: Where = Path("results"),
    device: Device = "auto",
    threads: Threads = 1,
    config: Config = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Measure where a method's time goes, against this machine's peak and a bare loop."""
    flags = {"clients": clients, "per_round": per_round, "heterogeneity": heterogeneity}
    where = {"device": device, "threads": threads, "data_root": data_root, "cache_dir": cache_dir}
    resources = validate(Resources, where)
    check_name("data set", dataset)
    opened = load_dataset(dataset)(data_root)
    flags["rounds"] = rounds + 1
    drafts = draft_runs(
        opened,
        dataset,
        methods=method,
        protocols=protocol,
        scenario=one_scenario(protocol, opened, scenario).name,
        recipe=recipe,
        seeds="0",
        user=user_layer(flags, config or (), [*(set_ or ()), *(pairs or ())]),
    )

    from feddg_bench.profile import profile, synthetic_federation
    from feddg_bench.results import ResultsStore
    from feddg_bench.run import RunData, open_federation

    data = None if synthetic else RunData(opened, cache_dir)
    measured = []
    for plan in make_plans(drafts, opened):
        if data is None:
            federation = synthetic_federation(
                plan.settings.partition.clients,
                synthetic or 1,
                plan.settings.data.image_size,
                len(opened.classes),
                like=opened,
            )
        else:
            federation, _ = open_federation(plan, data, ResultsStore(results))
        measured.append(profile(plan, federation, resources, rounds=rounds))
    if json_:
        _print_json([p.as_json() for p in measured] if len(measured) > 1 else measured[0].as_json())
        return
    from rich.console import Console

    from feddg_bench.progress import draw_overheads, draw_profile

    console = Console()
    console.print(draw_profile(measured[0]) if len(measured) == 1 else draw_overheads(measured))


# -------------------------------------------------------------------------------- lists


data_app.command("download")(download_command)
app.add_typer(data_app, name="data")
app.command("tables")(tables_command)
app.command("report")(report_command)
app.add_typer(figures_app, name="figures")
app.command("sweep")(sweep_command)

methods_app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode=None,
    help="List the methods with their settings; or show one's card, or begin a new one.",
)
app.add_typer(methods_app, name="methods")


@methods_app.callback()
def methods_command(context: typer.Context, json_: Json = False) -> None:
    """List the methods with their settings; or show one's card, or begin a new one."""
    if context.invoked_subcommand is not None:
        return
    from feddg_bench.registry import load_method

    _list(
        "methods",
        [
            {
                "name": name,
                "title": _first_line(load_method(name).__doc__),
                "settings": sorted(load_method(name).Settings.model_fields),
            }
            for name in names("method")
        ],
        as_json=json_,
    )


@methods_app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(help="A method; see `feddg-bench methods`.")],
    pairs: Pairs = None,
    dataset: DataName = "digits4",
    recipe: Recipe = None,
    backbone: Annotated[
        str | None, typer.Option(help="Backbone whose messages are shown; else the recipe's.")
    ] = None,
    json_: Json = False,
) -> None:
    """Print a method's card: paper, settings, what leaves a client in bytes, deviations."""
    given = [] if backbone is None else [f"backbone.name={backbone}", "backbone.pretrained=false"]
    check_name("method", name)
    check_name("data set", dataset)
    opened = load_dataset(dataset)()
    drafts = draft_runs(
        opened,
        dataset,
        methods=name,
        protocols="lodo",
        scenario=one_scenario("lodo", opened, None).name,
        recipe=recipe,
        seeds="0",
        user=user_layer({}, (), [*given, *(pairs or ())]),
    )

    from feddg_bench.cards import make_card, markdown

    (plan,) = make_plans(drafts, opened)
    card = make_card(plan, len(opened.classes))
    if json_:
        _print_json(card.as_json())
    else:
        print(markdown(card), end="")  # noqa: T201


@methods_app.command("new")
def new_command(
    name: Annotated[str, typer.Argument(help="Name of the method, such as fedclip.")],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to write; default ./NAME.")
    ] = None,
) -> None:
    """Write a working plugin package: a method, its test, and what makes it found by name."""
    from feddg_bench.template import write_plugin

    written = write_plugin(name, directory or Path(name))
    print("\n".join(f"wrote {path}" for path in written))  # noqa: T201
    print(  # noqa: T201
        f"next: pip install -e {directory or name}; feddg-bench run --method {name}; "
        f"pytest {directory or name}"
    )


@app.command("datasets")
def datasets_command(json_: Json = False) -> None:
    """List the data sets with their domains."""
    found = [(name, load_dataset(name)) for name in names("data set")]
    rows = [
        {
            "name": name,
            "title": dataset.title,
            "domains": list(dataset.domains),
            "classes": len(dataset.classes),
            "licence": dataset.licence,
            "source": dataset.source,
        }
        for name, dataset in found
    ]
    _list("datasets", rows, as_json=json_)


@app.command("recipes")
def recipes_command(json_: Json = False) -> None:
    """List the recipes with the data sets they are written for."""
    from feddg_bench.registry import shipped

    rows = []
    for name in recipe_names():
        layer = load_layer(shipped("recipes", "sweeps/recipes") / f"{name}.yaml")
        rows.append(
            {
                "name": name,
                "description": layer["description"],
                "datasets": sorted(layer["datasets"]),
            }
        )
    _list("recipes", rows, as_json=json_)


def _first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0] if text else ""


def _list(title: str, rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        _print_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            *(", ".join(map(str, v)) if isinstance(v, list) else str(v) for v in row.values())
        )
    Console().print(table)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))  # noqa: T201
