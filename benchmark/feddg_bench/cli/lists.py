"""``feddg-bench methods``, ``datasets`` and ``recipes``: what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from feddg_bench.cli.options import (
    DataName,
    Json,
    Pairs,
    Recipe,
    print_json,
)
from feddg_bench.config.layers import load_layer
from feddg_bench.config.recipes import recipe_names
from feddg_bench.plugins import check_name, load_dataset, names
from feddg_bench.runs.plans import draft_runs, make_plans, one_scenario, user_layer

MOST = 24
"""Values of a list that are shown."""

methods_app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode=None,
    help="List the methods with their settings; or show one's card, or begin a new one.",
)


@methods_app.callback()
def methods_command(context: typer.Context, json_: Json = False) -> None:
    """List the methods with their settings; or show one's card, or begin a new one."""
    if context.invoked_subcommand is not None:
        return
    from feddg_bench.plugins import load_method

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

    from feddg_bench.runs.cards import make_card, markdown

    (plan,) = make_plans(drafts, opened)
    card = make_card(plan, len(opened.classes))
    if json_:
        print_json(card.as_json())
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
    from feddg_bench.runs.template import write_plugin

    written = write_plugin(name, directory or Path(name))
    print("\n".join(f"wrote {path}" for path in written))  # noqa: T201
    print(  # noqa: T201
        f"next: pip install -e {directory or name}; feddg-bench run --method {name}; "
        f"pytest {directory or name}"
    )


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


def recipes_command(json_: Json = False) -> None:
    """List the recipes with the data sets they are written for."""
    from feddg_bench.common.files import shipped

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
        print_json(rows)
        return
    from rich.table import Table

    from feddg_bench.common.terminal import terminal

    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_shown(v) if isinstance(v, list) else str(v) for v in row.values()))
    terminal().print(table)


def _shown(values: list[Any]) -> str:
    """Return a list as text, of a long one its beginning and its length."""
    few = values if len(values) <= MOST else values[:3]
    return ", ".join([*map(str, few), *([f"... ({len(values)})"] if few != values else [])])
