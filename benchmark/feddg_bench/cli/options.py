"""Options that several commands share, single and in groups.

Typer reads the annotations of groups from other modules, so they are values here, not strings.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from feddg_bench.cli import complete
from feddg_bench.cli.help import DATA, OUTPUT, SETUP, WHAT, WHERE, option
from feddg_bench.common.errors import in_a_line, left_out
from feddg_bench.common.notices import tell
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import Resources
from feddg_bench.plugins import names, plugin_name
from feddg_bench.records.sources import FOLDERS, default_folders, holds_records
from feddg_bench.runs.request import FLAGS, NAMES, Request

T = TypeVar("T")


# What to run
Methods = Annotated[
    str | None,
    option(
        WHAT,
        *("--method", "--methods"),
        metavar="NAMES",
        help="comma-separated, or all; see `feddg-bench methods`",
        autocompletion=complete.METHODS,
    ),
]
DataName = Annotated[
    str | None,
    option(
        WHAT,
        metavar="NAME",
        help="data set; see `feddg-bench datasets`",
        autocompletion=complete.DATASET,
    ),
]
Protocols = Annotated[
    str | None,
    option(
        WHAT,
        metavar="NAMES",
        help="ltdo, lodo (default of folder) or wilds",
        autocompletion=complete.PROTOCOL_NAMES,
    ),
]
Scenarios = Annotated[
    str | None,
    option(
        WHAT,
        metavar="NAMES",
        help="such as ip-o-c, or all; default the protocol's",
        autocompletion=complete.SCENARIOS,
    ),
]
Seeds = Annotated[
    str | None,
    option(WHAT, "--seeds", "--seed", metavar="LIST", help="such as 0,1,2 or 0-2"),
]
NumSeeds = Annotated[
    int | None, option(WHAT, metavar="N", help="instead of --seeds: N seeds, counted from 0")
]
Recipe = Annotated[
    str | None,
    option(
        WHAT,
        metavar="NAME",
        help="name or YAML file; default the data set's own",
        autocompletion=complete.RECIPE,
    ),
]
Readings = Annotated[
    str | None,
    option(
        WHAT,
        rare=True,
        metavar="NAME",
        help="of a paper's recipe: published, as its tables were computed; or corrected, the "
        f"papers' own formulas (default {Request.readings})",
        autocompletion=complete.choices("published", "corrected"),
    ),
]
Tuned = Annotated[
    bool | None,
    option(WHAT, "--tuned", help="use the settings selected by `tune` (tuned=ltdo: on LTDO)"),
]

# Setup
Pairs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="settings; see `feddg-bench settings`",
        autocompletion=complete.pairs,
    ),
]
Rounds = Annotated[int | None, option(SETUP, metavar="N", help="rounds of a run")]
Clients = Annotated[int | None, option(SETUP, metavar="N", help="clients in total")]
PerRound = Annotated[
    int | None, option(SETUP, metavar="K", help="clients that are sampled each round")
]
Lambda = Annotated[
    float | None,
    option(
        SETUP,
        *("--lambda", "--heterogeneity"),
        metavar="X",
        help="0: one domain per client; 1: all clients IID",
    ),
]
Config = Annotated[
    list[Path] | None, option(SETUP, "--config", metavar="FILE", help="YAML file of settings")
]
Set = Annotated[
    list[str] | None,
    option(
        SETUP,
        "--set",
        rare=True,
        metavar="KEY=VALUE",
        help="such as train.lr=0.001",
        autocompletion=complete.pairs,
    ),
]
Portable = Annotated[
    bool | None,
    option(
        SETUP, "--portable", rare=True, help="the same bits on every x86-64 CPU with AVX2; slower"
    ),
]

# Data
DataRoot = Annotated[
    Path | None,
    option(DATA, metavar="DIR", help="default that of `data path`, or $FEDDG_DATA"),
]
CacheDir = Annotated[
    Path | None,
    option(DATA, metavar="DIR", help="decoded images; default $FEDDG_CACHE or ~/.cache"),
]
SplitCsv = Annotated[
    Path | None,
    option(DATA, rare=True, metavar="FILE", help="split file; replaces our own splits"),
]

# Where it runs
Device = Annotated[
    str,
    option(
        WHERE,
        metavar="NAME",
        help="auto (default), cpu, cuda (all GPUs) or cuda:0,2",
        autocompletion=complete.choices("auto", "cpu", "cuda"),
    ),
]
Workers = Annotated[
    int, option(WHERE, metavar="N", help="processes; 0: one per core or per GPU (default)")
]
Threads = Annotated[int, option(WHERE, metavar="N", help="of each worker; changes the last bits")]
Engine = Annotated[
    str,
    option(
        WHERE,
        metavar="NAME",
        help="processes (default), ray; of a sweep also slurm",
        autocompletion=complete.choices("processes", "ray", "slurm"),
    ),
]
Address = Annotated[
    str | None,
    option(
        WHERE,
        rare=True,
        metavar="HOST:PORT",
        help="Ray cluster, or auto; else one is started for the command",
    ),
]

# Output
Where = Annotated[Path, option(OUTPUT, metavar="DIR", help="folder of records and checkpoints")]
Folders = Annotated[
    list[Path] | None,
    option(
        OUTPUT, "--results", metavar="DIR", help="records, repeatable; default runs, else results"
    ),
]
Filters = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        metavar="KEY=VALUE",
        help="Only runs that have it, such as dataset=pacs, K=5 or method=fedavg,pardon; "
        "repeatable.",
    ),
]
Logger = Annotated[
    list[str] | None,
    option(
        OUTPUT,
        metavar="NAMES",
        help="csv, tensorboard, mlflow; comma-separated or repeated",
        autocompletion=complete.choices("csv", "tensorboard", "mlflow", several=True),
    ),
]
Wandb = Annotated[
    str,
    option(
        OUTPUT,
        metavar="MODE",
        help="online, offline (no account) or off (default)",
        autocompletion=complete.choices("online", "offline", "off"),
    ),
]
WandbProject = Annotated[
    str,
    option(OUTPUT, rare=True, metavar="NAME", help="W&B project; the entity is $WANDB_ENTITY"),
]
Json = Annotated[bool, option(OUTPUT, "--json", help="print one JSON document and nothing else")]


def _dataset(name: str) -> str:
    return plugin_name("data set", name)


def _method(name: str) -> str:
    return plugin_name("method", name)


MethodName = Annotated[
    str,
    typer.Argument(
        help="See `feddg-bench methods`.", callback=_method, autocompletion=complete.METHOD
    ),
]
Dataset = Annotated[
    str,
    typer.Argument(
        metavar="DATASET",
        help="See `feddg-bench data list`.",
        callback=_dataset,
        autocompletion=complete.DATASET,
    ),
]


@dataclass(frozen=True)
class Which:
    """Names that select runs."""

    method: Methods = None
    dataset: DataName = None
    protocol: Protocols = None
    scenario: Scenarios = None
    seeds: Seeds = None
    recipe: Recipe = None


@dataclass(frozen=True)
class Names(Which):
    """Options that define runs, except those that a command itself varies."""

    pairs: Pairs = None
    readings: Readings = None
    num_seeds: NumSeeds = None
    clients: Clients = None
    split_csv: SplitCsv = None
    config: Config = None
    set_: Set = None

    def request(self, resources: Resources, default_seeds: str = "0", **instead: Any) -> Request:
        """Return the request that the options describe.

        ``instead`` holds flags that replace the user's, ``default_seeds`` the command's own seeds.

        Raises:
            SettingsError: If a file cannot be read, or a setting is unknown.
        """
        flags = {k: v for k, v in vars(self).items() if k in NAMES or k in FLAGS} | instead
        pairs = [*(self.set_ or ()), *(self.pairs or ())]
        return Request.read(
            config=self.config or (),
            flags=flags,
            pairs=pairs,
            resources=resources,
            seeds=default_seeds,
        )


@dataclass(frozen=True)
class Experiment(Names):
    """Options that define runs."""

    rounds: Rounds = None
    per_round: PerRound = None
    heterogeneity: Lambda = None
    portable: Portable = None
    tuned: Tuned = None


@dataclass(frozen=True)
class Machine:
    """Folders of the data and devices that compute."""

    data_root: DataRoot = None
    cache_dir: CacheDir = None
    device: Device = "auto"
    workers: Workers = 0
    threads: Threads = 1

    def resources(self) -> Resources:
        """Return the options as checked resources; those without an option have their default.

        Raises:
            SettingsError: If a value is out of range.
        """
        return validate(
            Resources, {k: v for k, v in vars(self).items() if k in Resources.model_fields}
        )


@dataclass(frozen=True)
class Recording(Machine):
    """Where runs are computed and recorded."""

    results: Where = FOLDERS[0]
    checkpoint_every: Annotated[
        int | None,
        option(
            OUTPUT, rare=True, metavar="N", help="rounds between checkpoints; default 30 seconds"
        ),
    ] = None
    logger: Logger = None
    wandb: Wandb = "off"
    wandb_project: WandbProject = "feddg-bench"
    engine: Engine = "processes"
    address: Address = None

    def resources(self) -> Resources:
        """Return the options as checked resources for runs; only sweeps can use Slurm.

        Raises:
            SettingsError: If a value is out of range.
        """
        return super().resources().for_runs()


@dataclass(frozen=True)
class Shown:
    """Which runs tables show, and how; fields of `feddg_bench.TableOptions`."""

    dataset: Annotated[
        str | None,
        typer.Option(help="With --rows: data set.", autocompletion=complete.DATASET),
    ] = None
    protocol: Annotated[
        str | None,
        typer.Option(help="With --rows: protocol.", autocompletion=complete.PROTOCOL_NAMES),
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Recipe whose runs are shown, in place of each table's own.",
            autocompletion=complete.RECIPE,
        ),
    ] = None
    filters: Filters = None
    select: Annotated[
        str | None,
        typer.Option(
            help="Rounds that count: last, mean_last_5, best_by_val, best_by_id_val or oracle; "
            "default is each paper's own."
        ),
    ] = None
    against: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD|DIR|RECIPE",
            help="Method to compare the others with, in every table. Or another results folder or "
            "recipe: print the differences to its runs, and the number of equal keys.",
        ),
    ] = None
    metric: Annotated[
        str | None,
        typer.Option(
            help="Metric of all tables, such as macro_f1; default the data set's own. The names of "
            "files end in it."
        ),
    ] = None
    others: Annotated[
        bool, typer.Option("--others", help="Add rows for methods that a paper's table lacks.")
    ] = False
    variants: Annotated[
        bool,
        typer.Option("--variants", help="Also make NAME-variants: all settings that were varied."),
    ] = False
    bold: Annotated[
        str,
        typer.Option(
            help="Marks: tested (what a test supports), best (bold best, underlined second) or "
            "none."
        ),
    ] = "tested"


def command(kind: Callable[..., Callable[[], None]]) -> Callable[..., None]:
    """Return a Typer command for a dataclass: its fields are options, calling it does the work.

    A dataclass has the options of its bases, including the groups in this module.
    """

    @wraps(kind, assigned=("__module__", "__name__", "__doc__"), updated=())
    def run(**values: Any) -> None:
        kind(**values)()

    return run


def record_folders(given: list[Path] | None) -> tuple[list[Path], str]:
    """Return the folders whose records are read, and a text about them for the user."""
    folders = given or default_folders()
    sources = " and ".join(f"{folder}/" for folder in folders)
    more = [root for root in FOLDERS if root not in folders and holds_records(root)]
    if more and given is None:
        both = " ".join(f"--results {root}" for root in (*folders, *more))
        sources += f" ({more[0]}/ has records, too: {both} reads both)"
    return folders, sources


def each_usable(kind: str, make: Callable[[str], T]) -> Iterator[T]:
    """Yield what ``make`` returns for the name of every plugin of a kind.

    One that cannot be used is left out and named on standard error with its fault, so that the user
    still sees the others.
    """
    for name in names(kind):
        try:
            yield make(name)
        except Exception as error:
            said = left_out(f"the {kind} {name}", in_a_line(error))
            tell(f"feddg-bench: {said}")


def print_json(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=1))


def stopped(but: str = "") -> str:
    """Return what a stopped command says first: how to continue.

    ``but`` is an option that would repeat finished work.
    """
    without = f" without {but}" if but in sys.argv else ""
    return f"Stopped. Run the same command again{without} to continue."
