"""The federated loop: cohorts, evaluated rounds, skipped rounds and resumption."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from feddg_bench.config.schema import FederationSettings
from feddg_bench.core.loop import federate
from feddg_bench.core.messages import LocalUpdate, Reply, decode, encode
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_bench.engine.evaluation import evaluate

CLIENTS = tuple(f"client_{i:02d}" for i in range(10))


class Averaging:
    """The server half of `Method` without a model; clients add 1 and their own number."""

    trainable = ("w",)
    uplink = {"fit": ("weights",)}
    run_round = Method.run_round
    aggregate = Method.aggregate
    prepare = Method.prepare
    global_model = Method.global_model

    def fit(self, client):
        """Stand for a client function: only its name is sent."""


class Reversed(Averaging):
    """Another method: it asks twice per round and draws its own random numbers."""

    def run_round(self, server):
        torch.rand(17)
        list(server.ask(self.fit))
        super().run_round(server)


class FakeExecutor:
    """Pretends to train; clients in ``bad`` send NaN in the rounds given for them."""

    workers = 1

    def __init__(self, bad=None):
        self.bad = bad or {}
        self.memories = {}

    def map(self, tasks):
        for task in tasks:
            number = int(task.client[-2:])
            if task.round in self.bad.get(task.client, ()):
                number = math.nan
            rounds = self.memories.get(task.client, {}).get("rounds", 0) + 1
            self.memories[task.client] = memory = {"rounds": rounds}
            weights = {"w": task.weights["w"] * 1.1 + number + rounds}
            yield Reply(task.client, 1 + int(task.client[-2:]), LocalUpdate(weights), {}, memory)


def start(bad=None, seed=0, **federation):
    return Server(
        {"w": torch.tensor([1.0, -1.0])},
        CLIENTS,
        FakeExecutor(bad),
        seed=seed,
        federation=FederationSettings(**federation),
        uplink=Averaging.uplink,
    )


def nothing(_weights):
    """Stand for an evaluation."""
    return {}


def go(server, rounds, method=None, evaluate=nothing, **given):
    return list(federate(method or Averaging(), server, evaluate, rounds=rounds, **given))


# --------------------------------------------------------------------------------- cohorts


def cohorts(method, seed):
    return [r.cohort for r in go(start(seed=seed), 8, method, per_round=3)][1:]


def test_cohorts_depend_on_the_seed_and_the_round_but_not_on_the_method():
    drawn = cohorts(Averaging(), 0)
    assert drawn == cohorts(Reversed(), 0)
    assert len(set(drawn)) > 4
    assert drawn != cohorts(Averaging(), 1)


def test_all_clients_take_part_where_no_number_is_given():
    assert [r.cohort for r in go(start(), 2)] == [CLIENTS] * 3


def test_a_round_asks_its_cohort_only():
    server = start()
    results = go(server, 1, per_round=2)
    assert tuple(server._executor.memories) == results[1].cohort


# ------------------------------------------------------------------------------ evaluation


@pytest.mark.parametrize(
    ("rounds", "given", "measured"),
    [
        (3, {"every": 1}, [1, 2, 3]),
        (5, {"every": 2}, [2, 4, 5]),
        (4, {"every": 2}, [2, 4]),
        (2, {"every": 10}, [2]),
        (5, {"start": 4}, [4, 5]),
        (7, {"every": 2, "start": 3}, [4, 6, 7]),
        (3, {"start": 9}, [3]),
    ],
)
def test_every_nth_round_is_measured_and_always_the_last(rounds, given, measured):
    results = go(start(), rounds, **given, evaluate=lambda _: {"test": {}})
    assert [r.round for r in results] == list(range(rounds + 1))
    assert [r.round for r in results if r.evaluation is not None] == measured


def test_the_new_model_is_measured():
    server = start()
    seen = []
    for result in federate(
        Averaging(), server, lambda weights: seen.append(weights["w"].clone()), rounds=2
    ):
        if result.round:
            assert_close(seen[-1], server.weights["w"], rtol=0, atol=0)
    assert not torch.equal(seen[0], seen[1])


def test_every_round_has_its_own_ledger():
    results = go(start(), 2, per_round=4)
    assert [r.ledger.bytes for r in results] == [{"up": 0, "down": 0}] + [
        {"up": 32, "down": 32}
    ] * 2
    for result in results:
        assert all(seconds >= 0 for seconds in result.ledger.seconds.values())
        assert set(result.ledger.clients) == (set(result.cohort) if result.round else set())


def test_numbers_of_an_evaluation(start_run):
    """Compare with one forward pass over all images of a domain, without augmentation."""
    run = start_run("fedavg")
    measured = evaluate(run.executor, run.federation, run.server.weights, chunk=3)
    whole = evaluate(run.executor, run.federation, run.server.weights, chunk=100)
    assert [(s, d) for s in measured for d in measured[s]] == [
        ("id_val", "dark"),
        ("test", "bright"),
    ]
    for split, domain, index in run.federation.evaluation:
        images = torch.from_numpy(run.federation.images[index]).permute(0, 3, 1, 2) / 255
        labels = torch.from_numpy(run.federation.labels[index])
        with torch.no_grad():
            logits = run.method.eval()(images)
        found = measured[split][domain]
        assert found["images"] == len(index) == 8
        assert found["accuracy"] == (logits.argmax(1) == labels).sum().item() / 8
        assert found["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
        assert whole[split][domain]["loss"] == pytest.approx(found["loss"], rel=1e-5)


def test_batches_of_an_evaluation_do_not_matter(start_run):
    small, large = (
        start_run("fedavg", {"evaluation": {"batch_size": size}}).rounds(1)[1].evaluation
        for size in (3, 256)
    )
    assert small["test"]["bright"]["accuracy"] == large["test"]["bright"]["accuracy"]
    assert small["test"]["bright"]["loss"] == pytest.approx(large["test"]["bright"]["loss"])


# -------------------------------------------------------------------------------- skipping


@pytest.mark.parametrize("plugin", [Averaging, Reversed])
def test_a_round_without_a_sound_reply_is_skipped_and_the_next_goes_on(plugin):
    """Also if a plugin's own code waits for the replies."""
    server = start(bad=dict.fromkeys(CLIENTS, (2,)))
    models = {}
    results = []
    for result in federate(plugin(), server, nothing, rounds=3):
        results.append(result)
        models[result.round] = server.weights["w"].clone()
    assert [r.skipped for r in results] == [False, False, True, False]
    assert torch.equal(models[1], models[2])
    assert not torch.equal(models[2], models[3])
    assert bool(models[3].isfinite().all())
    assert [len(r.ledger.dropped) for r in results] == [0, 0, 10, 0]
    assert results[2].evaluation is not None


def test_one_bad_client_does_not_skip_the_round():
    results = go(start(bad={"client_03": (1, 2)}), 2)
    assert [r.skipped for r in results] == [False] * 3
    assert [len(r.ledger.dropped) for r in results] == [0, 1, 1]


# -------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_a_resumed_run_equals_one_that_never_stopped(stop):
    whole = start()
    expected = go(whole, 4, per_round=3)

    first = start()
    for result in federate(Averaging(), first, nothing, rounds=4, per_round=3):
        if result.round == stop:
            break
    state = decode(encode(first.state()))
    second = start()
    second.restore(state)
    rest = go(second, 4, per_round=3)

    assert_close(second.weights, whole.weights, rtol=0, atol=0)
    assert second._executor.memories == whole._executor.memories
    assert [r.cohort for r in rest if r.round] == [r.cohort for r in expected[stop + 1 :]]


def test_a_finished_run_has_nothing_left_to_do():
    server = start()
    go(server, 2)
    before = server.weights["w"].clone()
    assert go(server, 2) == []
    assert torch.equal(server.weights["w"], before)


def test_preparation_happens_once():
    calls = []

    class Prepared(Averaging):
        def prepare(self, server):
            calls.append((server.round, server.cohort))

    server = start()
    go(server, 1, Prepared(), per_round=2)
    go(server, 3, Prepared(), per_round=2)
    assert calls == [(0, CLIENTS)]


def test_preparation_is_not_repeated_after_a_stop_behind_it():
    calls = []

    class Prepared(Averaging):
        def prepare(self, server):
            calls.append(server.round)

    stopped = start()
    next(federate(Prepared(), stopped, nothing, rounds=2))
    resumed = start()
    resumed.restore(decode(encode(stopped.state())))
    assert [r.round for r in go(resumed, 2, Prepared())] == [1, 2]
    assert calls == [0]


# ------------------------------------------------------------------- a server half that fails


class Failing(Averaging):
    """Raises a RuntimeError in one function of the server half."""

    half = ""

    def _fail(self, half):
        if half == self.half:
            torch.zeros(2).view(3)

    def prepare(self, server):
        self._fail("prepare")

    def run_round(self, server):
        self._fail("run_round")
        super().run_round(server)

    def aggregate(self, server, updates):
        next(iter(updates))
        self._fail("aggregate")

    def global_model(self, server):
        self._fail("global_model")


@pytest.mark.parametrize("half", ["prepare", "run_round", "aggregate", "global_model"])
def test_an_exception_of_a_server_half_names_the_round(half):
    method = Failing()
    method.half = half
    if half == "global_model":
        method.aggregate = partial(Averaging.aggregate, method)
    with pytest.raises(RuntimeError, match="shape") as caught:
        go(start(), 1, method)
    when = "before round 1" if half == "prepare" else "round 1"
    assert caught.value.__notes__ == [f"server half, {when}"]


def test_an_exhausted_iterator_of_a_server_half_does_not_end_the_run():
    class Taking(Averaging):
        def run_round(self, server):
            next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        go(start(), 1, Taking())


# ---------------------------------------------------------------------- the base aggregate


def test_half_a_server_step():
    def first_round(lr):
        server = start(server_lr=lr)
        go(server, 1)
        return server.weights["w"]

    old = torch.tensor([1.0, -1.0])
    assert_close(first_round(0.5), old + 0.5 * (first_round(1.0) - old))


def test_weighting():
    def first_round(weighting):
        server = start(weighting=weighting)
        go(server, 1)
        return server.weights["w"]

    old = torch.tensor([1.0, -1.0]) * 1.1 + 1
    assert_close(first_round("uniform"), old + sum(range(10)) / 10)
    assert_close(first_round("samples"), old + sum(i * (i + 1) for i in range(10)) / 55)


class Doubled(Averaging):
    """A method that is evaluated with weights other than those it trains."""

    def global_model(self, server):
        return {"w": 2 * server.weights["w"]}


def test_the_method_says_with_which_weights_it_is_measured():
    server = start()
    seen = []
    list(federate(Doubled(), server, lambda weights: seen.append(weights["w"]) or {}, rounds=1))
    assert_close(seen, [2 * server.weights["w"]], rtol=0, atol=0)


# ---------------------------------------------------------------------- means over rounds


def measured(server, rounds=5):
    """Return the evaluated number of each round from here on."""
    seen = []
    go(server, rounds, Doubled(), lambda weights: seen.append(weights["w"][0].item()) or {})
    return seen


def test_the_evaluated_model_is_the_mean_of_the_last_rounds_models():
    single = measured(start())
    server = start(average_rounds=3)
    mean = [math.fsum(single[2:n]) / (n - 2) for n in (3, 4, 5)]
    assert measured(server) == pytest.approx(single[:2] + mean)
    assert 2 * server.weights["w"][0].item() == single[-1]  # training goes on from the last model


def test_a_skipped_round_adds_no_model_to_the_mean():
    bad = dict.fromkeys(CLIENTS, (4,))
    single, mean = measured(start(bad)), measured(start(bad, average_rounds=3))
    assert mean == pytest.approx([*single[:3], single[2], (single[2] + single[4]) / 2])


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_resumed_run_goes_on_with_its_mean(stop):
    whole = measured(start(average_rounds=3))
    first = start(average_rounds=3)
    for result in federate(Doubled(), first, nothing, rounds=5):
        if result.round == stop:
            break
    second = start(average_rounds=3)
    second.restore(decode(encode(first.state())))
    assert measured(second) == whole[stop:]
