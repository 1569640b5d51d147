"""``feddg-bench profile``: where a method's time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from feddg_bench.cli.options import (
    CacheDir,
    Clients,
    Config,
    DataName,
    DataRoot,
    Device,
    Json,
    Lambda,
    Methods,
    Pairs,
    PerRound,
    Recipe,
    Set,
    Threads,
    Where,
    print_json,
)
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import Resources
from feddg_bench.plugins import load_dataset
from feddg_bench.runs.plans import draft_runs, make_plans, one_scenario, user_layer


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

    from feddg_bench.records.store import ResultsStore
    from feddg_bench.runs.profile import profile, synthetic_federation
    from feddg_bench.runs.run import RunData, open_federation

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
        print_json([p.as_json() for p in measured] if len(measured) > 1 else measured[0].as_json())
        return
    from feddg_bench.cli.progress import draw_overheads, draw_profile
    from feddg_bench.common.terminal import terminal

    console = terminal()
    console.print(draw_profile(measured[0]) if len(measured) == 1 else draw_overheads(measured))
