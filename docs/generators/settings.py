"""Settings with kind, default and meaning, from the schema."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from feddg_bench.cli.lists import _value
from feddg_bench.config.layers import dotted_fields, paragraph
from feddg_bench.config.names import SYMBOLS
from feddg_bench.config.own import setting_of
from feddg_bench.config.schema import Resources, RunSettings
from generators import Page, table

NOT_HERE = ("hyper", "world")
"""Settings of methods and of data sets, which are on their own pages."""


def pages() -> Iterator[Page]:
    """Yield one page of all settings."""
    symbols = ", ".join(f"`{symbol}` is `{key}`" for symbol, key in SYMBOLS.items())
    text = f"""# Settings

Commands take settings as `KEY=VALUE`, files as nested YAML, Python as a dictionary
([how](../howto/settings.md)). Symbols of papers are keys, too: {symbols}. Settings of a method,
`hyper.*`, are on the [page of the method](methods/index.md), those of a data set, `world.*`, on the
[page of the data set](datasets/index.md).

## Of a run

{_fields(RunSettings, "", sections=False)}
"""
    for name, field in RunSettings.model_fields.items():
        section = field.annotation
        if inspect.isclass(section) and issubclass(section, BaseModel):
            text += f"## {name}\n\n{paragraph(section.__doc__)}\n\n{_fields(section, f'{name}.')}\n"
    text += f"""## Resources

{paragraph(Resources.__doc__)} They are flags of commands, such as `--workers 2`, and
are not part of the key.

{_fields(Resources, "")}"""
    yield Page("settings.md", text)


def _fields(model: type[BaseModel], prefix: str, sections: bool = True) -> str:
    rows = []
    for key, field in dotted_fields(model, prefix):
        if key in NOT_HERE or (not sections and "." in key):
            continue
        depends = field.is_required() or field.default_factory is not None
        default = None if depends else to_jsonable_python(field.default)
        setting = setting_of(field, default)
        shown = "" if depends else f"`{_value(default) or chr(34) * 2}`"
        rows.append((f"`{key}`", setting.accepts, shown, setting.meaning))
    return table(("setting", "values", "default", "meaning"), iter(rows))
