"""NCM and ridge: the result of all images in one place, whatever the partition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from feddg_bench.common.errors import SettingsError
from feddg_bench.data.federated import Federation
from feddg_bench.testing import start_toy_run, toy_federation
from feddg_methods.ncm import NEVER, nearest_mean
from feddg_methods.ridge import solve
from tests.helpers import PLAIN, refused


def dealt(clients: int, count: int = 300, seed: int = 0) -> Federation:
    """Return features of 5 numbers of 300 images of three classes, dealt out to clients."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, count)
    images = (rng.normal(size=(count, 1, 1, 5)) + 2 * np.eye(3, 5)[labels][:, None, None]).astype(
        np.float16
    )
    order = rng.permutation(count)
    cuts = np.sort(rng.choice(np.arange(1, count), clients - 1, replace=False))
    parts = {f"client_{i:03}": np.sort(p) for i, p in enumerate(np.split(order, cuts))}
    return replace(
        toy_federation(),
        images=images,
        size=1,
        labels=labels,
        clients=parts,
        evaluation=(("test", "a", np.arange(count)),),
        num_classes=3,
        domain_ids=np.zeros(count, dtype=np.int64),
        validation={},
        channels=5,
        pixels="float16",
        views=1,
    )


FROZEN = {
    **PLAIN,
    "data": {"image_size": 8},
    "backbone": {"name": "features"},
    "features": {"encoder": "toy"},
}


def head(method: str, clients: int, layer: dict | None = None) -> tuple[np.ndarray, np.ndarray]:
    federation = dealt(clients)
    layers = {
        **FROZEN,
        "partition": {"clients": clients},
        "federation": {"per_round": None},
        **(layer or {}),
    }
    run = start_toy_run(method, layers, federation=federation)
    run.rounds(1)
    weights = run.server.weights
    return weights["classifier.weight"].numpy(), weights["classifier.bias"].numpy()


def data() -> tuple[np.ndarray, np.ndarray]:
    federation = dealt(2)
    return federation.images[:, 0, 0].astype(np.float64), federation.labels


def class_means() -> tuple[np.ndarray, np.ndarray]:
    z, labels = data()
    means = np.stack([z[labels == c].mean(0) for c in range(3)])
    return means, -(means**2).sum(1) / 2


def ridge(penalty: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Solve the penalised least squares of all images as one stacked system, in float64."""
    z, labels = data()
    y = np.eye(3)[labels]
    centred, target = z - z.mean(0), y - y.mean(0)
    strength = penalty * (centred**2).sum() / z.shape[1]
    rows = np.vstack([centred, np.sqrt(strength) * np.eye(z.shape[1])])
    weight = np.linalg.lstsq(rows, np.vstack([target, np.zeros((z.shape[1], 3))]), rcond=None)[0].T
    return weight, y.mean(0) - weight @ z.mean(0)


@pytest.mark.parametrize("clients", [2, 100])
@pytest.mark.parametrize(("method", "centralised"), [("ncm", class_means), ("ridge", ridge)])
def test_any_partition_gives_the_solution_on_all_images(method, centralised, clients) -> None:
    for got, wanted in zip(head(method, clients), centralised(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_the_penalty_is_that_of_the_setting() -> None:
    got = head("ridge", 2, {"hyper": {"penalty": 3.0}})
    for ours, wanted in zip(got, ridge(3.0), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-6)


def test_secure_sums_give_the_same() -> None:
    layer = {"privacy": {"aggregation": "secure"}}
    for method in ("ncm", "ridge"):
        for got, wanted in zip(head(method, 5, layer), head(method, 5), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_class_without_images_is_never_predicted() -> None:
    sums = torch.tensor([[2.0, 0.0], [0.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    weight, bias = nearest_mean(sums, torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64))
    assert weight.tolist() == [[1, 0], [0, 0], [0, 3]]
    assert bias.tolist() == [-0.5, -4.5 - NEVER, -4.5]


def test_features_without_variance_have_a_solution() -> None:
    x = torch.tensor([[1.0, 1.0]] * 4, dtype=torch.float64)
    y = torch.tensor([[1.0], [0], [1], [0]], dtype=torch.float64)
    weight, bias = solve(x.T @ x, x.T @ y, 0.1)
    assert (weight.tolist(), bias.tolist()) == ([[0.0]], [0.5])


@pytest.mark.parametrize("method", ["ncm", "ridge", "copa"])
def test_other_classifiers_are_refused(method) -> None:
    with refused(SettingsError, "set backbone.classifier=linear"):
        start_toy_run(method, {"backbone": {"classifier": "cosine"}})
