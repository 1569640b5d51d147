"""Add the current code of our methods to the digests with the same numbers: ``make digests``.

It also writes the methods' outlines (what they declare), so that lists need not import methods.

Run it after a change that cannot alter results, such as a new name or a formula moved to another
file. If a change can alter them, first raise the method's version.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from feddg_bench.outlines import outline_of, write_outline
from feddg_bench.plugins import OUTLINES, load_method, names, source_digest
from feddg_bench.runs.code import code_digest

FILE = Path(__file__).parents[1] / "methods" / "feddg_methods" / "digests.json"


def ours() -> dict[str, tuple[str, str]]:
    """Return the version and the digest of each method of this repository."""
    found = {name: load_method(name) for name in names("method")}
    return {
        name: (str(method.version), code_digest(method))
        for name, method in found.items()
        if method.__module__.startswith("feddg_methods.")
    }


def outlines() -> dict[str, Any]:
    """Return the content of the outlines file; outlines that JSON cannot represent are left out."""
    found = {name: write_outline(outline_of(load_method(name))) for name in ours()}
    written = {name: outline for name, outline in found.items() if outline is not None}
    return {"source": source_digest("feddg_methods"), "outlines": written}


def main() -> None:
    """Write both files."""
    known: dict[str, dict[str, list[str]]] = json.loads(FILE.read_text())
    for name, (version, digest) in ours().items():
        digests = known.setdefault(name, {}).setdefault(version, [])
        if digest not in digests:
            digests.append(digest)
    FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    FILE.with_name(OUTLINES).write_text(lines(outlines()) + "\n", encoding="utf-8")


def lines(value: Any, depth: int = 0) -> str:
    """Return JSON with one line for each declaration, each setting and each sentence of a list."""
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, list) and len(text) > 100:
        return text.replace('", "', f'",\n{" " * (depth + 1)}"')
    if not (isinstance(value, dict) and value and depth < 5):
        return text
    inner = (f"{' ' * (depth + 1)}{json.dumps(k)}: {lines(v, depth + 1)}" for k, v in value.items())
    return "{\n" + ",\n".join(inner) + "\n" + " " * depth + "}"


if __name__ == "__main__":
    main()
