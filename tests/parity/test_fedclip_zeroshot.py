"""FedCLIP and zero-shot classification: logits and losses by hand, what is sent and trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from feddg_bench.core.messages import nbytes
from feddg_bench.testing import start_toy_run
from feddg_methods.fedclip import pair_loss
from tests.parity.test_ncm_ridge import FROZEN, dealt

TEXT = np.random.default_rng(5).normal(size=(3, 5)).astype(np.float32)


def start(method: str, **layer):
    federation = replace(dealt(4), text=TEXT, logit_scale=20.0)
    layers = {**FROZEN, "partition": {"clients": 4}, "federation": {"per_round": 2}, **layer}
    return start_toy_run(method, layers, federation=federation)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def scores(z: np.ndarray) -> np.ndarray:
    return 20 * unit(z) @ unit(TEXT.astype(np.float64)).T


def test_zero_shot_takes_the_text_with_the_largest_cosine() -> None:
    run = start("zeroshot")
    z = np.random.default_rng(6).normal(size=(8, 5))
    got = run.method(torch.from_numpy(z).float()[:, :, None, None])
    np.testing.assert_allclose(got.numpy(), scores(z), rtol=1e-4, atol=1e-4)
    (_, result) = run.rounds(1)
    assert (result.ledger.bytes, result.skipped, run.server.weights) == (
        {"up": 0, "down": 0},
        False,
        {},
    )
    federation = run.federation
    wanted = scores(federation.images[:, 0, 0].astype(np.float64)).argmax(1) == federation.labels
    assert result.evaluation["test"]["a"]["accuracy"] == pytest.approx(wanted.mean())


def test_fedclip_adapts_features_by_attention() -> None:
    run = start("fedclip")
    first, _, second, _ = run.method.attention
    z = np.random.default_rng(6).normal(size=(8, 5))
    p = [t.detach().double().numpy() for t in (*first.parameters(), *second.parameters())]
    hidden = np.tanh(z @ p[0].T + p[1]) @ p[2].T + p[3]
    attention = np.exp(hidden) / np.exp(hidden).sum(1, keepdims=True)
    got = run.method(torch.from_numpy(z).float()[:, :, None, None]).detach()
    np.testing.assert_allclose(got.numpy(), scores(attention * z), rtol=1e-4, atol=1e-4)


def test_fedclip_trains_and_sends_only_the_adapter() -> None:
    run = start("fedclip")
    text = run.method.classifier.weight.clone()
    (_, result) = run.rounds(1)
    adapter = {name: t for name, t in run.server.weights.items() if name.startswith("attention.")}
    assert run.server.weights.keys() == adapter.keys()
    assert result.ledger.bytes["up"] == 2 * nbytes(adapter)
    assert torch.equal(run.method.classifier.weight, text)


def test_the_loss_over_pairs_is_that_of_the_authors_code() -> None:
    rng = np.random.default_rng(7)
    logits, labels = rng.normal(size=(6, 3)), np.array([0, 2, 1, 1, 0, 2])
    pairs = np.array([[logits[i, labels[j]] for j in range(6)] for i in range(6)])
    of_images = np.log(np.exp(pairs).sum(1)) - np.diag(pairs)
    of_texts = np.log(np.exp(pairs).sum(0)) - np.diag(pairs)
    wanted = (of_images.mean() + of_texts.mean()) / 2
    got = pair_loss(torch.from_numpy(logits), torch.from_numpy(labels))
    assert float(got) == pytest.approx(wanted, rel=1e-12)


def test_both_losses_run() -> None:
    states = []
    for loss in ("classes", "batch"):
        run = start("fedclip", hyper={"loss": loss})
        run.rounds(1)
        states.append(run.server.weights["attention.0.weight"])
    assert not torch.equal(*states)
