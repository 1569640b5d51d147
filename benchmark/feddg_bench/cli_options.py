"""Options that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

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


def print_json(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=1, ensure_ascii=False))  # noqa: T201
