"""Requests from files, flags and pairs, and their plans with keys, before any image is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddg_bench as fb
from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.config.keys import canonical_settings, run_key
from feddg_bench.config.names import SYMBOLS
from feddg_bench.config.own import own_settings_of
from feddg_bench.config.schema import MethodSettings, Resources, RunSettings, TrainSettings
from feddg_bench.runs.request import (
    Datasets,
    Request,
    _say_once,
    check_without_download,
    read_seeds,
    say_cautions,
)
from feddg_bench.sweeps.definition import load_sweep
from feddg_bench.sweeps.jobs import jobs
from tests.fabricate import fabricate
from tests.helpers import refused

ONE = {"scenario": "ip-o-c"}


def keys(**words: Any) -> list[str]:
    return [plan.key for plan in Request(**{**ONE, **words}).plan()]


@pytest.mark.parametrize(
    ("given", "seeds"),
    [
        ("0", (0,)),
        ("0-2", (0, 1, 2)),
        ("3, 0-1,3", (3, 0, 1)),
        (3, (0, 1, 2)),
        ([4, 1], (4, 1)),
        (np.int64(2), (0, 1)),
        (np.array([4, 1]), (4, 1)),
    ],
    ids=repr,
)
def test_seeds(given: Any, seeds: tuple[int, ...]) -> None:
    assert read_seeds(given) == seeds


def test_a_name_means_the_same_wherever_it_is_said(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "method: fedprox\nscenario: ip-o-c\nseed: 7\nrecipe: quick\nhyper: {mu: 0.1}\n"
    )
    by_file = Request.read(config=[config]).plan()
    flags = {"method": "fedprox", "scenario": "ip-o-c", "seeds": "7", "recipe": "quick"}
    by_flag = Request.read(flags=flags, pairs=["hyper.mu=0.1"]).plan()
    pairs = [f"{name}={value}" for name, value in flags.items()]
    by_pair = Request.read(pairs=[*pairs, "hyper.mu=0.1"]).plan()
    assert by_file[0].key == by_flag[0].key == by_pair[0].key
    assert by_file[0].settings.method == "fedprox"
    assert by_file[0].settings.seed == 7


@pytest.mark.parametrize(
    ("key", "flag", "names", "value"),
    [
        ("partition.heterogeneity", "heterogeneity", ("lambda", "heterogeneity"), 0.5),
        ("partition.clients", "clients", ("N", "clients"), 30),
        ("federation.per_round", "per_round", ("K", "per_round"), 3),
        ("federation.rounds", "rounds", ("rounds",), 3),
    ],
)
def test_all_spellings_of_a_setting_have_one_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    flag: str,
    names: tuple[str, ...],
    value: float,
) -> None:
    """Flag, ``KEY=VALUE``, file, sweep file, override of a sweep, Python."""

    def stop(plans: Any) -> None:
        raise StopError(plans[0].key)

    monkeypatch.setattr("feddg_bench.api.check_runs", stop)

    def by_run(**words: Any) -> str:
        with pytest.raises(StopError) as stopped:
            fb.run("fedavg", **ONE, results=tmp_path / "r", **words)
        return str(stopped.value)

    (wanted,) = keys(settings={key: value})
    assert wanted != keys()[0]
    for spelt in (key, *names):
        (tmp_path / "c.yaml").write_text(f"{spelt}: {value}\n")
        (tmp_path / "s.yaml").write_text(
            f"method: grid\nparameters: {{scenario: {{value: chalk}}, {spelt}: {{value: {value}}}}}"
        )
        sweep = load_sweep(tmp_path / "s.yaml")
        other = load_sweep(tmp_path / "s.yaml", [f"{names[0]}={value}"])
        assert [*other.parameters] == ["scenario", SYMBOLS.get(spelt, spelt)]
        assert [
            Request.read(flags=ONE, pairs=[f"{spelt}={value}"]).plan(check=False)[0].key,
            Request.read(flags=ONE, config=[tmp_path / "c.yaml"]).plan(check=False)[0].key,
            *(job.key for job in jobs(sweep.pairs(next(iter(sweep.points()))), Datasets())),
            *(job.key for job in jobs(other.pairs(next(iter(other.points()))), Datasets())),
            by_run(settings={spelt: value}),
            by_run(config=tmp_path / "c.yaml"),
        ] == [wanted] * 6, spelt
    assert Request.read(flags={**ONE, flag: value}).plan(check=False)[0].key == wanted
    for name in {flag, *names}:
        assert by_run(**{name: value}) == wanted


class StopError(Exception):
    """Ends a call before its runs."""


@pytest.mark.parametrize(
    "given",
    [
        {"pairs": ["num_seeds=3"]},
        {"flags": {"num_seeds": 3}},
        {"flags": {"seeds": "0-2"}},
        {"config": "num_seeds: 3"},
        {"config": "seeds: 5-9", "flags": {"num_seeds": 3}},
        {"config": "num_seeds: 7", "pairs": ["seed=0,1,2"]},
    ],
    ids=str,
)
def test_a_number_of_seeds(tmp_path: Path, given: dict[str, Any]) -> None:
    if "config" in given:
        (tmp_path / "c.yaml").write_text(given["config"])
        given = {**given, "config": [tmp_path / "c.yaml"]}
    assert Request.read(**given).seeds == (0, 1, 2)


def test_a_number_of_seeds_counts_from_the_first_of_the_command() -> None:
    """Those of `tune` begin at 100, since tables must not use them."""
    assert Request.read(flags={"num_seeds": 5}, seeds="100-102").seeds == (100, 101, 102, 103, 104)
    assert Request.read(seeds="100-102").seeds == (100, 101, 102)
    assert Request.read(flags={"seeds": "7"}, seeds="100-102").seeds == (7,)


@pytest.mark.parametrize("pair", ["num_seeds=3", "seeds=0-2", "seed=0,1,2"])
@pytest.mark.parametrize("named", ["num_seeds: {value: 2}", "seed: {values: [4, 5]}"])
def test_seeds_of_a_sweep_are_replaced_by_whatever_name(
    tmp_path: Path, named: str, pair: str
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(f"method: grid\nparameters: {{scenario: {{value: ip-o-c}}, {named}}}")
    found = [(job.title, job.group) for p in load_sweep(file).points() for job in _jobs(file, p)]
    wanted = (4, 5) if "seed:" in named else (0, 1)
    assert found == [(f"FedAvg ltdo ip-o-c seed {seed}", "") for seed in wanted]
    sweep = load_sweep(file, [pair])
    (point,) = sweep.points()
    assert [job.title[-1] for job in jobs(sweep.pairs(point), Datasets())] == ["0", "1", "2"]


def _jobs(file: Path, point: Any) -> Any:
    return jobs(load_sweep(file).pairs(point), Datasets())


def test_a_setting_of_one_method_may_be_given_for_several(caplog: Any) -> None:
    _say_once.cache_clear()
    given = {"hyper.style": "pixel", "hyper.mu": 0.5, "rounds": 2}
    together = keys(method="fedavg,pardon,ccst,fedprox", settings=given)
    alone = [
        *keys(method="fedavg", settings={"rounds": 2}),
        *keys(method="pardon,ccst", settings={"hyper.style": "pixel", "rounds": 2}),
        *keys(method="fedprox", settings={"hyper.mu": 0.5, "rounds": 2}),
    ]
    assert together == alone
    assert caplog.messages == [
        "hyper.style applies to pardon, ccst; no other method here has it",
        "hyper.mu applies to fedprox; no other method here has it",
    ]


def test_later_words_win(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("method: fedprox\ntrain: {lr: 0.1}\n")
    asked = Request.read(config=[config], flags={"method": "moon"}, pairs=["train.lr=0.2"])
    assert asked.method == "moon"
    assert asked.settings == {"train": {"lr": 0.2}}


def test_the_command_line_wins_over_a_short_key_of_a_file(tmp_path: Path) -> None:
    """``lr: 0.1`` after ``train:`` once overrode ``lr=0.2`` and a later file."""
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("train: {batch_size: 8}\nlr: 0.1\n")
    second.write_text("train: {lr: 0.3}\n")
    by_pair = Request.read(config=[first], pairs=["lr=0.2"])
    assert by_pair.settings == {"train": {"batch_size": 8, "lr": 0.2}}
    by_file = Request.read(config=[first, second])
    assert by_file.settings == {"train": {"batch_size": 8, "lr": 0.3}}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("partition.kind=dirichlet partition.heterogeneity=0.3", "partition.kind=dirichlet"),
        ("partition.kind=domain partition.clients=30", "partition.clients has no effect with"),
        ("partition.kind=label_shards partition.alpha=0.3", "no effect with partition.kind=label_"),
        (
            "partition.alpha=0.1",
            "with partition.kind=heterogeneous, only with dirichlet or label",
        ),
        ("train.momentum=0.9", "train.momentum has no effect with train.optimizer=adam"),
        ("train.optimizer=sgd train.lr=0.1 train.eps=0.1", "train.eps has no effect with"),
        ("train.decay=0.9", "train.decay has no effect with train.schedule=constant"),
    ],
)
def test_a_setting_that_decides_nothing_is_named(
    words: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is part of the key, so one run gets two records and two rows of a table."""
    _say_once.cache_clear()
    plans = Request.read(pairs=words.split(), flags={"method": "fedavg,fedprox"}).plan(check=False)
    assert len(plans) == 8
    (told,) = caplog.messages
    assert said in told


def test_nothing_is_said_of_a_setting_that_decides_something_for_one_method(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """ERM pools all clients and SCAFFOLD trains with SGD, whatever the recipe says."""
    _say_once.cache_clear()
    scaffold = Request.read(pairs=["method=scaffold", "momentum=0.9", "lr=0.1"])
    assert scaffold.plan(check=False)[0].settings.train.momentum == 0.9
    both = Request.read(pairs=["method=erm,fedavg", "heterogeneity=0.5"])
    assert len({plan.key for plan in both.plan(check=False)}) == 8
    dirichlet = Request.read(pairs=["partition.kind=dirichlet", "partition.alpha=0.1"])
    assert dirichlet.plan(check=False)
    same = Request.read(pairs=["partition.kind=dirichlet", "partition.heterogeneity=0.1"])
    assert same.plan(check=False)
    assert caplog.messages == []


def test_a_file_cannot_name_one_data_set_and_train_on_another(tmp_path: Path) -> None:
    """`dataset: pacs` in a file once wrote a PACS record from digits."""
    config = tmp_path / "c.yaml"
    config.write_text("dataset: pacs\n")
    asked = Request.read(config=[config], flags={"scenario": "cs-a-p"})
    assert asked.dataset == "pacs"
    with pytest.raises(DataError):  # PACS is not available
        asked.plan()


def test_a_methods_settings_have_one_zero() -> None:
    ways = ({"hyper.mu": zero} for zero in (0, 0.0, -0.0, "-0.0"))
    assert len({keys(method="fedprox", settings=way)[0] for way in ways}) == 1


def test_settings_by_short_dotted_or_nested_key() -> None:
    ways = ({"rounds": 1}, {"federation.rounds": 1}, {"federation": {"rounds": 1}})
    assert len({keys(settings=way)[0] for way in ways}) == 1


@pytest.mark.parametrize("name", ["my splits #2.csv", "1", "2024-01-01"])
def test_the_name_of_a_split_file_is_taken_as_it_is(name: str) -> None:
    asked = Request.read(flags={"split_csv": Path(name), "rounds": 3})
    assert asked.settings == {"data": {"split_csv": name}, "federation": {"rounds": 3}}


def test_every_scenario_is_checked_first(tmp_path: Path) -> None:
    """A split file fits one of four scenarios: the error precedes any training."""
    file = tmp_path / "split.csv"
    file.write_text("split,domain,category,path\n")
    with pytest.raises((SettingsError, DataError), match=r"split\.csv"):
        Request(settings={"split_csv": str(file)}).plan()


def test_runs_of_one_seed_follow_each_other() -> None:
    plans = Request(("fedavg", "moon"), scenario=("ip-o-c", "oc-i-p"), seeds=[1, 0]).plan()
    titles = [(p.settings.seed, p.settings.method, p.scenario.name) for p in plans]
    assert titles == [
        (seed, method, scenario)
        for seed in (1, 0)
        for method in ("fedavg", "moon")
        for scenario in ("ip-o-c", "oc-i-p")
    ]


# ------------------------------------------------------------------------------- keys


class LaterTrain(TrainSettings):
    grad_clip: float = 0.0


class LaterRun(RunSettings):
    note: str = ""
    train: LaterTrain = LaterTrain()


class Hyper(MethodSettings):
    mu: float = 0.1


class LaterHyper(Hyper):
    added = ("nu",)
    nu: float = 0.5


def key(model: type[RunSettings], plugin: type[MethodSettings], **values: Any) -> str:
    own = plugin(**values.pop("hyper", {})).model_dump(mode="json")
    settings = model(method="theirs", scenario="a", hyper=own, **values)
    return run_key(canonical_settings(settings, own_settings_of(plugin)), 1)


@pytest.mark.parametrize(("dataset", "protocol"), [("folder", "lodo"), ("digits4", "ltdo")])
def test_the_data_set_decides_the_protocol_that_is_not_named(
    dataset: str, protocol: str, tmp_path: Path
) -> None:
    """Runs that name it have the same keys as before."""
    root = fabricate("folder", tmp_path / "data")
    where = Resources(data_root=root if dataset == "folder" else None)
    keys = {
        named: [
            plan.key
            for plan in Request(dataset=dataset, protocol=named, resources=where).plan(check=False)
        ]
        for named in (None, "lodo", "ltdo")
    }
    assert keys[None] == keys[protocol]
    assert keys["lodo"] != keys["ltdo"]
    request = Request(dataset=dataset, resources=where).one_scenario()
    assert [plan.key for plan in request.plan(check=False)] == keys[protocol][:1]


@pytest.mark.parametrize(
    ("dataset", "protocol", "advice"),
    [
        ("folder", "ltdo", "use --protocol lodo"),
        ("folder", "lodo", None),
        ("digits4", "ltdo", None),
    ],
)
def test_a_single_training_domain_is_said(
    dataset: str,
    protocol: str,
    advice: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _say_once.cache_clear()
    root = fabricate("folder", tmp_path / "data")
    where = Resources(data_root=root if dataset == "folder" else None)
    say_cautions(Request(dataset=dataset, protocol=protocol, resources=where).plan(check=False))
    said = [text for text in caplog.messages if "on a single domain" in text]
    assert said == (
        []
        if advice is None
        else [
            "3 scenarios, such as Day_Light-night-rainy_day, train on a single domain, which is "
            f"not domain generalisation from several: {advice}"
        ]
    )


def test_a_setting_added_later_changes_no_key_while_it_has_its_default() -> None:
    today = key(RunSettings, Hyper)
    assert key(LaterRun, LaterHyper) == today
    assert key(LaterRun, Hyper, note="x") != today
    assert key(LaterRun, Hyper, train={"grad_clip": 1.0}) != today
    assert key(LaterRun, LaterHyper, hyper={"nu": 0.6}) != today
    assert key(RunSettings, Hyper, hyper={"mu": 0.2}) != today


def test_settings_of_our_own_methods_added_later_need_no_mark() -> None:
    class Later(MethodSettings):
        mu: float = 0.01
        nu: float = 0.5

    settings = {"method": "fedprox", "scenario": "a"}
    old = RunSettings(**settings, hyper={"mu": 0.01})
    new = RunSettings(**settings, hyper={"mu": 0.01, "nu": 0.5})
    own = own_settings_of(Later)
    assert canonical_settings(new, own) == canonical_settings(old, own)


def test_keys_are_those_of_the_first_records() -> None:
    assert keys(seeds=[0]) == ["d34f1f5ea96d2d40"]


def test_clients_in_the_reference_s_order_have_keys_of_their_own() -> None:
    """They differ from the keys of the first records with this rounding."""

    def partition(dataset: str, scenario: str, rounding: str) -> dict[str, Any]:
        settings = {"partition.rounding": rounding, "pretrained": False}
        request = Request(dataset=dataset, scenario=scenario, recipe="quick", settings=settings)
        held: dict[str, Any] = request.plan(check=False)[0].canonical["partition"]
        return held

    ordered = partition("pacs", "cs-a-p", "reference")
    assert ordered["order"] == ["photo", "art_painting", "cartoon", "sketch"]
    assert "order" not in partition("pacs", "cs-a-p", "largest_remainder")
    assert "order" not in partition("digits4", "ip-o-c", "reference")


def test_runs_in_bf16_have_keys_of_their_own() -> None:
    """They differ from the keys of records whose depthwise convolutions were in bf16, too."""
    for precision, marked in (("bf16-mixed", True), ("32-true", False)):
        (plan,) = Request(settings={"train.precision": precision}, scenario="ip-o-c").plan(
            check=False
        )
        assert ("float32" in plan.canonical["train"]) == marked


def test_a_downloaded_style_network_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDDG_DATA", str(tmp_path / "home"))
    root = tmp_path / "given"
    for number, folder in enumerate((root, tmp_path / "home")):
        (folder / "weights").mkdir(parents=True)
        (folder / "weights/vgg19_16x_adain.safetensors").write_bytes(bytes([number]))

    def key(root: Path | None = None, weights: Path | None = None, style: str = "vgg19_16x") -> str:
        settings: dict[str, Any] = {"hyper.style": style}
        if weights is not None:
            settings["hyper.style_weights"] = [str(weights / "weights/vgg19_16x_adain.safetensors")]
        request = Request("pardon", **ONE, settings=settings, resources=Resources(data_root=root))
        (plan,) = request.plan(check=False)
        return plan.key

    assert key() == key(weights=tmp_path / "home")
    assert key(root) == key(weights=root) != key()
    assert key(root, weights=tmp_path / "home") == key()  # a file that the user names
    assert key(style="pixel") == key(root, style="pixel")


def test_checks_without_a_download_say_what_they_leave_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    given = {"dataset": "pacs", "scenario": "photo", "method": "fedavg,pardon", "recipe": "pardon"}
    monkeypatch.setenv("FEDDG_DATA", str(tmp_path))
    resources = Resources(results=tmp_path / "r")
    style = {"hyper.style_weights": [str(tmp_path / "vgg.safetensors")]}

    def checked(**settings: Any) -> str:
        asked = Request(**given, resources=resources, settings=settings)  # type: ignore[arg-type]
        return check_without_download(asked.plan(check=False))

    left = checked(**{"hyper.style": "pixel"})
    assert left == (
        "the images of PACS and their partition (not found); weights of resnet50 (downloaded by a "
        "run)"
    )
    with refused(DataError, "vgg.safetensors"):
        checked(**style)
    with refused(SettingsError, "padding=tf is for mobilenet_v2"):
        checked(**{"hyper.style": "pixel", "backbone.padding": "tf", "data.image_size": 224})
    resources = Resources(data_root=tmp_path)
    with refused(DataError, f"PACS was not found (looked in {tmp_path})"):
        checked(**{"hyper.style": "pixel"})
    given = {"scenario": "chalk"}
    assert checked() == ""
