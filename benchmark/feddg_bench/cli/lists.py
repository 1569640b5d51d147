"""``feddg-bench methods``, ``datasets``, ``recipes`` and ``settings``: what there is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddg_bench.cli.options import DataName, DataRoot, Json, Pairs, Recipe, print_json
from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.config.layers import Layer, dotted_fields, kind_of, merge, validate
from feddg_bench.config.recipes import load_recipe, read_recipe, recipe_names
from feddg_bench.config.schema import RunSettings
from feddg_bench.data.protocols import PROTOCOLS, scenarios
from feddg_bench.plugins import check_name, load_dataset, names, outline
from feddg_bench.runs.request import Request

if TYPE_CHECKING:
    from feddg_bench.data.dataset import DomainDataset

MOST = 24
"""Values of a list that are shown."""

Method = Annotated[str, typer.Argument(help="See `feddg-bench methods`.")]
Dataset = Annotated[str, typer.Argument(metavar="DATASET", help="See `feddg-bench datasets`.")]


def lists_app(command: Callable[..., None]) -> typer.Typer:
    """Return a group of commands that lists something when it is called alone."""
    made = typer.Typer(invoke_without_command=True, rich_markup_mode=None, help=command.__doc__)
    made.callback()(command)
    return made


# ------------------------------------------------------------------------------- methods


def methods_command(context: typer.Context, json_: Json = False) -> None:
    """List the methods with their settings; `show` prints one's card, `new` begins a new one."""
    if context.invoked_subcommand is not None:
        return
    rows = []
    for name in names("method"):
        method = outline(name)
        fields = dotted_fields(method.Settings)
        rows.append(
            {
                "name": name,
                "group": method.group,
                "title": _first_line(method.__doc__),
                "settings": {key: field.get_default() for key, field in fields},
            }
        )
    _list(
        rows,
        ("method", "group", "what it is, and its settings (hyper.*) with their defaults"),
        lambda row: (
            row["name"],
            row["group"],
            f"{row['title']}\n{_pairs(row['settings'])}".strip(),
        ),
        as_json=json_,
    )


methods_app = lists_app(methods_command)


@methods_app.command("show")
def show_method_command(
    name: Method,
    pairs: Pairs = None,
    dataset: DataName = None,
    recipe: Recipe = None,
    backbone: Annotated[
        str | None, typer.Option(help="Backbone whose messages are shown; else the recipe's.")
    ] = None,
    json_: Json = False,
) -> None:
    """Print a method's card: paper, settings, what leaves a client in bytes, deviations."""
    given = [] if backbone is None else [f"backbone.name={backbone}", "backbone.pretrained=false"]
    check_name("method", name)
    request = Request.read(
        flags={"method": name, "dataset": dataset, "recipe": recipe, "protocol": "lodo"},
        pairs=[*given, *(pairs or ())],
    )

    from feddg_bench.runs.cards import make_card, markdown

    (plan,) = request.one_scenario().plan(check=False)
    card = make_card(plan, len(plan.dataset.classes))
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


# ------------------------------------------------------------------------------ data sets


def datasets_command(context: typer.Context, json_: Json = False) -> None:
    """List the data sets with their domains; `show` prints all that is known of one."""
    if context.invoked_subcommand is not None:
        return
    rows = [_facts(name, load_dataset(name)) for name in names("data set")]
    _list(
        rows,
        ("data set", "classes", "title, domains and licence"),
        lambda row: (
            row["name"],
            str(row["classes"] or "-"),
            f"{row['title']}: {_shown(row['domains']) or 'domains as found on the disk'}\n"
            f"{row['licence']}",
        ),
        as_json=json_,
    )


datasets_app = lists_app(datasets_command)


@datasets_app.command("show")
def show_dataset_command(name: Dataset, data_root: DataRoot = None, json_: Json = False) -> None:
    """Print what is known of a data set: domains, classes, images, metrics, licence, recipes."""
    dataset: DomainDataset | type[DomainDataset] = load_dataset(name)
    if not dataset.domains:  # they are those on the disk
        with suppress(DataError):
            dataset = load_dataset(name)(data_root)
    facts = _facts(name, dataset)
    _print_facts(facts.pop("about"), facts, as_json=json_)


def _facts(name: str, dataset: DomainDataset | type[DomainDataset]) -> dict[str, Any]:
    """Return what a data set says of itself."""
    images = {domain: sum(counts) for domain, counts in dataset.counts.items()}
    return {
        "name": name,
        "title": dataset.title,
        "about": _text(dataset.__doc__),
        "domains": list(dataset.domains),
        "codes": [dataset.letters[domain] for domain in dataset.domains],
        "classes": len(dataset.classes),
        "class_names": list(dataset.classes),
        "task": dataset.task,
        "metrics": list(dataset.metrics),
        "scenarios": _scenarios(dataset),
        "images": images or dict(dataset.split_sizes),
        "default_recipe": dataset.default_recipe,
        "recipes": [recipe for recipe in recipe_names() if name in read_recipe(recipe)["datasets"]],
        "licence": dataset.licence,
        "source": dataset.source,
        "download": bool(dataset.downloads),
    }


def _scenarios(dataset: DomainDataset | type[DomainDataset]) -> dict[str, list[str]]:
    """Return the names of each protocol's own scenarios, where the protocol can be used."""
    found: dict[str, list[str]] = {}
    official = dataset.official if isinstance(dataset.official, Mapping) else {}
    for protocol in PROTOCOLS:
        with suppress(SettingsError):
            known = scenarios(protocol, dataset.domains, dataset.letters, None, official)
            found[protocol] = [scenario.name for scenario in known]
    return found


# -------------------------------------------------------------------------------- recipes


def recipes_command(context: typer.Context, json_: Json = False) -> None:
    """List the recipes with their data sets; `show` prints what one sets."""
    if context.invoked_subcommand is not None:
        return
    rows = []
    for name in recipe_names():
        layer = read_recipe(name)
        about, datasets = layer["description"], sorted(layer["datasets"])
        rows.append({"name": name, "description": about, "datasets": datasets})
    _list(
        rows,
        ("recipe", "what it is, and its data sets"),
        lambda row: (row["name"], f"{row['description']}\n{_shown(row['datasets'])}"),
        as_json=json_,
    )


recipes_app = lists_app(recipes_command)


@recipes_app.command("show")
def show_recipe_command(
    recipe: Annotated[str, typer.Argument(help="See `feddg-bench recipes`; or a YAML file.")],
    json_: Json = False,
) -> None:
    """Print what a recipe sets: for all data sets, for each, and for single methods."""
    layer = read_recipe(recipe)
    if json_:
        print_json(layer)
        return
    rows = [("all data sets", _pairs(dict(_flat(layer["settings"]))))]
    for name, entry in layer["datasets"].items():
        own = {key: value for key, value in entry.items() if key != "methods"}
        rows.append((name, _pairs(dict(_flat(own)))))
        rows += _methods(entry.get("methods") or {}, f"{name}, ")
    rows += _methods(layer["methods"])
    _draw(layer["description"], ("for", "settings"), (row for row in rows if row[1]))


def _methods(entries: Layer, before: str = "") -> list[tuple[str, str]]:
    return [(f"{before}{name}", _pairs(dict(_flat(entry)))) for name, entry in entries.items()]


# ------------------------------------------------------------------------------- settings


def settings_command(
    word: Annotated[
        str, typer.Argument(metavar="[WORD]", help="Show only keys that hold this, such as lr.")
    ] = "",
    method: Annotated[str, typer.Option(help="See `feddg-bench methods`.")] = str(Request.method),
    dataset: Annotated[str, typer.Option(help="See `feddg-bench datasets`.")] = Request.dataset,
    recipe: Recipe = None,
    json_: Json = False,
) -> None:
    """Show every setting of a run: value, where it comes from, kind, default and meaning.

    Give settings as KEY=VALUE, after the command or in a file for --config. A key may be cut to its
    last part where only one ends so: lr=0.1 is train.lr=0.1.
    """
    rows = [row for row in _settings(method, dataset, recipe) if word in row["key"]]
    if json_:
        print_json(rows)
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
    _draw(
        f"{method} on {dataset}, recipe {recipe or load_dataset(dataset).default_recipe}",
        ("key", "value", "meaning; kind; origin"),
        lines,
    )


def _settings(method: str, dataset: str, recipe: str | None) -> Iterator[dict[str, Any]]:
    """Yield every key with its value in a run, and where that comes from."""
    check_name("method", method)
    plugin = outline(method)
    chosen = load_recipe(recipe or load_dataset(dataset).default_recipe, dataset, method)
    named = {"method": method, "dataset": dataset, "scenario": ""}
    settings = validate(RunSettings, merge(chosen, plugin.needs, named))
    hyper = validate(plugin.Settings, settings.hyper, "hyper.").model_dump(mode="json")
    values = dict(_flat({**settings.model_dump(mode="json"), "hyper": {}})) | {
        f"hyper.{key}": value for key, value in hyper.items()
    }
    origins = dict.fromkeys(named, "command")
    for origin, layer in (("recipe", chosen), ("method", plugin.needs)):
        origins |= dict.fromkeys(dict(_flat(layer)), origin)
    for key, field in (*dotted_fields(), *dotted_fields(plugin.Settings, "hyper.")):
        if key == "hyper":
            continue
        default = None if field.is_required() else json.loads(json.dumps(field.get_default()))
        yield {
            "key": key,
            "value": values[key],
            "default": default,
            "origin": origins.get(key, "default" if values[key] == default else "implied"),
            "kind": kind_of(field),
            "meaning": _text(field.description),
        }


# -------------------------------------------------------------------------------- drawing


def _list(
    rows: list[dict[str, Any]],
    columns: tuple[str, ...],
    cells: Callable[[dict[str, Any]], tuple[str, ...]],
    *,
    as_json: bool,
) -> None:
    if as_json:
        print_json(rows)
    else:
        _draw("", columns, map(cells, rows))


def _draw(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...] | None]) -> None:
    from feddg_bench.common.terminal import table, terminal

    terminal().print(table(title, columns, rows, whole=columns[:1]), highlight=False)


def _print_facts(about: str, facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json({"about": about, **facts})
        return
    texts = ((key.replace("_", " "), _fact(value)) for key, value in facts.items())
    _draw(about, ("fact", ""), (row for row in texts if row[1]))


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return _shown(value)
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_fact(inner)}" for key, inner in value.items())
    return _value(value)


def _flat(layer: Mapping[str, Any] | None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a layer sets by dotted keys."""
    for key, value in (layer or {}).items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _pairs(values: Mapping[str, Any]) -> str:
    """Return settings as they are given on the command line."""
    return "  ".join(f"{key}={_value(value)}" for key, value in values.items())


def _value(value: Any) -> str:
    """Return a value as YAML would read it, long fractions cut."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def _text(text: str | None) -> str:
    """Return what a docstring says before its sections as one paragraph."""
    return " ".join((text or "").partition("Args:")[0].replace("``", "").split())


def _shown(values: list[Any]) -> str:
    """Return a list as text, of a long one its beginning and its length."""
    few = values if len(values) <= MOST else values[:3]
    return ", ".join([*map(str, few), *([f"... ({len(values)})"] if few != values else [])])
