"""Tables of refused calls: the call, the exception, and words of its one-line message."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

import feddg_bench as fb
from feddg_bench.common.errors import DataError, FeddgError, SettingsError
from feddg_bench.config.keys import canonical_settings
from feddg_bench.config.layers import load_layer, merge, parse_override, validate
from feddg_bench.config.recipes import load_recipe
from feddg_bench.config.schema import (
    AugmentSettings,
    BackboneSettings,
    FederationSettings,
    PartitionSettings,
    Resources,
    RunSettings,
    TrainSettings,
)
from feddg_bench.core.server import sample_clients
from feddg_bench.data.partition import heterogeneous_counts, make_partition
from feddg_bench.data.protocols import scenarios
from feddg_bench.models.weights import load_tensors
from feddg_bench.plugins import load_method
from feddg_bench.runs.request import NAMES, Request, read_seeds
from tests.helpers import refused

BASE = {"method": "fedavg", "scenario": "ip-o-c"}
CYCLE = ("art_painting", "photo", "sketch", "cartoon")
LETTERS = {"photo": "p", "art_painting": "a", "cartoon": "c", "sketch": "s"}
MANY = 1_000_000


# -------------------------------------------------------------------------- values of settings


class Kind(NamedTuple):
    """Valid and invalid values of a setting, written out here by hand."""

    good: tuple[str, ...]
    bad: tuple[str, ...]


def whole(low: int, high: int) -> Kind:
    """Return the kind of an integer."""
    bad = (str(low - 1), str(high + 1), f"{low}.5", "true", "1.5", "2020-01-01", "''", "null")
    return Kind((str(low), f"{high}", f"{low}.0"), bad)


def real(good: tuple[str, ...], bad: tuple[str, ...]) -> Kind:
    """Return the kind of a finite number."""
    return Kind(good, (*bad, ".nan", ".inf", "-.inf", "1e400", "true", "nan", "inf", "''", "null"))


def share(low: str, high: str, *, closed: str = "[]") -> Kind:
    """Return the kind of a number in an interval."""
    ends = [(low, closed[0] == "["), (high, closed[1] == "]")]
    good = tuple(value for value, inside in ends if inside)
    beyond = tuple(value for value, inside in ends if not inside)
    return real(good, (*beyond, f"-{float(low) + 1e-9}", str(float(high) + 1e-9), "1e300"))


def one_of(*good: str) -> Kind:
    """Return the kind of a word."""
    return Kind(good, (good[0][:-1], good[0].upper(), "0", "true", "''", "null", f"[{good[0]}]"))


TRUTH = Kind(
    ("true", "false", "on", "No"),
    ("0", "1", "0.", "1.0", "'yes'", "2", "-1", "0.5", "maybe", "''", "null", "[true]"),
)
NEVER = ("[1, 2", "{a: 1}", "'9': [", "9" * 5000, "[" * 5000, "&a [*a]", "!!python/name:os.system")
"""Values that no setting takes; some readers never finish an integer of 5,000 digits."""
CROP = ("[1.0, 0.5]", "[0, 1]", "[0.5, 1.5]", "[0.5]", "[a, b]", "[true, true]", "0.5", "[.nan, 1]")

KINDS: dict[str, Kind] = {
    "data.image_size": whole(8, 1024),
    "data.id_val_fraction": share("0", "1", closed="[)"),
    "data.id_test_fraction": share("0", "1", closed="[)"),
    "data.client_test_fraction": share("0", "1", closed="[)"),
    "augment.crop_scale": Kind(("[0.5, 1.0]", "null", "[1, 1]"), CROP),
    "augment.flip": share("0", "1"),
    "augment.hue": share("0", "0.5"),
    "augment.brightness": real(("0", "0.5", "1e300"), ("-0.1",)),
    "partition.kind": one_of(
        *("heterogeneous", "pooled", "domain", "per_domain", "dirichlet"),
        *("label_dirichlet", "label_shards"),
    ),
    "partition.clients": whole(1, MANY),
    "partition.heterogeneity": share("0", "1"),
    "partition.rounding": one_of("largest_remainder", "reference"),
    "partition.clients_per_domain": whole(1, MANY),
    "partition.classes_per_client": whole(1, MANY),
    "partition.alpha": real(("0.1", "100"), ("0", "-1")),
    "partition.min_client_size": whole(0, MANY),
    "backbone.name": one_of("small_cnn", "lenet"),
    "backbone.pretrained": TRUTH,
    "backbone.padding": one_of("torch", "tf"),
    "backbone.normalisation": one_of("auto", "imagenet", "half", "none"),
    "backbone.projection": whole(0, 65_536),
    "backbone.hidden": whole(0, 65_536),
    "backbone.adapter": whole(0, 65_536),
    "backbone.adapter_ratio": share("0", "1"),
    "backbone.classifier": one_of("linear", "cosine"),
    "backbone.temperature": real(("0.1", "100"), ("0", "-1")),
    "backbone.trainable": one_of("all", "head"),
    "train.optimizer": one_of("adam", "sgd"),
    "train.lr": real(("1e-3", "0.5"), ("0", "-1")),
    "train.momentum": share("0", "1", closed="[)"),
    "train.weight_decay": real(("0", "0.1"), ("-0.1",)),
    "train.eps": real(("1e-8",), ("0", "-1e-8")),
    "train.schedule": one_of("constant", "cosine", "exponential"),
    "train.decay": share("0", "1", closed="(]"),
    "train.optimizer_state": one_of("reset", "persist"),
    "train.local_epochs": whole(1, MANY),
    "train.batch_size": whole(1, MANY),
    "train.drop_last_if_single": TRUTH,
    "train.precision": one_of("32-true", "bf16-mixed"),
    "train.channels_last": TRUTH,
    "federation.rounds": whole(0, MANY),
    "federation.per_round": Kind(
        ("1", "4", "null"), ("0", "-1", "1.5", "true", "many", str(MANY + 1), "[1]", ".nan")
    ),
    "federation.bn": one_of("average", "frozen", "local"),
    "federation.weighting": one_of("samples", "uniform"),
    "federation.server_lr": real(("1", "0.5"), ("0", "-1")),
    "federation.average_rounds": Kind(
        ("1", "4", "null"), ("0", "-1", "1.5", "true", "all", str(MANY + 1), "[1]", ".nan")
    ),
    "evaluation.every": whole(1, MANY),
    "evaluation.start": whole(1, MANY),
    "evaluation.batch_size": whole(1, MANY),
    "gpu.tf32": TRUTH,
    "gpu.autotune": TRUTH,
    "gpu.deterministic": TRUTH,
}


@pytest.mark.parametrize("key", KINDS)
def test_a_setting_takes_what_it_may_be_and_nothing_else(key: str) -> None:
    few = {"partition": {"clients": 4}, "federation": {"per_round": 1}}
    for value in KINDS[key].good:
        layer = parse_override(f"{key}={value}")
        validate(RunSettings, merge(BASE, few, layer))
    for value in (*KINDS[key].bad, *NEVER):
        with refused(SettingsError) as caught:
            validate(RunSettings, merge(BASE, few, parse_override(f"{key}={value}")))
        assert len(str(caught.value)) < 400
    misspelt = key[:-2] + key[-1]
    with refused(SettingsError, f"'{key}'"):
        parse_override(f"{misspelt}=1")


# ---------------------------------------------------------------------------------------- texts

PAIRS = [
    ("lr", "expected KEY=VALUE, such as train.lr=0.001"),
    ("", "expected KEY=VALUE"),
    ("=3", "expected KEY=VALUE"),
    ("  =3", "expected KEY=VALUE"),
    ("lr=[1", "not YAML"),
    ("batch_size=8", "is ambiguous: give one of train.batch_size, evaluation.batch_size"),
    ("lrr=1", "unknown setting 'lrr'; did you mean 'train.lr'? See `feddg-bench settings` for all"),
    ("train.batchsize=8", "'train.batch_size'"),
    ("clint=3", "'partition.clients'"),
    ("heterogenity=0", "'partition.heterogeneity'"),
    ("train=3", "'train.lr'"),
    ("trian.lr=3", "'train.lr'"),
]
"""KEY=VALUE, and words of the message."""

FILES = [
    ("- a\n- b\n", "must hold KEY: VALUE lines, not a list"),
    ("train", "not a str"),
    ("a: [1\n", "is not YAML"),
    ("\x00\x01", "YAML"),
    ("train: {lr: 0.1}\ntrain: {lr: 0.2}", "twice"),
    ("train:\n  lr: 0.1\n  lr: 0.2", "twice"),
    ("train: {lr: 0.1}\nlr: 0.2\n", "train.lr is given twice"),
    ("train: {lr: 0.1}\n---\ntrain: {lr: 0.2}", "YAML"),
    ("train: &t {lr: *t}", "deep"),
    ("train: !!python/object/apply:os.system ['true']", "YAML"),
    ("1: 2", "key 1"),
    ("trian: {lr: 0.1}", "unknown setting 'trian'"),
    ("lrr: 0.2\n", "unknown setting 'lrr'"),
    ("train: 5", "setting train: 5 is not valid: expected settings by name, such as train."),
    ("train: null", "setting train"),
    ("hyper: [1]", "setting hyper"),
    ("hyper: 3", "such as hyper.NAME"),
    ("data: pacs", "setting data: 'pacs' is not valid: expected settings by name"),
    ("data.image_size: 8\ndata: 5", "setting data: 5 is not valid"),
    ("evaluation: {splits: tst}", "expected a list, such as [a, b]"),
    ("seed: 1\nseeds: 2", "seeds and seed give the same"),
    ("seed: abc", "seed"),
    ("seed: true", "seed"),
    ("seeds: 1.5", "seeds"),
    ("method: true", "method"),
    ("method: null", "method"),
    ("dataset: [pacs, digits4]", "pacs,digits4"),
    ("dataset: nonsense", "nonsense"),
    ("dataset: null", "dataset"),
    ("scenario: x", "'x'"),
    ("protocol: 5", "protocol"),
]
"""Texts of ``--config`` files."""

RECIPES = [
    ({"settings": 5}, "settings"),
    ({"settings": [1]}, "settings"),
    ({"settings": {"train": 5}}, "train"),
    ({"settings": {"train": {"lr": -1}}}, "train.lr"),
    ({"settings": {"trian": {}}}, "trian"),
    ({"settings": {"roundz": 3}}, "did you mean 'federation.rounds'"),
    *(({"settings": {n: 1}}, n) for n in ("method", "dataset", "protocol", "scenario", "seed")),
    ({"datasets": 5}, "datasets"),
    ({"datasets": ["digits4"]}, "datasets"),
    ({"datasets": {}}, "digits4"),
    ({"datasets": {"pacs": {}}}, "no settings for data set 'digits4', only for pacs; add an entry"),
    ({"datasets": {"digits4": 5}}, "digits4"),
    ({"datasets": {"digits4": {}, "pcas": {}}}, "did you mean 'pacs'"),
    ({"datasets": {"digits4": {"methods": 5}}}, "methods"),
    ({"datasets": {"digits4": {"methods": {"fedavg": 5}}}}, "fedavg"),
    ({"datasets": {"digits4": {"methods": {"pardn": {}}}}}, "did you mean 'pardon'"),
    ({"datasets": {"digits4": {"dataset": "pacs"}}}, "dataset"),
    ({"methods": 5}, "methods"),
    ({"methods": {"fedavg": 5}}, "fedavg"),
    ({"methods": {"fedavgg": {"train": {"lr": 0.5}}}}, "did you mean 'fedavg'"),
    ({"methods": {"fedavg": {"hyper": 5}}}, "hyper"),
    ({"methods": {"fedavg": {"hyper": {"mu": 5}}}}, "mu"),
    (
        {"train": {}},
        "unknown setting 'train'",
        "Known: conclusive, datasets, description, like, methods, rank, settings",
    ),
    ({"like": "pardon-cachd"}, "mine.yaml: unknown recipe 'pardon-cachd'; did you mean 'pardon-"),
]
"""Changes of a recipe for digits4."""


@pytest.mark.parametrize(("text", "words"), PAIRS)
def test_pairs(text: str, words: str) -> None:
    with refused(SettingsError, words):
        parse_override(text)


@pytest.mark.parametrize(("text", "words"), FILES)
def test_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with refused(FeddgError, words):
        Request.read(config=[path]).plan(check=False)


@pytest.mark.parametrize("row", RECIPES, ids=lambda row: str(row[0])[:60])
def test_recipes(tmp_path: Path, row: tuple[Any, ...]) -> None:
    path = tmp_path / "mine.yaml"
    right = {"settings": {}, "datasets": {"digits4": {}}, "methods": {}}
    path.write_text(yaml.safe_dump({**right, **row[0]}))
    with refused(SettingsError, *row[1:]):
        Request(scenario="ip-o-c", recipe=str(path)).plan(check=False)


# ------------------------------------------------------------------------------------- requests

REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"method": "fedgam"}, "fedgma"),
    ({"method": "fedavg,"}, "name of a method is empty; is there a comma too many"),
    ({"method": "all,fedavg"}, "all stands for every method: give it alone"),
    ({"dataset": "digit4"}, "digits4"),
    ({"protocol": "lodoo"}, "lodo"),
    ({"protocol": "ltod", "dataset": "not there"}, "unknown protocol 'ltod'; did you mean 'ltdo'"),
    ({"scenario": "xx"}, "scenario"),
    ({"recipe": "quik"}, "quick"),
    ({"settings": {"rouns": 1}}, "rounds"),
    ({"settings": {"clients": 5, "per_round": 6}}, "per_round"),
    ({"settings": {"clients": 5000, "per_round": 2}}, "clients"),
    ({"settings": {"image_size": 8, "backbone.name": "lenet"}}, "lenet"),
    ({"settings": {"split_csv": "nowhere.csv"}}, "nowhere.csv"),
    *(({"settings": {"split_csv": x}}, "valid string") for x in (2024, True, ["a"], 1e3)),
    *(({"settings": {"data": x}}, "setting data: ") for x in (None, 5, "pacs", [1])),
    ({"settings": {"evaluation.splits": itertools.count()}}, "a list is expected"),
    ({"settings": {"evaluation.splits": range(10**12)}}, "a list is expected"),
    ({"settings": {"batch_size": 1}}, "batch_size"),  # of training or of evaluation?
    ({"settings": {"lr": 0.1, "train.lr": 0.1}}, "train.lr is given twice"),
    *(({"settings": {n: "x"}}, n) for n in ("dataset", "method", "seed")),
    ({"method": "fedprox", "settings": {"hyper.muu": 1}}, "hyper.mu"),
    ({"method": "fedavg,pardon", "settings": {"hyper.styl": "x"}}, "did you mean 'hyper.style'?"),
    (
        {"method": "fedavg", "settings": {"hyper.style": "pixel"}},
        "fedavg: unknown setting 'hyper.style': the method has no settings of its own",
    ),
    (
        {"method": "fedavg,fednova", "settings": {"hyper.style": "pixel"}},
        "none of the methods fedavg, fednova has settings of its own",
    ),
    ({"settings": {"world.tint": 1}}, "'world.tint': the data set has no settings of its own"),
    (
        {"method": "fedavg,fedprox", "settings": {"hyper.mu": -1}},
        "fedprox: setting hyper.mu: -1 is not valid",
    ),
    *(
        ({"seeds": x}, "seeds")
        for x in ("", "a", "0,a", "-1", "2-0", "0-", "1.5", "010", "²", 0, -1)
    ),
    *(({"seeds": x}, "seeds") for x in ([], [-1], [True], True, [1.5], "0-99999999999")),
    *(({"seeds": x}, "more than 100,000: give fewer") for x in ("0-100000000", 10**12, 10**5000)),
    *(({"seeds": x}, "give fewer") for x in ("0-99999,5-99999", range(10**12), itertools.count())),
    ({"seeds": "99999999999999999999"}, "at most 18 digits without"),
    ({"seeds": 20251125}, "for one seed give [20251125]"),
]


@pytest.mark.parametrize(
    ("words", "said"), REQUESTS, ids=lambda x: x[:40] if isinstance(x, str) else ""
)
def test_requests(words: dict[str, Any], said: str) -> None:
    with refused(FeddgError, said):
        if "seeds" in words:
            read_seeds(words["seeds"])
        Request(**{"scenario": "ip-o-c", **words}).plan()


# ---------------------------------------------------------------------------------------- calls


def settings(**values: Any) -> Callable[[], object]:
    """Return a call that validates settings of a run."""
    return lambda: validate(RunSettings, merge(BASE, values))


def counts(*arguments: Any, rounding: str = "reference") -> Callable[[], object]:
    """Return a call that distributes the images of domains over clients."""
    return lambda: heterogeneous_counts(*arguments, rounding=rounding)


def partition(images: int = 20, **values: Any) -> Callable[[], object]:
    """Return a call that makes a partition of images of two domains and five classes."""
    index = np.arange(images)
    domains, labels = index % 2, index // 2 % 5
    return lambda: make_partition(PartitionSettings(**values), index, domains, labels, seed=0)


def named(*arguments: Any) -> Callable[[], object]:
    """Return a call that selects scenarios."""
    return lambda: scenarios(arguments[0], CYCLE, LETTERS, *arguments[1:])


def hyper(method: str, **values: Any) -> Callable[[], object]:
    """Return a call that validates settings of a method."""
    return lambda: validate(load_method(method).Settings, values, "hyper.")


def key_of(weights: str) -> Callable[[], object]:
    """Return a call that computes the key of a run with a weights file."""
    return lambda: canonical_settings(
        validate(RunSettings, merge(BASE, {"backbone": {"weights": weights}}))
    )


CALLS: list[tuple[Any, ...]] = [
    # of settings
    (settings(train={"lr": -1}), "train.lr: -1 is not valid: input should be greater than 0"),
    (settings(federation={"bn": "off"}), "should be 'average', 'frozen' or 'local'"),
    (settings(seed=1.5), "setting seed: 1.5 is not valid: input should be a valid integer"),
    (settings(train={"lr": "fast\nest"}), "setting train.lr: 'fast\\nest' is not valid"),
    (settings(train={"lrr": 1}), "unknown setting 'train.lrr'; did you mean 'train.lr'?"),
    (settings(trian={}), "unknown setting 'trian'"),
    (settings(backbone={"name": "resnet5"}), "backbone.name: unknown backbone 'resnet5'; did you"),
    (settings(augment={"crop_scale": [0.9, 0.1]}), "two numbers with 0 < low <= high <= 1"),
    (settings(augment={"crop_ratio": [0, 1]}), "augment: crop_ratio must be two numbers with 0 <"),
    (settings(scenario=None), "setting scenario: None is not valid"),
    (lambda: validate(RunSettings, {"method": "fedavg"}), "setting scenario is missing"),
    (
        lambda: validate(RunSettings, {"method": "fedavg", "scenari": "ip-o-c"}),
        "did you mean 'scenario'?",
    ),
    *(
        (
            settings(partition={"kind": kind, "clients": 4}, federation={"per_round": 5}),
            "federation.per_round is 5 but partition.clients is 4",
        )
        for kind in ("heterogeneous", "dirichlet", "label_dirichlet", "label_shards")
    ),
    (hyper("fedprox", muu=1), "unknown setting 'hyper.muu'; did you mean 'hyper.mu'? Known: hyper"),
    (hyper("fedprox", mu=-1), "setting hyper.mu: -1 is not valid"),
    (lambda: parse_override("lr=1", ["hyper.lr"]), "train.lr, hyper.lr"),
    (lambda: parse_override("mu=1"), "; if it is the method's own, write hyper.mu"),
    *(
        (lambda word=word: parse_override(f"{word}=1", NAMES), f"unknown setting '{word}'; {said}")
        for word, said in (
            ("learning_rate", "did you mean 'train.lr'?"),
            ("learningRate", "did you mean 'train.lr'?"),
            ("epochs", "did you mean 'train.local_epochs'?"),
            ("test_envs", "did you mean 'scenario'?"),
            ("batch", "did you mean 'train.batch_size'?"),
            ("num_clients", "did you mean 'partition.clients'?"),
            ("participation", "did you mean 'federation.per_round'?"),
            ("train.wd", "did you mean 'train.weight_decay'?"),
            ("arch", "did you mean 'backbone.name'?"),
            ("n_trials", "did you mean 'num_seeds'?"),
        )
    ),
    (settings(train={"learning-rate": 1}), "'train.learning-rate'; did you mean 'train.lr'?"),
    (lambda: Request(settings={"seed": 3}), "seed is no setting: give it as seeds=[3]"),
    (lambda: Request.read(pairs=["fedprox,MOON"]), "did you mean --method fedprox,MOON?"),
    (lambda: Request.read(pairs=["pacs"]), "did you mean --dataset pacs?"),
    (lambda: Request.read(pairs=["ltdo"]), "did you mean --protocol ltdo?"),
    (
        lambda: Request.read(flags={"seeds": "0"}, pairs=["num_seeds=2"]),
        "seeds and num_seeds give the same: leave in only one",
    ),
    *(
        (lambda n=n: Request.read(pairs=[f"num_seeds={n}"]), f"num_seeds: {said} cannot be read;")
        for n, said in (("0", "0"), ("true", "True"), ("many", "'many'"), ("100001", "100001"))
    ),
    *(
        (lambda words=words: fb.run(**words), *said)
        for words, said in (
            (
                {"learning_rate": 1},
                ("learning_rate is a setting: give it as settings=",),
            ),
            ({"lr": 1}, ("lr is a setting: give it as settings={'train.lr': 1}",)),
            ({"num_clients": 1}, ("argument of run 'num_clients'; did you mean 'clients'?",)),
            ({"sede": 1}, ("unknown argument of run 'sede'", "protocol", "scenario", "seeds")),
            ({"seeds": 3, "num_seeds": 2}, ("seeds and num_seeds give the same",)),
            ({"seed": 3, "seeds": [3]}, ("seeds and seed give the same",)),
            ({"rounds": 2, "settings": {"rounds": 2}}, ("federation.rounds is given twice",)),
            ({"config": 3}, ("config: 3 cannot be read; expected paths",)),
            ({"config": "absent.yaml"}, ("cannot read settings file absent.yaml",)),
        )
    ),
    *(
        (lambda model=model, value=value: validate(model, value), next(iter(value)))
        for model, value in (
            (FederationSettings, {"rounds": True}),
            (FederationSettings, {"server_lr": False}),
            (FederationSettings, {"per_round": True}),
            (TrainSettings, {"fold_batch_norm": 0.0}),
            (TrainSettings, {"fold_batch_norm": "on"}),
            (load_method("ccst").Settings, {"style_augment": 1}),
            (FederationSettings, {"rounds": 10**9}),
            (AugmentSettings, {"crop_scale": [True, 1]}),
            (TrainSettings, {"batch_size": 10**14}),
            (Resources, {"workers": 100_000}),
            (Resources, {"threads": 100_000}),
        )
    ),
    *(
        (lambda name=name: validate(BackboneSettings, {"name": name}), "unknown backbone")
        for name in ("timm:", "timm", "resnet")
    ),
    # of files
    (lambda: load_layer(Path("/dev/zero")), "/dev/zero"),
    (lambda: load_layer(Path("/absent.yaml"), "recipe"), "cannot read recipe", "No such file"),
    (lambda: load_recipe("/absent.yaml", "pacs", "fedavg"), "cannot read recipe"),
    (lambda: load_recipe("quik", "pacs", "fedavg"), "unknown recipe 'quik'; did you mean 'quick'?"),
    (lambda: load_recipe("laptop", "camelyon", "fedavg"), "copy it"),
    (lambda: load_recipe("pardon", "pacs", "fedgma", "publishd"), "published"),
    (key_of("/absent.pth"), DataError, "cannot read /absent.pth: No such file", "check the path"),
    (key_of("\0"), DataError, "check the path"),
    (key_of("x" * 5000), DataError, "check the path"),
    (lambda: load_tensors(Path("/gone.pth")), DataError, "there is no weights file", "gone"),
    (lambda: load_tensors(Path("/")), DataError, "there is no weights file"),
    # of clients and domains
    (counts((3, 2), 2, 1.5), "heterogeneity is 1.5"),
    (counts((3, 2), 2, -0.1), "heterogeneity is -0.1"),
    (counts((3, 2), 2, float("nan")), "heterogeneity is nan"),
    (counts((3, 2), 0, 0.5), "number of clients is 0"),
    (counts((3, 2), 2, 0.5, rounding="referense"), "did you mean 'reference'"),
    (counts((0, 0), 2, 0.5), "at least one image"),
    (counts((), 2, 0.5), "at least one image"),
    (counts((3, -1), 2, 0.5), "count >= 0"),
    (counts(((3, 1), (2, 2)), 2, 0.5), "one count"),
    (partition(clients=10**6), "partition.clients is 1000000", "20 training"),
    (partition(kind="per_domain", clients_per_domain=10**6), "clients_per_domain is 1000000"),
    (partition(clients=3, min_client_size=7), "too few for 7 each"),
    (
        partition(21, kind="per_domain", clients_per_domain=4, min_client_size=3),
        "3 of 8 clients would hold fewer than 3 of the 21 training images, the smallest 2",
    ),
    (partition(0), DataError, "no training images"),
    (
        partition(kind="label_shards", clients=4, classes_per_client=6),
        "classes_per_client is 6 but the training images have only 5 classes",
    ),
    (
        partition(kind="label_shards", clients=4, heterogeneity=0),
        "with partition.clients=4 and partition.classes_per_client=2, no client has a class of",
    ),
    (
        lambda: make_partition(
            PartitionSettings(kind="label_dirichlet", clients=2),
            *np.zeros((2, 9), int),
            np.zeros(9),
            seed=0,
        ),
        "spreads the images of each class, but this data set is a regression",
    ),
    *(
        (lambda size=size: sample_clients("abc", size, seed=0, round=1), f"{size} of 3 clients")
        for size in (0, 4)
    ),
    # of scenarios
    *(
        (named("ltdo", select), "unknown scenario", "Known:", "pa")
        for select in ("ac-p-p", "aa-p-s", "acc-p-s", "a-p-s", "art_painting-photo-sketch", "acs-p")
    ),
    *(
        (named("ltdo", select), "unknown scenario", "Known:", "pa")
        for select in ("sketches", "x-ac-p-s", "ac-p-s,all")
    ),
    *((named("lodo", select), "unknown scenario", "Known:") for select in ("ac-p-s", "acp-p")),
    *(
        (named("ltdo", select), "the name of a scenario is empty", "comma", "Known:", "pa")
        for select in ("", "ac-p-s,")
    ),
    (named("ltdo", "ac-p-x"), "did you mean 'ac-p-s'"),
    (named("ltod"), "unknown protocol"),
    *(
        (named("wilds", None, official), "published splits", "use --protocol lodo")
        for official in (None, {}, {"train": ("a",), "test": ()})
    ),
]
"""Calls, the exception unless it is `SettingsError`, and words of the message."""


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row[-1][:50])
def test_calls(row: tuple[Any, ...]) -> None:
    call, *words = row
    error = SettingsError if isinstance(words[0], str) else words.pop(0)
    with refused(error, *words):
        call()
