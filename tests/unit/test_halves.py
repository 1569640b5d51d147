"""Calls of a method's halves: their random streams, the state that they leave, their errors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from feddg_bench.common.errors import FeddgError
from feddg_bench.common.streams import derive_seed
from feddg_bench.core.messages import encode
from feddg_bench.core.method import Method
from feddg_bench.testing import start_toy_run

DRAWS = {
    "PyTorch": lambda: float(torch.rand(())),
    "NumPy": lambda: float(np.random.rand()),  # noqa: NPY002
    "Python": random.random,
}


def states() -> tuple[Any, ...]:
    """Return the states of the global generators."""
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002


class Calling(Method):
    """Calls a function in one place of the client half or the server half."""

    place = ""

    def call(self, place: str) -> float:
        """Return the function's value in its place, and 0 elsewhere."""
        return self.deed() if place == self.place else 0.0

    def deed(self) -> float:
        """Do what a test is about."""
        raise NotImplementedError

    def prepare(self, server):
        server.memory["prepared"] = self.call("prepare")

    def fit(self, client):
        update = super().fit(client)
        update.weights["classifier.bias"] += self.call("fit")
        return update

    def aggregate(self, server, updates):
        new = super().aggregate(server, updates)
        new["classifier.bias"] += self.call("aggregate")
        return new

    def global_model(self, server):
        shifted = server.weights["classifier.bias"] + self.call("global_model")
        return {**server.weights, "classifier.bias": shifted}


PLACES = {
    "prepare": "server half, before round 1",
    "fit": "client_1, round 1, fit",
    "aggregate": "server half, round 1",
    "global_model": "server half, round 1",
}
every_place = pytest.mark.parametrize("place", PLACES)


def start(place: str, deed: Any, **build: Any) -> Any:
    """Return a toy run that does a deed in one place."""
    built = {"build": lambda self: vars(self).update(build)}
    return start_toy_run(type("Doing", (Calling,), {"place": place, "deed": deed, **built}))


@every_place
@pytest.mark.parametrize("library", DRAWS)
def test_global_generators_are_those_of_the_run(place, library):
    ends = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        before = states()
        run = start(place, lambda _: DRAWS[library]())
        results = run.rounds(2)
        assert states() == before
        loss = results[-1].evaluation["test"]["bright"]["loss"]
        ends.add((encode(run.server.state()), loss))
    assert len(ends) == 1


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("prepare", ("server half", "prepare", 0)),
        ("fit", ("fit", 1, "client_2")),
        ("aggregate", ("server half", "run_round", 1)),
        ("global_model", ("server half", "global_model", 1)),
    ],
)
def test_each_call_has_the_stream_of_its_name(place, names):
    """Other streams would change the numbers of every method with dropout."""
    seeds: list[int] = []

    def look(_method):
        seeds.append(torch.initial_seed())
        return 0.0

    run = start(place, look)
    run.rounds(1)
    assert seeds[0] == derive_seed(run.settings.seed, *names)


@pytest.mark.parametrize("library", DRAWS)
def test_each_round_and_each_client_draws_numbers_of_its_own(library):
    drawn: list[float] = []

    def draw(_method):
        drawn.append(DRAWS[library]())
        return 0.0

    for place in ("fit", "aggregate"):
        start(place, draw).rounds(2)
    assert len(drawn) == len(set(drawn)) == 4 + 2


@every_place
@pytest.mark.parametrize("built", [{}, {"seen": 0}])
def test_state_on_the_method_ends_the_run(place, built):
    def remember(method):
        method.seen = getattr(method, "seen", 0) + 1
        return 0.0

    memory = "client.memory" if place == "fit" else "server.memory"
    with pytest.raises(FeddgError) as caught:
        start(place, remember, **built).rounds(1)
    assert (
        f"self.seen, which no other process and no resumed run would find: keep it in {memory}"
        in str(caught.value)
    )


@every_place
def test_a_value_for_one_call_is_gone_after_it(place):
    def hold(method):
        with method.temporarily(seen=[1], kept=2):
            assert (method.seen, method.kept) == ([1], 2)
            method.seen = 3
        assert (hasattr(method, "seen"), method.kept) == (False, 1)
        return 0.0

    start(place, hold, kept=1).rounds(1)


def test_a_mode_of_the_module_is_no_state():
    def evaluate(method):
        method.eval()
        return 0.0

    start("fit", evaluate).rounds(1)


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="needs PyTorch 2.9"
)
def test_a_script_may_set_the_precision_of_matrix_products():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        start("fit", lambda _: 0.0).rounds(1)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
