"""``feddg-bench methods``, ``datasets``, ``recipes`` and ``settings``: list what is available."""

from __future__ import annotations

import json
import logging
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic_core import to_jsonable_python

from feddg_bench.cli import complete
from feddg_bench.cli.options import (
    DataName,
    DataRoot,
    Dataset,
    Json,
    MethodName,
    Pairs,
    Recipe,
    Where,
    each_usable,
    print_json,
)
from feddg_bench.cli.templates import Package, write_data_set, write_method
from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.common.files import shipped
from feddg_bench.common.terminal import print_markdown, say, terminal, text_table
from feddg_bench.config.layers import (
    Layer,
    dotted,
    dotted_fields,
    merge,
    paragraph,
    parse_override,
    read_settings,
    validate,
)
from feddg_bench.config.names import SYMBOLS
from feddg_bench.config.own import Setting, setting_of
from feddg_bench.config.recipes import OTHERS, read_recipe, recipe_names
from feddg_bench.config.settle import recipe_layers, settle
from feddg_bench.data.protocols import PROTOCOLS, scenarios
from feddg_bench.extensions import extensions
from feddg_bench.plugins import (
    load_dataset,
    load_method,
    make_dataset,
    method_title,
    outline,
    own_values,
    plugin_name,
)
from feddg_bench.records.sources import FOLDERS
from feddg_bench.records.tuning import load_ledger
from feddg_bench.runs.request import Request

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from feddg_bench.data.dataset import DomainDataset

_MOST = 24
"""Length of the longest list that is shown in full."""


def catalogue(
    about: str,
    columns: tuple[str, ...],
    find: Callable[[], list[dict[str, Any]]],
    cells: Callable[[dict[str, Any]], tuple[str, ...]],
) -> typer.Typer:
    """Return a group of commands that lists all entries when called without a subcommand.

    ``find`` returns the entries as JSON values, ``cells`` turns one of them into a row.
    """
    app = typer.Typer(invoke_without_command=True, rich_markup_mode=None, help=about)

    @app.callback()
    def _list(context: typer.Context, json_: Json = False) -> None:
        if context.invoked_subcommand is not None:
            return
        rows = find()
        if json_:
            print_json(rows)
        else:
            _draw("", columns, map(cells, rows))

    return app


# ------------------------------------------------------------------------------- methods


def _method(name: str) -> dict[str, Any]:
    method = outline(name)
    return {
        "name": name,
        "group": method.group,
        "title": paragraph(method.doc.partition("\n")[0]),
        "settings": {key: setting.default for key, setting in method.own.settings.items()},
    }


methods_app = catalogue(
    "List the methods with their settings. `show` prints a card, `new` begins one, `check` tests.",
    ("method", "group", "what it is, and its settings (hyper.*) with their defaults"),
    lambda: list(each_usable("method", _method)),
    lambda row: (row["name"], row["group"], f"{row['title']}\n{_pairs(row['settings'])}".strip()),
)


@methods_app.command("show")
def show_method_command(
    name: MethodName,
    pairs: Pairs = None,
    dataset: DataName = None,
    recipe: Recipe = None,
    backbone: Annotated[
        str | None, typer.Option(help="Backbone whose messages are shown; else the recipe's.")
    ] = None,
    json_: Json = False,
) -> None:
    """Print a method's card. Paper, requirements, messages in bytes, deviations, results."""
    given = [] if backbone is None else [f"backbone.name={backbone}", "backbone.pretrained=false"]

    from feddg_bench.runs.cards import (
        card_request,
        crossing_text,
        facts,
        facts_text,
        protection_text,
        results_text,
        see_crossing,
        shipped_card,
    )

    plugins = {"method": name, "dataset": dataset, "recipe": recipe}
    request = card_request(plugins, [*given, *(pairs or ())])
    (plan,) = request.one_scenario().plan(check=False)
    told = facts(plan)
    if not json_:
        print_markdown(facts_text(told))  # at once: the rest may need PyTorch
    seen = shipped_card(name, plan.key) or see_crossing(plan)
    if json_:
        print_json(told | asdict(seen))
        return
    print_markdown(crossing_text(seen))
    folders = [*FOLDERS, shipped("results")]
    there, method = [folder for folder in folders if folder.is_dir()], outline(name)
    further = (extension.card(name, method, there) for extension in extensions())
    print_markdown(protection_text(method) + "".join(further))
    print_markdown(results_text(name, folders))


@methods_app.command("check")
def check_method_command(
    name: MethodName,
    pairs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="The method's own settings: bound=0.1."),
    ] = None,
) -> None:
    """Check a method against the contract on toy data: one line per check, half a minute."""
    from feddg_bench.testing import check_contract

    given = [parse_override(f"hyper.{pair.removeprefix('hyper.')}") for pair in pairs or ()]
    hyper = merge(*given).get("hyper", {})
    plugin = load_method(name)
    validate(plugin.Settings, {**plugin.Settings.toy, **hyper}, "hyper.")
    checks = []
    with _no_warnings():
        for check in check_contract(name, hyper):
            checks.append(check)
            say(f"{'FAILED' if check.fault else 'passed'} {check.seconds:5.1f} s  {check.name}")
            if check.fault:
                why = [f"reason: {check.fault}", f"rule: {check.rule}"]
                say("\n".join(textwrap.indent(textwrap.fill(each, 64), " " * 16) for each in why))
    passed, seconds = sum(not check.fault for check in checks), sum(c.seconds for c in checks)
    say(f"{method_title(name)}: {passed} of {len(checks)} checks passed in {seconds:.0f} s")
    if passed < len(checks):
        raise typer.Exit(1)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Silence warnings about what a check does on purpose, such as a client that diverges."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


NewDirectory = Annotated[
    Path | None, typer.Option("--dir", help="Where to write; default ./NAME in lower case.")
]


@methods_app.command("new")
def new_method_command(
    name: Annotated[str, typer.Argument(help="Name of the method, such as FedClip.")],
    directory: NewDirectory = None,
    kind: Annotated[
        str,
        typer.Option(help="What the method changes: server, client, style or messages."),
    ] = "server",
) -> None:
    """Write a working plugin package. A method, its test, and the entry point that names it.

    Kinds: server, the aggregation; client, the local loss; style, the images, by channel statistics
    that are exchanged before round 1; messages, data that clients send with their models.
    """
    package = write_method(name, directory, kind)
    _say_next(package, f"feddg-bench run --method {package.name}")


def _say_next(package: Package, run: str) -> None:
    """Print the written files and the next commands."""
    say("\n".join(f"wrote {path}" for path in package.files))
    what = shlex.quote(f"{package.folder}[test]")
    say(f"next: pip install -e {what}; {run}; pytest {shlex.quote(str(package.folder))}")


# ------------------------------------------------------------------------------ data sets


datasets_app = catalogue(
    "List the data sets with their domains. `show` describes one in full, `new` begins a new one.",
    ("data set", "classes", "title, domains and licence"),
    lambda: list(each_usable("data set", lambda name: _facts(name, load_dataset(name)))),
    lambda row: (
        row["name"],
        str(row["classes"] or "-"),
        f"{row['title']}: {_text(row['domains']) or 'domains as found on the disk'}\n"
        f"{row['licence']}",
    ),
)


@datasets_app.command("show")
def show_dataset_command(name: Dataset, data_root: DataRoot = None, json_: Json = False) -> None:
    """Print the facts of a data set. Domains, classes, images, metrics, licence, recipes."""
    dataset: DomainDataset | type[DomainDataset] = load_dataset(name)
    if not dataset.domains:  # its domains are read from the disk
        with suppress(DataError):
            dataset = make_dataset(name, data_root)
    facts = _facts(name, dataset)
    if json_:
        print_json(facts)
        return
    rows = ((key.replace("_", " "), _text(value)) for key, value in facts.items() if key != "about")
    _draw(facts["about"], ("fact", ""), (row for row in rows if row[1]))


@datasets_app.command("new")
def new_data_set_command(
    name: Annotated[str, typer.Argument(help="Name of the data set, such as Shapes.")],
    directory: NewDirectory = None,
) -> None:
    """Write a working plugin package. A data set of images in <domain>/<class>/, and its test."""
    package = write_data_set(name, directory)
    _say_next(package, f"feddg-bench run --dataset {package.name} --data-root DIR")


def _facts(name: str, dataset: DomainDataset | type[DomainDataset]) -> dict[str, Any]:
    """Return the facts that a data set declares."""
    images = {domain: sum(counts) for domain, counts in dataset.counts.items()}
    return {
        "name": name,
        "title": dataset.title,
        "about": paragraph(dataset.__doc__),
        "domains": list(dataset.domains),
        "codes": [dataset.letters[domain] for domain in dataset.domains],
        "classes": len(dataset.classes),
        "class_names": list(dataset.classes),
        "task": dataset.task,
        "metrics": list(dataset.metrics),
        "scenarios": _scenarios(dataset),
        "images": images or dict(dataset.split_sizes),
        "default_recipe": dataset.default_recipe,
        "recipes": [
            recipe
            for recipe in recipe_names()
            if {name, OTHERS} & {*(read_recipe(recipe).datasets or ())}
        ],
        "licence": dataset.licence,
        "source": dataset.source,
        "download": bool(dataset.downloads),
    }


def _scenarios(dataset: DomainDataset | type[DomainDataset]) -> dict[str, list[str]]:
    """Return the names of each usable protocol's own scenarios."""
    by_protocol: dict[str, list[str]] = {}
    official = dataset.official if isinstance(dataset.official, Mapping) else {}
    for protocol in PROTOCOLS:
        with suppress(SettingsError):
            known = scenarios(protocol, dataset.domains, dataset.letters, None, official)
            by_protocol[protocol] = [scenario.name for scenario in known]
    return by_protocol


# -------------------------------------------------------------------------------- recipes


def _all_recipes() -> list[dict[str, Any]]:
    recipes = {name: read_recipe(name) for name in recipe_names()}
    return [
        {"name": name, "description": r.summary, "datasets": sorted(r.datasets or ())}
        for name, r in recipes.items()
    ]


recipes_app = catalogue(
    "List the recipes with their data sets. `show` prints what one sets.",
    ("recipe", "what it is, and its data sets"),
    _all_recipes,
    lambda row: (row["name"], f"{row['description']}\n{_text(row['datasets'])}"),
)


@recipes_app.command("show")
def show_recipe_command(
    recipe: Annotated[
        str,
        typer.Argument(
            help="See `feddg-bench recipes`; or a YAML file.", autocompletion=complete.RECIPE
        ),
    ],
    json_: Json = False,
) -> None:
    """Print a recipe's settings. For all data sets, for each, and for single methods."""
    content = read_recipe(recipe)
    if json_:
        print_json(content.model_dump(exclude_unset=True))
        return
    sets = {"all data sets": content.settings}
    for name, frame in (content.datasets or {}).items():
        if frame is not None:
            sets[name] = frame.model_extra
            sets |= {f"{name}, {key}": values for key, values in (frame.methods or {}).items()}
    sets |= content.methods or {}
    rows = [(name, _pairs(dotted(values))) for name, values in sets.items() if values]
    rows += [
        (f"{name}, not published", ", ".join(frame.unpublished))
        for name, frame in (content.datasets or {}).items()
        if frame is not None and frame.unpublished
    ]
    _draw(content.summary, ("for", "settings"), rows)


# ------------------------------------------------------------------------------- settings


def settings_command(
    word: Annotated[
        str, typer.Argument(metavar="[WORD]", help="Show only keys that hold this, such as lr.")
    ] = "",
    method: Annotated[
        str, typer.Option(help="See `feddg-bench methods`.", autocompletion=complete.METHOD)
    ] = str(Request.method),
    dataset: Annotated[
        str, typer.Option(help="See `feddg-bench datasets`.", autocompletion=complete.DATASET)
    ] = Request.dataset,
    recipe: Recipe = None,
    tuned: Annotated[
        str | None, typer.Option(metavar="PROTOCOL", help="With what `tune` chose on a protocol.")
    ] = None,
    results: Where = FOLDERS[0],
    json_: Json = False,
) -> None:
    """Show every setting of a run. With WORD also kind, default and the full meaning.

    Other commands take them as KEY=VALUE, or from a file after --config. A key can be shortened to
    its last part if that is unique: lr=0.1 is train.lr=0.1.
    """
    method, dataset = plugin_name("method", method), plugin_name("data set", dataset)
    recipe = recipe or load_dataset(dataset).default_recipe
    chosen: Layer = {}
    if tuned is not None:
        ledger = load_ledger(results, dataset, tuned, recipe, method)
        chosen = read_settings(ledger.settings)
    every = list(_settings(method, dataset, recipe, chosen))
    word = SYMBOLS.get(word, word)
    rows = [row for row in every if word in row["key"]]
    if not rows:
        raise SettingsError(
            f"no setting of {method} has {word!r} in its key: give a part of one, such as lr or "
            f"train., or nothing for all"
        )
    if json_:
        print_json(rows)
        return
    title = f"{method} on {dataset}, recipe {recipe}"
    if not word:
        _draw_briefly(title, rows)
        return
    lines: list[tuple[str, ...] | None] = []
    section = ""
    for row in rows:
        first, _, last = row["key"].rpartition(".")
        if first != section:
            lines += [None, (f"{first}.", "", "")]
            section = first
        origin = row["origin"]
        if row["value"] != row["default"] and row["default"] is not None:
            origin += f" (default {_value(row['default'])})"
        about = f"{row['meaning']}\n{row['kind']}; {origin}".strip()
        lines.append((f" {last}" if section else last, _value(row["value"]), about))
    _draw(title, ("key", "value", "meaning; kind; origin"), lines)


def _draw_briefly(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line for each setting; a star marks a value that is not the default."""
    console, cells = terminal(), []
    for row in rows:
        value = _value(row["value"]) + " *" * (row["origin"] != "default")
        cells.append(
            (row["key"], value if len(value) <= 20 else f"{value[:17]}...", row["meaning"])
        )
    left = console.width - 4 - sum(2 + max(len(cell[n]) for cell in cells) for n in range(2))
    lines = [
        (key, value, textwrap.shorten(meaning, max(left, 20), placeholder="..."))
        for key, value, meaning in cells
    ]
    caption = (
        "* by recipe, method or command. `feddg-bench settings WORD` shows origin, kind, default "
        "and the whole meaning."
    )
    columns = ("key", "value", "meaning")
    shown = text_table(title, columns, lines, caption=caption, whole=columns[:2])
    console.print(shown, highlight=False)


def _settings(method: str, dataset: str, recipe: str, tuned: Layer) -> Iterator[dict[str, Any]]:
    """Yield every key with its value in a run, and the origin of the value."""
    plugin = outline(method)
    layers = recipe_layers(recipe, dataset, method, plugin.needs)._replace(tuned=tuned)
    world, origins, own = load_dataset(dataset).Settings, layers.origins(), ("hyper", "world")
    settings = settle(layers, partial(own_values, method), world).model_dump(mode="json")
    values = dotted({key: value for key, value in settings.items() if key not in own})
    values |= {f"{key}.{name}": value for key in own for name, value in settings[key].items()}
    known = {key: _declared(field) for key, field in dotted_fields() if key not in own}
    known |= {f"hyper.{name}": setting for name, setting in plugin.own.settings.items()}
    known |= {key: _declared(field) for key, field in dotted_fields(world, "world.")}
    for key, setting in known.items():
        yield {
            "key": key,
            "value": values[key],
            "default": setting.default,
            "origin": origins.get(key, "default" if values[key] == setting.default else "implied"),
            "kind": setting.accepts,
            "meaning": setting.meaning,
        }


def _declared(field: FieldInfo) -> Setting:
    default = None if field.is_required() else to_jsonable_python(field.get_default())
    return setting_of(field, default)


# -------------------------------------------------------------------------------- drawing


def _draw(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...] | None]) -> None:

    terminal().print(text_table(title, columns, rows, whole=columns[:1]), highlight=False)


def _pairs(values: Mapping[str, Any]) -> str:
    """Return settings as they are given on the command line."""
    return "  ".join(f"{key}={_value(value)}" for key, value in values.items())


def _value(value: Any) -> str:
    """Return a value as in YAML, with long fractions cut."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return _text(value)


def _text(value: Any) -> str:
    """Return a value as readable text; a long list is cut to its beginning and its length."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_text(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        few = [*map(str, value if len(value) <= _MOST else value[:3])]
        return ", ".join(few if len(value) <= _MOST else [*few, f"... ({len(value)})"])
    return json.dumps(value)
