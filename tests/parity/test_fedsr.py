"""FedSR: the loss worked out by hand, its variants, repeatable predictions, and local state."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck
from torch.testing import assert_close

from feddg_bench.config.layers import validate
from feddg_bench.config.schema import BackboneSettings, MethodSettings, TrainSettings
from feddg_bench.core.messages import Task, nbytes
from feddg_bench.core.method import Method
from feddg_bench.models.backbones import build_backbone
from feddg_methods.fedsr import FedSR, FedSRSettings, l2_regulariser, mean_log_probabilities
from tests.helpers import ALL, bitwise, hyper
from tests.tester import MethodTester

VARIANTS = ("official", "bai", "pardon", "aggregated")
SQUARED = ("bai", "pardon")
CERTAIN = -200.0  # softplus underflows to 0: z is its mean
PROJECTED = {"name": "small_cnn", "pretrained": False, "projection": 24}


# -------------------------------------------------------------------- the loss by hand


class Numbers(nn.Module):
    """Reads the 2 d_z numbers of an image from its first pixels."""

    def __init__(self, d_z):
        super().__init__()
        self.num_features = d_z
        self.projection = nn.Identity()

    def forward(self, images):
        return images[:, 0, 0, : self.num_features]  # FedSR has doubled it


def build(d_z=2, num_classes=2, **values):
    settings = validate(FedSRSettings, values)
    method = FedSR(
        settings, backbone=Numbers(d_z), num_classes=num_classes, train=TrainSettings()
    ).double()
    nn.init.zeros_(method.classifier.weight)  # cross-entropy is log C for any z
    nn.init.zeros_(method.classifier.bias)
    return method


def as_images(mu, sigma):
    """Return images from which `Numbers` reads these means and deviations, (B, d_z) each."""
    sigma = torch.as_tensor(sigma, dtype=torch.float64)
    raw = torch.where(sigma > 0, sigma.expm1().log(), CERTAIN)
    numbers = torch.cat([torch.as_tensor(mu, dtype=torch.float64), raw], dim=1)
    return numbers[:, None, None]


MU, SIGMA = [[1.0, 0.0], [0.5, -0.5]], [[1.0, 0.5], [2.0, 1.0]]
LABELS = torch.tensor([0, 1])


def loss_of(method, mu, sigma, labels=LABELS):
    """Return the loss without the cross-entropy."""
    loss = method.training_step((as_images(mu, sigma), labels), 0)
    return loss.item() - math.log(method.num_classes)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [("official", 3.0), ("aggregated", 3.0), ("bai", 13.0), ("pardon", 13.0)],
)
def test_norm_and_squared_norm(variant, expected):
    method = build(variant=variant, l2_weight=1.0, cmi_weight=0.0)
    found = loss_of(method, [[3.0, 4.0], [0.0, 1.0]], [[0.0, 0.0]] * 2)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("variant", "scale", "expected"),
    [
        ("official", 1.0, 0.668440),
        ("aggregated", 1.0, 0.668440),
        ("bai", 1.0, 0.958353),
        ("official", 2.0, 2.652382),
    ],
)
def test_information_at_the_variants_own_start(variant, scale, expected):
    """r_mu = 0 and r_sigma = softplus(1), or r_mu = 1; C = 1 unless given."""
    method = build(variant=variant, l2_weight=0.0, cmi_weight=1.0)
    if scale != 1.0:
        nn.init.constant_(method.reference["log_scale"], math.log(scale))
    assert loss_of(method, MU, SIGMA) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("row", "expected"), [(0, 0.890479), (1, 0.446401)])
def test_information_of_a_batch_of_one(row, expected):
    method = build(l2_weight=0.0, cmi_weight=1.0)
    one = slice(row, row + 1)
    assert loss_of(method, MU[one], SIGMA[one], LABELS[one]) == pytest.approx(expected, abs=1e-6)


def test_defaults_weigh_the_terms():
    """0.01 times a mean norm of 3, and 0.001 times the information."""
    method = build()
    mu = [[3.0, 4.0], [0.0, 1.0]]
    information = loss_of(build(l2_weight=0.0, cmi_weight=1.0), mu, [[0.0, 0.0]] * 2)
    expected = 0.01 * 3.0 + 0.001 * information
    assert loss_of(method, mu, [[0.0, 0.0]] * 2) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(5))
def test_total_loss_is_the_formula_in_numpy(variant, seed):
    """Random backbone outputs, references and scale; the noise is what the generator drew."""
    rng = np.random.default_rng(seed)
    size, d_z, classes = 6, 4, 3
    method = build(d_z, classes, variant=variant, l2_weight=0.3, cmi_weight=0.2)
    for parameter in method.parameters():
        parameter.data = torch.from_numpy(rng.normal(size=tuple(parameter.shape)))
    mu, sigma = rng.normal(size=(size, d_z)), rng.uniform(0.1, 2, (size, d_z))
    y = rng.integers(classes, size=size)
    torch.manual_seed(seed)
    found = method.training_step((as_images(mu, sigma), torch.from_numpy(y)), 0).item()
    torch.manual_seed(seed)
    z = mu + sigma * torch.randn(size, d_z, dtype=torch.float64).numpy()

    state = {name: value.detach().numpy() for name, value in method.state_dict().items()}
    logits = z @ state["classifier.weight"].T + state["classifier.bias"]
    ce = np.mean([np.log(np.exp(row - row[c]).sum()) for row, c in zip(logits, y, strict=True)])
    power = (z**2).sum(1)
    l2 = power.mean() if variant in SQUARED else np.sqrt(power).mean()
    scale = math.exp(state["reference.log_scale"]) if variant not in SQUARED else 1.0
    r_mu, r_sigma = state["reference.mu"][y], np.log1p(np.exp(state["reference.sigma"][y]))
    kl = np.log(r_sigma) - np.log(scale * sigma) - 0.5
    kl += ((scale * sigma) ** 2 + (scale * mu - r_mu) ** 2) / (2 * r_sigma**2)
    assert found == pytest.approx(ce + 0.3 * l2 + 0.2 * kl.sum(1).mean(), rel=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_the_total_loss(variant):
    """Against finite differences: the backbone's output, the reference, the scale, the head."""
    method = build(variant=variant, l2_weight=0.3, cmi_weight=0.2)
    nn.init.normal_(method.classifier.weight, generator=torch.Generator().manual_seed(0))
    step = Step(method)
    names, values = zip(*step.named_parameters(), strict=True)
    leaves = [as_images(MU, SIGMA), *values]

    def loss(images, *values):
        torch.manual_seed(0)
        state = dict(zip(names, values, strict=True))
        return torch.func.functional_call(step, state, (images, LABELS))

    assert gradcheck(loss, [leaf.detach().clone().requires_grad_() for leaf in leaves])


class Step(nn.Module):
    """The training step as a module's forward."""

    def __init__(self, method):
        super().__init__()
        self.method = method

    def forward(self, *batch):
        return self.method.training_step(batch, 0)


def test_information_trains_backbone_reference_and_scale():
    method = build(l2_weight=0.0, cmi_weight=1.0)
    images = as_images([[1.0, 0.3], [0.5, -0.5]], SIGMA).requires_grad_()
    method.training_step((images, LABELS), 0).backward()
    assert (images.grad != 0).all()
    for name in ("mu", "sigma", "log_scale"):
        assert bool(method.reference[name].grad.isfinite().all())
        assert (method.reference[name].grad != 0).any()


def test_a_certain_representation_of_zero_has_finite_gradients():
    """sigma underflows and mu is 0, where log sigma and the norm have no gradient of their own."""
    method = build()
    images = as_images([[0.0, 0.0]] * 2, [[0.0, 0.0]] * 2).requires_grad_()
    loss = method.training_step((images, LABELS), 0)
    loss.backward()
    assert bool(loss.isfinite())
    assert all(bool(p.grad.isfinite().all()) for p in (images, *method.reference.parameters()))


def test_the_scale_stays_positive():
    method = build(l2_weight=0.0, cmi_weight=1.0)
    optimizer = torch.optim.SGD([method.reference["log_scale"]], lr=0.5)
    scales = []
    for _ in range(20):  # the first step would take C itself from 1 to below 0
        optimizer.zero_grad()
        method.training_step((as_images(MU, [[3.0, 3.0]] * 2), LABELS), 0).backward()
        optimizer.step()
        scales.append(method.reference["log_scale"].exp().item())
    assert min(scales) > 0
    assert max(scales) < 1


def test_norms_of_rows():
    z = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert l2_regulariser(z).item() == pytest.approx(np.linalg.norm(z.detach(), axis=1).mean())
    assert gradcheck(l2_regulariser, z)
    assert gradcheck(partial(l2_regulariser, squared=True), z)


# -------------------------------------------------------------------------- test images


def test_probabilities_are_averaged_over_samples():
    """Logits (2, 0), (0, 0) with one noise vector and (0, 1), (3, 0) with the other."""
    method = build(4, test_samples=2).eval()
    method.test_noise = torch.tensor([[-1.0, -1, 1, 1], [1, 1, -1, -1]], dtype=torch.float64)
    method.classifier.weight.data = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1]]).double()
    mu = [[1.0, 0.5, 0.0, 0.0], [1.5, 0.0, 0.0, 0.0]]
    sigma = [[0.0, 0.5, 1.0, 0.0], [1.5, 0.0, 0.0, 0.0]]
    scores = method(as_images(mu, sigma))
    expected = torch.tensor([[0.574869, 0.425131], [0.726287, 0.273713]], dtype=torch.float64)
    assert_close(scores.exp(), expected, rtol=0, atol=1e-6)
    # another softmax, as in evaluation's cross-entropy, changes nothing
    assert_close(scores.softmax(1), expected, rtol=0, atol=1e-6)


def test_mean_probabilities_in_numpy():
    logits = np.random.default_rng(0).normal(scale=5, size=(7, 3, 4))
    e = np.exp(logits)
    expected = np.log((e / e.sum(-1, keepdims=True)).mean(0))
    assert_close(mean_log_probabilities(torch.from_numpy(logits)), torch.from_numpy(expected))


def test_impossible_classes_do_not_overflow():
    logits = torch.tensor([[[0.0, 500.0]], [[0.0, 400.0]]])
    assert_close(mean_log_probabilities(logits), torch.tensor([[math.log(0.5) - 400.0, 0.0]]))
    half = mean_log_probabilities(torch.tensor([[[1.0, 2.0]]], dtype=torch.bfloat16))
    assert half.dtype == torch.float32


def test_without_samples_the_mean_is_classified(start_run, toy_federation):
    run = start_run("fedsr", hyper(test="mean"))
    method = run.method.eval()
    images = pictures(toy_federation)
    with torch.no_grad():
        mu, sigma = method.distribution(images)
        bitwise(method(images), method.classifier(mu))
        bitwise(method.features(images), mu)
    assert (mu.shape, sigma.shape) == ((10, 128), (10, 128))
    assert bool((sigma > 0).all())
    assert "test_noise" not in method.state_dict()


def pictures(federation, count=10):
    return torch.from_numpy(federation.images[:count]).permute(0, 3, 1, 2) / 255


def test_predictions_depend_neither_on_the_batch_nor_on_the_generator(start_run, toy_federation):
    method = start_run("fedsr").method.eval()
    images = pictures(toy_federation)
    with torch.no_grad():
        whole = method(images)
        torch.rand(3)
        bitwise(method(images), whole)
        assert_close(method(images.flip(0)).flip(0), whole, rtol=1e-5, atol=1e-6)
        single = torch.cat([method(image[None]) for image in images])
        assert_close(single, whole, rtol=1e-5, atol=1e-6)
        assert_close(whole.exp().sum(1), torch.ones(10))


def test_samples_differ_from_their_mean_and_from_each_other(start_run, toy_federation):
    images = pictures(toy_federation)

    def scores(**values):
        method = start_run("fedsr", hyper(**values)).method.eval()
        with torch.no_grad():
            return method, method(images).log_softmax(1)

    twenty, first = scores()
    _, one = scores(test_samples=1)
    _, mean = scores(test="mean")
    assert twenty.test_noise.shape == (20, 128)
    assert len(twenty.test_noise.unique()) == twenty.test_noise.numel()
    assert abs(float(twenty.test_noise.mean())) < 0.1
    assert float(twenty.test_noise.std()) == pytest.approx(1, abs=0.1)
    assert not torch.allclose(first, one, atol=1e-3)
    assert not torch.allclose(first, mean, atol=1e-4)
    # more samples come nearer to the expectation
    _, many = scores(test_samples=2000)
    assert (first - many).abs().mean() < (one - many).abs().mean()


def test_noise_is_the_runs_own_and_never_moves(start_run, recorder):
    run = start_run("fedsr", executor=recorder)
    before = run.method.test_noise.clone()
    run.rounds(2)
    bitwise(run.method.test_noise, before)
    bitwise(start_run("fedsr").method.test_noise, before)
    assert not torch.equal(start_run("fedsr", {"seed": 1}).method.test_noise, before)
    assert not any("test_noise" in task.weights for task in recorder.tasks)


def test_training_draws_anew_for_every_image_and_step(start_run, toy_federation):
    method = start_run("fedsr").method.train()
    images = pictures(toy_federation, 2)[:1].expand(2, -1, -1, -1)
    with torch.no_grad():
        first, second = method(images), method(images)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, second)


# ------------------------------------------------------------------------- the wider head


def shapes(**backbone):
    settings = validate(BackboneSettings, {"pretrained": False, **backbone})
    with torch.device("cpu"):
        method = FedSR(
            validate(FedSRSettings, {}),
            backbone=build_backbone(settings),
            num_classes=7,
            train=TrainSettings(),
        )
    return method, {name: method.state_dict()[name] for name in method.federated}


def test_the_projection_is_doubled_where_there_is_one():
    """FedDG_Benchmark's ResNet-50: 2048 to 4096, 31,915,079 parameters, 127,873,220 bytes."""
    method, state = shapes(name="resnet50", projection=2048)
    assert tuple(state["backbone.projection.weight"].shape) == (4096, 2048)
    assert sum(state[name].numel() for name in method.trainable) == 31_915_079
    assert nbytes(state) == 127_873_220


def test_without_a_projection_one_is_added():
    """The authors' ResNet-18 with d_z = 512."""
    method, state = shapes(name="resnet18")
    assert tuple(state["backbone.projection.weight"].shape) == (1024, 512)
    assert tuple(state["classifier.weight"].shape) == (7, 512)
    wider = 512 * 1024 + 1024
    assert sum(state[name].numel() for name in method.trainable) == 11_180_103 + wider


class Wide(Method):
    """FedAvg whose features are half of a linear layer's output, as in FedSR."""

    def build(self):
        self.backbone.projection = nn.Linear(128, 256)

    def features(self, images):
        return self.backbone(images)[:, :128]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_without_noise_and_regularisers_it_is_fedavg_bit_for_bit(start_run, variant, optimizer):
    layers = ({"train": {"optimizer": optimizer}}, ALL)
    base = start_run("fedavg", *layers)
    plain = Wide(
        MethodSettings(),
        backbone=build_backbone(base.settings.backbone),
        num_classes=3,
        train=base.settings.train,
    )
    none = hyper(variant=variant, l2_weight=0.0, cmi_weight=0.0, test="mean")
    ours, theirs = start_run("fedsr", *layers, none), start_run("fedavg", *layers, method=plain)
    names = list(theirs.server.weights)
    for name in names:
        tensor = ours.server.weights[name].clone()
        if name.startswith("backbone.projection"):  # no deviations
            tensor[128:] = CERTAIN if name.endswith("bias") else 0.0
        ours.server.weights[name].copy_(tensor)
        theirs.server.weights[name].copy_(tensor)
    first, second = ours.rounds(2), theirs.rounds(2)
    bitwise({name: ours.server.weights[name] for name in names}, theirs.server.weights)
    for mine, other in zip(first, second, strict=True):
        assert mine.evaluation == other.evaluation
        assert mine.ledger.means() == other.ledger.means()


# ------------------------------------------------------------------------- the reference

SETTLED = {"train": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}}


@pytest.mark.parametrize("variant", ["official", "bai"])
def test_the_reference_stays_with_its_client_and_goes_on(start_run, recorder, variant):
    run = start_run("fedsr", hyper(variant=variant), ALL, executor=recorder)
    start = 1.0 if variant in SQUARED else 0.0
    bitwise(run.method.reference["mu"].detach(), torch.full((3, 128), start))
    bitwise(run.method.reference["sigma"].detach(), torch.ones(3, 128))
    names = {"reference.mu", "reference.sigma"}
    names |= {"reference.log_scale"} if variant == "official" else set()
    run.rounds(2)
    assert not any(n.startswith("reference") for n in run.server.weights)
    kept = [task.memory for task in recorder.tasks[4:]]
    assert all(set(memory["private state"]) == names for memory in kept)
    first, second = (memory["private state"]["reference.mu"] for memory in kept[:2])
    assert not torch.equal(first, second)
    assert not torch.equal(first, torch.full((3, 128), start))
    last = recorder.replies[4].memory["private state"]["reference.mu"]
    assert not torch.equal(last, first)


@pytest.mark.parametrize(("variant", "found"), [("bai", 5.0), ("pardon", 1.0)])
def test_in_pardons_code_a_reference_starts_anew(start_run, recorder, variant, found):
    train = {"train": {"optimizer": "sgd", "lr": 1e-12}}
    run = start_run("fedsr", hyper(variant=variant) | train, ALL, executor=recorder)
    run.rounds(1)
    for reply in recorder.replies:
        reply.memory["private state"]["reference.mu"].fill_(5.0)
    run.rounds(2)
    last = recorder.replies[-1].memory["private state"]["reference.mu"]
    assert_close(last, torch.full((3, 128), found), rtol=0, atol=1e-5)


def test_a_client_left_out_keeps_its_reference(start_run, recorder):
    run = start_run("fedsr", executor=recorder)  # two of four clients a round
    run.rounds(3)
    seen = {}
    for task, reply in zip(recorder.tasks, recorder.replies, strict=True):
        if task.client in seen:
            assert_close(task.memory, seen[task.client], rtol=0, atol=0)
        seen[task.client] = reply.memory
    assert len(recorder.tasks) > len(seen)


@pytest.mark.parametrize("train", [{"optimizer": "adam"}, SETTLED["train"]], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_class_that_a_client_lacks_keeps_its_rows(start_run, toy_federation, train, variant):
    """Class 2 is missing at client_0, which trains the other rows."""
    labels = toy_federation.labels
    index = toy_federation.clients["client_0"]
    clients = {**toy_federation.clients, "client_0": index[labels[index] != 2]}
    federation = replace(toy_federation, clients=clients)
    run = start_run("fedsr", hyper(variant=variant), {"train": train}, federation=federation)
    worker = run.executor.worker
    memory = {}
    weights = run.server.weights
    for round in (1, 2):
        reply = worker.run(Task("client_0", "fit", round, weights, {}, memory))
        memory, weights = reply.memory, reply.value.weights
    kept = weights if variant == "aggregated" else memory["private state"]
    start = 1.0 if variant in SQUARED else 0.0
    bitwise(kept["reference.mu"][2], torch.full((128,), start))
    bitwise(kept["reference.sigma"][2], torch.ones(128))
    assert (kept["reference.mu"][:2] != start).any(dim=1).all()


def test_an_aggregated_reference_is_sent_and_averaged(start_run, recorder):
    """Every message has 2 C d_z + 1 floats more than if the reference stayed local."""
    run = start_run("fedsr", hyper(variant="aggregated"), ALL, executor=recorder)
    _, result = run.rounds(1)
    _, local = start_run("fedsr", ALL).rounds(1)
    extra = (2 * 3 * 128 + 1) * 4
    for way in ("up", "down"):
        assert result.ledger.bytes[way] == local.ledger.bytes[way] + 4 * extra
    share = [n / 44 for n in (9, 11, 12, 12)]
    for name in ("reference.mu", "reference.sigma", "reference.log_scale"):
        rows = [reply.value.weights[name].double() for reply in recorder.replies]
        expected = sum(p * row for p, row in zip(share, rows, strict=True))
        assert_close(run.server.weights[name].double(), expected, rtol=1e-6, atol=1e-7)
    assert all("private state" not in reply.memory for reply in recorder.replies)


def test_published_size_of_an_aggregated_reference():
    """FedCCRL on PACS: 2 x 7 x 1280 + 1 floats are 71,684 bytes."""
    with torch.device("cpu"):
        method = FedSR(
            validate(FedSRSettings, {"variant": "aggregated"}),
            backbone=Numbers(1280),
            num_classes=7,
            train=TrainSettings(),
        )
    sent = {n: method.state_dict()[n] for n in method.federated if n.startswith("reference")}
    assert nbytes(sent) == 71_684


# -------------------------------------------------------------------------------- learning

LEARN = (ALL, {"augment": {"flip": 0.0}, "federation": {"rounds": 12}})


@pytest.mark.nightly
@pytest.mark.parametrize(
    "values", [{}, {"variant": "bai"}, {"variant": "aggregated"}, {"test": "mean"}], ids=str
)
def test_it_learns(start_run, values):
    """The class is the position of the light; chance is one third.

    Features are random and images only eight: single rounds fluctuate, and depend on CPU rounding.
    """
    results = start_run("fedsr", *LEARN, hyper(**values)).rounds(12)[1:]
    dark = [result.evaluation["id_val"]["dark"] for result in results]
    assert median(d["accuracy"] for d in dark[-7:]) > 0.8
    assert median(d["loss"] for d in dark[-7:]) < 0.6 * dark[0]["loss"]


def test_a_projected_backbone_trains(start_run):
    run = start_run("fedsr", {"backbone": PROJECTED})
    before = run.server.weights["backbone.projection.weight"].clone()
    run.rounds(1)
    assert before.shape == (48, 128)
    assert not torch.equal(run.server.weights["backbone.projection.weight"], before)


def test_half_precision_keeps_the_regularisers_exact(start_run, toy_federation):
    run = start_run("fedsr", {"train": {"precision": "bf16-mixed"}}, LEARN[1])
    results = run.rounds(2)
    assert all(bool(t.isfinite().all()) for t in run.server.weights.values())
    assert results[-1].ledger.dropped == []
    method, images = run.method.eval(), pictures(toy_federation)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        mu, sigma = method.distribution(images)
        scores = method(images)
    assert (mu.dtype, sigma.dtype, scores.dtype) == (torch.float32,) * 3
    assert_close(scores.exp().sum(1), torch.ones(10))
    assert_close(F.cross_entropy(scores, torch.zeros(10, dtype=torch.int64)), -scores[:, 0].mean())


def test_predictions_do_not_change_what_is_learnt(start_run):
    """The noise is drawn last."""
    runs = [start_run("fedsr", hyper(**v)) for v in ({}, {"test": "mean"}, {"test_samples": 3})]
    for run in runs:
        run.rounds(1)
        bitwise(run.server.weights, runs[0].server.weights)


class TestFedSR(MethodTester):
    name = "fedsr"
    apart = (
        {"variant": "bai"},
        {"variant": "aggregated"},
        {"l2_weight": 0.1},
        {"cmi_weight": 0.1},
    )
    wrong = ({"variant": "paper"}, {"test": "one"}, {"test_samples": 0}, {"l2_weight": -1})
