"""Checkpoints: damaged, changed or foreign files are refused with a helpful message."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from feddg_bench.common.errors import DataError
from feddg_bench.core.messages import decode, encode
from feddg_bench.records.record import RunRecord
from feddg_bench.records.store import ResultsStore
from feddg_bench.runs import checkpoints
from feddg_bench.runs.checkpoints import (
    Checkpoint,
    CheckpointWriter,
    load_checkpoint,
    save_checkpoint,
    states_folder,
    tidy,
)
from feddg_bench.testing import start_toy_run
from tests.helpers import bitwise, make_record, refused

HEAD = len(b"feddg-bench checkpoint 3\n")


def entry(number):
    return {"round": number, "cohort": [], "skipped": False, "train": {}, "evaluation": None}


@pytest.fixture(scope="module")
def kept():
    """Return the checkpoint of a run after two rounds."""
    run = start_toy_run("scaffold")
    run.rounds(2)
    record = make_record({"evaluation": {"start": 50}})
    record = RunRecord.model_validate({**record.as_json(), "rounds": [entry(1), entry(2)]})
    settings = run.settings.model_dump(mode="json")
    return Checkpoint(
        server=run.server.state(), record=record, settings=settings, recipe="x", data_root=None
    )


@pytest.fixture
def path(tmp_path, kept):
    path = ResultsStore(tmp_path).checkpoint(kept.record.key)
    save_checkpoint(path, kept)
    return path


def rewrite(path, change):
    """Change the content of a checkpoint and update its digest."""
    state = decode(path.read_bytes()[HEAD + 32 :])
    change(state)
    data = encode(state)
    path.write_bytes(path.read_bytes()[:HEAD] + hashlib.sha256(data).digest() + data)


def refusal(path):
    with pytest.raises(DataError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    assert "delete it" in message
    assert "\n" not in message
    return message


def test_a_checkpoint_comes_back_as_it_was(path, kept):
    found = load_checkpoint(path)
    assert found.record == kept.record
    assert (found.settings, found.recipe, found.data_root) == (kept.settings, "x", None)
    bitwise(found.server["weights"], dict(kept.server["weights"]))
    assert encode(found.server) == encode(kept.server)


def test_a_flipped_bit_anywhere_is_found(path):
    """In the head, in the digest, in the header and in the tensors."""
    data = path.read_bytes()
    places = [*range(0, HEAD + 64, 7), *range(HEAD + 64, len(data), len(data) // 60), len(data) - 1]
    for place in places:
        for bit in (0, 6):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            refusal(path)
    path.write_bytes(data)
    load_checkpoint(path)


def test_a_file_cut_short_anywhere_or_longer_is_refused(path):
    data = path.read_bytes()
    for length in range(0, len(data), len(data) // 80):
        path.write_bytes(data[:length])
        refusal(path)
    path.write_bytes(data + b"more")
    refusal(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: s.update(record=5), "record"),
        (lambda s: s.pop("record"), "record"),
        (lambda s: s["record"].update(key="../../../evil"), "of its record"),
        (lambda s: s["record"].update(key="0" * 16), "its settings are those of"),
        (lambda s: s["record"]["settings"].update(seed=3), "seed"),
        (lambda s: s["record"]["rounds"].pop(), "round 2"),
        (lambda s: s.pop("server"), "server"),
        (lambda s: s.update(server="x"), "server"),
        (lambda s: s["server"].update(round=1), "round 1"),
        (lambda s: s.pop("settings"), "settings"),
        (lambda s: s.pop("recipe"), "recipe"),
        (lambda s: s.update(data_root=5), "data_root"),
        (lambda s: s.update(more=5), "more"),
    ],
)
def test_a_changed_content_is_refused_by_name(path, change, named):
    rewrite(path, change)
    assert named in refusal(path)


@pytest.mark.parametrize("content", [{}, [], "text", None, {"server": {}}])
def test_another_content_is_refused(path, content):
    data = encode(content)
    path.write_bytes(path.read_bytes()[:HEAD] + hashlib.sha256(data).digest() + data)
    refusal(path)


def test_a_deep_header_is_refused(path):
    text = b"[" * 100_000
    data = len(text).to_bytes(8, "little") + text
    path.write_bytes(path.read_bytes()[:HEAD] + hashlib.sha256(data).digest() + data)
    refusal(path)


def test_a_checkpoint_of_another_run_is_refused(path):
    other = path.with_name("0123456789abcdef.safetensors")
    path.rename(other)
    assert "it is of the run" in refusal(other)


def test_what_is_no_file_is_refused(tmp_path):
    refusal(tmp_path / "absent.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    refusal(tmp_path / "pipe.safetensors")
    refusal(tmp_path)


def test_the_last_checkpoint_survives_a_full_disk(path, kept, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refused(DataError, "No space left on device; nothing written before is lost"):
        save_checkpoint(path, kept.model_copy(update={"recipe": "other"}))
    assert load_checkpoint(path).recipe == "x"
    assert {p.name for p in path.parent.iterdir()} == {path.name, states_folder(path).name}


def test_who_ends_the_same_run_at_the_same_time_spoils_no_checkpoint(tmp_path, kept, monkeypatch):
    store, flush, calls = ResultsStore(tmp_path), os.fsync, []

    def another_process_ends(descriptor):
        calls.append(flush(descriptor))
        if len(calls) == 1:
            tidy(store, kept.record.key)

    monkeypatch.setattr(os, "fsync", another_process_ends)
    path = store.checkpoint(kept.record.key)
    save_checkpoint(path, kept)
    assert load_checkpoint(path).recipe == "x"
    assert {p.name for p in path.parent.iterdir()} == {path.name, states_folder(path).name}


def test_left_overs_of_a_run_are_removed_and_no_others(tmp_path, kept):
    store, key = ResultsStore(tmp_path), kept.record.key
    left = [
        store.checkpoint(key),
        store.checkpoints / f"{key}.safetensors.12ab.part",
        store.checkpoints / f"{key}.clients" / "cafe",
        store.runs / f"{key}.json.12ab.part",
        store.runs / f"{key}.last.safetensors.12ab.part",
        store.runs / ".writable.12ab.part",
        store.partitions / "cafe.json.12ab.part",
    ]
    stays = [
        store.path(key),
        store.runs / f"{key}.last.safetensors",
        store.checkpoint("f" * 16),
        store.checkpoints / f"{'f' * 16}.clients" / "cafe",
        store.checkpoints / f"{'f' * 16}.safetensors.12ab.part",
        store.partitions / "cafe.json",
        store.partitions / "beef.json.12ab.part",
    ]
    for file in (*left, *stays):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    tidy(store, key)
    assert [file.exists() for file in left] == [False] * len(left)
    assert [file.exists() for file in stays] == [True] * len(stays)


# ------------------------------------------------------------------------ states of clients


def after(done, run):
    """Return a checkpoint of a toy run after ``done`` rounds."""
    run.rounds(done)
    record = make_record({"evaluation": {"start": 50}}).as_json()
    record = RunRecord.model_validate({**record, "rounds": [entry(i + 1) for i in range(done)]})
    settings = run.settings.model_dump(mode="json")
    state = decode(encode(run.server.state()))
    state["clients"] = dict(run.server.state()["clients"])
    return Checkpoint(server=state, record=record, settings=settings, recipe="x", data_root=None)


@pytest.mark.parametrize("method", ["scaffold", "moon", "fedbn"])
def test_bytes_grow_with_the_clients_of_a_round(tmp_path, method, monkeypatch):
    """One of four clients changes per round: only its state is written."""
    normalised = (
        {"backbone": {"name": "resnet18", "pretrained": False}} if method == "fedbn" else {}
    )
    run = start_toy_run(method, {"federation": {"per_round": 1}}, normalised)
    path = tmp_path / f"{make_record({'evaluation': {'start': 50}}).key}.safetensors"
    known, written = {}, []
    whole = checkpoints.write_whole
    monkeypatch.setattr(
        checkpoints, "write_whole", lambda p, data: written.append(p) or whole(p, data)
    )
    save_checkpoint(path, after(4, run), known)
    for done in range(5, 8):
        before = {p.name for p in states_folder(path).iterdir()}
        written.clear()
        save_checkpoint(path, after(done, run), known)
        assert written[-1] == path
        assert [p.parent for p in written[:-1]] == [states_folder(path)]
        assert {p.name for p in written[:-1]}.isdisjoint(before)
        kept = [state for state in run.server.state()["clients"].values() if state]
        assert len([*states_folder(path).iterdir()]) == len(kept)
        assert encode(load_checkpoint(path).server) == encode(run.server.state())


def test_a_stop_between_any_two_file_operations_resumes_with_the_same_bits(tmp_path, monkeypatch):
    """Before and after each operation, the disk holds the state of round 1 or of round 2."""
    run = start_toy_run("scaffold", {"federation": {"per_round": 2}})
    folder, instants = tmp_path / "run", []
    path = folder / f"{make_record({'evaluation': {'start': 50}}).key}.safetensors"
    kept = {1: after(1, run), 2: after(2, run)}
    run.rounds(4)
    expected = {name: tensor.clone() for name, tensor in run.server.weights.items()}
    save_checkpoint(path, kept[1])

    def snapshot():
        instants.append(shutil.copytree(folder, tmp_path / str(len(instants))) / path.name)

    def watched(owner, name):
        real = getattr(owner, name)

        def operation(*given, **more):
            snapshot()
            result = real(*given, **more)
            snapshot()
            return result

        monkeypatch.setattr(owner, name, operation)

    with monkeypatch.context() as monkeypatch:
        watched(os, "fsync")
        for name in ("open", "replace", "unlink", "mkdir"):
            watched(Path, name)
        save_checkpoint(path, kept[2])
    assert len(instants) > 20
    found = [load_checkpoint(instant).server for instant in instants]
    rounds = [state["round"] for state in found]
    assert rounds == sorted(rounds)
    assert {*rounds} == {1, 2}
    for number in (1, 2):
        same = {encode(state) for state in found if state["round"] == number}
        assert same == {encode(kept[number].server)}
        again = start_toy_run("scaffold", {"federation": {"per_round": 2}})
        again.server.restore(decode(same.pop()))
        again.rounds(4)
        bitwise(again.server.weights, expected)


@pytest.mark.parametrize("digest", ["../x", "/etc/passwd", "0" * 64, 5, None, ["a"]])
def test_a_digest_is_no_path(path, digest):
    """A state is looked up among the files of the folder."""
    (path.parent / "x").write_bytes(encode({}))
    rewrite(path, lambda state: state["server"]["clients"].update(client_0=digest))
    assert "the state of client client_0 is missing" in refusal(path)


def test_a_state_that_is_missing_or_damaged_is_refused(path):
    for file in states_folder(path).iterdir():
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert "is damaged" in refusal(path)
        file.unlink()
        assert "is missing" in refusal(path)
        file.write_bytes(data)
    load_checkpoint(path)


@pytest.mark.parametrize("version", [1, 2, 4])
def test_a_checkpoint_of_another_version_is_refused(path, version):
    path.write_bytes(path.read_bytes().replace(b"checkpoint 3", b"checkpoint %d" % version, 1))
    assert "another version of feddg-bench wrote it" in refusal(path)


# ------------------------------------------------------------------------------- the writer


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: Clock.now)
    return Clock


def offered(writer, path, kept, clock, seconds):
    """Offer six rounds, ``seconds`` apart; return the round on disk after each."""
    written = []
    for number in range(6):
        checkpoint = kept.model_copy(update={"recipe": str(number)})
        writer.offer(number, lambda checkpoint=checkpoint: checkpoint)
        writer.wait()
        written.append(load_checkpoint(path).recipe if path.exists() else None)
        clock.now += seconds
    return written


def test_without_a_number_of_rounds_one_is_written_every_thirty_seconds(path, kept, clock):
    path.unlink()
    writer = CheckpointWriter(path, None)
    assert offered(writer, path, kept, clock, 12) == ["0", "0", "0", "3", "3", "3"]
    writer.finish(write=True)
    assert load_checkpoint(path).recipe == "5"


def test_a_number_of_rounds_is_kept_to(path, kept, clock):
    path.unlink()
    writer = CheckpointWriter(path, 2)
    assert offered(writer, path, kept, clock, 0) == ["0", "0", "2", "2", "4", "4"]
    writer.finish(write=False)
    assert load_checkpoint(path).recipe == "4"


def test_a_full_disk_is_told_at_the_next_checkpoint(path, kept, monkeypatch):
    writer = CheckpointWriter(path, 1)

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        writer.offer(1, lambda: kept)
        with refused(DataError, "No space left on device"):
            writer.offer(2, lambda: kept)
    writer.finish(write=True)
