"""Cards of our methods and data sets, from their declarations and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from feddg_bench.cli.lists import _declared, _facts, _text, _value
from feddg_bench.common.errors import DataError
from feddg_bench.common.files import shipped
from feddg_bench.config.layers import dotted_fields
from feddg_bench.extensions import extensions
from feddg_bench.plugins import load_dataset, make_dataset, names, outline
from feddg_bench.runs import cards
from generators import ROOT, UNLISTED, Page, table
from generators.overview import method_table


def pages() -> Iterator[Page]:
    """Yield a list of methods, one of data sets, and one page for each of both."""
    methods = built_in("method")
    for name in methods:
        yield Page(f"methods/{name}.md", UNLISTED + _method(name))
    yield Page("methods/index.md", _list_of_methods(methods))
    sets = []
    for name in built_in("data set"):
        facts = _facts(name, load_dataset(name))
        sets.append(facts)
        yield Page(f"datasets/{name}.md", UNLISTED + _dataset(facts))
    yield Page("datasets/index.md", _list_of_data_sets(sets))


FOLDERS = {"method": "methods/feddg_methods", "data set": "datasets/feddg_datasets"}


def built_in(kind: str) -> list[str]:
    """Return the names of this repository's plugins, without those of other packages."""
    return [name for name in names(kind) if (ROOT / FOLDERS[kind] / f"{name}.py").is_file()]


def _method(name: str) -> str:
    method = outline(name)
    request = cards.card_request({"method": name})
    (plan,) = request.one_scenario().plan(check=False)
    told = cards.facts(plan)
    text = f"(method-{name})=\n" + cards.facts_text(told)
    if seen := cards.shipped_card(name):
        text += cards.crossing_text(seen)
    folders = [shipped("results")]
    text += cards.protection_text(method)
    text += "".join(extension.card(name, method, folders) for extension in extensions())
    return f"{text}{cards.results_text(name, folders)}\n[All methods](index.md)\n"


def _list_of_methods(names: list[str]) -> str:
    return f"""# Methods

{len(names)} methods. The name of a method leads to its card; `feddg-bench methods show NAME` prints
it, also of your own method. [Other suites](../suites.md) have other methods.

{method_table(names)}"""


def _dataset(facts: dict[str, object]) -> str:
    rows = [
        (key.replace("_", " "), _text(value).replace("\n", "; "))
        for key, value in facts.items()
        if key not in ("about", "title") and _text(value)
    ]
    text = f"# {facts['title']}\n\n{facts['about']}\n\n{table(('fact', 'value'), iter(rows))}\n"
    text += "[All data sets](index.md)\n"
    own = load_dataset(str(facts["name"])).Settings
    if settings := [(key, _declared(field)) for key, field in dotted_fields(own, "world.")]:
        lines = ((f"`{k}`", s.accepts, f"`{_value(s.default)}`", s.meaning) for k, s in settings)
        text += f"\n## Settings\n\n{table(('setting', 'values', 'default', 'meaning'), lines)}"
    return text


def _list_of_data_sets(sets: list[dict[str, object]]) -> str:
    rows = (
        (
            f"[`{facts['name']}`]({facts['name']}.md)",
            facts["title"],
            _text(facts["domains"]) or "as found on the disk",
            facts["classes"] or "-",
            f"{images:,}" if (images := _images(facts)) else "-",
            "yes" if facts["download"] else "",
            facts["licence"],
        )
        for facts in sets
    )
    return f"""# Data sets

`feddg-bench datasets show NAME` prints these facts, also of your own data set. *Download*: by
`feddg-bench data download NAME`; cards of the others name their source. `digits4` and the planted
worlds need no files. A hyphen: there is none, or it depends on the files.

{table(("name", "title", "domains", "classes", "images", "download", "licence"), rows)}"""


def _images(facts: Mapping[str, Any]) -> int | None:
    """Return the number of images that a data set declares, or makes without files."""
    if known := sum(facts["images"].values()) or load_dataset(facts["name"]).total:
        return known
    try:
        dataset = make_dataset(facts["name"])
        return None if dataset.find() else len(dataset.records().paths)
    except DataError:
        return None
