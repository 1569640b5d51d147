"""Frozen backbones: what is trained and sent, methods without effect, inputs of other sizes."""

from __future__ import annotations

import logging

import pytest
import torch

from feddg_bench.config.schema import BackboneSettings
from feddg_bench.models.backbones import build_backbone, check_timm_size
from feddg_bench.testing import start_toy_run
from tests.helpers import bitwise, numbers

HEAD = {"backbone": {"name": "small_cnn", "trainable": "head"}}
SMALL = {"backbone": {"name": "mobilenet_v2", "trainable": "head", "projection": 4}}
NOTHING_BELOW = "no layer below the classifier is trained"


def test_only_the_head_is_trained_and_sent():
    run = start_toy_run("fedavg", SMALL)
    before = {name: tensor.clone() for name, tensor in run.method.state_dict().items()}
    run.rounds(2)
    named = ["backbone.projection.bias", "backbone.projection.weight"]
    assert sorted(run.server.weights) == [*named, "classifier.bias", "classifier.weight"]
    changed = {
        name
        for name, tensor in {**run.method.state_dict(), **run.server.weights}.items()
        if not torch.equal(tensor, before[name])
    }
    assert changed == set(run.server.weights)


@pytest.mark.parametrize(
    ("method", "layer", "why"),
    [
        ("fpl", HEAD, NOTHING_BELOW),
        ("moon", HEAD, NOTHING_BELOW),
        ("coral", HEAD, NOTHING_BELOW),
        ("dann", HEAD, NOTHING_BELOW),
        ("dann", SMALL, ""),
        ("mmd", HEAD, NOTHING_BELOW),
        ("gperxan", HEAD, NOTHING_BELOW),
        ("fedbn", HEAD, "the network has no batch normalisation"),
        ("fedbn", SMALL, "no batch normalisation is trained"),
        ("moon", {**HEAD, "hyper": {"proj_dim": 8}}, ""),
        ("fpl", SMALL, ""),
        ("irm", HEAD, ""),
    ],
    ids=str,
)
def test_a_method_without_effect_here_equals_fedavg_and_says_so(method, layer, why, caplog):
    with caplog.at_level(logging.WARNING):
        run = start_toy_run(method, layer)
    said = [f"{why}: {method} is the same as fedavg"] if why else []
    assert [record.getMessage() for record in caplog.records] == said
    assert run.method.same_as_fedavg == why
    if why:
        frame = {name: values for name, values in layer.items() if name != "hyper"}
        theirs = start_toy_run("fedavg", frame)
        got, wanted = run.rounds(2), theirs.rounds(2)
        assert [r.evaluation for r in got] == [r.evaluation for r in wanted]
        shared = {name: run.server.weights[name] for name in theirs.server.weights}
        bitwise(shared, theirs.server.weights)  # DANN's discriminator is not in both


def test_a_method_whose_extractor_has_no_tensors_runs():
    assert len(numbers(start_toy_run("copa", HEAD).rounds(2))) == 3


def test_a_transformer_takes_images_of_another_size():
    pytest.importorskip("timm")
    settings = BackboneSettings(name="timm:vit_tiny_patch16_224", pretrained=False)
    check_timm_size(settings, 32)
    own, other = build_backbone(settings).eval(), build_backbone(settings, size=32).eval()
    assert other.net.pos_embed.shape == (1, 5, 192)
    images = torch.rand(1, 3, 32, 32)
    assert other(images).shape == (1, 192)
    with pytest.raises(AssertionError):
        own(images)
