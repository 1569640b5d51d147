"""Forged checkpoints, stores and records, and names in them that look like paths."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.attacks.lab import Lab, Outcome, call, tree
from tests.attacks.pictures import few
from tests.fabricate_records import record, save
from tests.helpers import make_record

ROUNDS = 3


def run(lab: Lab, out: Path, *more: object, rounds: int = ROUNDS) -> Outcome:
    """Train the run under attack."""
    return lab.feddg("run", *few(lab), "--rounds", rounds, "--results", out, *more)


def numbers(out: Path) -> Any:
    """Return the reproducible numbers of the only record; ``None`` without one."""
    from feddg_bench.records.record import RunRecord

    found = list((out / "runs").glob("*.json"))
    return RunRecord.parse(found[0].read_bytes()).numbers() if len(found) == 1 else None


def judge(lab: Lab, attack: str, out: Path, outcome: Outcome, honest: Any) -> None:
    """Assess a forgery: it must be refused in one sentence, or change nothing."""
    if outcome.code == 0:
        made, failed = call(numbers, out)
        same = made == honest
        lab.add(attack, failed or ("no change" if same else "a record with other numbers"), same)
    else:
        lab.refused(attack, outcome)


# ------------------------------------------------------------------------------ checkpoints


def stopped(lab: Lab, out: Path) -> Path:
    """Return the checkpoint of a run that was stopped after its first round."""
    from feddg_bench.common.errors import RunInterruptedError
    from feddg_bench.runs.recorder import Recorder

    done = Recorder.round

    def stop(self: Any, *arguments: Any) -> None:
        done(self, *arguments)
        if arguments[1].round == 1:
            raise RunInterruptedError(2)

    Recorder.round = stop  # type: ignore[method-assign]
    try:
        run(lab, out)
    finally:
        Recorder.round = done  # type: ignore[method-assign]
    (path,) = (out / "checkpoints").glob("*.safetensors")
    return path


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a checkpoint's content and update its digest."""
    from feddg_bench.core.messages import decode, encode

    whole = path.read_bytes()
    begin = whole.index(b"\n") + 1
    data = encode(change(decode(whole[begin + 32 :])))
    path.write_bytes(whole[:begin] + hashlib.sha256(data).digest() + data)


def changes() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield forgeries of a checkpoint's content."""

    def put(*keys: Any, to: Any) -> Callable[[Any], Any]:
        def change(state: Any) -> Any:
            inner = state
            for key in keys[:-1]:
                inner = inner[key]
            inner[keys[-1]] = to(inner[keys[-1]]) if callable(to) else to
            return state

        return change

    def drop(*keys: Any) -> Callable[[Any], Any]:
        def change(state: Any) -> Any:
            inner = state
            for key in keys[:-1]:
                inner = inner[key]
            del inner[keys[-1]]
            return state

        return change

    def some(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def weights(state: Any) -> Any:
            held = state["server"]["weights"]
            name = next(iter(held))
            held[name] = change(held[name])
            return state

        return weights

    yield "a weight of shape (3,)", some(lambda _: torch.zeros(3))
    yield "a weight of shape (1,)", some(lambda t: t.flatten()[:1])
    yield "a weight of float64", some(lambda t: t.double())
    yield "a weight of NaN", some(lambda t: t * float("nan"))
    yield "a weight that is a text", some(lambda _: "evil")
    yield "an extra weight", put("server", "weights", to=lambda w: {**w, "evil": torch.zeros(2)})
    yield "a missing weight", put("server", "weights", to=lambda w: dict(list(w.items())[1:]))
    yield "no weights", put("server", "weights", to={})
    yield "weights of None", put("server", "weights", to=None)
    yield "no server", drop("server")
    for value in (-5, 10**6, 2, "x", None, 1.5, True):
        yield f"server round={value!r}", put("server", "round", to=value)
    yield "prepared=no", put("server", "prepared", to=False)
    yield "prepared='x'", put("server", "prepared", to="x")
    yield "memory of a text", put("server", "memory", to="evil")
    yield "clients of a list", put("server", "clients", to=[1])
    yield "an unknown client", put("server", "clients", to={"evil": {"a": torch.zeros(3)}})
    yield "versions of a text", put("server", "versions", to="evil")
    yield "received of a text", put("server", "weights received", to="evil")
    for value in (5, "x", None, [], {}):
        yield f"record={value!r}", put("record", to=value)
    yield "no record", drop("record")
    yield "record.key = a path", put("record", "key", to="../../../evil")
    yield "record.key of another run", put("record", "key", to="0" * 16)
    yield "record.dataset=pacs", put("record", "dataset", to="pacs")
    yield "record.seed=7", put("record", "seed", to=7)
    yield "record.rounds=[]", put("record", "rounds", to=[])
    yield "record.rounds twice", put("record", "rounds", to=lambda r: [*r, *r])
    yield "an accuracy of 55", put("record", "rounds", to=_too_good)
    yield "settings of another run", put("record", "settings", "train", "lr", to=9.0)


def _too_good(rounds: Any) -> Any:
    for entry in rounds:
        for split in (entry["evaluation"] or {}).values():
            for measured in split.values():
                measured["accuracy"] = 55.0
    return rounds


def checkpoints(lab: Lab) -> None:
    """Continue from changed checkpoints, by the same command and by ``resume``."""
    first = lab.folder()
    run(lab, first)
    honest = numbers(first)
    assert honest is not None
    template = lab.folder()
    path = stopped(lab, template)
    whole = path.read_bytes()

    def attempt(attack: str, write: Callable[[Path], None], *, resume: bool = False) -> None:
        folder = lab.folder()
        out = folder / "results"
        shutil.copytree(template, out)
        target = out / "checkpoints" / path.name
        write(target)
        before = tree(lab.root)
        if resume:
            outcome = lab.feddg("resume", path.stem, "--workers", 1, "--results", out)
        else:
            outcome = run(lab, out)
        judge(lab, f"checkpoint: {attack}", out, outcome, honest)
        allowed = (str(out.relative_to(lab.root)), "tmp/", "cache/", "home/")
        strays = [f for f in tree(lab.root) - before if not f.startswith(allowed)]
        if strays:
            lab.add(f"checkpoint: {attack}: files", f"wrote {strays[0]}", False)
        shutil.rmtree(folder)  # searching thousands of files for strays takes long

    attempt("untouched", lambda _: None)
    attempt("untouched, resumed", lambda _: None, resume=True)
    for number, (name, change) in enumerate(changes()):
        resume = number % 2 == 1  # both use the same code to read a checkpoint
        attempt(
            f"{name}{', resumed' if resume else ''}",
            lambda target, change=change: rewrite(target, change),
            resume=resume,
        )
    for key in ("settings", "recipe", "data_root", "server"):
        for value in (5, "x" * (key == "settings"), [], {}):

            def put(target: Path, value: Any = value, key: str = key) -> None:
                rewrite(target, lambda state: {**state, key: value})

            if (key, value) not in (("recipe", ""), ("data_root", "")):
                attempt(f"{key}={value!r}, resumed", put, resume=True)
    length = len(whole)
    flips = {f"byte {n}": n for n in (0, 20, 30, 60, 70, 200, length - 1)}
    flips |= {f"byte {n}": n for n in range(100, length, max(1, length // 8))}
    for name, at in flips.items():
        for bit in (0, 6):

            def flip(target: Path, at: int = at, bit: int = bit) -> None:
                data = bytearray(whole)
                data[at] ^= 1 << bit
                target.write_bytes(bytes(data))

            attempt(f"bit {bit} flipped in {name}", flip)
    for name, data in {
        "empty": b"",
        "8 bytes": b"\xff" * 8,
        "half": whole[: length // 2],
        "a byte less": whole[:-1],
        "a byte more": whole + b"\x00",
        "a pickle": b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.",
        "a header of 900,000 brackets": (900_005).to_bytes(8, "little") + b'{"a":' + b"[" * 900_000,
    }.items():
        attempt(name, lambda target, data=data: target.write_bytes(data))


# ----------------------------------------------------------------------------------- stores


def stores(lab: Lab) -> None:
    """Change decoded images without the suite's knowledge."""
    cache = lab.folder()

    def train() -> tuple[Path, Outcome]:
        out = lab.folder()
        return out, run(lab, out, "--cache-dir", cache, rounds=1)

    honest = numbers(train()[0])
    assert honest is not None
    (store,) = (cache / "stores").glob("*.rgb")
    whole = store.read_bytes()
    middle, last = len(whole) // 2, len(whole) - 9
    changed = {
        "every byte inverted": bytes(255 - b for b in whole),
        "one bit flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "the last pixels' bit flipped": whole[:last] + bytes([whole[last] ^ 1]) + whole[last + 1 :],
        "zeros": bytes(len(whole)),
        "cut short": whole[:-1],
        "empty": b"",
    }
    for name, data in changed.items():
        store.chmod(0o644)
        store.write_bytes(data)
        judge(lab, f"store: {name}", *train(), honest)
        store.write_bytes(whole)
    for note in (cache / "fingerprints").glob("*"):
        for data in (b"", b"../../evil", b"0" * 64, b"\xff\xfe"):
            before = note.read_bytes()
            note.write_bytes(data)
            judge(lab, f"note of a fingerprint: {data[:12]!r}", *train(), honest)
            note.write_bytes(before)


# ---------------------------------------------------------------------------------- records


def edits() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield changes of a record's content."""

    def measured(value: Any, name: str = "accuracy") -> Callable[[Any], Any]:
        def change(r: Any) -> Any:
            for split in r["rounds"][-1]["evaluation"].values():
                for domain in split.values():
                    domain[name] = value
            return r

        return change

    def put(*keys: Any, to: Any) -> Callable[[Any], Any]:
        def change(r: Any) -> Any:
            inner = r
            for key in keys[:-1]:
                inner = inner[key]
            inner[keys[-1]] = to
            return r

        return change

    for value in (55, -1, float("nan"), None, float("inf"), -0.0001, 1.0001, "x", [0.5], True):
        yield f"accuracy: {value!r}", measured(value)
    for value in (-1, 2.5, "x", 10**30):
        yield f"images: {value!r}", measured(value, "images")
    yield "train.lr of another run", put("settings", "train", "lr", to=0.5)
    yield "seed unlike the settings'", put("seed", to=7)
    for key in (
        "seed",
        "method",
        "dataset",
        "protocol",
        "recipe",
        "scenario",
        "rounds",
        "data",
        "settings",
        "key",
        "format",
        "environment",
        "labels",
        "partition",
        "once",
        "time",
    ):
        for value in ([0], 5, None, "x", {"a": {}}, 10**30, -1):
            right = (key, value) in (("recipe", "x"), ("once", {"a": {}}), ("time", {"a": {}}))
            if not right:
                yield f"{key}: {value!r:.12}", put(key, to=value)
    yield "method: fedprox", put("method", to="fedprox")
    yield "dataset: pacs", put("dataset", to="pacs")
    yield "protocol: lodo", put("protocol", to="lodo")
    yield "rounds that repeat", lambda r: {**r, "rounds": [*r["rounds"], *r["rounds"]]}


def records(lab: Lab) -> None:
    """Change records: tables leave them out with a notice, and still show the others."""
    others = [record("fedavg", seed=s) for s in (1, 2)]
    honest = lab.folder()
    save(honest, *others)
    want = lab.feddg("tables", "generic", "--results", honest, "--out", lab.folder())
    victim = json.loads(next(iter((_saved(lab) / "runs").glob("*.json"))).read_text())

    def attempt(attack: str, text: str, name: str = f"{victim['key']}.json") -> None:
        folder, out = lab.folder(), lab.folder()
        save(folder, *others)
        (folder / "runs" / name).write_text(text)
        outcome = lab.feddg("tables", "generic", "--results", folder, "--out", out)
        told = name in outcome.err or name.removesuffix(".json") in outcome.err
        shown = "5500" in _cells(out) or "inf" in _cells(out).lower()  # 55 in percent
        right = outcome.code == 0 and bool(_cells(out)) and told and not shown
        lab.add(
            f"record: {attack}",
            f"exit {outcome.code}, {'told' if told else 'not a word'}: {outcome.err.strip()[:110]}",
            right,
        )

    lab.add("records untouched", want.sentence, want.code == 0)
    for name, change in edits():
        text = json.dumps(change(json.loads(json.dumps(victim)))).replace("Infinity", "1e999")
        attempt(name, text)
    whole = json.dumps(victim)
    attempt("cut short", whole[: len(whole) // 2])
    attempt("empty", "")
    attempt("no JSON", "{" * 10_000)
    attempt("a foreign file", '{"hello": "world"}', "notes.json")
    attempt("a record under another name", whole, "0123456789abcdef.json")
    attempt("100,000 brackets", "[" * 100_000)


def _saved(lab: Lab) -> Path:
    folder = lab.folder()
    save(folder, record("fedavg", seed=0))
    return folder


def _cells(out: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(out.rglob("*.csv")))


def paths(lab: Lab) -> None:
    """Names in records are not used as paths."""
    for where in (
        "../../../escaped",
        "x/../../../../escaped",
        "/abs",
        "..",
        "</script>",
        "a\x00b",
        "=1+1",
        "@SUM(1)",
        "con",
        "x" * 300,
    ):
        folder, out = lab.folder(), lab.folder() / "a" / "b"
        domains = (("ink", "poster"), "outline", "chalk")
        one = record(domains=domains)
        for field in ("dataset", "protocol", "method", "recipe", "scenario"):
            layer = {} if field == "recipe" else {field: where}
            fields = {"recipe": where} if field == "recipe" else {}
            made = make_record(layer, domains=domains, rounds=one.rounds, **fields)
            try:
                save(folder, made)
            except Exception as error:  # a record that cannot be written does no harm
                lab.add(f"{field} {where[:24]!r}", type(error).__name__, True)
        before = tree(lab.root)
        for command in (
            ("tables", "generic", "--results", folder, "--out", out / "out"),
            ("report", "--results", folder, "--out", out / "r" / "report.html"),
        ):
            outcome = lab.feddg(*command)
            what = f"{command[0]}: all names {where[:24]!r}"
            inside = str(out.relative_to(lab.root))
            new = tree(lab.root) - before
            strays = [f for f in new if not f.startswith((inside, "tmp/", "home/", "cache/"))]
            fine = outcome.code in (0, 2) and "Traceback" not in outcome.err and not strays
            happened = f"wrote {strays[0]}" if strays else f"exit {outcome.code}"
            formula = command[0] == "tables" and any(
                line.startswith(("=", "@", "+")) or ",=" in line or ",@" in line
                for line in _cells(out).splitlines()
            )
            lab.add(what, "a cell is a formula" if formula else happened, fine and not formula)


# -------------------------------------------------------------------------------- left-overs


def leftovers(lab: Lab) -> None:
    """The next command removes leftovers of a kill and never takes them for results."""
    out = lab.folder()
    run(lab, out, rounds=1)
    (done,) = (out / "runs").glob("*.json")
    for where in (out / "runs", out / "checkpoints"):
        where.mkdir(exist_ok=True)
        (where / f"{done.stem}.json.{'0' * 32}.part").write_bytes(b"half")
    (out / "checkpoints" / f"{done.stem}.safetensors").write_bytes(b"left")
    outcome = run(lab, out, rounds=1)
    left = [f for f in tree(out) if f.endswith(".part") or "checkpoints/" in f]
    lab.add("left-overs of a kill, run again", left or "tidied", outcome.code == 0 and not left)
    diverged = lab.folder()
    run(lab, diverged, "train.optimizer=sgd", "train.lr=1e30", rounds=3)
    table = lab.feddg("tables", "generic", "--results", diverged, "--out", lab.folder() / "t")
    page = lab.folder()
    lab.feddg("tables", "generic", "--results", diverged, "--out", page)
    text = "".join(p.read_text() for p in page.rglob("*.md"))
    said = any(word in text for word in ("skipped", "not finite", "diverged"))
    lab.add(
        "a run that diverged, in a table",
        "footnote" if said else "not a word",
        said and table.code == 0,
    )


def attack(lab: Lab) -> None:
    """Try all forgeries."""
    for part in (checkpoints, stores, records, paths, leftovers):
        part(lab)
