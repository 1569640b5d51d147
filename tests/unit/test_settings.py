"""Settings: layers, overrides, one-line refusals, and the run key."""

from __future__ import annotations

import os

import pytest
import yaml
from pydantic import Field, ValidationError

from feddg_bench.common.errors import SettingsError, unknown
from feddg_bench.config.keys import canonical_settings, run_key
from feddg_bench.config.layers import dotted_keys, load_layer, merge, parse_override, validate
from feddg_bench.config.own import own_settings_of
from feddg_bench.config.schema import MethodSettings, Resources, RunSettings
from tests.helpers import refused

BASE = {"method": "fedavg", "scenario": "ac-p-s"}


class Hyper(MethodSettings):
    """A method's settings with a file and a list of files."""

    files = ("weights", "parts")

    mu: float = Field(0.01, ge=0)
    weights: str | None = None
    parts: tuple[str, ...] = ()


# ------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("text", "layer"),
    [
        ("train.lr=0.01", {"train": {"lr": 0.01}}),
        ("lr=0.01", {"train": {"lr": 0.01}}),
        (" lr =0.01", {"train": {"lr": 0.01}}),
        ("seed=3", {"seed": 3}),
        ("rounds=50", {"federation": {"rounds": 50}}),
        ("per_round=null", {"federation": {"per_round": None}}),
        ("pretrained=false", {"backbone": {"pretrained": False}}),
        ("crop_scale=[0.5, 1]", {"augment": {"crop_scale": [0.5, 1]}}),
        ("scenario=a=b", {"scenario": "a=b"}),
        ("hyper.mu=0.1", {"hyper": {"mu": 0.1}}),
        ("hyper={mu: 0.1}", {"hyper": {"mu": 0.1}}),
        ("hyper.files=[a, b]", {"hyper": {"files": ["a", "b"]}}),
        ("bn=frozen", {"federation": {"bn": "frozen"}}),
    ],
)
def test_key_equals_value(text, layer):
    assert parse_override(text) == layer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e-3", 0.001),
        ("3E-5", 3e-5),
        ("1e4", 1e4),
        (".5", 0.5),
        ("-2e+1", -20.0),
        ("1.0e-3", 1e-3),
    ],
)
def test_numbers_that_yaml_takes_for_text(text, number):
    value = parse_override(f"lr={text}")["train"]["lr"]
    assert isinstance(value, float)
    assert value == number


@pytest.mark.parametrize("key", list(dotted_keys()))
def test_every_setting_can_be_given_by_its_whole_key(key):
    layer = parse_override(f"{key}=1")
    for part in key.split("."):
        layer = layer[part]
    assert layer == 1


def test_short_keys_of_methods():
    assert parse_override("mu=1", ["hyper.mu"]) == {"hyper": {"mu": 1}}


# ---------------------------------------------------------------------------------- layers


def test_layers_are_not_changed_by_a_merge():
    first, second = {"train": {"lr": 1}}, {"train": {"eps": 2}}
    merge(first, second, {"train": {"lr": 5}})
    assert (first, second) == ({"train": {"lr": 1}}, {"train": {"eps": 2}})


def test_a_settings_file(tmp_path):
    path = tmp_path / "more.yaml"
    path.write_text("train: {lr: 0.1}\n")
    assert load_layer(path) == {"train": {"lr": 0.1}}
    path.write_text("# nothing\n")
    assert load_layer(path) == {}


# ----------------------------------------------------------------------------- validation


def test_other_partitions_count_their_own_clients():
    values = {"partition": {"kind": "per_domain", "clients": 4}, "federation": {"per_round": 5}}
    assert validate(RunSettings, merge(BASE, values)).federation.per_round == 5


def test_settings_are_frozen():
    settings = validate(RunSettings, BASE)
    with pytest.raises(ValidationError, match="frozen"):
        settings.train.lr = 1.0


def test_numbers_may_come_as_text():
    assert validate(RunSettings, merge(BASE, {"train": {"lr": "1e-3"}})).train.lr == 1e-3


def test_the_nearest_name_is_offered():
    assert unknown("method", "fedgam", ["fedavg", "fedgma"]) == (
        "unknown method 'fedgam'; did you mean 'fedgma'? Known: fedavg, fedgma"
    )
    assert unknown("method", "", ["fedavg"]) == (
        "the name of a method is empty; is there a comma too many? Known: fedavg"
    )
    assert unknown("method", "zzz", ["fedavg"]) == "unknown method 'zzz'. Known: fedavg"


# --------------------------------------------------------------------------------- run key

OTHER = {
    "method": "fedprox",
    "dataset": "pacs",
    "protocol": "lodo",
    "scenario": "c-a-s",
    "seed": 1,
    "data.image_size": 96,
    "data.id_val_fraction": 0.1,
    "data.id_test_fraction": 0.1,
    "data.background": "white",
    "data.exif": True,
    "data.skip_unreadable": True,
    "data.split_csv": None,  # a file: below
    "augment.crop_scale": None,
    "augment.crop_ratio": [0.8, 1.25],
    "augment.flip": 0.4,
    "augment.brightness": 0.2,
    "augment.contrast": 0.2,
    "augment.saturation": 0.2,
    "augment.hue": 0.2,
    "augment.grayscale": 0.2,
    "partition.kind": "domain",
    "partition.clients": 99,
    "partition.heterogeneity": 0.2,
    "partition.rounding": "reference",
    "partition.seed": 1001,
    "partition.clients_per_domain": 3,
    "partition.classes_per_client": 3,
    "partition.alpha": 0.6,
    "partition.min_client_size": 2,
    "backbone.name": "resnet18",
    "backbone.pretrained": False,
    "backbone.weights": None,  # a file: below
    "backbone.padding": "tf",
    "backbone.normalisation": "half",
    "backbone.projection": 64,
    "train.optimizer": "sgd",
    "train.lr": 0.1,
    "train.momentum": 0.9,
    "train.weight_decay": 0.1,
    "train.eps": 1e-7,
    "train.schedule": "cosine",
    "train.decay": 0.5,
    "train.optimizer_state": "persist",
    "train.local_epochs": 2,
    "train.batch_size": 16,
    "train.drop_last_if_single": True,
    "train.precision": "bf16-mixed",
    "train.channels_last": False,
    "train.fold_batch_norm": "auto",
    "train.depthwise_sums": True,
    "federation.rounds": 51,
    "federation.per_round": None,
    "federation.bn": "local",
    "federation.weighting": "uniform",
    "federation.server_lr": 0.5,
    "federation.average_rounds": 10,
    "portable": True,
    "federation.on_fault": "fail",
    "evaluation.every": 2,
    "evaluation.start": 2,
    "evaluation.splits": ["test"],
    "evaluation.metrics": ["ece"],
    "data.client_test_fraction": 0.2,
    "federation.unseen_clients": 2,
    "backbone.hidden": 64,
    "backbone.adapter": 64,
    "backbone.adapter_ratio": 0.3,
    "backbone.classifier": "cosine",
    "backbone.temperature": 0.1,
    "backbone.trainable": "head",
    "features.encoder": "resnet18",
    "features.views": 3,
    "features.digest": "0123abcd",
    "evaluation.batch_size": 64,
    "gpu.tf32": True,
    "gpu.autotune": True,
    "gpu.deterministic": False,
    "evaluation.fuse_batch_norm": True,
    "privacy.mechanism": "dp_style",
    "privacy.clip_norm": 2.0,
    "privacy.noise_multiplier": 2.0,
    "privacy.delta": 1e-3,
    "privacy.sampling": "fixed",
    "privacy.accountant": "prv",
    "privacy.adaptive_clipping": True,
    "privacy.clip_quantile": 0.4,
    "privacy.clip_rate": 0.1,
    "privacy.count_noise": 3.0,
    "privacy.aggregation": "secure",
    "privacy.bits": 32,
    "privacy.fraction_bits": 16,
    "privacy.threshold": 0.5,
    "privacy.dropout": 0.1,
    "hyper": {"mu": 0.5},
    "world": {"q": 0.5},
}
SECURE = {
    f"privacy.{name}": {"privacy": {"aggregation": "secure"}}
    for name in ("bits", "fraction_bits", "threshold", "dropout")
}
PRIVATE = {
    key: {
        "privacy": {"mechanism": "dp_client", "adaptive_clipping": "adaptive" not in key},
        "federation": {"weighting": "uniform"},
    }
    for key in OTHER
    if key.startswith("privacy.") and key not in ("privacy.mechanism", "privacy.aggregation")
}
FEATURES = {
    key: {"backbone": {"name": "features"}, "features": {"encoder": "resnet50"}}
    for key in OTHER
    if key.startswith("features.")
}
NEEDED = PRIVATE | SECURE | FEATURES
"""Settings without which a setting has no effect and is refused."""
FILES = ("data.split_csv", "backbone.weights")


def nested(key, value):
    """Return the layer that sets one dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def key_of(*layers, plugin=MethodSettings, version=1):
    settings = validate(RunSettings, merge(BASE, *layers))
    return run_key(canonical_settings(settings, own_settings_of(plugin)), version)


REMOVED = {"federation.client_timeout", "engine.clients"}


@pytest.mark.parametrize("key", sorted({*dotted_keys()} - REMOVED - {*FILES}))
def test_every_setting_changes_the_key(key):
    needed = NEEDED.get(key, {})
    assert key_of(needed, nested(key, OTHER[key])) != key_of(needed)


def test_how_gpus_compute_is_left_out_of_the_key_while_it_is_the_default():
    default = {"gpu": {"tf32": False, "autotune": False, "deterministic": True}}
    assert key_of(default) == key_of()
    settings = validate(RunSettings, merge(BASE, default))
    assert "gpu" not in canonical_settings(settings)


@pytest.mark.parametrize(
    ("pair", "default", "hint"),
    [
        ("client_timeout=60", {"federation": {"client_timeout": None}}, "Ctrl-C"),
        ("engine.clients=auto", {"engine": {"clients": "exact"}}, "leave engine.clients out"),
        ("engine.clients=batched", {"engine": {"clients": "exact"}}, "leave engine.clients out"),
    ],
)
def test_values_that_were_removed_are_refused_and_defaults_keep_the_key(pair, default, hint):
    assert key_of(default) == key_of()
    with refused(SettingsError, pair.partition("=")[0], "was removed", hint):
        key_of(parse_override(pair))


def test_no_two_changes_give_the_same_key():
    keys = [
        key_of(NEEDED.get(key, {}), nested(key, value))
        for key, value in OTHER.items()
        if key not in FILES
    ]
    assert len(set(keys)) == len(keys)


def test_the_key_is_the_same_for_the_same_values():
    assert key_of({"train": {"lr": 0.01, "eps": 1e-6}}) == key_of(
        {"train": {"eps": "1e-6", "lr": 1e-2}}
    )
    default = validate(RunSettings, BASE).model_dump(mode="json")
    assert key_of(default) == key_of()


def test_the_default_decay_is_not_in_the_key():
    """Records from before this setting existed keep their keys."""
    layer = {"train": {"schedule": "cosine"}}
    assert "decay" not in canonical_settings(validate(RunSettings, merge(BASE, layer)))["train"]
    assert key_of({"train": {"decay": 0.96}}) == key_of()


def test_the_key_is_sixteen_hexadecimal_digits():
    assert len(key_of()) == 16
    assert int(key_of(), 16) >= 0


def test_a_new_version_of_the_method_changes_the_key():
    assert key_of(version=2) != key_of()


@pytest.fixture
def three_files(tmp_path):
    """Two files of equal content and one that differs."""
    texts = {"first": "a", "second": "a", "third": "b"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return [str(tmp_path / name) for name in texts]


@pytest.mark.parametrize("key", [*FILES, "hyper.weights"])
def test_a_file_enters_the_key_by_its_content(three_files, key):
    first, second, third = (key_of(nested(key, f), plugin=Hyper) for f in three_files)
    assert first == second
    assert len({first, third, key_of()}) == 3


def test_a_list_of_files_enters_the_key_by_content_and_order(three_files):
    first, second, third = three_files

    def key(*paths):
        return key_of({"hyper": {"parts": list(paths)}}, plugin=Hyper)

    assert key(first, third) == key(second, third)
    assert len({key(first, third), key(third, first), key(first), key(), key(first, second)}) == 5


def test_no_path_is_in_the_canonical_settings(three_files):
    values = {"backbone": {"weights": three_files[0]}, "hyper": {"parts": three_files}}
    settings = validate(RunSettings, merge(BASE, values))
    canonical = canonical_settings(settings, own_settings_of(Hyper))
    assert os.path.dirname(three_files[0]) not in yaml.safe_dump(canonical)  # noqa: PTH120


@pytest.mark.parametrize("key", ["partition.heterogeneity", "augment.flip"])
def test_there_is_one_zero(key):
    zeros = (key_of(nested(key, zero), plugin=Hyper) for zero in (0, 0.0, -0.0, "-0.0"))
    assert len(set(zeros)) == 1


def test_folders_stay_where_they_were_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    resources = validate(Resources, {"data_root": "d", "cache_dir": "~/c"})
    monkeypatch.chdir("/")
    assert resources.results == tmp_path / "runs"
    assert resources.data_root == tmp_path / "d"
    assert str(resources.cache_dir) == "/home/me/c"


def test_where_a_run_is_computed_is_not_part_of_what():
    settings = {key.split(".")[-1] for key in {*dotted_keys()} - REMOVED}
    assert not set(Resources.model_fields) & settings


# ----------------------------------------------------------------------------------- YAML


def test_settings_survive_yaml():
    others = [nested(k, v) for k, v in OTHER.items() if k not in ("method", "scenario")]
    consistent = {
        "privacy": {"mechanism": "dp_client", "accountant": "rdp"},
        "features": {"encoder": None, "views": 1, "digest": None},
    }
    settings = validate(RunSettings, merge(BASE, *others, consistent))
    text = yaml.safe_dump(settings.model_dump(mode="json"))
    assert validate(RunSettings, yaml.safe_load(text)) == settings
