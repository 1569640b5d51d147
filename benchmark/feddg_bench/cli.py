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
from feddg_bench.cli_figures import figures_app
from feddg_bench.cli_sweep import sweep_command
from feddg_bench.cli_tables import tables_command
from feddg_bench.errors import FeddgError, RunInterruptedError, SettingsError
from feddg_bench.registry import check_name, load_dataset, load_recipe, names, recipe_names
from feddg_bench.settings import (
    Layer,
    Resources,
    RunSettings,
    load_layer,
    merge,
    parse_override,
    validate,
)

if TYPE_CHECKING:
    from feddg_bench.data import DomainDataset
    from feddg_bench.protocols import Scenario
    from feddg_bench.results import RunRecord
    from feddg_bench.run import Plan, RunData

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help answers in half the time
    help="Federated domain generalisation: one loop, every method a plugin, numbers that repeat.",
)

FLAGS = {
    "rounds": "federation.rounds",
    "per_round": "federation.per_round",
    "clients": "partition.clients",
    "heterogeneity": "partition.heterogeneity",
    "split_csv": "data.split_csv",
}
"""Flags that stand for a setting."""

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
        device, workers, threads, data_root, cache_dir, results, checkpoint_every
    )
    check_name("data set", dataset)
    opened = load_dataset(dataset)(data_root)
    wanted = [
        (*_layers(m, dataset, p, recipe, flags, config, None, pairs), s)
        for p in protocol.split(",")
        for m in _methods(method)
        for s in _scenarios(p, opened, scenario)
    ]
    seed_list = _seeds(seeds)
    for _, base, user, chosen in wanted:
        layer = {"scenario": chosen.name, "seed": seed_list[0]}
        validate(RunSettings, merge(base, user, layer))

    from feddg_bench.run import RunData, make_plan

    plans = [
        make_plan([base], [user, {"scenario": s.name, "seed": seed}], s, label, opened.identity)
        for seed in seed_list
        for label, base, user, s in wanted
    ]
    data = RunData(opened, cache_dir)
    _run_all(plans, data, resources, as_json=json_)


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
    chosen = _scenarios(settings["protocol"], opened, settings["scenario"])[0]
    plan = make_plan([], [settings], chosen, state["plan"]["recipe"], opened.identity)
    if plan.key != found[0].stem:
        raise SettingsError(
            f"checkpoint {found[0]} was made by another version of {plan.settings.method} or with "
            f"other file contents; delete it and run the original command again"
        )
    resources = _resources(device, workers, threads, root, cache_dir, results, checkpoint_every)
    data = RunData(opened, cache_dir)
    _run_all([plan], data, resources, as_json=json_)


def _run_all(plans: list[Plan], data: RunData, resources: Resources, *, as_json: bool) -> None:
    """Run what is not recorded yet, then print the table."""
    from rich.console import Console

    from feddg_bench.progress import ConsoleReport, draw
    from feddg_bench.results import ResultsStore
    from feddg_bench.run import open_executor, run
    from feddg_bench.tables import summary

    store = ResultsStore(resources.results)
    store.check_writable()
    records: list[RunRecord] = []
    current: Plan | None = None
    executor = None
    try:
        with ConsoleReport(Console(stderr=True), len(plans)) as report:
            for plan in plans:
                record = store.load(plan.key)
                if record is not None:
                    data.check_same(record, store.path(plan.key))
                    report.already(plan)
                    records.append(record)
                    continue
                current = plan
                executor = executor or open_executor(resources)
                records.append(run(plan, data, executor, resources, report))
    except RunInterruptedError as stop:
        key = current.key if current else ""
        where = "" if resources.results == Path("results") else f" --results {resources.results}"
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


def _resources(
    device: str,
    workers: int,
    threads: int,
    data_root: Path | None,
    cache_dir: Path | None,
    results: Path,
    checkpoint_every: int,
) -> Resources:
    return validate(
        Resources,
        {
            "device": device,
            "workers": workers,
            "threads": threads,
            "data_root": data_root,
            "cache_dir": cache_dir,
            "results": results,
            "checkpoint_every": checkpoint_every,
        },
    )


def _layers(
    method: str,
    dataset: str,
    protocol: str,
    recipe: str | None,
    flags: dict[str, Any],
    config: list[Path] | None,
    set_: list[str] | None,
    pairs: list[str] | None,
) -> tuple[str, Layer, Layer]:
    """Return the recipe's label, its layer, and the user's: files, flags, ``KEY=VALUE``."""
    from feddg_bench.protocols import validate_protocol

    check_name("method", method)
    check_name("data set", dataset)
    validate_protocol(protocol)
    label = recipe or load_dataset(dataset).default_recipe
    base = merge(
        load_recipe(label, dataset, method),
        {"method": method, "dataset": dataset, "protocol": protocol},
    )
    given = [
        parse_override(f"{FLAGS[flag]}={value}")
        for flag, value in flags.items()
        if value is not None
    ]
    user = merge(
        *(load_layer(path) for path in config or ()),
        *given,
        *(parse_override(text) for text in (*(set_ or ()), *(pairs or ()))),
    )
    return Path(label).stem, base, user


def _methods(text: str) -> list[str]:
    """Return the methods of a comma-separated list."""
    if text == "all":
        return list(names("method"))
    found = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in found:
        check_name("method", name)
    return found


def _scenarios(protocol: str, dataset: DomainDataset, select: str | None) -> list[Scenario]:
    from feddg_bench.protocols import scenarios

    return scenarios(protocol, dataset.domains, dataset.letters, select, dataset.official)


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = [-1]
    if any(seed < 0 for seed in seeds):
        raise SettingsError(f"cannot read --seeds {text!r}: expected numbers >= 0, such as 0,1,2")
    return list(dict.fromkeys(seeds))


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
    chosen = _scenarios(protocol, opened, scenario)[0]
    run = {"scenario": chosen.name, "federation": {"rounds": rounds + 1}}
    wanted = [
        _layers(m, dataset, protocol, recipe, flags, config, set_, pairs) for m in _methods(method)
    ]
    for _, base, user in wanted:
        validate(RunSettings, merge(base, user, run))

    from feddg_bench.profile import profile, synthetic_federation
    from feddg_bench.results import ResultsStore
    from feddg_bench.run import RunData, make_plan, open_federation

    data = None if synthetic else RunData(opened, cache_dir)
    measured = []
    for label, base, user in wanted:
        plan = make_plan([base], [user, run], chosen, label, opened.identity)
        if data is None:
            federation = synthetic_federation(
                plan.settings.partition.clients,
                synthetic or 1,
                plan.settings.data.image_size,
                len(opened.classes),
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


app.add_typer(data_app, name="data")
app.command("tables")(tables_command)
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
    given = None if backbone is None else [f"backbone.name={backbone}", "backbone.pretrained=false"]
    label, base, user = _layers(name, dataset, "lodo", recipe, {}, None, given, pairs)
    chosen = _scenarios("lodo", load_dataset(dataset)(), None)[0]
    user = merge(user, {"scenario": chosen.name})
    validate(RunSettings, merge(base, user))

    from feddg_bench.cards import make_card, markdown
    from feddg_bench.run import make_plan

    card = make_card(make_plan([base], [user], chosen, label), len(load_dataset(dataset).classes))
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
