"""MOON: the contrast by hand, against frozen copies of both models, and client memory."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import TrainSettings
from feddg_bench.core.messages import Task, decode, encode, nbytes
from feddg_bench.engine.worker import Worker, WorkerSpec
from feddg_methods.moon import Moon, MoonSettings, model_contrast
from tests.helpers import ALL, bitwise, hyper
from tests.tester import MethodTester, Twin

SGD = {"train": {"batch_size": 4, "optimizer": "sgd", "lr": 0.05, "local_epochs": 2}}


# ------------------------------------------------------------------------------ the contrast


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def test_published_number():
    loss = model_contrast(row(1, 0), row(1, 1), row(0, 1), temperature=0.5)
    assert loss.item() == pytest.approx(0.2176217216, abs=1e-10)


def oracle(z, z_glob, z_prev, temperature):
    def cosine(a, b):
        return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))

    losses = []
    for a, g, p in zip(z, z_glob, z_prev, strict=True):
        near, far = (math.exp(cosine(a, other) / temperature) for other in (g, p))
        losses.append(-math.log(near / (near + far)))
    return np.mean(losses)


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 9),
    temperature=st.sampled_from([0.02, 0.5, 3.0]),
)
def test_contrast_equals_its_definition(seed, size, temperature):
    z, z_glob, z_prev = np.random.default_rng(seed).normal(size=(3, size, 4))
    found = model_contrast(*map(torch.from_numpy, (z, z_glob, z_prev)), temperature=temperature)
    assert found.item() == pytest.approx(oracle(z, z_glob, z_prev, temperature), rel=1e-6)


def test_gradient():
    z, z_glob, z_prev = torch.randn(
        3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    contrast = partial(model_contrast, z_glob=z_glob, z_prev=z_prev, temperature=0.5)
    assert torch.autograd.gradcheck(contrast, z.requires_grad_())


def test_equal_models_give_log_two_without_gradient():
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    other = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    loss = model_contrast(z, other, other, temperature=0.5)
    assert loss.item() == pytest.approx(math.log(2))
    loss.backward()
    assert_close(z.grad, torch.zeros(5, 4), rtol=0, atol=1e-7)


def test_a_sharp_contrast_does_not_overflow():
    """Opposite representations at temperature 0.001: e^2000 overflows."""
    loss = model_contrast(row(1, 0), row(-1, 0), row(1, 0), temperature=0.001)
    assert loss.item() == pytest.approx(2000)


@pytest.mark.parametrize("which", range(3))
def test_a_representation_of_zeros_has_finite_loss_and_gradient(which):
    rows = [row(1, 2).float() for _ in range(3)]
    rows[which] = row(0, 0).float()
    z, *others = rows
    loss = model_contrast(z.requires_grad_(), *others, temperature=0.5)
    loss.backward()
    assert loss.isfinite()
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened(dtype):
    z = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model_contrast(*z, temperature=0.5)
    assert found.dtype == torch.float32
    assert_close(found, model_contrast(*z.double(), temperature=0.5).float())


# -------------------------------------------------------------------------------- the class


class Normalised(nn.Sequential):
    """A convolution with batch normalisation: 6 features."""

    num_features = 6

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 6, kernel_size=3, stride=2),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )


def start_normalised(start_run, bn="average", values=None, **parts):
    """Return a run of MOON on a small network with batch normalisation."""
    layers = (SGD, {"federation": {"bn": bn, "per_round": None}})
    base = start_run("moon", *layers)
    torch.manual_seed(0)
    method = Moon(
        validate(MoonSettings, values or {}),
        backbone=Normalised(),
        num_classes=3,
        train=base.settings.train,
        bn=bn,
    )
    return start_run("moon", *layers, method=method, **parts)


class Twist(nn.Module):
    """Features are an image's first two pixels times a matrix."""

    num_features = 2

    def __init__(self, matrix):
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor(matrix))

    def forward(self, images):
        return images[:, 0, 0, :2] @ self.matrix


def test_published_number_from_one_image():
    """z = x A for x = (1, 0): the models differ in the first row of A; logits are 0."""
    method = Moon(
        validate(MoonSettings, {"mu": 2.0}),
        backbone=Twist([[1.0, 0.0], [0.0, 0.0]]),
        num_classes=3,
        train=TrainSettings(),
    )
    nn.init.zeros_(method.classifier.weight)
    nn.init.zeros_(method.classifier.bias)
    images = torch.zeros(1, 3, 4, 4)
    images[0, 0, 0, 0] = 1
    method.received = {"backbone.matrix": torch.tensor([[1.0, 1.0], [0.0, 0.0]])}
    method.previous = {"backbone.matrix": torch.tensor([[0.0, 1.0], [0.0, 0.0]])}
    loss = method.training_step((images, torch.tensor([1])), 0)
    assert loss.item() == pytest.approx(math.log(3) + 2 * 0.2176217216, abs=1e-6)
    loss.backward()
    assert method.backbone.matrix.grad.abs().sum() > 0


def trained(start_run, name, *layers, rounds=3):
    run = start_run(name, *layers)
    results = run.rounds(rounds)
    return run.server.weights, [r.ledger.means() for r in results]


@pytest.mark.parametrize("proj_dim", [None, 16])
def test_without_contrast_nothing_is_kept_or_computed(start_run, proj_dim):
    run = start_run("moon", ALL, hyper(mu=0.0, proj_dim=proj_dim))
    passes = []
    run.method.backbone.register_forward_hook(lambda *_: passes.append(1))
    run.server.round = 1
    for _ in run.server.ask(run.method.fit):
        pass
    assert len(passes) == 4 * 2  # four clients with two batches
    assert run.executor.memories == {f"client_{i}": {} for i in range(4)}


def test_the_first_time_it_is_fedavg_with_log_two_in_the_loss(start_run):
    """The received model stands in for the previous one; from round 2 on, MOON differs."""
    weights, means = trained(start_run, "moon", ALL, hyper(mu=3.0), rounds=1)
    expected, plain = trained(start_run, "fedavg", ALL, rounds=1)
    bitwise(weights, expected)
    assert means[1]["loss"] == pytest.approx(plain[1]["loss"] + 3 * math.log(2), rel=1e-6)
    weights, _ = trained(start_run, "moon", ALL, hyper(mu=3.0), rounds=2)
    expected, _ = trained(start_run, "fedavg", ALL, rounds=2)
    assert [name for name in weights if torch.equal(weights[name], expected[name])] == []


def by_copies(method, data, received, previous, *, mu, temperature):
    """Train as in the paper, with frozen copies of both whole models in evaluation mode."""
    frozen = []
    for weights in (received, previous):
        twin = copy.deepcopy(method)
        twin.load_state_dict(weights)
        frozen.append(twin.eval().requires_grad_(False))
    method.load_state_dict(received)
    optimizer = torch.optim.SGD(method.parameters(), lr=0.05)
    losses = []
    for epoch in range(2):
        for images, labels in data.batches(
            shuffle=True,
            augment=True,
            views=1,
            companions=None,
            generator=torch_generator(0, "loader", epoch, 2, "client_0"),
        ):
            z = method.features(images)
            near, far = (
                F.cosine_similarity(z, twin.features(images)) / temperature for twin in frozen
            )
            contrast = F.cross_entropy(torch.stack([near, far], 1), torch.zeros_like(labels))
            loss = F.cross_entropy(method.classifier(z), labels) + mu * contrast
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += [loss.item()] * len(labels)
    return dict(method.state_dict()), sum(losses) / len(losses)


@pytest.mark.parametrize("proj_dim", [None, 4])
@pytest.mark.parametrize("bn", ["average", "frozen", "local"])
def test_the_second_time_equals_training_against_copies(start_run, recorder, bn, proj_dim):
    values = {"mu": 4.0, "temperature": 0.3, "proj_dim": proj_dim}
    run = start_normalised(start_run, bn, values, executor=recorder)
    worker, method = recorder.worker, run.method
    initial = copy.deepcopy(method.state_dict())

    first = worker.run(Task("client_0", "fit", 1, run.server.weights, {}))
    previous = copy.deepcopy(method.state_dict())
    given = {n: t * 1.1 if t.is_floating_point() else t for n, t in run.server.weights.items()}
    own = previous if bn == "local" else initial  # private state is as the client left it
    second = worker.run(Task("client_0", "fit", 2, given, {}, dict(first.memory)))
    found = copy.deepcopy(dict(method.state_dict()))

    expected, loss = by_copies(
        copy.deepcopy(method).train(),
        worker.data["client_0"],
        {**own, **given},
        previous,
        mu=4.0,
        temperature=0.3,
    )
    assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert second.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    bitwise(second.value.weights, {n: found[n] for n in second.value.weights})


@pytest.mark.parametrize("bn", ["average", "frozen", "local"])
def test_a_late_first_visit_equals_training_against_the_initial_model(start_run, recorder, bn):
    values = {"mu": 4.0, "temperature": 0.3, "proj_dim": 4, "first_visit": "initial"}
    run = start_normalised(start_run, bn, values, executor=recorder)
    worker, method = recorder.worker, run.method
    initial = copy.deepcopy(method.state_dict())
    given = {n: t * 1.1 if t.is_floating_point() else t for n, t in run.server.weights.items()}
    worker.run(Task("client_1", "fit", 1, given, {}))  # what another client leaves is not seen
    first = worker.run(Task("client_0", "fit", 2, given, {}))
    found = copy.deepcopy(dict(method.state_dict()))

    expected, loss = by_copies(
        copy.deepcopy(method).train(),
        worker.data["client_0"],
        {**initial, **given},
        initial,
        mu=4.0,
        temperature=0.3,
    )
    assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert first.metrics["loss"] == pytest.approx(loss, rel=1e-5)


def test_first_visits_differ_from_round_two_on(start_run):
    """In round 1 the received model is the initial one; for returning clients nothing differs."""

    def weights(rounds, per_round, first_visit):
        layers = {"federation": {"per_round": per_round}}, hyper(mu=3.0, first_visit=first_visit)
        return trained(start_run, "moon", *layers, rounds=rounds)[0]

    for per_round, rounds, same in ((None, 1, True), (None, 2, True), (1, 3, False)):
        received, initial = (weights(rounds, per_round, f) for f in ("received", "initial"))
        if same:
            bitwise(initial, received)
        else:
            assert [n for n in initial if torch.equal(initial[n], received[n])] == []


def test_representations_carry_no_gradient_and_leave_the_module_alone(start_run):
    method = start_normalised(start_run, values={"proj_dim": 4}).method.train()
    before = copy.deepcopy(dict(method.state_dict()))
    places = {n: t.data_ptr() for n, t in method.state_dict().items()}
    other = {
        n: t + 0.1
        for n, t in before.items()
        if n.startswith(("backbone.", "head.")) and t.is_floating_point()
    }
    images = torch.rand(6, 3, 16, 16)
    z = method.representation(images, other)
    assert not z.requires_grad
    assert z.shape == (6, 4)
    assert all(part.training for part in method.modules())
    bitwise(dict(method.state_dict()), before)
    assert {n: t.data_ptr() for n, t in method.state_dict().items()} == places
    # evaluation mode: an image's representation does not depend on its batch
    assert_close(method.representation(images[:1], other), z[:1])


def test_a_stronger_contrast_keeps_representations_near_the_global_models(start_run, recorder):
    def similarity(mu):
        run = start_run(
            "moon", ALL, hyper(mu=mu), {"train": {"local_epochs": 4}}, executor=recorder
        )
        run.rounds(1)
        received = {n: t.clone() for n, t in run.server.weights.items()}
        memory = recorder.memories["client_3"]
        recorder.worker.run(Task("client_3", "fit", 2, received, {}, dict(memory)))
        images = torch.from_numpy(run.federation.images[:40]).permute(0, 3, 1, 2) / 255
        local, far = run.method.state.federated_weights(), dict(memory["previous"])
        z, z_glob, z_prev = (
            run.method.representation(
                images, {n: t for n, t in weights.items() if n.startswith("backbone.")}
            )
            for weights in (local, received, far)
        )
        pull = F.cosine_similarity(z, z_glob) - F.cosine_similarity(z, z_prev)
        return float(pull.mean())

    # a run with mu = 0 keeps no model, so a tiny mu stands in
    weak, strong = similarity(1e-6), similarity(5.0)
    assert strong > weak + 0.01


# ----------------------------------------------------------------------------- client memory


@pytest.mark.parametrize("proj_dim", [None, 16])
def test_a_client_keeps_its_last_model_without_the_classifier(start_run, recorder, proj_dim):
    run = start_run("moon", ALL, hyper(proj_dim=proj_dim), executor=recorder)
    run.rounds(2)
    last = {reply.client: reply for reply in recorder.replies}
    for client, memory in recorder.memories.items():
        assert list(memory) == ["previous"]
        kept = last[client].value.weights
        expected = {n: t for n, t in kept.items() if not n.startswith("classifier.")}
        bitwise(dict(memory["previous"]), expected)
        ours = {t.data_ptr() for t in (*kept.values(), *run.method.state_dict().values())}
        assert not ours & {t.data_ptr() for t in memory["previous"].values()}
    heads = {n for n in memory["previous"] if n.startswith("head.")}
    assert len(heads) == (0 if proj_dim is None else 4)


@pytest.mark.parametrize(
    ("bn", "kept"),
    [
        (
            "average",
            {"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"},
        ),
        ("frozen", {"0.weight", "0.bias", "1.weight", "1.bias"}),
        ("local", {"0.weight", "0.bias"}),
    ],
)
def test_batch_normalisation_is_kept_once(start_run, recorder, bn, kept):
    """Not kept: constants, what ``local`` keeps anyway, and counters, which have no use."""
    start_normalised(start_run, bn, executor=recorder).rounds(1)
    for memory in recorder.memories.values():
        assert set(memory["previous"]) == {f"backbone.{name}" for name in kept}


def test_an_absent_clients_model_stays(start_run, recorder):
    run = start_run("moon", {"federation": {"per_round": 1, "rounds": 6}}, executor=recorder)
    last = {}
    for _ in range(6):
        run.rounds(run.server.round + 1)
        for reply in recorder.replies:
            last[reply.client] = encode(reply.memory)
        assert {c: encode(memory) for c, memory in recorder.memories.items()} == last
    assert 1 < len(last) <= 4


def test_a_kept_model_that_crossed_processes_gives_the_same_bits(start_run, recorder):
    """Encoding loses the channels-last format of convolutions, the default here."""
    run = start_run("moon", ALL, executor=recorder)
    run.rounds(1)
    memory = recorder.memories["client_1"]
    kept, crossed = (
        recorder.worker.run(Task("client_1", "fit", 2, run.server.weights, {}, m))
        for m in (dict(memory), decode(encode(memory)))
    )
    bitwise(crossed.value.weights, kept.value.weights)


# ------------------------------------------------------------------------------------ the head


def test_the_head_is_part_of_the_global_model(start_run):
    run = start_run("moon", ALL, hyper(proj_dim=256))
    shapes = {n: tuple(t.shape) for n, t in run.server.weights.items()}
    assert {n: s for n, s in shapes.items() if not n.startswith("backbone.")} == {
        "head.0.weight": (128, 128),
        "head.0.bias": (128,),
        "head.2.weight": (256, 128),
        "head.2.bias": (256,),
        "classifier.weight": (3, 256),
        "classifier.bias": (3,),
    }
    before = {n: t.clone() for n, t in run.server.weights.items()}
    results = run.rounds(2)
    assert [n for n, t in run.server.weights.items() if torch.equal(t, before[n])] == []
    assert results[-1].ledger.bytes["up"] == 4 * nbytes(run.server.weights)


def test_the_classifier_sees_the_head(start_run):
    method = start_run("moon", hyper(proj_dim=8)).method
    images = torch.rand(4, 3, 16, 16)
    with torch.no_grad():
        h = method.backbone(images)
        hidden = F.relu(F.linear(h, method.head[0].weight, method.head[0].bias))
        z = F.linear(hidden, method.head[2].weight, method.head[2].bias)
        logits = F.linear(z, method.classifier.weight, method.classifier.bias)
        assert_close(method(images), logits)


def test_the_default_trains_the_network_of_fedavg(start_run):
    ours, theirs = start_run("moon"), start_run("fedavg")
    bitwise(ours.server.weights, theirs.server.weights)


# ---------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(("given", "expected"), [("none", None), (None, None), (256, 256)])
def test_width_of_the_head(given, expected):
    settings = validate(MoonSettings, {"proj_dim": given})
    assert settings.proj_dim == expected
    assert validate(MoonSettings, settings.model_dump(mode="json")) == settings


# ------------------------------------------------------------------------------------- edges


def test_one_client_with_one_image(start_run, toy_federation):
    federation = replace(toy_federation, clients={"client_0": np.array([3])})
    layer = {"partition": {"clients": 1}, "federation": {"per_round": 1}}
    run = start_run("moon", layer, federation=federation)
    run.rounds(3)
    assert all(bool(t.isfinite().all()) for t in run.server.weights.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(start_run):
    run = start_run("moon", ALL, hyper(proj_dim=8))
    worker = Worker(WorkerSpec(run.settings, run.federation, device="cuda:0"))
    weights = {n: t.cuda() for n, t in run.server.weights.items()}
    first = worker.run(Task("client_0", "fit", 1, weights, {}))
    assert {t.device.type for t in first.memory["previous"].values()} == {"cpu"}
    second = worker.run(Task("client_0", "fit", 2, weights, {}, first.memory))
    assert math.isfinite(second.metrics["loss"])


class TestMoon(MethodTester):
    name = "moon"
    layer = ALL
    rounds = 3
    twins = (Twin({"mu": 0.0}, ALL, rounds=3),)
    apart = ({"mu": 5.0}, {"temperature": 0.1}, {"proj_dim": 32})
    wrong = ({"proj_dim": 0}, {"proj_dim": "wide"}, {"mu": -1}, {"temperature": 0})
    models = (1, 1)
