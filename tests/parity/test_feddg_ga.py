"""FedDG-GA: published numbers through whole rounds, what gaps measure, when it equals FedAvg."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import FederationSettings, TrainSettings
from feddg_bench.core.aggregation import streaming_mean
from feddg_bench.core.messages import LocalUpdate, Reply, Task
from feddg_bench.core.server import Server
from feddg_methods.feddg_ga import VARIANTS, FedDGGA, FedDGGASettings, badness, signed_mean
from tests.helpers import ALL, PLAIN, UNIFORM, bitwise, hyper
from tests.tester import MethodTester, Twin

# ------------------------------------------------------------ whole rounds with given answers


class Told:
    """An executor whose clients have unit vectors as models, and given gaps."""

    def __init__(self, gaps, num_clients, sizes, broken):
        self.gaps, self.eye, self.sizes, self.broken = gaps, torch.eye(num_clients), sizes, broken
        self.memories, self.calls = {}, []

    def map(self, tasks):
        for task in tasks:
            self.calls.append(task.call)
            i = int(task.client)
            if task.call == "fit":
                model = torch.full_like(self.eye[i], math.nan) if i in self.broken else self.eye[i]
                value = LocalUpdate({"w": model, "mean": model, "count": torch.tensor(i)})
            else:
                gap = self.gaps[i]
                value = {"own": 0.5, "averaged": gap if gap is None else 0.5 + gap}
            yield Reply(task.client, self.sizes[i], value, {}, {})


class NoBackbone(nn.Module):
    num_features = 1


class Script:
    """FedDG-GA's server half with such clients: the new model is the vector of coefficients."""

    def __init__(self, gaps, *, num_clients=3, rounds=40, sizes=None, broken=(), **values):
        settings = values.pop("federation", {})
        self.executor = Told(gaps, num_clients, sizes or [1] * num_clients, broken)
        zeros = torch.zeros(num_clients)
        self.server = Server(
            {"w": zeros, "mean": zeros.clone(), "count": torch.tensor(0)},
            tuple(str(i) for i in range(num_clients)),
            self.executor,
            seed=0,
            federation=FederationSettings(rounds=rounds, per_round=None, **settings),
            uplink=FedDGGA.uplink,
        )
        self.method = FedDGGA(
            validate(FedDGGASettings, values),
            backbone=NoBackbone(),
            num_classes=2,
            train=TrainSettings(),
        )
        self.method.trainable = ["w"]
        self.method.prepare(self.server)

    def round(self, number, cohort=None):
        self.server.round = number
        self.server.cohort = tuple(str(i) for i in cohort) if cohort else self.server.clients
        self.method.run_round(self.server)
        return self.server.weights["w"].tolist()

    @property
    def a(self):
        return self.server.memory["a"].tolist()


approx = partial(pytest.approx, abs=1e-9)
GAPS = [0.2, 0.1, 0.4]


@pytest.mark.parametrize(
    ("variant", "rounds", "number", "gaps", "expected"),
    [
        # the code counts from 0 and runs R + 1 rounds: its round 1 of R = 40 is our round 2 of 41
        ("official", 41, 2, GAPS, (0.3283582090, 0.3134328358, 0.3582089552)),
        ("official", 41, 2, [0.05, 0.01, -0.02], (0.3797468354, 0.3291139241, 0.2911392405)),
        ("paper", 40, 10, GAPS, (0.3033333333, 0.2133333333, 0.4833333333)),
        ("default", 40, 10, GAPS, (0.3233333333, 0.2933333333, 0.3833333333)),
        ("default", 40, 10, [0.3, 0.3, 0.3], (1 / 3, 1 / 3, 1 / 3)),
        ("default", 40, 10, [0.0, 0.0, 0.0], (1 / 3, 1 / 3, 1 / 3)),
    ],
)
def test_published_numbers_through_two_rounds(variant, rounds, number, gaps, expected):
    script = Script(gaps, rounds=rounds, variant=variant, gap_timing="same_round")
    assert script.round(number) == pytest.approx([1 / 3] * 3)
    assert script.a == approx(expected)
    assert script.round(number + 1) == pytest.approx(expected)


@pytest.mark.parametrize(("number", "step"), [(1, 0.0683333333), (2, 0.0666666667), (41, 1 / 600)])
def test_official_steps_from_the_first_round_to_the_last(number, step):
    """For gaps 1 and 0, the step follows from the ratio of the weights."""
    script = Script([1.0, 0.0], num_clients=2, rounds=41, variant="official")
    script.round(number)
    assert 0.5 * script.a[0] / script.a[1] - 0.5 == approx(step)


def test_official_with_one_round():
    script = Script([1.0, 0.0], num_clients=2, rounds=1, variant="official")
    assert script.round(1) == pytest.approx([0.5, 0.5])


def test_two_of_five_take_part():
    script = Script([None, 0.5, None, -0.2, None], num_clients=5, rounds=50)
    script.round(10, cohort=(1, 3))
    assert script.a == approx([0.2, 0.232, 0.2, 0.168, 0.2])
    assert script.round(11, cohort=(1, 3)) == pytest.approx([0, 0.58, 0, 0.42, 0])


def test_pardon_weighs_with_the_gaps_of_the_same_round():
    """PARDON's round 10 of 50, counted from 0, is our round 11; gaps come before the models."""
    script = Script([None, 0.5, None, -0.2, None], num_clients=5, rounds=50, variant="pardon")
    new = script.round(11, cohort=(1, 3))
    assert script.executor.calls == ["measure"] * 2 + ["fit"] * 2
    expected = [0.1724137931, 0.4022988506, 0.1724137931, 0.0804597701, 0.1724137931]
    assert script.a == approx(expected)
    assert new == pytest.approx([0, 0.8333333333, 0, 0.1666666667, 0])


def test_both_timings_make_the_same_step_when_all_take_part():
    now = Script(GAPS, gap_timing="same_round")
    later = Script(GAPS, gap_timing="next_participation")
    now.round(1)
    later.round(1)
    assert later.a == [1 / 3] * 3
    assert now.round(2) == later.round(2) != [1 / 3] * 3


@pytest.mark.parametrize("gap", [math.nan, None])
def test_a_client_without_a_finite_metric_keeps_its_weight(gap):
    script = Script([0.2, gap, 0.4], gap_timing="same_round")
    script.round(10)
    assert script.a == approx([1 / 3 - 0.05, 1 / 3, 1 / 3 + 0.05])


def test_pardon_falls_back_to_image_counts_for_the_whole_round():
    sizes = [10, 30, 60]
    script = Script(GAPS, rounds=10, variant="pardon", sizes=sizes)
    assert script.round(1) == pytest.approx([0.1, 0.3, 0.6])
    assert script.executor.calls == ["fit"] * 3
    assert script.a == [1 / 3] * 3

    moved = script.round(2)  # 1/3 + (1 - 1/10)/3 x (.5, .25, 1), divided by their sum
    expected = np.array([0.15, 0.075, 0.3]) + 1 / 3
    assert moved == pytest.approx(expected / expected.sum())
    before = script.a

    script.executor.gaps = [0.2, None, 0.4]
    assert script.round(3) == pytest.approx([0.1, 0.3, 0.6])
    assert script.a == before
    script.executor.gaps = [0.1, 0.1, 0.1]
    assert script.round(4) != pytest.approx([0.1, 0.3, 0.6])


def test_clients_of_weight_0_count_where_nobody_else_does():
    """PARDON's step of 1/3 sets weights to 0 at once; a cohort of such clients has a plain mean."""
    script = Script([1.0, -1.0, -1.0], rounds=10**6, variant="pardon")
    assert script.round(2) == pytest.approx([1, 0, 0], abs=1e-5)
    script.server.memory["a"] = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    script.method.settings = script.method.settings.model_copy(update={"step": 0.0})
    assert script.round(3, cohort=(1, 2)) == pytest.approx([0, 0.5, 0.5])
    assert script.round(3, cohort=(2,)) == [0, 0, 1]
    assert script.round(3, cohort=(0, 2)) == [1, 0, 0]


def test_the_weights_of_clients_that_diverged_go_to_the_others():
    script = Script([0.2, 0.1, 0.4, 0.4], num_clients=4, broken={2})
    script.server.memory["a"] = torch.tensor([0.1, 0.3, 0.4, 0.2], dtype=torch.float64)
    assert script.round(1) == pytest.approx([1 / 6, 1 / 2, 0, 1 / 3])
    script.server.memory["a"] = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    assert script.round(2) == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])


def test_buffers_take_the_same_weights_and_no_server_step():
    script = Script(GAPS, federation={"server_lr": 0.5})
    script.server.memory["a"] = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    assert script.round(1) == pytest.approx([0.1, 0.15, 0.25])
    assert script.server.weights["mean"].tolist() == pytest.approx([0.2, 0.3, 0.5])
    assert int(script.server.weights["count"]) == 2


def test_image_counts_play_no_part():
    assert Script(GAPS, sizes=[10, 30, 60]).round(1) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_client_is_the_new_model_bit_for_bit(variant):
    script = Script([0.3], num_clients=1, rounds=3, variant=variant, initial_weights="uniform")
    for number in (1, 2, 3):
        assert script.round(number) == [1.0]
        assert script.a == [1.0]


# ---------------------------------------------------------------------- weights below zero


@pytest.mark.parametrize("seed", range(30))
def test_signed_mean_equals_its_definition(seed):
    rng = np.random.default_rng(seed)
    p = rng.integers(-3 if seed % 2 else 0, 5, size=rng.integers(1, 7)) / 4  # zeros are common
    w, buffer = rng.normal(size=(2, len(p), 3))
    states = [
        {"w": torch.from_numpy(w[i]), "b": torch.from_numpy(buffer[i]), "n": torch.tensor(i)}
        for i in range(len(p))
    ]
    mean = signed_mean(zip(states, p.tolist(), strict=True), ["w"])

    positive = np.maximum(p, 0) if (p > 0).any() else np.ones(len(p))
    convex = positive / positive.sum()
    expected = p @ w / p.sum() if p.sum() > 0 and (p < 0).any() else convex @ w
    np.testing.assert_allclose(mean["w"], expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(mean["b"], convex @ buffer, rtol=1e-6, atol=1e-9)
    assert int(mean["n"]) == len(p) - 1


def test_signed_mean_of_positive_weights_is_the_convex_one_bit_for_bit():
    states = [{"w": torch.randn(50), "n": torch.tensor(3)} for _ in range(5)]
    shares = [0.3, 0.1, 1.0, 0.7, 1 / 3]
    found = signed_mean(zip(states, shares, strict=True), ["w"])
    bitwise(found, streaming_mean(zip(states, shares, strict=True)))


def test_no_more_than_a_few_models_are_alive(counted):
    signed_mean(((counted({"w": torch.ones(3)}), 0.5 - (i % 3 == 1)) for i in range(20)), ["w"])
    assert counted.most <= 2


def test_fedccrl_extrapolates_from_negative_weights():
    """With 3000 times its own step: (.25, .25, .5) + (0, -1, 1), at the start of the decay."""
    script = Script(
        [0.0, -1.0, 1.0], rounds=10**6, variant="fedccrl", initial_weights="uniform", step=3.0
    )
    script.server.memory["a"] = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    script.round(1)
    assert script.a == pytest.approx([0.25, -0.75, 1.5], abs=1e-5)
    assert script.round(2) == pytest.approx([0.25, -0.75, 1.5], abs=1e-5)
    assert script.server.weights["mean"].tolist() == pytest.approx([1 / 7, 0, 6 / 7], abs=1e-5)


# -------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("variant", VARIANTS)
def test_when_a_variant_measures_and_what(start_run, recorder, variant):
    """It measures at once or before the next round, and a loss or an error rate."""
    run = start_run("feddg_ga", ALL, hyper(variant=variant), executor=recorder)
    run.rounds(2)
    mine = [i for i, task in enumerate(recorder.tasks) if task.client == "client_0"]
    late = variant in ("paper", "pardon")
    steps = ["fit", "measure", "fit"] + ([] if late else ["measure"])
    first = ["count_batches"] if variant == "fedccrl" else []
    assert [recorder.tasks[i].call for i in mine] == first + steps
    (measured, *_) = [
        recorder.replies[i].value for i in mine if recorder.tasks[i].call == "measure"
    ]
    errors = 4 * measured["averaged"]  # of four validation images
    assert errors.is_integer() == (variant == "official")


# ------------------------------------------------------------------------- what is measured


def oracle(method, weights, images, labels, metric):
    """Return each image's loss, or error, under some weights in evaluation mode, in float64."""
    method.state.load(weights)
    method.eval()
    with torch.no_grad():
        logits = method(images).double().numpy()
    if metric == "accuracy":
        return (logits.argmax(1) != labels.numpy()).astype(float)
    logits = logits - logits.max(1, keepdims=True)
    return np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels.numpy()]


def stored(federation, index):
    images = torch.from_numpy(federation.images[index]).permute(0, 3, 1, 2) / 255
    return images, torch.from_numpy(federation.labels[index])


def replies(recorder, round, call):
    pairs = zip(recorder.tasks, recorder.replies, strict=True)
    return {t.client: r.value for t, r in pairs if (t.round, t.call) == (round, call)}


@pytest.mark.parametrize("timing", ["same_round", "next_participation"])
@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_gaps_weights_and_models_of_a_run(start_run, recorder, timing, metric):
    """Three rounds recomputed in float64: metrics, the default rule, the mean."""
    layer = hyper(metric=metric, gap_timing=timing)
    run = start_run("feddg_ga", ALL, layer, {"federation": {"rounds": 3}}, executor=recorder)
    method, federation = run.method, run.federation
    run.rounds(0)
    a, own, weights = np.full(4, 0.25), {}, {}
    for number in (1, 2, 3):
        received = {n: t.clone() for n, t in run.server.weights.items()}
        run.rounds(number)
        new = {n: t.clone() for n, t in run.server.weights.items()}
        sent = replies(recorder, number, "measure")
        if timing == "same_round" or number > 1:
            gaps = []
            for client, index in federation.validation.items():
                batch = stored(federation, index)
                if timing == "same_round":
                    own[client] = replies(recorder, number, "fit")[client].weights
                model = new if timing == "same_round" else received
                local, averaged = (
                    oracle(method, w, *batch, metric).mean() for w in (own[client], model)
                )
                assert sent[client] == pytest.approx({"own": local, "averaged": averaged}, rel=1e-5)
                gaps.append(averaged - local)
            finished = number if timing == "same_round" else number - 1
            x = np.array(gaps) - np.mean(gaps)
            b = np.clip(a + 0.2 * (1 - finished / 3) / 4 * x / np.abs(x).max(), 0, 1)
            if timing == "next_participation":
                a = b / b.sum()
        else:
            assert sent == {}
        fits = replies(recorder, number, "fit")
        for name in method.trainable:
            mean = sum(
                share * fits[c].weights[name].double() for share, c in zip(a, fits, strict=True)
            )
            assert_close(new[name].double(), mean, rtol=1e-5, atol=1e-6)
        if timing == "same_round":
            a = b / b.sum()
        else:
            own = {client: value.weights for client, value in fits.items()}
        weights[number] = run.server.memory["a"].tolist()
        assert weights[number] == pytest.approx(a.tolist(), abs=1e-5)
    if timing == "same_round":  # the last step is 0
        assert weights[3] == weights[2] != weights[1]


@pytest.mark.parametrize("variant", ["default", "paper"])
def test_when_all_take_part_the_timings_agree_bit_for_bit(start_run, variant):
    now, later = (
        start_run("feddg_ga", ALL, hyper(variant=variant, gap_timing=timing))
        for timing in ("same_round", "next_participation")
    )
    now.rounds(3)
    later.rounds(3)
    bitwise(later.server.weights, now.server.weights)
    assert not torch.equal(later.server.memory["a"], torch.full((4,), 0.25, dtype=torch.float64))


def test_pardon_measures_training_batches_and_running_losses(start_run, recorder):
    """Without augmentation a training epoch in evaluation mode is a pass over the stored images."""
    train = {"train": {"local_epochs": 2}}
    run = start_run("feddg_ga", ALL, PLAIN, train, hyper(variant="pardon"), executor=recorder)
    losses = {}
    step = run.method.training_step

    def keep(batch, index):
        loss = step(batch, index)
        losses.setdefault((run.method.client.round, run.method.client.name), []).append(
            (len(batch[1]), loss.item())
        )
        return loss

    run.method.training_step = keep
    run.rounds(1)
    received = {n: t.clone() for n, t in run.server.weights.items()}
    run.rounds(2)
    for client, terms in replies(recorder, 2, "measure").items():
        steps = losses[1, client]
        last = steps[len(steps) // 2 :]
        own = sum(n * loss for n, loss in last) / sum(n for n, _ in last)
        batch = stored(run.federation, run.federation.clients[client])
        averaged = oracle(run.method, received, *batch, "loss").mean()
        assert terms == pytest.approx({"own": own, "averaged": averaged}, rel=1e-5)


def test_fedccrl_takes_means_of_batches(start_run, recorder):
    """Client 0 holds 9 images: its batches of 8 and of 1 count the same."""
    run = start_run("feddg_ga", ALL, PLAIN, hyper(variant="fedccrl"), executor=recorder)
    means = []
    step = run.method.training_step

    def keep(batch, index):
        loss = step(batch, index)
        if run.method.client.name == "client_0":
            means.append(loss.item())
        return loss

    run.method.training_step = keep
    run.rounds(1)
    terms = replies(recorder, 1, "measure")["client_0"]
    assert len(means) == 2
    assert terms["own"] == pytest.approx(sum(means) / 2, rel=1e-6)

    run.method.state.load(run.server.weights)
    data = recorder.worker.data["client_0"]
    epoch = torch_generator(run.settings.seed, "loader", 1, 1, "client_0")  # after the only epoch
    order = torch.randperm(9, generator=epoch)
    images, labels = stored(run.federation, data.index[order].numpy())
    values = oracle(run.method, run.server.weights, images, labels, "loss")
    expected = (values[:8].mean() + values[8]) / 2
    assert terms["averaged"] == pytest.approx(expected, rel=1e-5)


def test_gaps_on_training_batches_see_augmented_images(start_run):
    stored_run = start_run("feddg_ga", ALL, PLAIN, hyper(variant="pardon"))
    augmented = start_run("feddg_ga", ALL, hyper(variant="pardon"))
    weights = stored_run.method.state.federated_weights()
    task = Task("client_1", "measure", 2, weights, {}, {"own": 0.0})
    plain, moved = (
        run.executor.worker.run(task).value["averaged"] for run in (stored_run, augmented)
    )
    assert plain != moved


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_accuracy_counts_errors(metric):
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    values = badness(logits.bfloat16(), torch.tensor([0, 0]), metric)
    expected = [math.log1p(math.exp(-2)), math.log1p(math.e)] if metric == "loss" else [0, 1]
    assert values.tolist() == pytest.approx(expected)
    assert values.dtype == torch.float32


def test_measuring_leaves_training_as_it_was(start_run, toy_federation):
    """For a ResNet, update and batch statistics equal FedAvg's, and training mode is restored."""
    resnet = {"backbone": {"name": "resnet18", "pretrained": False}, "train": {"batch_size": 16}}
    run = start_run("feddg_ga", resnet, federation=toy_federation)
    plain = start_run("fedavg", resnet, federation=toy_federation)
    weights = run.method.state.federated_weights()
    mode = []
    run.method.backbone.register_forward_pre_hook(lambda m, _: mode.append(m.training))
    reply = run.executor.worker.run(Task("client_2", "fit", 1, weights, {}))
    expected = plain.executor.worker.run(Task("client_2", "fit", 1, weights, {}))
    bitwise(reply.value.weights, expected.value.weights)
    assert mode == [True, False]
    assert run.method.training
    state = {n: t.clone() for n, t in run.method.state_dict().items()}
    memory = reply.memory
    worker_reply = run.executor.worker.run(
        Task("client_2", "measure", 1, reply.value.weights, {}, memory)
    )
    assert run.method.training
    bitwise(dict(run.method.state_dict()), state)
    terms = worker_reply.value
    assert terms["own"] == terms["averaged"]  # the model measured is the client's own
    assert worker_reply.memory == {}


def test_a_local_term_is_used_once(start_run):
    run = start_run("feddg_ga")
    weights = run.method.state.federated_weights()
    worker = run.executor.worker
    fit = worker.run(Task("client_0", "fit", 1, weights, {}))
    first = worker.run(Task("client_0", "measure", 1, weights, {}, fit.memory))
    assert set(first.value) == {"own", "averaged"}
    assert worker.run(Task("client_0", "measure", 2, weights, {}, first.memory)).value == {}


@pytest.mark.parametrize(
    ("variant", "timing", "expected"),
    [("pardon", "next_participation", 0.0), ("pardon", "same_round", None), ("paper", None, None)],
)
def test_newcomers(start_run, variant, timing, expected):
    """PARDON's have their whole loss as gap; others have none, and send nothing."""
    given = {"gap_timing": timing} if timing else {}
    run = start_run("feddg_ga", hyper(variant=variant, **given))
    task = Task("client_0", "measure", 2, run.method.state.federated_weights(), {})
    value = run.executor.worker.run(task).value
    assert value.get("own") == expected
    assert bool(value) == (expected is not None)


def test_a_loss_that_is_not_finite_is_missing_and_drops_nobody(start_run, recorder):
    run = start_run("feddg_ga", ALL, executor=recorder)
    measured = run.method.measured

    def fail(client):
        values = measured(client)
        return [v * math.nan for v in values] if client.name == "client_1" else values

    run.method.measured = fail
    results = run.rounds(2)
    assert all(r.ledger.dropped == [] for r in results)
    assert replies(recorder, 2, "measure")["client_1"] == {"own": None, "averaged": None}
    a = run.server.memory["a"].tolist()
    assert a[1] == 0.25
    assert a[0] != 0.25
    assert sum(a) == pytest.approx(1)


def test_a_client_that_diverged_keeps_its_weight(start_run):
    run = start_run("feddg_ga", ALL)
    step = run.method.training_step

    def fail(batch, index):
        client = run.method.client
        bad = (client.name, client.round) == ("client_1", 1)
        return step(batch, index) * (math.nan if bad else 1)

    run.method.training_step = fail
    results = run.rounds(1)
    assert [entry["client"] for entry in results[1].ledger.dropped] == ["client_1"]
    assert run.server.memory["a"][1] == 0.25
    assert not torch.equal(run.server.memory["a"], torch.full((4,), 0.25, dtype=torch.float64))
    run.rounds(2)
    assert run.server.memory["a"][1] != 0.25


# -------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("k", [2, 3])
def test_bytes_of_the_same_round(start_run, k):
    """Two scalars of 8 bytes per participant up, and the new model down, to be measured.

    Clients that also take part in the next round already have it then.
    """
    run = start_run("feddg_ga", {"federation": {"per_round": k}})
    model = 4 * sum(t.numel() for t in run.server.weights.values())
    once, *results = run.rounds(3)
    assert once.ledger.bytes == {"up": 0, "down": 0}
    up_to_date, models = set(), []
    for result in results:
        models.append(k + len(set(result.cohort) - up_to_date))
        up_to_date = set(result.cohort)
        assert result.ledger.bytes == {"up": k * (model + 16), "down": models[-1] * model}
    assert min(models) < models[0] == 2 * k


def test_bytes_of_the_next_participation(start_run):
    """No further download; newcomers send no scalars."""
    run = start_run(
        "feddg_ga", {"federation": {"per_round": 3}}, hyper(gap_timing="next_participation")
    )
    model = 4 * sum(t.numel() for t in run.server.weights.values())
    trained, known = set(), []
    for result in run.rounds(3)[1:]:
        known.append(len(trained & set(result.cohort)))
        trained |= set(result.cohort)
        assert result.ledger.bytes == {"up": 3 * model + 16 * known[-1], "down": 3 * model}
    assert known[0] == 0 < known[1] <= 3


def test_weights_by_numbers_of_batches(start_run):
    """9, 11, 12 and 12 images in batches of 3; every client sends its number once, in 8 bytes."""
    run = start_run("feddg_ga", {"train": {"batch_size": 3}}, hyper(initial_weights="batches"))
    (once,) = run.rounds(0)
    assert once.ledger.bytes == {"up": 32, "down": 0}
    assert run.server.memory["a"].tolist() == pytest.approx([0.2, 4 / 15, 4 / 15, 4 / 15])


def test_a_client_whose_number_is_left_out_has_the_mean_of_the_others(start_run):
    class Silent(FedDGGA):
        def count_batches(self, client):
            found = super().count_batches(client)
            return {"batches": torch.tensor(torch.nan)} if client.name == "client_0" else found

    run = start_run(Silent, {"train": {"batch_size": 3}}, hyper(initial_weights="batches"))
    (once,) = run.rounds(0)
    assert [entry["client"] for entry in once.ledger.dropped] == ["client_0"]
    assert run.server.memory["a"].tolist() == pytest.approx([0.25] * 4)


def test_between_rounds_only_the_server_keeps_anything(start_run):
    run = start_run("feddg_ga")
    run.rounds(2)
    assert set(run.server.memory) == {"a", "by_samples"}
    assert all(memory == {} for memory in run.executor.memories.values())
    assert dict(run.server.broadcast) == {}


# ---------------------------------------------------------------------------- degenerate cases


def trained(start_run, name, *layers, **parts):
    run = start_run(name, *layers, **parts)
    results = run.rounds(2)
    return run.server.weights, [(r.ledger.means(), r.ledger.bytes) for r in results]


def test_equal_weights_are_uniform_to_the_last_bit():
    """Tenths in float64 would not be: 0.1 / (0.1 + 0.1 + 0.1) is below 1/3."""
    script = Script([0.0] * 10, num_clients=10)
    states = [{"w": torch.randn(50, dtype=torch.float64)} for _ in range(10)]
    script.server.weights = states[0]
    updates = [
        Reply(client, 1, LocalUpdate(state), {}, {})
        for client, state in zip(script.server.clients, states, strict=True)
    ]
    found = script.method.aggregate(script.server, iter(updates))
    bitwise(found, streaming_mean((state, 1.0) for state in states))


def test_pardon_without_a_step_counts_images_in_the_first_round_only():
    script = Script(GAPS, rounds=10, variant="pardon", step=0.0, sizes=[10, 30, 60])
    assert script.round(1) == pytest.approx([0.1, 0.3, 0.6])
    assert script.round(2) == pytest.approx([1 / 3] * 3)
    assert set(script.executor.calls) == {"fit"}


@pytest.fixture
def equal(toy_federation):
    """Three clients with 11 images each: thirds are not exact in binary."""
    everything = np.concatenate(list(toy_federation.clients.values()))[:33]
    clients = {f"client_{i}": part for i, part in enumerate(np.split(everything, 3))}
    return replace(toy_federation, clients=clients)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_with_equal_gaps_and_sizes_it_is_fedavg_bit_for_bit(start_run, equal, weighting):
    """Gaps are equal because every measurement gives the same number."""
    layers = (ALL, {"federation": {"weighting": weighting}})
    expected = trained(start_run, "fedavg", *layers, federation=equal)
    run = start_run("feddg_ga", *layers, federation=equal)
    run.method.measured = lambda _client: [torch.ones(3)]
    run.rounds(2)
    bitwise(run.server.weights, expected[0])


# ------------------------------------------------------------------------------- variants


@pytest.mark.parametrize("layer", [{}, ALL], ids=["sampled", "all"])
def test_variants_run_and_differ(start_run, layer):
    found = {}
    for variant in VARIANTS:
        run = start_run("feddg_ga", layer, hyper(variant=variant))
        run.rounds(3)
        a = run.server.memory["a"]
        assert float(a.sum()) == pytest.approx(1)
        assert all(bool(tensor.isfinite().all()) for tensor in run.server.weights.values())
        found[variant] = run.server.weights["classifier.weight"]
    same = [pair for pair in pairwise(found) if torch.equal(found[pair[0]], found[pair[1]])]
    # two sampled clients have centred gaps of 1 and -1 under either normaliser
    assert same == []


class TestFedDGGA(MethodTester):
    """Without a step, for any client sizes; here 9, 11, 12 and 12 images."""

    name = "feddg_ga"
    layer = ALL
    twins = tuple(
        Twin({"step": 0.0, **values}, layer, only_theirs=UNIFORM)
        for values, layer in (
            ({}, {}),
            ({}, ALL),
            ({"variant": "official"}, {}),
            ({"variant": "paper"}, ALL),
            ({"gap_data": "client_train"}, ALL),
        )
    )
    apart = ({"step": 0.0},)
    rounds = 2
