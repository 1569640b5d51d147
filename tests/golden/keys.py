"""Compare the run keys of all shipped records and the public names with the current code.

``python -m tests.golden.keys`` recomputes each record's key from its settings, and exits with 1 if
a key differs or a public name is gone. ``--write`` stores the current names in ``names.txt``.
"""

from __future__ import annotations

import argparse
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import feddg_bench
from feddg_bench.config.keys import canonical_settings, run_key
from feddg_bench.config.schema import RunSettings
from feddg_bench.plugins import outline
from feddg_bench.records.sources import read_json
from feddg_methods import functional

ROOT = Path(__file__).parents[2]
NAMES = Path(__file__).with_name("names.txt")


def records() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each shipped record with its file, as JSON values."""
    for file in sorted(ROOT.glob("results/**/records/*.jsonl.xz")):
        for line in lzma.decompress(file.read_bytes()).splitlines():
            values = read_json(line)
            yield file, values.get("record", values)


def key_of(record: dict[str, Any]) -> str:
    """Return the run key of a record's settings under the current code; files count by digest."""
    values = {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in record["settings"].items()
    }
    # Facts of a data set, and a setting that runs can no longer have.
    own = {"data": ("names",), "partition": ("order",), "engine": ("clients",)}
    kept = {
        (section, key): values[section].pop(key)
        for section, value in values.items()
        if isinstance(value, dict)
        for key, inner in list(value.items())
        if key in own.get(section, ()) or _is_digest(inner)
    }
    settings = RunSettings.model_validate(values)
    canonical = canonical_settings(settings, outline(settings.method).own)
    for (section, key), inner in kept.items():
        canonical.setdefault(section, {})[key] = inner
    return run_key(canonical, record["method_version"])


def _is_digest(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(isinstance(item, dict) and "sha256" in item for item in items)


def public_names() -> list[str]:
    """Return the public names of the package and of the methods' functions."""
    modules = {
        "feddg_bench": feddg_bench._FACE,
        "feddg_methods.functional": functional._HOMES,
    }
    return sorted(f"{module}.{name}" for module, names in modules.items() for name in names)


def gone() -> list[str]:
    """Return the stored public names that no longer exist."""
    return sorted(set(NAMES.read_text().split()) - set(public_names()))


def main() -> None:
    """Compare, or write the names."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.keys", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep today's public names")
    if parser.parse_args().write:
        NAMES.write_text("".join(f"{name}\n" for name in public_names()))
    total, faults = 0, []
    for file, record in records():
        total += 1
        if (key := key_of(record)) != record["key"]:
            faults.append(f"{file.relative_to(ROOT)}: {record['key']} is planned as {key}")
    faults += [f"public name {name} is gone" for name in gone()]
    print(*faults, f"{total} records planned again, {len(faults)} faults", sep="\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
