"""Files that are whole or absent: records, the results folder, checkpoints."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch
from torch.testing import assert_close

from feddg_bench.common.errors import DataError
from feddg_bench.common.files import write_whole
from feddg_bench.core.messages import encode
from feddg_bench.records.rules import split_metric
from feddg_bench.records.statistics import mean_and_std
from feddg_bench.records.store import ResultsStore, read_record
from feddg_bench.runs.checkpoints import load_checkpoint, save_checkpoint
from tests import helpers


def evaluation(accuracy):
    return {
        "test": {"sketch": {"accuracy": accuracy, "loss": 0.5, "images": 8}},
        "id_val": {
            "photo": {"accuracy": 1.0, "loss": 0.5, "images": 30},
            "cartoon": {"accuracy": 0.5, "loss": 0.5, "images": 10},
        },
    }


def make_record(seed=0, **changes):
    rounds = [
        helpers.entry(1, evaluation(0.25), train={"loss": 2.0}),
        helpers.entry(2, evaluation(0.75), train={"loss": 1.0}),
        helpers.entry(3, None, train={"loss": 0.5}),
    ]
    values = {
        "recipe": "quick \N{LATIN SMALL LETTER E WITH ACUTE}",
        "once": {"bytes": {"up": 96, "down": 0}, "seconds": {"training": 0.5}},
        "rounds": rounds,
        "environment": {"versions": {"torch": "2"}},
        "time": {"seconds": 3.3},
    }
    return helpers.make_record({"seed": seed}, **{**values, **changes})


# ----------------------------------------------------------------------------- whole files


def test_a_file_is_written_with_its_folders(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    write_whole(path, b"content")
    assert path.read_bytes() == b"content"
    assert os.listdir(path.parent) == ["file"]  # noqa: PTH208
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "file"
    write_whole(path, b"a longer old content")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, b"old")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError) as caught:
        write_whole(path, b"new")
    assert str(caught.value).startswith(f"cannot write {path}: No space left on device;")
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208


def test_an_interrupt_while_writing_leaves_no_litter(tmp_path, monkeypatch):
    def interrupt(_descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", b"new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "results").write_text("in the way")
    with pytest.raises(DataError, match="choose another folder with --results"):
        write_whole(tmp_path / "results" / "runs" / "x.json", b"")
    with pytest.raises(DataError, match="cannot write"):
        ResultsStore(tmp_path / "results").check_writable()


# --------------------------------------------------------------------------------- records


def test_a_record_comes_back_as_it_was(tmp_path):
    store = ResultsStore(tmp_path)
    record = make_record()
    path = store.save(record)
    assert path == tmp_path / "runs" / f"{record.key}.json"
    assert store.load(record.key) == record
    assert read_record(path) == record


def test_records_can_be_read_by_people(tmp_path):
    text = ResultsStore(tmp_path).save(make_record()).read_text(encoding="utf-8")
    assert json.loads(text)["settings"]["train"]["lr"] == 3e-5
    assert json.loads(text)["rounds"][2]["evaluation"] is None
    assert "quick \N{LATIN SMALL LETTER E WITH ACUTE}" in text
    assert text.endswith("}\n")


def test_numbers_that_json_lacks_are_null(tmp_path):
    store = ResultsStore(tmp_path)
    overflowed = helpers.measured(0.5, "chalk")
    overflowed["chalk"]["loss"] = float("nan")
    entry = helpers.entry(1, {"test": overflowed}, train={"loss": float("inf")})
    record = make_record(rounds=[entry])
    path = store.save(record)
    values = json.loads(path.read_text(), parse_constant=pytest.fail)["rounds"][0]
    assert values["train"]["loss"] is None
    assert values["evaluation"]["test"]["chalk"] == {"accuracy": 0.5, "loss": None, "images": 10}
    again = store.load(record.key)
    assert math.isnan(again.rounds[0].train["loss"])
    assert math.isnan(again.evaluation()["test"]["chalk"]["loss"])
    assert again.as_json() == record.as_json()


def test_a_run_that_is_not_there(tmp_path):
    assert ResultsStore(tmp_path).load("0" * 16) is None
    assert list(ResultsStore(tmp_path)) == []


def test_the_store_lists_records_and_nothing_else(tmp_path):
    store = ResultsStore(tmp_path)
    records = [make_record(seed) for seed in range(3)]
    for record in records:
        store.save(record)
    (store.runs / ".part-x").write_text("half")
    (store.runs / "notes.txt").write_text("notes")
    assert list(store) == sorted(records, key=lambda record: record.key)


def test_trying_the_folder_leaves_nothing_there(tmp_path):
    store = ResultsStore(tmp_path / "new")
    store.check_writable()
    assert list(store.runs.iterdir()) == []


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_record_cut_short_is_refused(tmp_path, share):
    store = ResultsStore(tmp_path)
    record = make_record()
    path = store.save(record)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * (len(data) - 3))])
    with pytest.raises(DataError, match="cannot be used") as caught:
        store.load(record.key)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"{}", b"[]", b"\xff\xfe", b'{"key": 3}', b"null"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "record.json"
    path.write_bytes(text)
    with pytest.raises(DataError, match="cannot be used"):
        read_record(path)


def test_what_a_later_version_added_is_kept(tmp_path):
    values = make_record().as_json()
    values["weather"] = {"rain": True}
    values["data"]["camera"] = "old"
    values["rounds"][0]["dropped"] = [{"client": "c", "tensor": "w", "mood": 3}]
    path = tmp_path / "record.json"
    path.write_text(json.dumps(values))
    record = read_record(path)
    assert record.unknown_fields() == ["weather", "data.camera"]
    assert record.as_json() == values


def test_a_later_form_is_refused(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(make_record().as_json() | {"format": 2}))
    with pytest.raises(DataError, match="newer"):
        read_record(path)


def test_a_missing_record_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"cannot read record .*: No such file"):
        read_record(tmp_path / "absent.json")


def test_numbers_are_what_the_same_settings_repeat():
    slower = make_record(
        environment={"versions": {"torch": "3"}},
        time={"seconds": 99.0},
        once={"bytes": {"up": 96, "down": 0}, "seconds": {"training": 50}},
    )
    slower.rounds[0].seconds = {"training": 77}
    assert slower.numbers() == make_record().numbers()
    assert slower.rounds[0].seconds == {"training": 77}
    better = make_record()
    better.rounds[1].train = {"loss": 0.9}
    assert better.numbers() != make_record().numbers()


def test_the_last_evaluation_counts():
    assert make_record().evaluation() == evaluation(0.75)
    with pytest.raises(DataError, match="holds no evaluated round"):
        make_record(rounds=[]).evaluation()


def test_accuracy_of_a_split_is_over_its_images():
    assert split_metric(evaluation(0.75), "id_val", "accuracy") == pytest.approx((30 + 5) / 40)
    assert split_metric(evaluation(0.75), "test", "accuracy") == 0.75
    assert split_metric(evaluation(0.75), "val", "accuracy") is None
    assert split_metric({"val": {}}, "val", "accuracy") is None


def test_mean_and_sample_deviation():
    assert mean_and_std([0.5]) == (0.5, None)
    mean, std = mean_and_std([2.0, 4.0, 9.0])
    assert (mean, std) == (5.0, pytest.approx(13**0.5))


# ----------------------------------------------------------------------------- checkpoints


STATE = {
    "server": {"round": 2, "weights": {"w": torch.arange(6.0).view(2, 3)}, "clients": {}},
    "record": {"key": "0123456789abcdef", "rounds": [{"loss": 0.5}]},
}


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    path = ResultsStore(tmp_path).checkpoint("0123456789abcdef")
    save_checkpoint(path, STATE)
    state = load_checkpoint(path)
    assert state["record"] == STATE["record"]
    assert state["server"]["round"] == 2
    assert_close(state["server"]["weights"], STATE["server"]["weights"], rtol=0, atol=0)


def test_a_checkpoint_cut_short_anywhere_is_refused(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    data = encode(STATE)
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(DataError, match="delete it to start this run from round 1"):
            load_checkpoint(path)


@pytest.mark.parametrize("state", [{}, {"server": {}}, [], "text", {"record": {}}])
def test_another_file_is_not_a_checkpoint(tmp_path, state):
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(encode(state))
    with pytest.raises(DataError, match="is not a checkpoint of feddg-bench"):
        load_checkpoint(path)


def test_a_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"cannot read checkpoint .*: No such file"):
        load_checkpoint(tmp_path / "absent.safetensors")


def test_the_last_checkpoint_survives_a_full_disk(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, STATE)

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device"):
        save_checkpoint(path, {**STATE, "record": {}})
    assert load_checkpoint(path)["record"] == STATE["record"]
