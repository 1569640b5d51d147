"""The Python API, as used in notebooks: real runs on digits4, their records and their models."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save as safe

import feddg_bench as fb
from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.models.weights import digest
from feddg_bench.records.store import ResultsStore
from feddg_bench.runs.checkpoints import load_checkpoint, save_checkpoint
from feddg_bench.runs.kept import read_model
from tests.helpers import one_sentence, refused, run_cell

SETTINGS = {
    "clients": 4,
    "per_round": 2,
    "rounds": 2,
    "evaluation.every": 1,
    "data.image_size": 8,
    "data.id_test_fraction": 0.5,
    "data.id_val_fraction": 0.3,
}


@pytest.fixture(scope="module")
def made_before() -> dict[str, Path]:
    """Return the results of earlier tests, by request."""
    return {}


@pytest.fixture
def made(
    tmp_path: Path,
    cache: Path,
    made_before: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """Return a function that makes runs in this test's folder; equal runs are made once."""
    folder = tmp_path / "r"

    def run(method: str = "fedavg", **words: Any) -> list[Any]:
        words = {"scenario": "ip-o-c", "settings": SETTINGS, "quiet": True, **words}
        kept = made_before.get(repr((method, words)))
        if kept is not None and not folder.exists():
            shutil.copytree(kept, folder)
        first = not folder.exists()
        records: list[Any] = fb.run(method, results=folder, cache_dir=cache, **words)
        if first and "observers" not in words:
            kept = tmp_path_factory.mktemp("kept") / "r"
            made_before[repr((method, words))] = shutil.copytree(folder, kept)
        return records

    return run


class Stop(fb.Observer):
    """Ends a run after its first round."""

    def round(self, run: Any, result: Any) -> None:
        if result.round == 1:
            raise KeyboardInterrupt


@pytest.fixture
def checkpoint(made: Any, tmp_path: Path) -> Path:
    """Return the checkpoint of a run that was stopped after its first round."""
    with pytest.raises(KeyboardInterrupt):
        made(observers=[Stop()])
    (path,) = ResultsStore(tmp_path / "r").checkpoints.glob("*.safetensors")
    return path


@pytest.mark.parametrize("wrong", [Stop, 3])
def test_what_cannot_observe_is_refused(made: Any, tmp_path: Path, wrong: Any) -> None:
    for given in ([wrong], wrong):
        with refused(SettingsError, "cannot observe runs", "observers=[Mine()]"):
            made(observers=given)
    assert not (tmp_path / "r").exists()


@pytest.mark.nightly
def test_a_run_does_not_go_on_with_other_code(made: Any, checkpoint: Path) -> None:
    kept = load_checkpoint(checkpoint)
    kept.record.code = "0" * 64
    save_checkpoint(checkpoint, kept)
    with refused(DataError, "the code of fedavg changed", "delete it"):
        made()


def test_a_run_on_two_kinds_of_cpu_says_so(
    made: Any, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = load_checkpoint(checkpoint)
    mine = kept.record.environment.cpu
    kept.record.environment.cpu = "Zilog, z80"
    for measured in kept.record.rounds[0].evaluation["val"].values():
        measured["accuracy"] = 1.0
    save_checkpoint(checkpoint, kept)
    (record,) = made(keep=["best"])
    assert record.environment.cpu == f"{mine} and Zilog, z80"
    assert "the model of round 1, the best so far, was not kept" in caplog.text


def test_type_checkers_see_the_face_as_it_is() -> None:
    stub = Path(fb.__file__).with_suffix(".pyi").read_text()
    told = re.findall(r"from feddg_bench\.(\S+) import (\w+) as \2$", stub, re.MULTILINE)
    assert {name: module for module, name in told} == fb._FACE


def test_a_number_of_seeds_and_a_table_of_values(made: Any, tmp_path: Path) -> None:
    records = made(seeds=2)
    assert [record.seed for record in records] == [0, 1]
    again = made(seeds=[1])
    assert again[0].key == records[1].key
    assert len(list((tmp_path / "r/runs").glob("*.json"))) == 2
    frame = fb.load_records(tmp_path / "r")
    last = frame[(frame["round"] == 2) & (frame["split"] == "test") & (frame["seed"] == 1)]
    (value,) = last[last["metric"] == "accuracy"]["value"]
    assert value == records[1].evaluation()["test"]["chalk"]["accuracy"]


@pytest.mark.parametrize(
    "words",
    [
        {"method": None},
        {"method": []},
        {"protocol": 3},
        {"scenario": ()},
        {"dataset": None},
        {"recipe": 1},
        {"seeds": 1.5},
        {"settings": [1]},
        {"settings": {3: 1}},
        {"results": ""},
        {"results": 5},
        {"data_root": ""},
        {"keep": True},
        {"tuned": 3},
        {"again": "no"},
        {"quiet": 1},
    ],
    ids=str,
)
def test_what_is_of_no_use_is_named(words: dict[str, Any]) -> None:
    with refused(fb.FeddgError, next(iter(words)), "expected"):
        fb.run(**words)


def test_what_is_no_model_and_no_number_is_named() -> None:
    with refused(SettingsError, "key: None cannot be read; expected"):
        fb.load_model(None)
    for wrong in ("10", 0):
        with refused(SettingsError, f"num_classes is {wrong!r}: give the number"):
            fb.build_method("fedprox", num_classes=wrong)
    with refused(SettingsError, "name: None cannot be read; expected"):
        fb.build_method(None, num_classes=10)


def test_what_is_no_folder_no_setting_and_no_table_is_named(made: Any, tmp_path: Path) -> None:
    for call in (fb.load_records, lambda given: fb.tables(results=given)):
        for wrong in (3, [3]):
            with refused(SettingsError, "results", "expected"):
                call(wrong)
    made()
    for wrong in (3, [3]):
        with refused(SettingsError, "settings", "expected"):
            fb.load_records(tmp_path / "r", settings=wrong)
        with refused(SettingsError, "table", "expected"):
            fb.tables(wrong, results=tmp_path / "r")
    frame = fb.load_records(tmp_path / "r", settings="lr")
    assert set(frame["train.lr"]) == {0.002}


def test_tables_of_a_notebook(made: Any, tmp_path: Path) -> None:
    records = made(("fedavg", "fedprox"), scenario="ip-o-c,oc-i-p")
    (table,) = fb.tables(results=tmp_path / "r").values()
    frame = table.frame()
    test = frame[(frame["method"] == "fedprox") & frame["run_keys"].notna()]
    keys = {key for cell in test["run_keys"] for key in cell.split()}
    assert keys == {record.key for record in records if record.method == "fedprox"}
    assert "FedProx" in table.to_markdown()
    assert "tabular" in table.to_latex()
    mine = fb.table(["fedprox"], results=tmp_path / "r")
    assert {*mine.frame()["method"]} == {"fedprox"}
    assert {*mine.frame()["scenario"].dropna()} == {record.scenario.name for record in records}
    with refused(fb.FeddgError, "pardon-1"):
        fb.tables("pardon-l", results=tmp_path / "r")


def test_without_rounds_the_model_before_training_is_measured(
    made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**SETTINGS, "rounds": 0}
    for record in made(("fedavg", "scaffold"), settings=settings, keep=["last", "best"]):
        assert [entry.round for entry in record.rounds] == [0]
        assert "round 0 of 0" in repr(record)
    facts, weights = read_model(tmp_path / "r/runs" / f"{record.key}.best.safetensors")
    assert facts.round == 0
    model = fb.load_model(record.key, tmp_path / "r").state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in weights.items())
    assert not [line for line in caplog.messages if "nothing was learnt" in line]
    (table,) = fb.tables(results=tmp_path / "r").values()  # reads the records, and compares them
    cells = table.frame().dropna(subset=["run_keys"])
    assert cells.groupby(["column", "scenario"])["value"].nunique().max() == 1


def test_a_run_that_goes_on_keeps_what_it_was_to_keep(
    made: Any, feddg: Any, cache: Path, tmp_path: Path
) -> None:
    whole = {**SETTINGS, "rounds": 3}
    with pytest.raises(KeyboardInterrupt):
        made(settings=whole, keep=["last", "best"], observers=[Stop()])
    store = ResultsStore(tmp_path / "r")
    (checkpoint,) = store.checkpoints.glob("*.safetensors")
    key = checkpoint.stem
    done = feddg("resume", key, "--results", store.root, "--cache-dir", cache, "--workers", 1)
    assert done.code == 0, done.err
    assert store.has_models(key, ["last", "best"])
    record = store.load(key)
    best = max(record.rounds, key=lambda r: (r.evaluation["val"]["outline"]["accuracy"], -r.round))
    assert read_model(store.model(key, "best"))[0].round == best.round
    assert read_model(store.model(key, "last"))[0].round == 3
    store.model(key, "last").unlink()
    words = [f"{name}={value}" for name, value in whole.items()]
    again = ("run", "--scenario", "ip-o-c", "--results", store.root, "--dry-run", *words)
    assert "1 done" in feddg(*again).out
    assert "1 pending" in feddg(*again, "--keep", "last").out


@pytest.mark.parametrize("name", ["claims", "privacy"])
def test_what_only_the_command_makes_is_no_table(made: Any, tmp_path: Path, name: str) -> None:
    made()
    with pytest.raises(fb.FeddgError) as refusal:
        fb.tables(name, results=tmp_path / "r")
    assert f"did you mean '{name}'" not in str(refusal.value)


def test_wandb_of_a_notebook_is_not_forgotten(made: Any, tmp_path: Path) -> None:
    made(wandb="offline")
    (run,) = (tmp_path / "r/wandb").glob("offline-run-*")
    assert run.is_dir()


def test_an_observer_sees_every_round_and_reply(made: Any) -> None:
    class Watch(fb.Observer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seen: list[str] = []

        def begin(self, run: Any) -> None:
            self.seen.append(f"begin {run.plan.settings.method}")

        def replied(self, run: Any, task: Any, reply: Any) -> None:
            self.seen.append(f"{task.call} {reply.client}")

        def round(self, run: Any, result: Any) -> None:
            self.seen.append(f"round {result.round} {run.images(result) > 0}")

        def end(self, run: Any) -> None:
            self.seen.append(f"end {run.record.key}")

    watch = Watch()
    (record,) = made("fedprox", observers=[watch])
    asked = [[f"fit {name}" for name in entry.cohort] for entry in record.rounds]
    assert watch.seen == [
        "begin fedprox",
        "round 0 True",
        *asked[0],
        "round 1 True",
        *asked[1],
        "round 2 True",
        f"end {record.key}",
    ]
    plain = made("fedprox", seeds=[0], again=True)  # observing changes nothing
    assert plain[0].numbers() == record.numbers()


@pytest.mark.parametrize(("method", "own"), [("fedavg", {"average_rounds": 2}), ("fedbn", {})])
def test_a_kept_model_is_the_one_that_was_measured(
    made: Any, tmp_path: Path, method: str, own: dict[str, int], cache: Path
) -> None:
    settings = {**SETTINGS, "rounds": 3, **own}
    (record,) = made(method, settings=settings, keep=["last", "best"])
    model = fb.load_model(record.key, tmp_path / "r")
    facts, weights = read_model(tmp_path / "r/runs" / f"{record.key}.best.safetensors")
    values = [e.evaluation["val"]["outline"]["accuracy"] for e in record.rounds]
    assert facts.round == 1 + values.index(max(values))
    images = torch.rand(3, 3, 32, 32)
    assert not model.training
    assert model(images).shape == (3, 10)
    best = fb.load_model(record.key, tmp_path / "r", "best")
    assert all(torch.equal(best.state_dict()[name], tensor) for name, tensor in weights.items())
    own = {key: value for key, value in SETTINGS.items() if key.startswith("data.")}
    splits = fb.open_dataset("digits4", scenario="ip-o-c", seed=0, settings=own, cache_dir=cache)
    for kept, number in ((best, facts.round), (model, 3)):
        held_out = splits["val"]["outline"]
        found = kept.predict(torch.stack([held_out[n][0] for n in range(len(held_out))]))
        assert (found.labels.numpy() == held_out.labels).mean() == values[number - 1]
    # a recorded run without its model is repeated for the model; its record stays unchanged
    path = tmp_path / "r/runs" / f"{record.key}.json"
    before = path.read_bytes()
    for file in (tmp_path / "r/runs").glob("*.safetensors"):
        file.unlink()
    made(method, settings=settings, keep=["last"])
    assert path.read_bytes() == before
    again = fb.load_model(record.key, tmp_path / "r")
    assert all(torch.equal(again.state_dict()[n], t) for n, t in model.state_dict().items())


def test_a_kept_model_predicts_files_pictures_and_arrays(
    made: Any, tmp_path: Path, feddg: Any, cache: Path
) -> None:
    from PIL import Image

    (record,) = made(keep=["last"])
    model = fb.load_model(record.key, tmp_path / "r")
    assert model.classes == tuple("0123456789")
    settings = {key: value for key, value in SETTINGS.items() if key.startswith("data.")}
    splits = fb.open_dataset(
        "digits4", scenario="ip-o-c", seed=0, settings=settings, cache_dir=cache
    )
    (images,) = splits["test"].values()
    pixels = torch.stack([images[place][0] for place in range(len(images))])
    found = model.predict(pixels)
    # the images and labels of the data set are those on which the run was evaluated
    right = (found.labels.numpy() == images.labels).mean()
    assert right == record.evaluation()["test"][record.scenario.test]["accuracy"]

    stored = (pixels[0] * 255).round().byte().permute(1, 2, 0).numpy()
    size = stored.shape[0]
    Image.fromarray(stored).save(tmp_path / "a.png")
    Image.fromarray(stored).resize((50, 70)).save(tmp_path / "b.png")
    assert torch.equal(model.transform(stored), pixels[0])
    several = [tmp_path / "a.png", Image.open(tmp_path / "b.png"), stored]
    answers = model.predict(several)
    assert torch.equal(answers.probabilities[0], answers.probabilities[2])
    assert torch.equal(answers.labels[:1], model.predict(str(tmp_path / "a.png")).labels)
    torch.testing.assert_close(answers.probabilities.sum(1), torch.ones(3))
    with refused(fb.FeddgError, f"70 x 50 pixels and the model was trained on {size} x {size}"):
        model.predict(torch.rand(1, 3, 50, 70))
    with refused(fb.FeddgError, "float64 [4, 4, 3]", "uint8 [H, W, 3]"):
        model.transform(np.zeros((4, 4, 3)))

    (tmp_path / "bad.png").write_bytes(b"no image")
    words = ("predict", record.key, "a.png", "b.png", "--results", "r")
    shown = feddg(*words)
    assert shown.code == 0, shown.err
    label = model.classes[int(answers.labels[0])]
    assert f" a.png   {label} " in shown.out
    partly = feddg(*words, "bad.png", "--csv", "answers.csv")
    assert partly.code == 2
    assert "could not read 1 of 3 images: cannot decode the image bad.png" in partly.err
    head, first, second = (tmp_path / "answers.csv").read_text().splitlines()
    assert head == "image,label,probability," + ",".join(f"p({c})" for c in range(10))
    assert first.startswith(f"a.png,{label},{float(answers.probabilities[0].max()):.6f},")
    assert second.startswith("b.png,")
    assert "there is no image none.png" in feddg("predict", record.key, "none.png").err


def test_a_data_set_is_opened_by_domain_and_by_split(cache: Path) -> None:
    domains = fb.open_dataset("Digits4", settings={"image_size": 8}, cache_dir=cache)
    assert list(domains) == ["ink", "poster", "outline", "chalk"]
    assert sum(map(len, domains.values())) == 1797
    image, label = domains["ink"][3]
    assert (image.shape, image.dtype, type(label)) == ((3, 8, 8), torch.float32, int)
    assert 0 <= image.min() <= image.max() <= 1
    assert domains["ink"].paths[3].startswith(f"ink/{domains['ink'].classes[label]}/")
    splits = fb.open_dataset(
        "digits4", scenario="ip-o-c", seed=1, settings={"data.image_size": 8}, cache_dir=cache
    )
    assert {split: set(parts) for split, parts in splits.items()} == {
        "train": {"ink", "poster"},
        "id_val": {"ink", "poster"},
        "id_test": {"ink", "poster"},
        "val": {"outline"},
        "test": {"chalk"},
    }
    names = [path for parts in splits.values() for part in parts.values() for path in part.paths]
    assert len(names) == len(set(names)) == 1797
    with refused(fb.FeddgError, "give both"):
        fb.open_dataset("digits4", scenario="ip-o-c")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"keep": ["lst"]}, "unknown model to keep 'lst'; did you mean 'last'?"),
        ({"keep": "beste"}, "did you mean 'best'?"),
        ({"lr": 1}, "settings={'train.lr': 1}"),
        ({"worker": 2}, "did you mean 'workers'?"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_computed(
    made: Any, tmp_path: Path, words: dict[str, Any], sentence: str
) -> None:
    with refused(fb.FeddgError, sentence):
        made(**words)
    assert not (tmp_path / "r").exists()


def test_models_that_cannot_be_loaded_are_one_sentence(made: Any, tmp_path: Path) -> None:
    (record,) = made(keep=["last"])
    path = tmp_path / "r/runs" / f"{record.key}.last.safetensors"
    good = path.read_bytes()
    with refused(fb.FeddgError, "--keep"):
        fb.load_model(record.key, tmp_path / "r", "best")
    with refused(fb.FeddgError, "no run 'zz'", "feddg-bench runs --results"):
        fb.load_model("zz", tmp_path / "r")
    with refused(fb.FeddgError, "no run", "none"):
        fb.load_model(record.key, tmp_path / "none")
    with refused(fb.FeddgError, "last or best"):
        fb.load_model(record.key, tmp_path / "r", "worst")
    for bad in (good[:100], b"", b"\x00" * 64, good.replace(b"num_classes", b"num_glasses")):
        path.write_bytes(bad)
        with pytest.raises(fb.FeddgError):
            fb.load_model(record.key, tmp_path / "r")


def test_a_kept_model_is_that_of_its_name_as_it_was_written(
    made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (record,) = made(keep=["last"])
    path = tmp_path / "r/runs" / f"{record.key}.last.safetensors"
    good = path.read_bytes()
    with safe_open(path, "pt") as file:
        said = file.metadata()["model"]
        weights = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118

    def refuses(data: bytes, *words: str, name: str = path.name) -> None:
        path.with_name(name).write_bytes(data)
        with refused(fb.FeddgError, *words):
            fb.load_model(path.with_name(name))

    def forged(change: dict[str, Any], tensors: dict[str, torch.Tensor] = weights) -> bytes:
        model = json.dumps(json.loads(said) | change)
        return safe(tensors, {"model": model, "digest": digest(model, tensors)})

    refuses(good[:-1] + bytes([good[-1] ^ 1]), "digest")
    refuses(good.replace(b'round\\":2', b'round\\":1'), "digest")
    refuses(good, f"the run {record.key}", name=f"{'0' * 16}.last.safetensors")
    refuses(forged({"key": "0" * 16}), f"the run {'0' * 16}")
    refuses(forged({"round": 1000}), "round 1000")
    name = next(n for n, tensor in weights.items() if tensor.is_floating_point())
    refuses(forged({}, weights | {name: weights[name] * math.nan}), name, "NaN")
    for absurd in ({"num_classes": 10**9}, {"channels": 10**9}):
        refuses(forged(absurd), "too small for")
    path.write_bytes(safe(weights, {"model": said}))  # as earlier versions stored it
    assert fb.load_model(record.key, tmp_path / "r").training is False
    assert "kept without a digest" in caplog.text


def test_again_keeps_the_old_record_beside(made: Any, tmp_path: Path) -> None:
    (record,) = made()
    path = tmp_path / "r/runs" / f"{record.key}.json"
    old = path.read_bytes()
    (new,) = made(again=True)
    assert new.numbers() == record.numbers()
    assert path.with_name(f"{path.name}.1").read_bytes() == old
    assert json.loads(path.read_bytes())["time"] != json.loads(old)["time"]
    assert len(fb.load_records(tmp_path / "r")["key"].unique()) == 1


def test_a_method_whose_code_changed_needs_a_version(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: Callable[[], None]
) -> None:
    """An edited plugin once silently returned its old numbers."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    info = folder / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[feddg_bench.methods]\ntheirs = theirs_plugin:Theirs\n")

    def write(body: str, version: int = 1, comment: str = "") -> None:
        (folder / "theirs_plugin.py").write_text(
            f'"""Theirs."""  # {comment}\nfrom feddg_bench.core.method import Method\n\n'
            f"class Theirs(Method):\n    version = {version}\n    citation = '{comment}'\n"
            f"    def forward(self, images):\n        return super().forward({body})\n"
        )
        sys.modules.pop("theirs_plugin", None)
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)  # stale within one second
        anew()

    write("images")
    (record,) = made("theirs")
    write("images", comment="a word")
    assert made("theirs")[0].key == record.key
    write("images * 0.5")
    with refused(fb.FeddgError, "raise `version`"):
        made("theirs")
    assert made("theirs", again=True)[0].key == record.key
    write("images * 0.25", version=2)
    assert made("theirs")[0].key != record.key


# ------------------------------------------------------------------------ methods as objects

CELL = """
import feddg_bench as fb

LIMIT = 0.01


def limited(change):
    return change.clamp(-LIMIT, LIMIT)


class Clip(fb.Method):
    \"\"\"FedAvg with small steps.\"\"\"

    def aggregate(self, server, updates):
        new = super().aggregate(server, updates)
        for name in self.trainable:
            new[name] = server.weights[name] + limited(new[name] - server.weights[name])
        return new
"""


def test_a_class_of_a_notebook_runs_beside_names(
    made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = run_cell(monkeypatch, "a_notebook", CELL)
    own, fedavg = made([here["Clip"], "FedAvg"], keep=["last"])
    assert re.fullmatch("Clip@[0-9a-f]{8}", own.method)
    assert own.code[:8] == own.method[-8:]
    assert fedavg.method == "fedavg"
    run_cell(monkeypatch, "a_notebook", CELL.replace("small", "# tiny").replace("\n\n\n", "\n"))
    assert made(here["Clip"])[0].time == own.time  # layout and docstrings are no edits
    cells = [CELL, CELL.replace("0.01", "0.02"), CELL.replace("(-LIMIT", "(-2 * LIMIT")]
    cells.append(CELL.replace("return new", "return dict(new)"))
    run_cell(monkeypatch, "a_notebook", "other = 3")
    keys = []
    for cell in cells:
        run_cell(monkeypatch, "a_notebook", cell)
        keys.append(made(here["Clip"])[0].key)
    assert keys[0] == own.key
    assert len({*keys}) == 4
    assert fb.load_model(own.key, tmp_path / "r").classes == tuple("0123456789")
    shown = fb.table(results=tmp_path / "r").to_markdown()
    assert own.method in shown
    assert "FedAvg" in shown


IDLE = """
import torch
import feddg_bench as fb


class Unconnected(fb.Method):
    def training_step(self, batch, batch_idx):
        self(batch[0])  # statistics of batch normalisation move
        return torch.zeros((), requires_grad=True)


class Unassigned(fb.Method):
    def run_round(self, server):
        self.aggregate(server, server.ask(self.fit))


class Learns(fb.Method):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)
"""


@pytest.mark.parametrize(
    ("name", "told"), [("Unconnected", True), ("Unassigned", True), ("Learns", False)]
)
def test_a_run_that_learns_nothing_says_so(
    made: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    told: bool,
) -> None:
    method = run_cell(monkeypatch, "a_notebook", IDLE)[name]
    with pytest.raises(KeyboardInterrupt):
        made(method, observers=[Stop()])
    assert "nothing was learnt" not in caplog.text
    (record,) = made(method)  # goes on from the checkpoint
    said = [text for text in caplog.messages if "nothing was learnt" in text]
    assert len(said) == told
    assert all(record.key in text and "bit for bit" in text for text in said)


def test_records_of_a_class_without_the_class(
    made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, feddg: Any
) -> None:
    """Another process has the records, but cannot compute with the class."""
    here = run_cell(monkeypatch, "a_notebook", CELL)
    with pytest.raises(KeyboardInterrupt):
        made(here["Clip"], observers=[Stop()])
    (checkpoint,) = ResultsStore(tmp_path / "r").checkpoints.glob("*.safetensors")
    monkeypatch.setattr("feddg_bench.plugins._GIVEN", {})
    words = "is a class of a script or a notebook: give the class to fb.run"
    one_sentence(feddg("resume", checkpoint.stem, "--results", tmp_path / "r"), words)
    (record,) = made(here["Clip"], keep=["last"])
    assert record.key == checkpoint.stem
    assert not checkpoint.exists()
    monkeypatch.setattr("feddg_bench.plugins._GIVEN", {})
    with refused(SettingsError, words):
        fb.load_model(record.key, tmp_path / "r")
    one_sentence(feddg("run", "--method", record.method), words)
    for command in ("tables", "report", "runs", "figures convergence"):
        done = feddg(*command.split(), "--results", tmp_path / "r")
        assert done.code == 0, done.err
    assert record.method in feddg("runs", "--results", tmp_path / "r").out
    assert feddg("results", "check", "--results", tmp_path / "r").code == 0


def test_a_class_that_cannot_be_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = run_cell(monkeypatch, "a_notebook", CELL + "class MOON(Clip): pass")
    gone: dict[str, Any] = {"__name__": "a_notebook", "fb": fb}
    exec("class Gone(fb.Method):\n    def build(self): pass\n", gone)  # noqa: S102
    for given, more, *words in (
        (here["Clip"], {"workers": 2}, "cannot import the class Clip", "workers=1", "methods new"),
        (here["Clip"], {"workers": 0}, "cannot import the class Clip from a_notebook"),
        (here["MOON"], {}, "has the name of the method moon", "another name"),
        (gone["Gone"], {}, "source of the class Gone cannot be read", "methods new"),
        (int, {}, "<class 'int'> is no subclass of feddg_bench.Method"),
        ([here["Clip"], 3], {}, "method", "expected a name"),
    ):
        with refused(SettingsError, *words):
            fb.run(given, results=tmp_path / "r", **more)
    assert not (tmp_path / "r").exists()


def test_a_class_of_a_plugin_is_the_plugin(made: Any) -> None:
    from feddg_methods.fedavg import FedAvg

    assert made(FedAvg)[0].key == made()[0].key


@pytest.mark.nightly
def test_workers_import_a_class_of_a_module(
    made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my_clip.py").write_text(CELL)
    monkeypatch.syspath_prepend(tmp_path)
    import my_clip

    (alone,) = made(my_clip.Clip)
    (together,) = made(my_clip.Clip, workers=2, again=True)
    assert together.key == alone.key
    assert together.evaluation() == alone.evaluation()
