"""Add today's code of our methods to the digests whose numbers are the same: ``make digests``.

Run it after a change that cannot move a number, such as a new name or a formula in another file. A
change that can move one raises the method's version instead, and is then added here too.
"""

from __future__ import annotations

import json
from pathlib import Path

from feddg_bench.plugins import load_method, names
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


def main() -> None:
    """Write the file."""
    known: dict[str, dict[str, list[str]]] = json.loads(FILE.read_text())
    for name, (version, digest) in ours().items():
        digests = known.setdefault(name, {}).setdefault(version, [])
        if digest not in digests:
            digests.append(digest)
    FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
