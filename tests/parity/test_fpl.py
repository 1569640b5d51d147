"""FPL: prototypes worked out by hand, from clients' features to the loss of the next round."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from feddg_bench.config.layers import validate
from feddg_bench.config.schema import FederationSettings, TrainSettings
from feddg_bench.core.messages import LocalUpdate, Reply, Task, nbytes
from feddg_bench.core.server import NoReplyError, Server
from feddg_bench.engine.worker import Worker, WorkerSpec
from feddg_methods.fpl import FPL, ClassSums, FPLSettings, cluster_prototypes
from tests.helpers import ALL, PLAIN, Features, bitwise, hyper
from tests.tester import MethodTester, Twin

# ------------------------------------------------------------------- the server, by hand


def build(num_classes=3, **values):
    """Return a method whose logits are all 0."""
    method = FPL(
        validate(FPLSettings, values),
        backbone=Features(),
        num_classes=num_classes,
        train=TrainSettings(),
    )
    nn.init.zeros_(method.classifier.weight)
    nn.init.zeros_(method.classifier.bias)
    return method


def start_server():
    return Server(
        {"w": torch.zeros(2)},
        (),
        executor=None,
        seed=0,
        federation=FederationSettings(),
        uplink=FPL.uplink,
        downlink=FPL.downlink,
    )


def replies(*clients):
    """Yield replies of clients, each given by its image count and prototypes."""
    for number, (size, prototypes) in enumerate(clients):
        rows = torch.tensor(list(prototypes.values())).reshape(len(prototypes), 2)
        extra = {"prototypes": rows, "classes": torch.tensor(list(prototypes), dtype=torch.int64)}
        update = LocalUpdate({"w": torch.full((2,), float(number))}, extra)
        yield Reply(f"client_{number}", size, update, {}, {})


HELD = (
    (10, {0: (1.0, 0.0), 1: (-1.0, 0.0)}),
    (30, {1: (-3.0, 0.0), 0: (0.96, 0.28)}),
    (20, {0: (0.0, 1.0)}),
    (40, {0: (0.28, 0.96)}),
)
TABLE = {
    "0": torch.tensor([[0.98, 0.14], [0.14, 0.98]]),
    "1": torch.tensor([[-2.0, 0.0]]),
}


def aggregated(*clients, **values):
    server, method = start_server(), build(**values)
    server.round = 1
    server.weights = method.aggregate(server, replies(*clients))
    return server


def test_published_cluster_prototypes():
    server = aggregated(*HELD)
    assert_close(server.broadcast["prototypes"], TABLE, rtol=0, atol=1e-6)
    unbiased = server.broadcast["prototypes"]["0"].mean(dim=0)
    assert_close(unbiased, torch.tensor([0.56, 0.56]), rtol=0, atol=1e-6)


def test_the_model_is_averaged_by_image_counts():
    bitwise(aggregated(*HELD).weights["w"], torch.full((2,), (30 * 1 + 20 * 2 + 40 * 3) / 100))


def test_a_class_of_one_client_has_one_prototype():
    """It keeps its shape [J, D]; the authors' code loses J."""
    table = aggregated(*HELD, (5, {2: (3.0, 4.0)})).broadcast["prototypes"]
    bitwise(table["2"], torch.tensor([[3.0, 4.0]]))


def test_classes_stand_in_the_order_in_which_they_arrive():
    table = aggregated((1, {2: (1.0, 0.0)}), *HELD).broadcast["prototypes"]
    assert list(table) == ["2", "0", "1"]


def test_a_client_without_prototypes():
    """A client whose batches are all skipped has none; if no client has any, the table is empty."""
    nothing = (7, {})
    assert_close(aggregated(nothing, *HELD).broadcast["prototypes"], TABLE, rtol=0, atol=1e-6)
    assert aggregated(nothing).broadcast["prototypes"] == {}


def finch_oracle(rows):
    """Return the cluster means of FINCH's last partition by cosine distance, in float64."""

    def level(points):
        unit = points / np.linalg.norm(points, axis=1, keepdims=True)
        similarity = unit @ unit.T
        np.fill_diagonal(similarity, -np.inf)
        label = np.arange(len(points))
        for i, j in enumerate(similarity.argmax(axis=1)):  # merge i with its first neighbour
            label[label == label[j]] = label[i]
        return np.unique(label, return_inverse=True)[1]

    labels = level(rows) if len(rows) > 1 else np.zeros(1, int)
    while True:
        means = np.stack([rows[labels == c].mean(axis=0) for c in range(labels.max() + 1)])
        if len(means) < 2 or (merged := level(means)).max() == 0:
            return means
        labels = merged[labels]


@pytest.mark.parametrize("seed", range(40))
def test_clusters_equal_their_definition(seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(rng.integers(1, 25), rng.integers(2, 6)))
    found = cluster_prototypes(torch.from_numpy(rows)).numpy()
    expected = finch_oracle(rows)
    assert found.shape == expected.shape
    order = [np.lexsort(values.round(9).T) for values in (found, expected)]
    np.testing.assert_allclose(found[order[0]], expected[order[1]], rtol=1e-6)


def test_the_first_cluster_is_that_of_the_first_client():
    """PARDON's copy takes the first prototype of a class as its only negative."""
    rows = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.1, 1.0], [1.0, 0.1]])
    assert_close(cluster_prototypes(rows), torch.tensor([[0.05, 1.0], [1.0, 0.05]]))


def test_a_prototype_of_zeros():
    rows = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    assert cluster_prototypes(rows).isfinite().all()


def test_no_more_than_two_replies_are_alive(counted):
    def many():
        for reply in replies(*(HELD * 5)):
            update = LocalUpdate(counted(reply.value.weights), reply.value.extra)
            yield replace(reply, value=update)
            del update, reply

    server = start_server()
    server.round = 1
    build().aggregate(server, many())
    assert counted.most <= 3


# ------------------------------------------------------------------------- absent classes

ONLY_1 = (10, {1: (-1.0, 0.0)})


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_absent_classes_stay_as_long_as_they_may(keep):
    """Class 0 occurs in round 1 only; it stays for the next round and ``keep`` more."""
    server, method = start_server(), build(keep_absent=keep)
    there = []
    for number in range(1, 5):
        server.round = number
        method.aggregate(server, replies(*(HELD if number == 1 else [ONLY_1])))
        table = server.broadcast["prototypes"]
        there.append("0" in table)
        assert "1" in table
    assert there == [number <= 1 + keep for number in range(1, 5)]


def test_a_kept_class_keeps_its_prototypes_until_it_comes_back():
    server, method = start_server(), build(keep_absent=1)
    again = (3, {0: (5.0, 0.0)})
    for number, clients in enumerate((HELD, [ONLY_1], [again], [ONLY_1], [ONLY_1]), start=1):
        server.round = number
        method.aggregate(server, replies(*clients))
        table = server.broadcast["prototypes"]
        if number == 2:
            assert_close(table["0"], TABLE["0"], rtol=0, atol=1e-6)
            bitwise(table["1"], torch.tensor([[-1.0, 0.0]]))
        if number in (3, 4):  # its age counts from its return
            bitwise(table["0"], torch.tensor([[5.0, 0.0]]))
    assert list(table) == ["1"]


def test_a_skipped_round_leaves_the_table():
    server = aggregated(*HELD)
    server.round = 2

    def nobody():
        raise NoReplyError("fit")
        yield

    with pytest.raises(NoReplyError):
        build().aggregate(server, nobody())
    assert_close(server.broadcast["prototypes"], TABLE, rtol=0, atol=1e-6)


# ------------------------------------------------------------------- the loss, by hand


def loss_of(table, labels, point=(0.6, 0.8), **values):
    """Return the loss without the cross-entropy, of images with the same features."""
    method = build(**values)
    method.table = {int(c): p for c, p in table.items()}
    images = torch.zeros(len(labels), 3, 4, 4)
    images[:, 0, 0, :2] = torch.tensor(point)
    return method.training_step((images, torch.tensor(labels)), 0).item() - math.log(3)


@pytest.mark.parametrize(
    ("labels", "values", "expected"),
    [
        ([0], {"temperature": 0.5}, 0.0300036 + 0.0296),
        ([1], {"temperature": 0.5}, 3.5214014 + 3.7),
        ([0], {}, 0.0296),
        ([1], {}, 73.84083 + 3.7),
        ([1], {"temperature": 0.5, "pardon_bugs": True}, 2.6848820 + 3.7),
        ([0], {"temperature": 0.5, "pardon_bugs": True}, 0.0296),
        ([0, 1, 2], {"temperature": 0.5}, 3.640503),
        ([0, 1, 2], {"temperature": 0.5, "divide_by": "batch"}, 2.427002),
        ([0, 1, 2], {"temperature": 0.5, "pardon_bugs": True}, 3.207241),
        ([2, 2], {}, 0.0),
        ([2, 2], {"divide_by": "batch", "pardon_bugs": True}, 0.0),
    ],
)
def test_published_losses(labels, values, expected):
    """With the prototypes that the server forms from those of its clients."""
    table = aggregated(*HELD).broadcast["prototypes"]
    tolerance = 1e-4 if expected > 70 else 2e-6
    assert loss_of(table, labels, **values) == pytest.approx(expected, abs=tolerance)


def test_the_class_stored_first_is_that_of_the_first_client():
    """With class 1 first, PARDON's copy omits the contrast of class 1, not of class 0."""
    clients = [(10, {1: (-1.0, 0.0), 0: (1.0, 0.0)}), *HELD[1:]]
    table = aggregated(*clients).broadcast["prototypes"]
    assert list(table) == ["1", "0"]
    values = {"temperature": 0.5, "pardon_bugs": True}
    assert loss_of(table, [1], **values) == pytest.approx(3.7, abs=2e-6)
    assert loss_of(table, [0], **values) == pytest.approx(0.0300036 + 0.0296, abs=2e-6)


@pytest.mark.parametrize("pardon_bugs", [False, True])
def test_of_one_known_class_only_the_second_term_is_left(pardon_bugs):
    table = {"0": TABLE["0"]}
    assert loss_of(table, [0], pardon_bugs=pardon_bugs) == pytest.approx(0.0296, abs=1e-6)


def test_prototypes_and_features_of_zeros_have_finite_losses():
    table = {"0": torch.zeros(1, 2), "1": torch.tensor([[1.0, 0.0], [0.0, 0.0]])}
    assert math.isfinite(loss_of(table, [0, 1], point=(0.0, 0.0)))
    assert math.isfinite(loss_of(table, [0, 1]))


# ------------------------------------------------------------------ the client's prototypes


def test_sums_of_batches_equal_means_over_classes():
    rng = np.random.default_rng(5)
    z, labels = rng.normal(size=(50, 4)), rng.integers(1, 4, size=50)
    sums = ClassSums(6, 4)
    for part in np.array_split(np.arange(50), 7):
        sums.add(torch.from_numpy(z[part]).float(), torch.from_numpy(labels[part]))
    classes, prototypes = sums.means()
    appeared = list(dict.fromkeys(labels.tolist()))
    assert classes.tolist() == appeared
    expected = np.stack([z[labels == c].mean(axis=0) for c in appeared])
    np.testing.assert_allclose(prototypes.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_one_image_of_a_class_is_its_prototype_bit_for_bit():
    z = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    sums = ClassSums(3, 4)
    sums.add(z, torch.tensor([2, 0, 1]))
    classes, prototypes = sums.means()
    assert classes.tolist() == [2, 0, 1]
    bitwise(prototypes, z)


def test_sums_are_made_in_single_precision():
    z = torch.randn(256, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    sums = ClassSums(1, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums.add(z, torch.zeros(256, dtype=torch.int64))
    assert_close(sums.means()[1], z.double().mean(0, keepdim=True).float(), rtol=1e-5, atol=1e-6)


def watched(run, client="client_2", broadcast=None, number=1):
    """Return a client's reply and, by training batch, labels and features."""
    seen = []
    step = run.method.training_step
    run.method.backbone.register_forward_hook(lambda _m, _i, z: seen[-1].append(z.detach().clone()))

    def keep(batch, index):
        seen.append([batch[1]])
        return step(batch, index)

    run.method.training_step = keep
    task = Task(client, "fit", number, run.server.weights, broadcast or {})
    reply = run.executor.worker.run(task)
    return reply, seen


def test_prototypes_are_of_the_last_epochs_features_as_they_were_in_training(start_run):
    """12 images in two batches, three epochs: weights move between the last two."""
    run = start_run("fpl", {"train": {"local_epochs": 3}})
    reply, seen = watched(run)
    assert len(seen) == 6
    labels = torch.cat([entry[0] for entry in seen[-2:]])
    z = torch.cat([entry[1] for entry in seen[-2:]])
    classes = list(dict.fromkeys(labels.tolist()))
    extra = reply.value.extra
    assert extra["classes"].tolist() == classes
    expected = torch.stack([z[labels == c].mean(dim=0) for c in classes])
    assert_close(extra["prototypes"], expected, rtol=1e-5, atol=1e-6)
    assert not extra["prototypes"].requires_grad


def prototype_oracle(z, labels, table, temperature):
    """Return FPL's two terms, averaged over images of known classes, one by one in float64."""

    def weight(a, b):
        return math.exp(a @ b / np.linalg.norm(a) / np.linalg.norm(b) / temperature)

    losses = []
    for x, c in zip(z, labels, strict=True):
        if c in table:
            every = {k: sum(weight(x, p) for p in ps) for k, ps in table.items()}
            spread = np.mean((x - np.mean(table[c], axis=0)) ** 2)
            losses.append(-math.log(every[c] / sum(every.values())) + spread)
    return np.mean(losses)


def test_the_logged_loss_is_cross_entropy_and_the_definition(start_run):
    """One batch of a client, with prototypes of two of three classes, from images to loss."""
    layer = {"train": {"batch_size": 64}}
    run = start_run("fpl", PLAIN, layer, hyper(temperature=0.1))
    rng = np.random.default_rng(3)
    table = {2: rng.uniform(size=(3, 128)), 0: rng.uniform(size=(1, 128))}
    broadcast = {"prototypes": {str(c): torch.tensor(p).float() for c, p in table.items()}}
    reply, seen = watched(run, broadcast=broadcast, number=2)
    ((labels, z),) = seen
    head = run.server.weights
    logits = (z @ head["classifier.weight"].T + head["classifier.bias"]).double()
    entropy = -logits.log_softmax(1)[torch.arange(len(labels)), labels].mean().item()
    extra = prototype_oracle(z.double().numpy(), labels.tolist(), table, 0.1)
    assert extra > 0.5
    assert reply.metrics["loss"] == pytest.approx(entropy + extra, rel=1e-5)


# ---------------------------------------------------------------------------- federations


def trained(start_run, *layers):
    run = start_run("fpl", ALL, *layers)
    run.rounds(2)
    return run.server.weights


def test_without_a_match_a_client_trains_as_in_fedavg(start_run, toy_federation):
    """Only class 2 has prototypes, and the client has no image of it."""
    rows = {n: i[toy_federation.labels[i] != 2] for n, i in toy_federation.clients.items()}
    federation = replace(toy_federation, clients=rows)
    ours, theirs = (start_run(name, federation=federation) for name in ("fpl", "fedavg"))
    broadcast = {"prototypes": {"2": torch.ones(2, 128)}}
    found = ours.executor.worker.run(Task("client_0", "fit", 1, ours.server.weights, broadcast))
    expected = theirs.executor.worker.run(Task("client_0", "fit", 1, theirs.server.weights, {}))
    bitwise(found.value.weights, expected.value.weights)
    assert found.metrics == expected.metrics
    assert sorted(found.value.extra["classes"].tolist()) == [0, 1]


@pytest.mark.parametrize("width", [128, 2048])
def test_what_travels(start_run, recorder, width):
    """Up d x 4 bytes a class, 8,192 for d = 2048, and 8 for its id; down sum |P_c| x d x 4."""
    layer = {"backbone": {"projection": 0 if width == 128 else width}}
    run = start_run("fpl", layer, executor=recorder)
    once, *results = run.rounds(3)
    assert once.ledger.bytes == {"up": 0, "down": 0}
    model = nbytes(run.server.weights)
    for result in results:
        sent = [reply.value.extra for reply in recorder.replies[:2]]
        told = [task.broadcast.get("prototypes", {}) for task in recorder.tasks[:2]]
        del recorder.replies[:2], recorder.tasks[:2]
        classes = sum(len(extra["classes"]) for extra in sent)
        rows = sum(len(p) for p in told[0].values())
        assert {p.shape[1] for p in told[0].values()} == ({width} if result.round > 1 else set())
        assert result.ledger.bytes["up"] == 2 * model + classes * (width * 4 + 8)
        assert result.ledger.bytes["down"] == 2 * model + 2 * rows * width * 4
        assert rows == 0 if result.round == 1 else rows >= 3


@pytest.fixture
def lone(toy_federation):
    """The toy federation with class 2 only at client 3."""
    labels = toy_federation.labels
    clients = {n: i[labels[i] != 2] for n, i in toy_federation.clients.items()}
    clients["client_3"] = toy_federation.clients["client_3"]
    return replace(toy_federation, clients=clients)


def test_the_table_is_replaced_each_round(start_run, recorder, lone):
    """Class 2 is sent only in a round after one with client 3."""
    layer = {"federation": {"rounds": 8, "per_round": 2}}
    run = start_run("fpl", layer, federation=lone, executor=recorder)
    results = run.rounds(8)[1:]
    told = {task.round: task.broadcast.get("prototypes", {}) for task in recorder.tasks}
    held = ["client_3" in result.cohort for result in results]
    assert [("2" in told[number]) for number in range(2, 9)] == held[:-1]
    assert 0 < sum(held[:-1]) < 7
    lone = [told[number]["2"] for number in range(2, 9) if held[number - 2]]
    assert {tuple(p.shape) for p in lone} == {(1, 128)}


def test_kept_classes_are_told(start_run, recorder, lone):
    """With an age limit, class 2 stays once it has occurred."""
    layer = {"federation": {"rounds": 8, "per_round": 2}}
    run = start_run("fpl", layer, hyper(keep_absent=99), federation=lone, executor=recorder)
    held = ["client_3" in result.cohort for result in run.rounds(8)[1:]]
    told = {task.round: task.broadcast.get("prototypes", {}) for task in recorder.tasks}
    first = held.index(True) + 1
    assert [("2" in told[number]) for number in range(1, 9)] == [n > first for n in range(1, 9)]


def test_the_class_stored_first_changes_from_round_to_round(start_run):
    run = start_run("fpl", ALL, {"federation": {"rounds": 8}})
    first = set()
    for number in range(1, 9):
        run.rounds(number)
        first.add(next(iter(run.server.broadcast["prototypes"])))
    assert len(first) > 1


@pytest.mark.parametrize(
    ("values", "equal"),
    [
        ({"temperature": 0.5}, False),
        ({"pardon_bugs": True}, False),
        ({"divide_by": "batch"}, True),  # every class has prototypes: both divide by B
        ({"keep_absent": 3}, True),
    ],
    ids=str,
)
def test_variants(start_run, values, equal):
    base, found = trained(start_run), trained(start_run, hyper(**values))
    assert all(bool(t.isfinite().all()) for t in found.values())
    assert all(torch.equal(found[n], t) for n, t in base.items()) == equal


def test_the_divisor_matters_where_a_class_is_unknown(start_run):
    broadcast = {"prototypes": {"1": torch.ones(1, 128)}}

    def loss(divide_by):
        run = start_run("fpl", hyper(divide_by=divide_by))
        reply = run.executor.worker.run(Task("client_2", "fit", 1, run.server.weights, broadcast))
        return reply.metrics["loss"]

    assert loss("batch") < loss("matched")


def few(toy_federation, choose):
    clients = {n: choose(i, toy_federation.labels[i]) for n, i in toy_federation.clients.items()}
    return replace(toy_federation, clients=clients)


@pytest.mark.parametrize(
    ("choose", "layer"),
    [
        pytest.param(lambda i, y: i[np.unique(y, return_index=True)[1]], {}, id="one-per-class"),
        pytest.param(lambda i, _: i[:1], {}, id="one-image"),
        pytest.param(lambda i, y: i[y == 1], {}, id="one-class"),
        pytest.param(lambda i, y: i[y == 1], hyper(pardon_bugs=True), id="one-class-bugs"),
        pytest.param(lambda i, _: i, {"train": {"precision": "bf16-mixed"}}, id="bf16"),
        pytest.param(lambda i, _: i, {"train": {"channels_last": False}}, id="contiguous"),
    ],
)
def test_small_clients_and_half_precision(start_run, toy_federation, choose, layer):
    run = start_run("fpl", ALL, layer, federation=few(toy_federation, choose))
    results = run.rounds(3)
    assert all(bool(t.isfinite().all()) for t in run.server.weights.values())
    assert [r.ledger.dropped for r in results] == [[]] * 4
    assert {p.dtype for p in run.server.broadcast["prototypes"].values()} == {torch.float32}


def test_where_every_batch_is_skipped_nobody_has_prototypes(start_run):
    """Batches of one image are all skipped: the model stays, and no table is made."""
    layer = {"train": {"batch_size": 1, "drop_last_if_single": True}}
    run = start_run("fpl", ALL, layer)
    run.rounds(2)
    assert run.server.broadcast["prototypes"] == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(start_run):
    run = start_run("fpl", ALL)
    worker = Worker(WorkerSpec(run.settings, run.federation, device="cuda:0"))
    weights = {n: t.cuda() for n, t in run.server.weights.items()}
    broadcast = {"prototypes": {"0": torch.ones(2, 128), "2": torch.zeros(1, 128)}}
    reply = worker.run(Task("client_0", "fit", 2, weights, broadcast))
    assert math.isfinite(reply.metrics["loss"])
    assert reply.value.extra["prototypes"].isfinite().all()


class TestFPL(MethodTester):
    name = "fpl"
    layer = ALL
    twins = (Twin({}, ALL, rounds=1, sends=False),)
    wrong = ({"temperature": 0}, {"divide_by": "match"}, {"keep_absent": -1})
