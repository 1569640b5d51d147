"""Atomic file writes, records, the results folder, packed records and the index."""

from __future__ import annotations

import copy
import errno
import json
import lzma
import math
import os
import resource
import sqlite3
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feddg_bench import cli
from feddg_bench.analysis.report.gather import gather
from feddg_bench.analysis.tables.build import build
from feddg_bench.analysis.tables.generic import frames
from feddg_bench.analysis.tables.writers import WRITERS
from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.common.files import write_whole
from feddg_bench.config.keys import run_key
from feddg_bench.config.schema import RunSettings
from feddg_bench.protection.guarantee import doubt, guarantee
from feddg_bench.records import sources
from feddg_bench.records.checksums import sums_faults
from feddg_bench.records.frame import load_records, read_frame
from feddg_bench.records.record import PrivacyRecord, RunRecord, TunedRecord
from feddg_bench.records.rules import split_metric
from feddg_bench.records.runs import read_runs
from feddg_bench.records.statistics import mean_and_std
from feddg_bench.records.store import ResultsStore, pack_runs, unpack_runs
from feddg_methods.fedavg import FedAvg
from tests import helpers
from tests.helpers import refused


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
    ]
    values = {
        "recipe": "quick \N{LATIN SMALL LETTER E WITH ACUTE}",
        "once": {"bytes": {"up": 96, "down": 0}, "seconds": {"training": 0.5}},
        "rounds": rounds,
        "environment": {"versions": {"torch": "2"}},
        "time": {"seconds": 3.3},
    }
    domains = (("photo", "cartoon"), "outline", "sketch")
    return helpers.make_record({"seed": seed}, domains=domains, **{**values, **changes})


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
    with refused(DataError, "name another place"):
        write_whole(tmp_path / "results" / "runs" / "x.json", b"")
    for write in (
        lambda: write_whole(tmp_path / "results" / "x.json", b""),
        ResultsStore(tmp_path / "results").check_writable,
    ):
        with refused(DataError, f"cannot write to {tmp_path}", "results is a file, not a folder;"):
            write()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that nobody can write to")
def test_a_folder_that_cannot_be_made_is_named():
    with refused(DataError, "cannot write to /proc/x/runs: "):
        ResultsStore(Path("/proc/x")).check_writable()


# --------------------------------------------------------------------------------- records


def test_a_record_comes_back_as_it_was(tmp_path):
    store = ResultsStore(tmp_path)
    record = make_record()
    path = store.save(record)
    assert path == tmp_path / "runs" / f"{record.key}.json"
    assert store.load(record.key) == record
    assert RunRecord.parse(path.read_bytes()) == record


def test_records_can_be_read_by_people(tmp_path):
    text = ResultsStore(tmp_path).save(make_record()).read_text(encoding="utf-8")
    assert json.loads(text)["settings"]["train"]["lr"] == 3e-5
    assert json.loads(text)["environment"]["commit"] is None
    assert "quick \N{LATIN SMALL LETTER E WITH ACUTE}" in text
    assert text.endswith("}\n")


def test_numbers_that_json_lacks_are_null(tmp_path):
    store = ResultsStore(tmp_path)
    overflowed = helpers.measured(0.5, "sketch")
    overflowed["sketch"]["loss"] = float("nan")
    entry = helpers.entry(1, {"test": overflowed}, train={"loss": float("inf")})
    record = make_record(rounds=[entry])
    path = store.save(record)
    values = json.loads(path.read_text(), parse_constant=pytest.fail)["rounds"][0]
    assert values["train"]["loss"] is None
    assert values["evaluation"]["test"]["sketch"] == {"accuracy": 0.5, "loss": None, "images": 10}
    again = store.load(record.key)
    assert math.isnan(again.rounds[0].train["loss"])
    assert math.isnan(again.evaluation()["test"]["sketch"]["loss"])
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


def test_hidden_files_are_no_records(tmp_path, several, caplog):
    store = ResultsStore(tmp_path)
    (tmp_path / "records").mkdir()
    path = store.save(several[0])
    for hidden in (path.with_name(f"._{path.name}"), tmp_path / "records" / "._a.jsonl.xz"):
        hidden.write_bytes(b"\0\5\x16\7")
    assert [run.key for run in read_runs(tmp_path)] == [several[0].key]
    (packed,) = pack_runs(tmp_path)
    assert store.load(several[0].key) == several[0]
    assert sources.holds_records(tmp_path)
    packed.unlink()
    assert not sources.holds_records(tmp_path)
    assert caplog.messages == []


def test_trying_the_folder_leaves_nothing_there(tmp_path):
    ResultsStore(tmp_path / "new").check_writable()
    assert list(tmp_path.iterdir()) == []


def test_commands_that_begin_at_once_try_the_folder_at_once(tmp_path):
    def several(store):
        for _ in range(50):
            store.check_writable()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(several, [ResultsStore(tmp_path)] * 4))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_record_cut_short_is_set_aside(tmp_path, share, caplog):
    store = ResultsStore(tmp_path)
    record = make_record()
    for names in (["broken"], ["broken", "broken.1"]):
        path = store.save(record)
        data = path.read_bytes()
        path.write_bytes(data[: int(share * (len(data) - 3))])
        with pytest.raises(DataError) as caught:
            RunRecord.parse(path.read_bytes())
        assert "\n" not in str(caught.value)
        assert store.load(record.key) is None
        left = sorted(found.name for found in store.runs.iterdir())
        assert left == [f"{path.name}.{name}" for name in names]
    assert [path.name in message for message in caplog.messages] == [True, True]


@pytest.mark.parametrize("text", [b"{}", b"[]", b"\xff\xfe", b'{"key": 3}', b"null"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "record.json"
    path.write_bytes(text)
    with pytest.raises(DataError):
        RunRecord.parse(path.read_bytes())


def test_what_a_later_version_added_is_kept(tmp_path):
    values = make_record().as_json()
    values["weather"] = {"rain": True}
    values["data"]["camera"] = "old"
    values["rounds"][0]["dropped"] = [{"client": "c", "tensor": "w", "mood": 3}]
    path = tmp_path / "record.json"
    path.write_text(json.dumps(values))
    record = RunRecord.parse(path.read_bytes())
    assert RunRecord.parse(path.read_text()).unknown_fields() == ["weather", "data.camera"]
    assert record.as_json() == values


def test_a_changed_character_of_a_record_is_never_believed(tmp_path):
    record = make_record().sealed()
    text = ResultsStore(tmp_path).save(record).read_text()
    assert list(json.loads(text))[-1] == "digest"
    assert RunRecord.parse(text) == record
    assert RunRecord.parse(text).digest == record.digest
    names = RunRecord.model_fields.keys() - {"digest"}
    for at, old in enumerate(text):
        for new in {"1", "8", "x"} - {old}:
            with suppress(DataError):
                again = RunRecord.parse(text[:at] + new + text[at + 1 :])
                assert all(getattr(again, name) == getattr(record, name) for name in names)
    lines = text.splitlines(keepends=True)
    for at in range(len(lines)):
        with pytest.raises(DataError):
            RunRecord.parse("".join(lines[:at] + lines[at + 1 :]))
        with suppress(DataError):  # the order of names has no meaning
            assert RunRecord.parse("".join(lines[:at] + lines[at : at + 2][::-1] + lines[at + 2 :]))


def test_a_changed_record_is_named_by_tables_and_check(tmp_path, caplog, capsys):
    store = ResultsStore(tmp_path)
    path = store.save(make_record().sealed())
    path.write_text(path.read_text().replace('"accuracy": 0.75', '"accuracy": 0.79'))
    assert read_runs(tmp_path) == []
    assert f"{path}: it changed after it was written" in caplog.text
    with pytest.raises(SystemExit) as ended:
        cli.app(["results", "check", "--results", str(tmp_path)])
    assert ended.value.code == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "changed after it was written" in told
    assert "restore the file, or run it again" in told
    assert store.load(make_record().key) is None  # the run is repeated


def test_noting_that_settings_were_tuned_renews_the_digest(tmp_path):
    store = ResultsStore(tmp_path)
    for record in (make_record(), make_record().sealed()):
        noted = store.note_tuned(record, TunedRecord(trials=3))
        assert store.load(record.key) == noted == noted.sealed()
        assert noted.numbers() == record.numbers()


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.nightly), 100])
def test_shipped_records_are_written_back_unchanged(every):
    root, records = Path(__file__).parents[2] / "results", 0
    for file in root.glob("**/records/*.jsonl.xz"):
        for line in lzma.decompress(file.read_bytes()).splitlines()[::every]:
            record = RunRecord.parse(line)
            text = json.dumps(record.as_json(), ensure_ascii=False, separators=(",", ":"))
            assert text.encode() == line, file
            again = json.dumps(record.sealed().as_json(), indent=1)
            assert RunRecord.parse(again).numbers() == record.numbers()
            records += 1
    assert records > 4000 // every


def test_a_later_form_is_refused_and_stays(tmp_path):
    store = ResultsStore(tmp_path)
    record = make_record()
    path = store.save(record)
    path.write_text(json.dumps(record.as_json() | {"format": 2}))
    with refused(DataError, "newer"):
        store.load(record.key)
    assert path.exists()


def test_a_record_that_cannot_be_read_stays(tmp_path):
    store = ResultsStore(tmp_path)
    record = make_record()
    path = store.save(record)
    denied = patch.object(Path, "open", side_effect=PermissionError(13, "Permission denied"))
    with denied, refused(DataError, "cannot read record", ": Permission denied"):
        store.load(record.key)
    assert path.exists()


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
    with refused(DataError, "holds no evaluated round"):
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


# ------------------------------------------------------------------- contradictory records


def _damage(*path, value):
    def change(values):
        for name in path[:-1]:
            values = values[name]
        values[path[-1]] = value

    return change


TEST = ("rounds", 1, "evaluation", "test", "sketch")


PRIVACY = {
    "mechanism": "dp_client",
    "aggregation": "plain",
    "protects": "a client, there or not",
    "epsilon": 4.0,
    "delta": 1e-5,
    "accountant": "rdp",
    "sampling": "poisson",
}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("data", "fingerprint"), "images=\x1b[31m", "data.fingerprint"),
        (("partition", "hash"), "x", "partition.hash"),
        (("code",), "../x", "code"),
        (("time", "flop"), -1.0, "time.flop"),
        (("personal",), {"a": 3}, "personal.a: "),
    ],
)
def test_a_record_with_values_of_other_types_is_left_out(tmp_path, caplog, path, value, words):
    sound, other = make_record(1), make_record()
    ResultsStore(tmp_path).save(sound)
    values = other.as_json()
    *before, last = path
    inner = values
    for name in before:
        inner = inner[name]
    inner[last] = value
    text = json.dumps(values).replace("Infinity", "1e999")
    (tmp_path / "runs" / f"{other.key}.json").write_text(text)
    assert [run.key for run in read_runs(tmp_path)] == [sound.key]
    assert words in caplog.text
    store = ResultsStore(tmp_path)
    assert not store.holds(other.key)  # as for --dry-run
    assert store.keys() == {sound.key}  # as for a sweep
    assert store.load(other.key) is None
    assert "set aside" in caplog.text


def privately(**changes):
    """Return a record under client-level differential privacy, and its JSON with ``changes``."""
    own = {"mechanism": "dp_client", "noise_multiplier": 2.0}
    federation = {"per_round": 2, "bn": "frozen", "weighting": "uniform"}
    layer = {"privacy": own, "federation": federation}
    record = helpers.make_record(
        layer,
        rounds=[
            helpers.entry(
                n, {s: helpers.measured(0.5, d) for s, d in (("test", "chalk"), ("val", "outline"))}
            )
            for n in (1, 2)
        ],
    )
    return record, json.dumps(record.as_json() | {"privacy": PRIVACY | changes})


@pytest.mark.parametrize(
    "changes", [*({"epsilon": e} for e in (math.nan, math.inf, -3, 0)), {"delta": 1}, {"delta": 0}]
)
def test_what_is_said_of_privacy_is_a_guarantee(changes):
    assert RunRecord.parse(privately()[1]).privacy.epsilon == 4.0
    with pytest.raises(DataError, match="privacy"):
        RunRecord.parse(privately(**changes)[1].replace("Infinity", "1e999"))


def test_an_epsilon_is_computed_again():
    record, _ = privately()
    again = guarantee(RunSettings.model_validate(record.settings), FedAvg, 4)
    for epsilon, accountant, words in (
        (again.epsilon, "rdp", ""),
        (again.epsilon - 0.0005, "rdp", ""),
        (again.epsilon - 0.01, "rdp", "by its settings"),
        (again.epsilon + 0.01, "rdp", "by its settings"),
        (again.epsilon - 0.1, "prv", ""),
        (again.epsilon + 0.01, "prv", "at most"),
    ):
        said = {"epsilon": epsilon, "accountant": accountant}
        record.privacy = PrivacyRecord(**(PRIVACY | said))
        assert words in doubt(record, FedAvg)
        assert bool(words) is bool(doubt(record, FedAvg))
    record.privacy = PrivacyRecord(**(PRIVACY | {"epsilon": again.epsilon, "protects": "all"}))
    assert "not all" in doubt(record, FedAvg)


def test_noise_that_guarantees_nothing_is_refused():
    record, _ = privately()
    settings = RunSettings.model_validate(record.settings)
    for noise in (1e-200, 1e-3 * 1e-200):
        little = settings.privacy.model_copy(update={"noise_multiplier": noise})
        with refused(SettingsError, "privacy.noise_multiplier", "guarantees nothing"):
            guarantee(settings.model_copy(update={"privacy": little}), FedAvg, 4)


@pytest.mark.parametrize(
    "twice", ['"accuracy": 0.99, "accuracy"', '"\\u0061ccuracy": 0.99, "accuracy"']
)
def test_a_key_that_is_there_twice_is_refused(twice):
    text = json.dumps(make_record().as_json())
    assert RunRecord.parse(text) == make_record()
    with refused(DataError, 'Detected duplicate key "accuracy"'):
        RunRecord.parse(text.replace('"accuracy"', twice, 1))
    with refused(DataError, 'Detected duplicate key "seed"'):
        RunRecord.parse(text.replace('"seed": 0', '"seed" : 1, "seed": 0', 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_damage(*TEST, "accuracy", value="x"), "accuracy is 'x'"),
        (_damage(*TEST, "accuracy", value=True), "rounds.1.evaluation.test.sketch.accuracy"),
        (_damage(*TEST, "loss", value=10**400), "rounds.1.evaluation.test.sketch.loss"),
        (_damage(*TEST, "images", value=2.5), "of how many images"),
        (_damage(*TEST, value={"accuracy": 0.5}), "of how many images"),
        (_damage("rounds", 0, "seconds", value={"training": -1}), "seconds.training"),
        (_damage("seed", value=[0]), "seed"),
        (_damage("seed", value=1), "seed is 1, but 0 in its settings"),
        (_damage("seed", value=10**30), "seed"),
        (_damage("seed", value=False), "seed"),
        (_damage("method", value=5), "method"),
        (_damage("dataset", value="pacs"), "dataset is 'pacs', but 'digits4' in its settings"),
        (_damage("scenario", "name", value="oc-i-p"), "scenario is 'oc-i-p'"),
        (_damage("settings", "train", "lr", value=0.5), "its settings are those of the run"),
        (_damage("method_version", value=2), "its settings are those of the run"),
        (_damage("rounds", value=[{"round": 1}]), "cohort"),
        (_damage("partition", value=5), "partition"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_record_that_lies_is_left_out_with_one_notice(tmp_path, caplog, change, words):
    store = ResultsStore(tmp_path)
    sound, other = make_record(1), make_record()
    store.save(sound)
    path = store.save(other)
    values = other.as_json()
    change(values)
    path.write_text(json.dumps(values))
    for _ in range(2):
        (run,) = read_runs(tmp_path)
        assert run.key == sound.key
        message = caplog.messages.pop()
        caplog.clear()
        assert words in message
        assert f"skipped 1 record that cannot be used: {path}: " in message
        assert "\n" not in message
    assert store.load(other.key) is None


def test_a_regression_may_correlate_negatively(tmp_path):
    part = {"pearson": -0.5, "worst_group": -0.75, "loss": 2.0, "images": 3}
    store = ResultsStore(tmp_path)
    rounds = [helpers.entry(1, {"test": {"all": part}})]
    record = make_record(rounds=rounds, data={"task": "regression", "metric": "pearson"})
    store.save(record)
    assert store.load(record.key).evaluation()["test"]["all"] == part


def test_files_that_are_no_records_are_left_out_with_one_notice(tmp_path, caplog):
    store = ResultsStore(tmp_path)
    record = make_record()
    text = store.save(record).read_text()
    (store.runs / "copy\x1b[2J.json").write_text(text)
    (store.runs / "folder.json").mkdir()
    (store.runs / "link.json").symlink_to(tmp_path / "nowhere")
    os.mkfifo(store.runs / "pipe.json")
    (store.runs / "list.json").write_text("[]")
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "cut.jsonl.xz").write_bytes(lzma.compress(b"{}")[:-9])
    (tmp_path / "records" / "text.jsonl.xz").write_bytes(b"text")
    assert [run.key for run in read_runs(tmp_path)] == [record.key]
    (message,) = caplog.messages
    assert message.startswith("skipped 7 records that cannot be used: ")
    assert "copy\\x1b[2J.json: it holds the run" in message
    assert "and 6 more, see `feddg-bench results check`" in message
    with refused(DataError, "there is no results folder"):
        read_runs(tmp_path / "nowhere")


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**25), 10**25),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from(
        ["../../x", "</script>", "\x1b[2J", "=1+1", "a\nb", [], {}, [[]], {"sha256": 5}]
    ).map(copy.deepcopy),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_a_record_holds_no_table_is_stopped(tmp_path, data):
    """Records are changed at random, some with a matching key; tables and frames come out."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        root, out = Path(name) / "records", Path(name) / "out"
        values = make_record().as_json()
        for _ in range(data.draw(st.integers(1, 3))):
            inner = values
            while True:
                keys = range(len(inner)) if isinstance(inner, list) else sorted(inner)
                key = data.draw(st.sampled_from(list(keys)))
                deeper = isinstance(inner[key], dict | list) and inner[key]
                if not (deeper and data.draw(st.integers(0, 4))):
                    break
                inner = inner[key]
            if data.draw(st.booleans()):
                inner[key] = data.draw(LEAVES)
            else:
                del inner[key]
        own = values.get("settings")
        if isinstance(own, dict) and data.draw(st.booleans()):  # as a forger would
            for name in ("method", "dataset", "protocol", "seed"):
                own[name] = values.get(name)
            values["key"] = run_key(own, values.get("method_version"))
        key = values.get("key")
        ResultsStore(root).save(make_record(1))
        name = key if isinstance(key, str) and key.isalnum() else "x"
        (root / "runs" / f"{name}.json").write_text(json.dumps(values))
        runs = read_frame(root)
        assert make_record(1).key in {*runs["key"]}
        assert set(load_records(root).key) >= {make_record(1).key}
        for table in frames(runs):
            grid = build(table.name, table.description, table.runs, any_paper=True)
            for ending, write in (pair for form in WRITERS.values() for pair in form.items()):
                write_whole(out / f"{grid.name}.{ending}", write(grid).encode())
        gather(runs)
        assert {path.parent for path in Path(name).rglob("*.md")} <= {out}


# ------------------------------------------------------------------------- packed records


@pytest.fixture
def several():
    recipes = {"recipe": "quick"}
    return [make_record(seed, **recipes) for seed in range(3)] + [make_record(3)]


def test_packing_and_unpacking_change_nothing(tmp_path, several):
    store = ResultsStore(tmp_path)
    texts = {path.name: path.read_bytes() for path in map(store.save, several)}
    paths = pack_runs(tmp_path)
    assert sorted(path.name for path in paths) == [
        "digits4-ltdo-quick.jsonl.xz",
        "digits4-ltdo-quick_-702ca7.jsonl.xz",
    ]
    assert not list(store.runs.iterdir())
    packed = {path: path.read_bytes() for path in paths}
    assert store.keys() == {record.key for record in several}
    assert all(store.load(record.key) == record for record in several)
    assert store.path(several[0].key) in paths
    assert sorted(unpack_runs(tmp_path)) == sorted(paths)
    assert {path.name: path.read_bytes() for path in store.runs.iterdir()} == texts
    assert {path: path.read_bytes() for path in pack_runs(tmp_path)} == packed


def test_many_records_are_packed_into_several_files(tmp_path, several, monkeypatch):
    sizes = [len(json.dumps(r.as_json(), separators=(",", ":"))) + 1 for r in several]
    two = sizes[0] + sizes[1]
    monkeypatch.setattr(sources, "MOST_TEXT", two)
    store = ResultsStore(tmp_path)
    for record in several[:2]:
        store.save(record)
    (first,) = pack_runs(tmp_path)
    content = first.read_bytes()
    store.save(several[2])
    paths = pack_runs(tmp_path)
    assert [path.name for path in paths] == ["digits4-ltdo-quick@2.jsonl.xz"]
    assert first.read_bytes() == content  # a new seed changes no older file
    assert [store.load(record.key) for record in several[:3]] == several[:3]
    store.save(several[0])
    assert pack_runs(tmp_path) == [first]  # a record stays in its part
    assert [store.load(record.key) for record in several[:3]] == several[:3]


class Interruption(BaseException):
    """A signal."""


@pytest.mark.parametrize("call", ["replace", "unlink"])
def test_packing_that_is_interrupted_at_any_call_loses_no_record(tmp_path, monkeypatch, call):
    records = [make_record(seed, labels={"x": "y" * 500}, recipe="quick") for seed in range(5)]
    longest = max(len(json.dumps(r.as_json(), separators=(",", ":"))) for r in records) + 1
    monkeypatch.setattr(sources, "MOST_TEXT", 2 * longest)
    quick = lzma.compress
    monkeypatch.setattr(lzma, "compress", lambda data, preset: quick(data, preset=preset & 0))
    for calls in count(1):
        store = ResultsStore(tmp_path / str(calls))
        for record in records[:4]:
            store.save(record)
        assert len(pack_runs(store.root)) == 2
        shorter = make_record(0, recipe="quick")
        elsewhere = make_record(2, recipe="mine")
        for record in (shorter, elsewhere, records[4]):
            store.save(record)
        kept = {r.key for r in records}
        real, made = getattr(Path, call), []

        def stopped(path, *args, real=real, made=made, calls=calls, **how):
            made.append(path)
            if len(made) == calls:
                raise Interruption
            return real(path, *args, **how)

        with monkeypatch.context() as patch:
            patch.setattr(Path, call, stopped)
            with suppress(Interruption):
                pack_runs(store.root)
        assert {run.key for run in read_runs(store.root)} == kept
        assert list(sums_faults(store.root)) == []
        pack_runs(store.root)
        assert list(sums_faults(store.root)) == []
        assert [store.load(r.key) for r in (shorter, records[1], elsewhere, *records[3:])] == [
            shorter, records[1], elsewhere, *records[3:]
        ]  # fmt: skip
        assert not list(store.runs.iterdir())
        if len(made) < calls:
            break
    assert calls > 3


def test_a_full_disk_loses_no_packed_record(tmp_path, several, monkeypatch):
    sizes = [len(json.dumps(r.as_json(), separators=(",", ":"))) + 1 for r in several]
    monkeypatch.setattr(sources, "MOST_TEXT", sizes[0] + sizes[1])
    store = ResultsStore(tmp_path)
    for record in (several[0], several[2]):
        store.save(record)
    pack_runs(tmp_path)
    store.save(several[1])
    whole = Path.open

    def full(path, *arguments, **how):
        if "@2" in path.name and "x" in str(arguments):
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(path, *arguments, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with refused(DataError, "No space left"):
            pack_runs(tmp_path)
    assert [store.load(record.key) for record in several[:3]] == several[:3]
    pack_runs(tmp_path)
    assert [store.load(record.key) for record in several[:3]] == several[:3]


def test_sums_are_those_of_coreutils_and_name_a_file_that_changed(tmp_path, several):
    store = ResultsStore(tmp_path)
    for record in several[:2]:
        store.save(record)
    (path,) = pack_runs(tmp_path)
    sums = path.with_name("SHA256SUMS")
    command = ["sha256sum", "--check", "--strict", sums.name]
    assert subprocess.run(command, cwd=sums.parent, check=True, stdout=subprocess.DEVNULL)
    assert list(sums_faults(tmp_path)) == []
    whole, text = path.read_bytes(), sums.read_text()
    path.write_bytes(lzma.compress(lzma.decompress(whole)))  # the same records in other bytes
    ((wrong, reason),) = sums_faults(tmp_path)
    assert wrong == path
    assert "SHA-256" in reason
    store.save(several[2])
    with refused(DataError, path.name, "changed after it was packed", "restore it"):
        pack_runs(tmp_path)
    assert sums.read_text() == text
    sums.write_text("")  # as told
    assert pack_runs(tmp_path) == [path]
    sums.unlink()  # a folder of an earlier version
    assert pack_runs(tmp_path) == []
    assert list(sums_faults(tmp_path)) == []
    assert path.name in sums.read_text()
    path.rename(path.with_name("other"))
    ((_, reason),) = sums_faults(tmp_path)
    assert "not here" in reason
    path.with_name("other").rename(path)
    for line in ("nonsense\n", f"{'0' * 64}  ../x\n"):
        sums.write_text(line)
        ((wrong, reason),) = sums_faults(tmp_path)
        assert wrong == sums
        assert "no SHA-256" in reason
    sums.write_text(text)
    sums.unlink()
    pack_runs(tmp_path)
    unpack_runs(tmp_path)
    assert not sums.exists()


def test_shipped_packed_files_are_those_of_their_sums():
    root = Path(__file__).parents[2] / "results"
    packed = {p.relative_to(root) for p in root.rglob("*.jsonl*") if p.parent.name != "published"}
    assert len(packed) > 20
    listed = {
        path.parent.relative_to(root) / line.partition("  ")[2]
        for path in root.rglob("SHA256SUMS")
        for line in path.read_text().splitlines()
    }
    assert listed == packed
    folders = {path.parent.parent for path in root.rglob("SHA256SUMS")}
    assert [fault for folder in folders for fault in sums_faults(folder)] == []


def test_packed_and_single_records_are_read_together(tmp_path, several, caplog):
    store = ResultsStore(tmp_path)
    for record in several[:3]:
        store.save(record)
    pack_runs(tmp_path)
    store.save(several[3])
    store.save(several[0])  # an identical copy causes no message
    assert [run.record() for run in read_runs(tmp_path)] == sorted(several, key=lambda r: r.key)
    assert caplog.messages == []
    better = several[1].model_copy(deep=True)
    better.rounds[1].evaluation["test"]["sketch"]["accuracy"] = 1.0
    store.save(better)
    (run,) = [run for run in read_runs(tmp_path) if run.key == better.key]
    assert run.evaluation("last")["test"]["sketch"]["accuracy"] == 1.0
    assert f"its run {better.key} differs from that in" in caplog.text
    assert store.load(better.key) == better
    assert len(pack_runs(tmp_path)) == 2
    assert [store.load(record.key) for record in several] == [several[0], better, *several[2:]]


def test_unpacking_keeps_what_a_broken_single_file_stands_before(tmp_path, several, caplog):
    store = ResultsStore(tmp_path)
    path = store.save(several[0])
    pack_runs(tmp_path)
    path.write_text("{ broken")
    unpack_runs(tmp_path)
    assert store.load(several[0].key) == several[0]
    assert path.with_name(f"{path.name}.broken").read_text() == "{ broken"
    assert "set aside" in caplog.text


def test_packing_a_run_again_under_another_recipe_drops_the_old_record(tmp_path, several):
    store = ResultsStore(tmp_path)
    for record in several[:2]:
        store.save(record)
    (first,) = pack_runs(tmp_path)
    again = several[0].model_copy(update={"recipe": "mine"}, deep=True)
    again.rounds[1].evaluation["test"]["sketch"]["accuracy"] = 1.0
    store.save(again)
    pack_runs(tmp_path)
    assert store.load(again.key) == again
    assert [run.record() for run in read_runs(tmp_path) if run.key == again.key] == [again]
    store.save(several[1].model_copy(update={"recipe": "mine"}))
    pack_runs(tmp_path)
    assert not first.exists()
    unpack_runs(tmp_path)
    assert store.load(again.key) == again
    assert len(store.keys()) == 2


def test_a_packed_file_with_a_bad_line_is_not_packed_over(tmp_path, several, caplog):
    store = ResultsStore(tmp_path)
    store.save(several[0])
    (path,) = pack_runs(tmp_path)
    text = lzma.decompress(path.read_bytes())
    path.write_bytes(lzma.compress(text + b"{}\n"))
    store.save(several[1])
    before = path.read_bytes()
    with refused(DataError, "cannot be added to: line 2"):
        pack_runs(tmp_path)
    assert path.read_bytes() == before
    assert len(read_runs(tmp_path)) == 2
    assert "line 2" in caplog.text
    assert unpack_runs(tmp_path) == []
    assert store.keys() == {record.key for record in several[:2]}


def test_a_packed_file_of_several_streams_is_read_whole(tmp_path, several, caplog):
    store = ResultsStore(tmp_path)
    for record in several[:3]:
        store.save(record)
    (path,) = pack_runs(tmp_path)
    lines = lzma.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(b"".join(map(lzma.compress, lines)) + bytes(8))  # as by `cat`, padded
    path.with_name("SHA256SUMS").unlink()
    assert len(read_runs(tmp_path)) == 3
    store.save(several[3].model_copy(update={"recipe": "quick"}))
    assert pack_runs(tmp_path) == [path]
    assert len(read_runs(tmp_path)) == 4
    assert unpack_runs(tmp_path) == [path]
    assert store.keys() == {record.key for record in several}
    assert caplog.messages == []


@pytest.mark.parametrize("more", [b"garbage", b"\0", lzma.compress(b"{}")[:-1], b"\xfd7zXZ\0"])
def test_a_packed_file_with_something_else_behind_it_is_refused(tmp_path, several, more, caplog):
    store = ResultsStore(tmp_path)
    store.save(several[0])
    (path,) = pack_runs(tmp_path)
    path.write_bytes(path.read_bytes() + more)
    before = path.read_bytes()
    assert read_runs(tmp_path) == []
    assert path.name in caplog.text
    store.save(several[1])
    with refused(DataError, path.name, "cannot be added to"):
        pack_runs(tmp_path)
    assert unpack_runs(tmp_path) == []
    assert path.read_bytes() == before


def test_nothing_packed_goes_before_it_is_counted(tmp_path, several, monkeypatch):
    store = ResultsStore(tmp_path)
    for record in several[:2]:
        store.save(record)
    lost = []

    def forget(data, **_):
        lost.append(data)
        packer = lzma.LZMACompressor()
        return packer.compress(data.splitlines(keepends=True)[0]) + packer.flush()

    monkeypatch.setattr(sources.lzma, "compress", forget)
    with refused(DataError, "would hold 1 records instead of 2"):
        pack_runs(tmp_path)
    assert lost
    assert len(store.keys()) == 2
    assert not (tmp_path / "records").exists()


def test_a_packed_record_unlike_the_single_one_is_not_deleted(tmp_path, several, caplog):
    store = ResultsStore(tmp_path)
    store.save(several[0])
    (path,) = pack_runs(tmp_path)
    other = several[0].model_copy(update={"recipe": "mine"})
    store.save(other)
    assert unpack_runs(tmp_path) == []
    assert path.exists()
    assert "holds other contents" in caplog.text


def test_two_packed_records_of_a_run_that_differ_are_not_packed_into_one(tmp_path, several):
    store = ResultsStore(tmp_path)
    store.save(several[0])
    (path,) = pack_runs(tmp_path)
    other = several[0].as_json() | {"recipe": "mine"}
    path.write_bytes(path.read_bytes() + lzma.compress(json.dumps(other).encode()))
    store.save(several[1])
    with refused(DataError, several[0].key, "different contents", "keep one of the two"):
        pack_runs(tmp_path)
    assert len(lzma.decompress(path.read_bytes()).splitlines()) == 2


@pytest.mark.parametrize("field", ["partition", "time", "data", "once"])
def test_folders_that_disagree_on_a_run_are_told_and_none_is_set_aside(tmp_path, caplog, field):
    first, second = tmp_path / "a", tmp_path / "b"
    record = make_record()
    ResultsStore(first).save(record)
    values = copy.deepcopy(record.as_json())
    part = values[field]
    name = next(n for n, v in part.items() if isinstance(v, str | float | dict))
    part[name] = {str: "ab", float: 9.5}.get(type(part[name]), {"up": 1, "down": 2})
    if field == "data":
        part.update(record.as_json()["data"], fingerprint="e" * 32)
    path = ResultsStore(second).save(RunRecord.parse(json.dumps(values)))
    (run,) = read_runs([first, second])
    assert run.source.folder.parent == first
    assert f"its run {record.key} differs from that in" in caplog.text
    assert caplog.text.rstrip().endswith(f": {field}")
    assert ResultsStore(second).load(record.key) is not None
    assert path.exists()


def test_a_file_far_larger_than_records_are_is_refused(tmp_path, several, caplog):
    store = ResultsStore(tmp_path)
    store.save(several[0])
    (tmp_path / "records").mkdir()
    with (store.runs / "sparse.json").open("wb") as file:
        file.truncate(6 * 2**30)
    (tmp_path / "records" / "zeros.jsonl.xz").write_bytes(lzma.compress(bytes(sources.LARGEST + 1)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert [run.key for run in read_runs(tmp_path)] == [several[0].key]
    assert "skipped 2 records" in caplog.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024


# ------------------------------------------------------------------------------ the index


def test_the_index_is_trusted_no_longer_than_files_stay_the_same(tmp_path, monkeypatch, caplog):
    store = ResultsStore(tmp_path)
    records = [make_record(seed) for seed in range(60)]
    paths = [store.save(record) for record in records]
    first = read_runs(tmp_path)
    path = tmp_path / ".index"
    index = path.read_bytes()
    monkeypatch.setattr(RunRecord, "parse", None)  # nothing is parsed again
    again = read_runs(tmp_path)
    for one, two in zip(first, again, strict=True):
        assert one.measured == two.measured
        assert str(one.usage) == str(two.usage)  # memory was not measured
        own = {"source", "_chosen", "table", "usage"}
        assert {k: v for k, v in vars(one).items() if k not in own} == {
            k: v for k, v in vars(two).items() if k not in own
        }
    assert len({id(run.settings) for run in again}) == 1
    monkeypatch.undo()
    paths[0].unlink()
    better = records[1].model_copy(deep=True)
    better.rounds[1].evaluation["test"]["sketch"]["accuracy"] = 0.25
    times = paths[1].stat()
    store.save(better)  # same size
    os.utime(paths[1], ns=(times.st_atime_ns, times.st_mtime_ns))
    runs = {run.key: run for run in read_runs(tmp_path)}
    assert set(runs) == {record.key for record in records[1:]}
    assert runs[better.key].evaluation("last")["test"]["sketch"]["accuracy"] == 0.25
    values = {key: run.measured for key, run in runs.items()}
    with closing(sqlite3.connect(path)) as old:
        old.execute("PRAGMA user_version = 5")
    half, cut = len(index) // 2, index[: len(index) // 8192 * 4096]
    damaged = [index[:-8], cut, b"", b"\n" * 9000, index.replace(b"0.5", b"0.6")]
    damaged += [index[:half] + bytes(99) + index[half + 99 :], path.read_bytes()]
    for data in damaged:
        path.write_bytes(data)
        for _ in range(2):  # the second time with the rebuilt index
            assert {run.key: run.measured for run in read_runs(tmp_path)} == values
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("DELETE FROM files")
        other.commit()
        other.execute("BEGIN EXCLUSIVE")  # another process writes for a long time
        assert {run.key: run.measured for run in read_runs(tmp_path)} == values
    path.unlink()
    path.symlink_to(tmp_path / "nowhere" / "else")
    assert {run.key: run.measured for run in read_runs(tmp_path)} == values
    assert not caplog.messages


def test_records_as_a_table_of_pandas(tmp_path):
    record = make_record(7)
    ResultsStore(tmp_path).save(record)
    frame = load_records(tmp_path)
    assert list(frame.columns) == [
        "key", "method", "dataset", "protocol", "scenario", "seed",
        "recipe", "round", "split", "domain", "metric", "value",
    ]  # fmt: skip
    expected = {
        (entry.round, split, domain, metric, value)
        for entry in record.rounds
        for split, parts in (entry.evaluation or {}).items()
        for domain, measured in parts.items()
        for metric, value in measured.items()
    }
    columns = ["round", "split", "domain", "metric", "value"]
    assert set(frame[columns].itertuples(index=False, name=None)) == expected
    assert len(frame) == len(expected) == 18
    assert set(frame.key) == {record.key}
    assert set(frame.seed) == {7}
    assert {name: str(frame[name].dtype) for name in frame} == dict.fromkeys(frame, "category") | {
        "seed": "int64",
        "round": "int64",
        "value": "float64",
    }
    last = load_records(tmp_path, rounds="last")
    assert last.equals(frame[frame["round"] == 2].reset_index(drop=True))
    with refused(SettingsError, "rounds: 'first' cannot be read"):
        load_records(tmp_path, rounds="first")
    apart = ["key", "method", "scenario", "round", "split", "domain", "metric"]
    assert len(frame.groupby(apart)["value"].mean()) == 18  # no combination without records
    assert frame.query("split == 'test'").pivot_table("value", ["split", "domain"]).shape == (1, 1)
    (tmp_path / "none").mkdir()
    assert load_records([tmp_path / "none"]).empty


def test_a_table_of_pandas_tells_runs_with_other_settings_apart(tmp_path):
    for lr in (0.001, 0.004):
        record = make_record(0)
        record.settings = {**record.settings, "train": {"lr": lr}}
        record.key = run_key(record.settings, record.method_version)
        ResultsStore(tmp_path).save(record)
    varied = load_records(tmp_path, settings=True)
    assert list(varied.columns[12:]) == ["train.lr"]
    named = load_records(tmp_path, settings=["lr", "hyper.nothing"])
    assert named.groupby("train.lr")["key"].nunique().to_dict() == {0.001: 1, 0.004: 1}
    assert named["hyper.nothing"].isna().all()
    with refused(SettingsError, "rate"):
        load_records(tmp_path, settings=["rate"])


def test_shipped_results_stay_small():
    """All records, tables and figures together stay below 24 MB, so that a clone is quick."""
    root = Path(__file__).parents[2] / "results"
    files = (path for path in root.rglob("*") if path.is_file() and path.name != ".index")
    assert sum(path.stat().st_size for path in files) < 24_000_000
