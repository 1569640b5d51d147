"""Checkpoints: what is damaged, changed or of another run is refused in a sentence that helps."""

from __future__ import annotations

import hashlib
import os

import pytest
import torch

from feddg_bench.common.errors import DataError
from feddg_bench.core.messages import decode, encode
from feddg_bench.records.record import RunRecord
from feddg_bench.records.store import ResultsStore
from feddg_bench.runs.checkpoints import Checkpoint, load_checkpoint, save_checkpoint, tidy
from feddg_bench.testing import start_toy_run
from tests.helpers import bitwise, make_record, refused

HEAD = len(b"feddg-bench checkpoint 2\n")


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
    """Change the content of a checkpoint and give it the digest that goes with it."""
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
        (lambda s: s["record"]["rounds"].pop(0), "do not follow one another"),
        (lambda s: s.pop("server"), "server"),
        (lambda s: s.update(server="x"), "server"),
        (lambda s: s["server"].update(round=-5), "round"),
        (lambda s: s["server"].update(round="x"), "round"),
        (lambda s: s["server"].update(round=True), "round"),
        (lambda s: s["server"].update(round=1), "round 1"),
        (lambda s: s["server"].pop("weights"), "weights"),
        (lambda s: s["server"].update(memory=5), "memory"),
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


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights.popitem(),
        lambda weights: weights.update(more=torch.zeros(1)),
        lambda weights: weights.update({next(iter(weights)): torch.zeros(1)}),
        lambda weights: weights.update({n: t.double() for n, t in weights.items()}),
    ],
    ids=["missing", "extra", "shape", "type"],
)
def test_the_weights_of_another_model_are_not_restored(path, change):
    rewrite(path, lambda state: change(state["server"]["weights"]))
    run = start_toy_run("scaffold")
    before = {name: tensor.clone() for name, tensor in run.server.weights.items()}
    with refused(DataError, "weight"):
        run.server.restore(load_checkpoint(path).server)
    bitwise(run.server.weights, before)


def test_the_last_checkpoint_survives_a_full_disk(path, kept, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refused(DataError, "No space left on device; nothing written before is lost"):
        save_checkpoint(path, kept.model_copy(update={"recipe": "other"}))
    assert load_checkpoint(path).recipe == "x"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


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
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_left_overs_of_a_run_are_removed_and_no_others(tmp_path, kept):
    store, key = ResultsStore(tmp_path), kept.record.key
    left = [
        store.checkpoint(key),
        store.checkpoints / f"{key}.safetensors.12ab.part",
        store.runs / f"{key}.json.12ab.part",
        store.runs / f"{key}.last.safetensors.12ab.part",
        store.runs / ".writable.12ab.part",
        store.partitions / "cafe.json.12ab.part",
    ]
    stays = [
        store.path(key),
        store.runs / f"{key}.last.safetensors",
        store.checkpoint("f" * 16),
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
