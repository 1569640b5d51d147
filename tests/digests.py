"""Add today's code of our methods to the digests whose numbers are the same: ``make digests``.

It also writes down what the methods declare, so that lists need not import them.

Run it after a change that cannot move a number, such as a new name or a formula in another file. A
change that can move one raises the method's version instead, and is then added here too.
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
    """Return the content of the file of outlines; one that JSON cannot hold is left out."""
    found = {name: write_outline(outline_of(load_method(name))) for name in ours()}
    written = {name: outline for name, outline in found.items() if outline is not None}
    return {"source": source_digest("feddg_methods"), "outlines": written}


def main() -> None:
    """Write the files."""
    known: dict[str, dict[str, list[str]]] = json.loads(FILE.read_text())
    for name, (version, digest) in ours().items():
        digests = known.setdefault(name, {}).setdefault(version, [])
        if digest not in digests:
            digests.append(digest)
    FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    text = json.dumps(outlines(), indent=1, ensure_ascii=False)
    FILE.with_name(OUTLINES).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
