"""Ditto and FedProto: float64 simulations, prototypes in NumPy, and personal models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from feddg_bench.config.layers import validate
from feddg_bench.config.schema import TrainSettings
from feddg_bench.core.messages import LocalUpdate, Reply, nbytes
from feddg_bench.plugins import load_method
from feddg_methods.fedproto import distance, prototype_logits
from tests.helpers import ALL, PLAIN, bitwise, hyper
from tests.quadratics import quadratics
from tests.tester import MethodTester, Twin

CLIENTS = [[(1, 0)], [(4, 6)] * 3, [(2, 9)] * 2]
"""Images (a, b) of each client, all equal within one."""

# ---------------------------------------------------------------------------------------- Ditto


@pytest.mark.parametrize("lam", [0.0, 0.3, 2.0])
def test_ditto(start_run, lam):
    """Algorithm 1, six rounds of two in three clients."""
    run = quadratics(
        start_run, "ditto", CLIENTS, hyper={"lam": lam}, federation={"per_round": 2}, lr=0.05
    )
    w, own = 1.0, {}
    for result in run.rounds(6)[1:]:
        cohort = [int(name[-1]) for name in result.cohort]
        ends = {}
        for k in cohort:
            (a, b), theta, v = CLIENTS[k][0], w, own.get(k, w)
            for _ in CLIENTS[k]:
                theta -= 0.05 * a * (theta - b)
                v -= 0.05 * (a * (v - b) + lam * (v - w))
            ends[k], own[k] = theta, v
        counts = [len(CLIENTS[k]) for k in cohort]
        w = np.average([ends[k] for k in cohort], weights=counts)
    assert run.server.weights["v"].item() == pytest.approx(w, rel=1e-9)
    for k, v in own.items():
        kept = run.executor.memories[f"client_{k}"]["own"]["v"].item()
        assert kept == pytest.approx(v, rel=1e-9)


def test_both_models_keep_their_optimizers(start_run):
    """With momentum that persists: the global model is FedAvg's."""
    layer = {"train": {"optimizer": "sgd", "momentum": 0.9, "optimizer_state": "persist"}}
    runs = [start_run(name, ALL, layer) for name in ("fedavg", "ditto")]
    for run in runs:
        run.rounds(3)
    bitwise(runs[0].server.weights, runs[1].server.weights)
    for memory in runs[1].executor.memories.values():
        assert memory["optimizer"].keys() == memory["own_optimizer"].keys() != set()


class TestDitto(MethodTester):
    name = "ditto"
    twins = (Twin({"lam": 0.0}, logs=False), Twin({"lam": 5.0}, logs=False))
    wrong = ({"lam": -1},)
    models = (1, 1)


# ------------------------------------------------------------------------------------- FedProto


class Colours(nn.Module):
    """Features are a linear map of an image's mean colour."""

    num_features = 2

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(3, 2)

    def forward(self, images):
        return self.map(images.to(self.map.weight).mean((2, 3)))


def test_fedproto(start_run, toy_federation):
    """Three rounds of two epochs, each of one step on all images of a client."""
    layer = {"train": {"optimizer": "sgd", "lr": 0.5, "batch_size": 64, "local_epochs": 2}}
    kind, classes = load_method("fedproto"), toy_federation.num_classes
    torch.manual_seed(0)
    method = kind(
        validate(kind.Settings, {"lam": 3.0}),
        backbone=Colours(),
        num_classes=classes,
        train=TrainSettings(**layer["train"]),
    )
    method.backbone.double()
    method.classifier.double()
    first = [t.detach().numpy().copy() for t in method.parameters()]
    run = start_run("fedproto", ALL, PLAIN, layer, method=method)
    run.rounds(3)

    f, table, known = run.federation, np.zeros((classes, 2)), np.zeros(classes)
    own = {name: [w.copy() for w in first] for name in f.clients}
    for _ in range(3):
        sums, counts = np.zeros((classes, 2)), np.zeros(classes)
        for name, index in f.clients.items():
            x, y = (f.images[index] / 255).mean((1, 2)), f.labels[index]
            one = np.eye(classes)[y]
            for epoch in (0, 1):
                a, c, v, b = own[name]
                z = x @ a.T + c
                e = np.exp(z @ v.T + b)
                by_score = (e / e.sum(1, keepdims=True) - one) / len(y)
                gap = (z - table[y]) * known[y, None]
                by_z = by_score @ v + 3.0 * 2 * gap / gap.size
                steps = by_z.T @ x, by_z.sum(0), by_score.T @ z, by_score.sum(0)
                own[name] = [w - 0.5 * step for w, step in zip(own[name], steps, strict=True)]
                if epoch:  # prototypes are the features of the last epoch
                    sums, counts = sums + one.T @ z, counts + one.sum(0)
        known = (counts > 0).astype(float)
        table = sums / np.maximum(counts, 1)[:, None]
    np.testing.assert_allclose(run.server.broadcast["prototypes"], table, rtol=1e-5, atol=1e-6)
    for name, weights in own.items():
        kept = run.executor.memories[name]["own"]
        found = [kept[n] for n, _ in run.method.named_parameters()]
        for tensor, w in zip(found, weights, strict=True):
            np.testing.assert_allclose(tensor, w, rtol=1e-5, atol=1e-6)


def test_the_nearest_prototype():
    """Distances 1 and 9 to the known classes; the third comes last."""
    prototypes = torch.tensor([[0.0, 0.0], [4.0, 0.0], [1.0, 0.0]])
    known = torch.tensor([True, True, False])
    logits = prototype_logits(torch.tensor([[1.0, 0.0]]), prototypes, known)
    assert_close(logits, torch.tensor([[-1.0, -9.0, -10.0]]))


def test_the_distance_of_a_batch():
    """(1 + 4 + 0 + 0) / 4: the second image's class has no prototype."""
    z = torch.tensor([[1.0, 2.0], [5.0, 5.0]])
    found = distance(z, torch.tensor([0, 1]), torch.zeros(2, 2), torch.tensor([True, False]))
    assert found.item() == 1.25


def test_global_prototypes_weight_by_images(start_run):
    run = start_run("fedproto", PLAIN)
    d = run.method.num_features
    rows = {"a": ([0, 2], [3, 1], [1.0, 5.0]), "b": ([0], [1], [9.0])}

    def replies():
        for name, (classes, counts, values) in rows.items():
            extra = {
                "prototypes": torch.tensor(values)[:, None].expand(-1, d),
                "classes": torch.tensor(classes),
                "counts": torch.tensor(counts),
            }
            yield Reply(name, 4, LocalUpdate(dict(run.server.weights), extra), {}, {})

    run.method.aggregate(run.server, replies())
    assert run.server.broadcast["prototypes"][:, 0].tolist() == [3.0, 0.0, 5.0]
    assert run.server.broadcast["known"].tolist() == [True, False, True]


def test_prototypes_are_the_mean_features_of_the_last_epoch(start_run, recorder):
    """At a learning rate of 0 the model stays, and features can be computed afterwards."""
    run = start_run("fedproto", ALL, PLAIN, {"train": {"lr": 1e-30}}, executor=recorder)
    run.rounds(1)
    f = run.federation
    run.method.state.load(run.server.weights)
    run.method.eval()
    index = np.concatenate([*f.clients.values()])
    with torch.no_grad():
        z = run.method.features(torch.from_numpy(f.images[index]).permute(0, 3, 1, 2) / 255)
    for c in range(run.method.num_classes):
        mine = torch.from_numpy(f.labels[index] == c)
        assert_close(run.server.broadcast["prototypes"][c], z[mine].mean(0), rtol=1e-4, atol=1e-5)
    assert sum(int(r.value.extra["counts"].sum()) for r in recorder.replies) == len(index)


def test_clients_keep_their_models_and_receive_the_first_one_only(start_run):
    run = start_run("fedproto", ALL)
    first = dict(run.server.weights)
    results = run.rounds(3)
    down = [result.ledger.bytes["down"] for result in results[1:]]
    table = nbytes({n: run.server.broadcast[n] for n in ("prototypes", "known")})
    clients = len(run.federation.clients)
    assert down == [clients * nbytes(first), clients * table, clients * table]
    own = [memory["own"] for memory in run.executor.memories.values()]
    assert not torch.equal(own[0]["classifier.weight"], own[1]["classifier.weight"])
    mean = run.method.global_model(run.server)
    shares = [len(index) for index in run.federation.clients.values()]
    expected = sum(n * w["classifier.weight"] for n, w in zip(shares, own, strict=True))
    assert_close(mean["classifier.weight"], expected / sum(shares))


class TestFedProto(MethodTester):
    name = "fedproto"
    wrong = ({"lam": -1}, {"prediction": "mean"})


@pytest.mark.parametrize("values", [{"lam": 20.0}])
def test_a_setting_changes_what_a_client_learns(start_run, values):
    own = []
    for given in ({}, values):
        run = start_run("fedproto", ALL, hyper(**given))
        run.rounds(2)
        own.append(run.executor.memories["client_0"]["own"]["classifier.weight"])
    assert not torch.equal(*own)
