"""The messages that methods declare, from their outlines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from feddg_bench.plugins import method_title, outline
from generators import Page, table
from generators.cards import built_in


def pages() -> Iterator[Page]:
    """Yield one page with a table of all methods."""
    text = """# Messages

The content that each method declares, by client function; all other content is refused. [Your own
method](../tutorials/methods.md#messages) explains the forms. Cards of [methods](methods/index.md)
show sizes in bytes. The server sends `weights`, the global model, with every request that needs it.

"""
    rows = []
    for name in built_in("method"):
        method = outline(name)
        sent = [
            f"`{call}`: {_entries(entries) or 'nothing'}" for call, entries in method.uplink.items()
        ]
        told = ", ".join(f"`{entry}`" for entry in method.downlink)
        rows.append(
            (f"[{method_title(name)}](methods/{name}.md)", "; ".join(sent) or "-", told or "-")
        )
    text += table(("method", "client to server", "server to client, besides weights"), iter(rows))
    yield Page("messages.md", text)


def _entries(entries: object) -> str:
    """Return the entries of a reply with the forms that the method declares."""
    if not isinstance(entries, Mapping):
        return ", ".join(f"`{entry}`" for entry in entries)
    forms = {name: f" ({_form(form)})" if form else "" for name, form in entries.items()}
    return ", ".join(f"`{name}`{form}" for name, form in forms.items())


def _form(form: object) -> str:
    return _entries(form) if isinstance(form, Mapping) else str(form)
