"""Recipes named after papers have the values of the papers and their code, with sources."""

from __future__ import annotations

from typing import Any

import pytest

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import dotted, merge
from feddg_bench.config.recipes import READINGS, load_recipe, read_recipe, recipe_names
from feddg_bench.plugins import load_method, names
from feddg_bench.runs.request import Request, _say_once

PARDON = "PARDON-FedDG: config/*/PACS, main.py"
CODE = "PARDON-FedDG: src/server.py, src/client.py"
CENTRAL = "FedDG_Benchmark: sweep/cen_random_seeds"
SEEDS = "FedDG_Benchmark: sweep/random_seeds"
BAI = "FedDG_Benchmark: src/client.py, src/server.py"
FEDCCRL = "FedCCRL: algorithm/, config"
PPDG = "PPDG, section 4"
WILDS = "wilds: configs, examples/transforms.py"

FRAMES: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "pardon",
        "pacs",
        {
            "backbone.name": "resnet50",
            "backbone.projection": 2048,
            "data.image_size": 224,
            "partition.clients": 100,
            "partition.heterogeneity": 0.1,
            "partition.rounding": "reference",
            "federation.per_round": 20,
            "federation.rounds": 50,
            "federation.bn": "frozen",
            "train.optimizer": "adam",
            "train.lr": 3e-5,
            "train.batch_size": 32,
            "train.local_epochs": 1,
            "augment.hue": 0.3,
            "augment.crop_scale": [0.7, 1.0],
        },
        PARDON,
    ),
    ("pardon", "officehome", {"augment.hue": 0.4, "federation.rounds": 50}, CODE),
    (
        "pardon",
        "iwildcam",
        {"partition.clients": 243, "federation.per_round": 24, "federation.rounds": 100},
        "PARDON-FedDG: config/FISC/IWildCams",
    ),
    (
        "fedccrl",
        "pacs",
        {
            "backbone.name": "mobilenet_v3_large",
            "data.image_size": 224,
            "data.id_val_fraction": 0.1,
            "partition.kind": "per_domain",
            "partition.clients_per_domain": 2,
            "federation.rounds": 10,
            "federation.per_round": None,
            "train.lr": 1e-3,
            "train.weight_decay": 1e-4,
            "train.schedule": "cosine",
            "train.optimizer_state": "persist",
            "train.local_epochs": 3,
            "train.batch_size": 32,
            "augment.flip": 0.0,
        },
        FEDCCRL,
    ),
    ("fedccrl", "minidomainnet", {"data.image_size": 128, "train.batch_size": 128}, FEDCCRL),
    (
        "ppdg",
        "camelyon17",
        {
            "backbone.name": "densenet121",
            "backbone.pretrained": False,
            "federation.rounds": 10,
            "train.optimizer": "sgd",
            "train.lr": 1e-3,
            "train.momentum": 0.9,
            "train.weight_decay": 0.01,
            "train.batch_size": 32,
        },
        PPDG,
    ),
    (
        "ppdg",
        "poverty",
        {
            "backbone.name": "resnet18",
            "federation.rounds": 200,
            "federation.per_round": 13,
            "train.lr": 1e-3,
            "train.schedule": "exponential",
            "train.decay": 0.96,
            "train.batch_size": 64,
        },
        PPDG,
    ),
    ("ppdg", "poverty", {"augment.flip": 0.5}, WILDS),
    (
        "ppdg",
        "fmow",
        {"federation.per_round": 5, "train.lr": 1e-4, "train.decay": 0.96, "train.batch_size": 32},
        PPDG,
    ),
    (
        "feddg_benchmark",
        "pacs",
        {"federation.rounds": 80, "federation.per_round": None, "train.lr": 3e-5},
        SEEDS,
    ),
    ("feddg_benchmark", "femnist", {"train.lr": 2e-3, "train.batch_size": 1024}, SEEDS),
    ("feddg_benchmark", "camelyon17", {"federation.rounds": 20, "train.batch_size": 512}, SEEDS),
]
"""Recipe, data set, settings of the setup, and their source."""

METHODS: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("pardon", "pacs", "pardon", {"triplet_weight": 0.75, "feature_weight": 0.2}, CODE),
    ("pardon", "pacs", "pardon", {"margin": 0.3, "style": "vgg19"}, CODE),
    ("pardon", "officehome", "pardon", {"feature_weight": 0.1}, CODE),
    ("pardon", "iwildcam", "pardon", {"feature_weight": 0.2}, CODE),
    ("pardon", "pacs", "fedgma", {"variant": "reference", "threshold": 0.4}, PARDON),
    ("pardon", "pacs", "fedgma", {"federation.server_lr": 1.0}, PARDON),
    ("pardon", "officehome", "feddg_ga", {"variant": "pardon"}, CODE),
    ("pardon", "pacs", "fpl", {"pardon_bugs": True, "temperature": 0.02}, CODE),
    ("pardon", "pacs", "ccst", {"preset": "pardon", "style": "vgg19"}, CODE),
    ("pardon", "pacs", "fedsr", {"variant": "pardon", "test_samples": 1}, CODE),
    ("pardon", "pacs", "fedsr", {"train.optimizer": "sgd", "train.lr": 3e-5}, PARDON),
    ("pardon", "pacs", "fedsr", {"l2_weight": 0.01, "cmi_weight": 0.001}, PARDON),
    ("fedccrl", "pacs", "fedsr", {"variant": "aggregated", "test_samples": 1}, FEDCCRL),
    ("fedccrl", "pacs", "fedsr", {"l2_weight": 1e-3, "cmi_weight": 1e-3}, FEDCCRL),
    ("fedccrl", "officehome", "ccst", {"preset": "fedccrl"}, FEDCCRL),
    ("fedccrl", "pacs", "fediir", {"federation.weighting": "samples"}, FEDCCRL),
    ("fedccrl", "pacs", "fediir", {"gamma": 5e-4, "ema": 0.9, "mean": "clients"}, FEDCCRL),
    ("fedccrl", "pacs", "feddg_ga", {"variant": "fedccrl"}, FEDCCRL),
    ("fedccrl", "pacs", "fedadg", {"variant": "released_fedccrl"}, FEDCCRL),
    ("fedccrl", "pacs", "fedadg", {"train.optimizer": "sgd", "train.momentum": 0.9}, FEDCCRL),
    ("fedccrl", "pacs", "fedccrl", {"variant": "released"}, FEDCCRL),
    ("fedccrl", "pacs", "fedccrl", {"lambda1": 0.1, "lambda2": 1.0}, "FedCCRL, section 4"),
    ("fedccrl", "pacs", "fedprox", {"mu": 0.01}, FEDCCRL),
    ("ppdg", "rmnist", "ppdg", {"strength": 0.001}, PPDG),
    ("ppdg", "terraincognita", "ppdg", {"strength": 0.2}, PPDG),
    ("ppdg", "camelyon17", "ppdg", {"strength": 0.1}, PPDG),
    ("ppdg", "poverty", "ppdg", {"strength": 0.1}, PPDG),
    ("ppdg", "fmow", "ppdg", {"strength": 0.05}, PPDG),
    ("ppdg", "rmnist", "fedprox", {"mu": 0.1}, PPDG),
    ("ppdg", "fmow", "fedprox", {"mu": 0.01}, PPDG),
    ("feddg_benchmark", "pacs", "erm", {"federation.rounds": 10, "train.lr": 3e-5}, CENTRAL),
    ("feddg_benchmark", "pacs", "erm", {"train.optimizer_state": "reset"}, BAI),
    ("feddg_benchmark", "femnist", "erm", {"federation.rounds": 40, "train.lr": 1e-3}, CENTRAL),
    ("feddg_benchmark", "femnist", "erm", {"train.batch_size": 512}, CENTRAL),
    ("feddg_benchmark", "camelyon17", "erm", {"federation.rounds": 10}, CENTRAL),
    ("feddg_benchmark", "camelyon17", "erm", {"train.weight_decay": 5e-5}, CENTRAL),
    ("feddg_benchmark", "iwildcam", "fedavg", {"federation.rounds": 80}, SEEDS),
    ("feddg_benchmark", "pacs", "fedprox", {"train.lr": 1e-5, "mu": 1.0, "norm": "l2"}, SEEDS),
    ("feddg_benchmark", "femnist", "fedprox", {"train.lr": 1e-3, "mu": 0.01}, SEEDS),
    ("feddg_benchmark", "camelyon17", "fedprox", {"train.lr": 5e-4, "mu": 0.001}, SEEDS),
    ("feddg_benchmark", "pacs", "fedgma", {"threshold": 0.1, "federation.server_lr": 0.1}, SEEDS),
    ("feddg_benchmark", "femnist", "fedgma", {"threshold": 0.2, "train.lr": 3e-5}, SEEDS),
    ("feddg_benchmark", "iwildcam", "fedgma", {"threshold": 0.4, "train.batch_size": 64}, SEEDS),
    ("feddg_benchmark", "camelyon17", "fedgma", {"federation.server_lr": 0.4}, SEEDS),
    ("feddg_benchmark", "camelyon17", "fedgma", {"variant": "reference"}, BAI),
    ("feddg_benchmark", "pacs", "fedsr", {"variant": "bai", "test_samples": 1}, BAI),
    ("feddg_benchmark", "iwildcam", "fedsr", {"l2_weight": 0.01, "train.batch_size": 64}, SEEDS),
    ("feddg_benchmark", "pacs", "fedadg", {"variant": "released_bai"}, BAI),
    ("feddg_benchmark", "iwildcam", "fedadg", {"train.lr": 2e-5, "federation.rounds": 70}, SEEDS),
    ("feddg_benchmark", "iwildcam", "fedadg", {"train.weight_decay": 5e-5}, SEEDS),
    ("feddg_benchmark", "camelyon17", "fedadg", {"train.lr": 1e-4, "ce_weight": 0.1}, SEEDS),
    ("feddg_benchmark", "camelyon17", "fedadg", {"adversary_lr": 1e-3, "noise": 0.5}, SEEDS),
    ("feddg_benchmark", "camelyon17", "fedadg", {"train.batch_size": 512}, SEEDS),
    ("feddg_benchmark", "camelyon17", "fedadg", {"train.weight_decay": 5e-5}, SEEDS),
]
"""Recipe, data set, method, values (bare names are the method's own settings), and their source.

The parity tests check what a preset or a variant sets."""

CORRECTED: list[tuple[str, str, str, dict[str, Any]]] = [
    ("pardon", "pacs", "fedgma", {"variant": "paper", "federation.server_lr": 1.0}),
    ("pardon", "pacs", "feddg_ga", {"variant": "default", "step": 0.2}),
    ("pardon", "pacs", "fpl", {"pardon_bugs": False}),
    ("pardon", "pacs", "fedsr", {"variant": "official", "test_samples": 20}),
    ("pardon", "pacs", "fedsr", {"train.optimizer": "adam", "train.lr": 3e-5}),
    ("fedccrl", "pacs", "fedccrl", {"variant": "default", "lambda2": 1.0}),
    ("fedccrl", "pacs", "fedsr", {"variant": "official", "l2_weight": 1e-3}),
    ("feddg_benchmark", "pacs", "fedgma", {"variant": "paper", "federation.server_lr": 1.0}),
    ("feddg_benchmark", "pacs", "fedprox", {"norm": "squared", "mu": 1.0}),
    ("feddg_benchmark", "pacs", "erm", {"train.optimizer_state": "persist"}),
    ("feddg_benchmark", "camelyon17", "fedadg", {"train_generator": True, "ce_weight": 0.1}),
]
"""The same for values that ``--readings corrected`` changes."""


def values_of(recipe: str, dataset: str, method: str, readings: str) -> dict[str, Any]:
    """Return a run's settings by dotted key, the method's own by bare name."""
    base, own = load_recipe(recipe, dataset, method, readings)
    cls = load_method(method)
    merged = merge(base, cls.needs, own)
    hyper = cls.Settings.model_validate(merged.pop("hyper", {})).model_dump(mode="json")
    defaults = {"federation": {"server_lr": 1.0, "weighting": "samples"}}
    return {**dotted(merge(defaults, merged)), **hyper}


def check(expected: dict[str, Any], values: dict[str, Any]) -> None:
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize(("recipe", "dataset", "expected", "source"), FRAMES)
def test_the_frame_is_the_papers(recipe, dataset, expected, source):
    assert source
    for readings in READINGS:  # they change methods, never the setup
        check(expected, values_of(recipe, dataset, "fedavg", readings))


@pytest.mark.parametrize(("recipe", "dataset", "method", "expected", "source"), METHODS)
def test_methods_are_as_in_the_papers_tables(recipe, dataset, method, expected, source):
    assert source
    check(expected, values_of(recipe, dataset, method, "published"))


@pytest.mark.parametrize(("recipe", "dataset", "method", "expected"), CORRECTED)
def test_corrected_readings_are_the_methods_own_formulas(recipe, dataset, method, expected):
    check(expected, values_of(recipe, dataset, method, "corrected"))


def test_readings_change_the_key_and_not_that_of_quick():
    def key(recipe: str, readings: str) -> str:
        request = Request("fedprox", recipe=recipe, dataset="digits4", readings=readings)
        return request.plan(check=False)[0].key

    assert key("quick", "published") == key("quick", "corrected")
    femnist = [values_of("feddg_benchmark", "femnist", "fedprox", r) for r in READINGS]
    assert femnist[0] != femnist[1]


def test_pardon_cached_is_pardon_with_settings_that_are_faster_on_a_gpu():
    faster = {
        "train.precision": "bf16-mixed",
        "gpu.tf32": True,
        "evaluation.every": 5,
        "hyper.transfer": "cached",
    }
    for method in ("pardon", "fedsr", "scaffold"):
        theirs, ours = (
            dotted(merge(*load_recipe(recipe, "pacs", method)))
            for recipe in ("pardon", "pardon-cached")
        )
        own = {
            key: value for key, value in faster.items() if method == "pardon" or "hyper" not in key
        }
        assert ours == theirs | own


def test_every_recipe_gives_scaffold_a_rate_for_sgd():
    for recipe in recipe_names():
        for dataset in read_recipe(recipe).datasets or ():
            base, own = load_recipe(recipe, dataset, "scaffold")
            sgd = merge(base, own).get("train", {}).get("optimizer") == "sgd"
            assert "lr" in own.get("train", {}) or sgd, (recipe, dataset)


def test_scaffold_does_not_take_the_rate_of_adam(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("datasets: {digits4: {train: {lr: 0.001}}}")

    def plan(text: str = "", **settings: Any) -> float:
        path.write_text(text or path.read_text())
        request = Request("scaffold", recipe=str(path), settings=settings)
        return request.plan(check=False)[0].settings.train.lr

    with pytest.raises(SettingsError, match="sgd"):
        plan()
    assert plan(lr=0.001) == 0.001  # an explicit rate is used
    assert plan("datasets: {digits4: {train: {optimizer: sgd, lr: 0.01}}}") == 0.01
    own = "datasets: {digits4: {train: {lr: 1}, methods: {scaffold: {train: {lr: 0.1}}}}}"
    assert plan(own) == 0.1


def test_all_leaves_out_methods_without_a_rate_for_their_optimizer(tmp_path, caplog):
    _say_once.cache_clear()
    path = tmp_path / "mine.yaml"
    path.write_text("datasets: {digits4: {train: {lr: 0.001}}}")
    plans = Request("all", scenario="ip-o-c", recipe=str(path)).plan(check=False)
    left_out = {"fedclip", "fednova", "scaffold", "zeroshot"}
    assert {plan.settings.method for plan in plans} == {*names("method")} - left_out
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "sgd" in line] == [
        f"left out: {name} trains with sgd and the learning rate of recipe mine is meant for adam"
        for name in ("fednova", "scaffold")
    ]
