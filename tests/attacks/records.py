"""Forged records: one field at a time, whole files, packed files, and bombs."""

from __future__ import annotations

import copy
import json
import logging
import lzma
import resource
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tests.attacks.lab import Lab, call
from tests.fabricate_records import record, save
from tests.helpers import make_record

ODD: tuple[Any, ...] = (
    None,
    -1,
    2.5,
    10**30,
    "x",
    "",
    "\x1b[31mred\n",
    True,
    [],
    [5],
    {},
    {"a": 1},
)
NUMBERS = ("NaN", "1e999", "-1e999", "-0.001", "1e400")
"""Written into a file literally."""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each field, and of the first and last item of each list."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value:
        for place in {0, len(value) - 1}:
            yield from leaves(value[place], (*path, place))


def edits(values: Any) -> Iterator[tuple[str, str]]:
    """Yield changes of a record, and the changed texts."""
    whole = json.dumps(values)
    for path in leaves(values):
        *above, last = path
        for odd in ("gone", *ODD, *NUMBERS):
            changed = copy.deepcopy(values)
            inner = changed
            for key in above:
                inner = inner[key]
            if odd == "gone":
                del inner[last]
            else:
                inner[last] = "@" if odd in NUMBERS else odd
            text = json.dumps(changed)
            text = text.replace('"@"', str(odd)) if odd in NUMBERS else text
            if text != whole:
                yield f"{'.'.join(map(str, path))}: {odd!r:.20}", text


class Tables:
    """The tables of a results folder."""

    def __init__(self, lab: Lab) -> None:
        self.root, self.pages = lab.folder(), ""
        others = (("fedavg", 0), ("moon", 0), ("moon", 1))
        save(self.root, *(record(name, seed=seed, every=2) for name, seed in others))
        self.victim = record("fedavg", seed=1, every=2).sealed()
        self.path = self.root / "runs" / f"{self.victim.key}.json"
        self.without = self.cells()
        self.write(json.dumps(self.victim.as_json()))
        self.honest = self.cells()
        assert self.honest != self.without

    def write(self, text: str) -> None:
        """Write the victim's file, possibly a forgery."""
        self.path.write_text(text)
        (self.root / ".index").unlink(missing_ok=True)

    def cells(self) -> str:
        """Return all tables as text."""
        from feddg_bench.analysis.tables.build import build
        from feddg_bench.analysis.tables.generic import frames
        from feddg_bench.analysis.tables.writers import WRITERS
        from feddg_bench.records.frame import read_frame

        runs = read_frame(self.root)
        grids = [build(t.name, t.description, t.runs, any_paper=True) for t in frames(runs)]
        writers = {end: write for files in WRITERS.values() for end, write in files.items()}
        texts = {end: "".join(map(write, grids)) for end, write in writers.items()}
        self.pages = "".join(t for end, t in texts.items() if end != "csv")  # CSV has raw names
        return "".join(texts.values())

    def judge(self, text: str) -> tuple[str, bool]:
        """Return the outcome of a forgery: refused and reported, without effect, or silent."""
        self.write(text)
        told: list[str] = []
        listener = logging.Handler()
        listener.emit = lambda line: told.append(line.getMessage())  # type: ignore[method-assign]
        logging.getLogger().addHandler(listener)
        try:
            shown, failed = call(self.cells)
        finally:
            logging.getLogger().removeHandler(listener)
        if failed:
            return failed, False
        if "\x1b" in "".join((self.pages, *told)):
            return "an escape is in a table or notice", False
        if shown == self.without:
            return "told" if told else "left out without a word", bool(told)
        if shown == self.honest:
            return "no effect", True
        return "another table" + ", told" * bool(told), bool(told)


def fields(lab: Lab) -> None:
    """Change one field of a record at a time: all if the lab is full, else every sixth change."""
    tables = Tables(lab)
    grid = edits(tables.victim.as_json())
    for name, text in islice(grid, 0, None, 1 if lab.full else 6):
        lab.add(f"field {name}", *tables.judge(text))


def whole(lab: Lab) -> None:
    """Give a record a key twice: the last value wins for most readers."""
    tables = Tables(lab)
    text = json.dumps(tables.victim.as_json())
    twice = text.replace('"accuracy"', '"accuracy": 0.9990, "accuracy"', 1)
    lab.add("record: a key twice", *tables.judge(twice))
    turned = text[::-1].replace('"ycarucca"', ': 0999.0 ,"ycarucca"'[::-1], 1)[::-1]
    lab.add("record: a key twice, the last wins", *tables.judge(turned))


def packed(lab: Lab) -> None:
    """Packed files: several streams, garbage, and records that could get lost."""
    from feddg_bench.records.runs import read_runs
    from feddg_bench.records.store import pack_runs, unpack_runs

    made = [record("fedavg", seed=seed) for seed in range(4)]
    lines = [json.dumps(one.as_json()).encode() + b"\n" for one in made]
    honest = {one.key for one in made}

    def attempt(attack: str, data: bytes, command: Any, *, refused: bool = False) -> None:
        root = lab.folder()
        (root / "records").mkdir()
        path = root / "records" / "digits4-ltdo-quick.jsonl.xz"
        path.write_bytes(data)
        save(root, record("moon", seed=9))
        call(command, root)
        if path.exists() and path.read_bytes() == data and refused:
            lab.add(f"packed: {attack}", "refused, untouched", True)
            return
        found, failed = call(read_runs, root)
        left = {run.key for run in found or ()} & honest
        lab.add(f"packed: {attack}", failed or f"{len(left)} of 4 are left", left == honest)

    streams = b"".join(map(lzma.compress, lines))
    for name, command in (("read", read_runs), ("pack", pack_runs), ("unpack", unpack_runs)):
        attempt(f"a stream for each record, {name}", streams, command)
        attempt(f"two streams and padding, {name}", streams + bytes(4), command)
    for more in (b"garbage", bytes(3), b"\xfd7zXZ\0", streams[:-5]):
        for name, command in (("pack", pack_runs), ("unpack", unpack_runs)):
            data = lzma.compress(b"".join(lines)) + more
            attempt(f"{more[:6]!r} behind the stream, {name}", data, command, refused=True)


def folders(lab: Lab) -> None:
    """Folders with different contents of one run: this is reported, and nothing is set aside."""
    for field, value in (
        ("partition", {"hash": "0b", "clients": 20, "sizes": [1, 1, 1]}),
        ("time", {"seconds": 9.0, "peak_memory_mib": 1.0}),
        ("once", {"bytes": {"up": 1, "down": 1}, "dropped": [], "seconds": {}}),
    ):
        first, second = lab.folder(), lab.folder()
        one = record("fedavg", seed=0)
        save(first, one)
        save(second, one)
        path = second / "runs" / f"{one.key}.json"
        path.write_text(json.dumps(one.as_json() | {field: value}))
        words = ("tables", "generic", "--out", lab.folder() / "t")
        outcome = lab.feddg(*words, "--results", first, "--results", second)
        told = "differs" in outcome.err or "other" in outcome.err
        held = outcome.code == 0 and told and path.exists()
        lab.add(f"folders differ in {field}", outcome.sentence or "not a word", held)


def bombs(lab: Lab) -> None:
    """Files far larger than records: they are refused with little memory and time."""
    from feddg_bench.records.runs import read_runs

    def attempt(attack: str, name: str, write: Any) -> None:
        root = lab.folder()
        save(root, record("fedavg", seed=0))
        path = root / name
        path.parent.mkdir(exist_ok=True)
        write(path)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found, failed = call(read_runs, root)
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
        fine = not failed and len(found) == 1 and more < 512
        lab.add(f"bomb: {attack}", failed or f"{len(found)} read, {more} MiB more", fine)
        path.unlink()

    def sparse(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(6 * 2**30)

    zeros = lzma.compress(bytes(600 * 2**20))
    attempt("600 MiB packed into 90 kB", "records/a.jsonl.xz", lambda p: p.write_bytes(zeros))
    attempt("a sparse packed file of 6 GiB", "records/a.jsonl.xz", sparse)
    attempt("a sparse record of 6 GiB", "runs/a.json", sparse)


def escapes(lab: Lab) -> None:
    """Escapes in a record's texts reach neither terminal nor Markdown nor TeX."""
    red = "\x1b[31mred\x1b[0m\r\n| a | b |"
    for field in ("recipe", "method", "dataset", "protocol", "scenario"):
        root, out = lab.folder(), lab.folder()
        one = record("fedavg", seed=0)
        layer = {} if field == "recipe" else {field: red}
        again = {"recipe": red} if field == "recipe" else {}
        rounds = [entry.model_dump() for entry in one.rounds]
        domains = (("ink", "poster"), "outline", "chalk")
        forged = make_record(layer, domains=domains, rounds=rounds, **again)
        folder = root / "runs"
        folder.mkdir()
        (folder / f"{forged.key}.json").write_text(json.dumps(forged.as_json()))
        for command in ("tables", "results"):
            words = (
                ("tables", "generic", "--out", out) if command == "tables" else ("results", "list")
            )
            outcome = lab.feddg(*words, "--results", root)
            made = "".join(p.read_text() for p in out.rglob("*") if p.suffix in (".md", ".tex"))
            obeyed = "\x1b" in outcome.out + outcome.err + made or "\r" in made
            lab.add(f"escapes in {field}: {command}", f"exit {outcome.code}", not obeyed)


def attack(lab: Lab) -> None:
    """Try all forgeries."""
    for part in (fields, whole, packed, folders, bombs, escapes):
        part(lab)
