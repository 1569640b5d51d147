"""Shared tests, on vectors, of the rules by which servers combine clients' updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.testing import assert_close

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import FederationSettings, TrainSettings
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import NoReplyError, Server
from feddg_bench.plugins import load_method
from tests.helpers import bitwise, refused

Vectors = NDArray[np.float64]
Options = Mapping[str, Any]
WIDE = (2, 2, 2, 2)
"""Shape of 16 parameters that can have the memory format channels last."""


class NoBackbone(nn.Module):
    num_features = 1


def build(name: str, **values: Any) -> Method:
    """Return a method whose parameters are ``a``, the first coordinate, and ``b``, the others."""
    plugin = load_method(name)
    settings = validate(plugin.Settings, values)
    method = plugin(settings, backbone=NoBackbone(), num_classes=2, train=TrainSettings())
    method.trainable = ["a", "b"]
    return method


def as_state(
    vector: Any, mean: float = 0.0, count: int = 0, shape: tuple[int, ...] = (1, -1)
) -> Weights:
    """Return a model for a vector: two parameters, a running mean and a counter."""
    vector = torch.as_tensor(np.asarray(vector), dtype=torch.float32)
    return {
        "a": vector[0].clone(),
        "running_mean": torch.tensor([mean], dtype=torch.float32),
        "b": vector[1:].reshape(shape).clone(),
        "num_batches_tracked": torch.tensor(count),
    }


def serve(w: Any, *, seed: int = 0, round: int = 1, **federation: Any) -> Server:
    """Return a server whose model has the parameters ``w``."""
    server = Server(
        as_state(w, 0.5, 3) if not isinstance(w, dict) else w,
        (),
        executor=None,
        seed=seed,
        federation=FederationSettings(**federation),
        uplink={"fit": ("weights",)},
    )
    server.round = round
    return server


def replies(
    states: Sequence[Weights], sizes: Sequence[int] | None = None
) -> Iterator[Reply[LocalUpdate]]:
    """Yield clients' replies."""
    for k, state in enumerate(states):
        yield Reply(f"client_{k:03}", sizes[k] if sizes else 10, LocalUpdate(state), {}, {})


def parameters(state: Weights) -> Vectors:
    """Return the parameters of a model as one vector."""
    return torch.cat([state[n].double().flatten() for n in ("a", "b")]).numpy()


def step(
    name: str,
    deltas: Any,
    *,
    sizes: Sequence[int] | None = None,
    w: Any = None,
    federation: Options | None = None,
    seed: int = 0,
    round: int = 1,
    **values: Any,
) -> Vectors:
    """Return the change of the parameters in a round, [P], for updates [K, P]."""
    deltas = np.asarray(deltas, dtype=np.float64)
    w = np.zeros(deltas.shape[1]) if w is None else np.asarray(w, dtype=np.float64)
    server = serve(w, seed=seed, round=round, **(federation or {}))
    states = [as_state((w + delta).astype(np.float32)) for delta in deltas]
    new = build(name, **values).aggregate(server, replies(states, sizes))
    return parameters(new) - parameters(server.weights)


def near(found: Any, expected: Any) -> None:
    """Assert a relative error of the whole vector of at most 1e-6."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected) + 1e-7


def drawn(seed: int, count: int, width: int = 9) -> tuple[np.random.Generator, Vectors]:
    """Return updates [K, P], multiples of 1/64, with zeros and coordinates where all agree."""
    rng = np.random.default_rng(seed)
    deltas = rng.integers(-64, 65, (count, width)) + rng.integers(-96, 97, width)
    deltas[rng.uniform(size=deltas.shape) < 0.15] = 0
    deltas[:, rng.uniform(size=width) < 0.1] = 0
    return rng, deltas / 64


class RuleTester:
    """A rule: its server half and, if it has one, its function of updates.

    Attributes:
        name: The method.
        rows: Computed by hand: updates, options of `step`, the move. The function must agree.
        usual: Options that all checks set, such as a fixed order of clients.
        variants: Options for the edge cases.
        lone: Options under which the model of a single client is kept.
        alike: Federation settings under which updates that agree move the model exactly as FedAvg
            does; ``None`` for a rule that never does so.
        wrong: Options that the function refuses, and words of the error.
    """

    name: ClassVar[str]
    rows: ClassVar[Sequence[tuple[Any, Options, Sequence[float]]]] = ()
    usual: ClassVar[Options] = {}
    variants: ClassVar[Sequence[Options]] = ({},)
    lone: ClassVar[Sequence[Options]] = ({},)
    alike: ClassVar[Options | None] = {}
    wrong: ClassVar[Sequence[tuple[Options, str]]] = ()

    def __init_subclass__(cls) -> None:
        for test, declared in DECLARED.items():
            wanted = getattr(cls, declared) not in ((), None)
            setattr(cls, test, getattr(RuleTester, test) if wanted else None)

    @staticmethod
    def draw(rng: np.random.Generator, count: int) -> dict[str, Any]:
        """Return options for a random case with ``count`` clients."""
        return {}

    @staticmethod
    def oracle(deltas: Vectors, sizes: Sequence[int], **options: Any) -> Vectors:
        """Return the move, [P], according to the definition."""
        raise NotImplementedError

    @staticmethod
    def function(deltas: Tensor, sizes: Sequence[int], **options: Any) -> Tensor | None:
        """Return the move by the rule's function; ``None`` if it does not support these options."""
        return None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        lists = {"row": self.rows, "values": self.variants, "own": self.lone, "seed": range(30)}
        for argument, values in lists.items():
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, values, ids=lambda value: str(value)[-60:])

    def step(self, deltas: Any, **options: Any) -> Vectors:
        """Return the move by the server half."""
        return step(self.name, deltas, **{**self.usual, **options})

    def new(
        self, w: Any, states: Sequence[Weights], sizes: Any = None, rule: str = "", **options: Any
    ) -> Weights:
        """Return the new model of a round."""
        values = options.pop("values", {})
        own = {} if rule else {**self.usual, **values}
        return build(rule or self.name, **own).aggregate(
            serve(w, **options), replies(states, sizes)
        )

    def test_numbers_by_hand(self, row: tuple[Any, dict[str, Any], Any]) -> None:
        deltas, options, expected = row
        near(self.step(deltas, **options), expected)
        sizes = options.get("sizes") or [1] * len(deltas)
        rest = {**self.usual, **{n: v for n, v in options.items() if n != "sizes"}}
        for dtype in (torch.float64, torch.float32):
            found = self.function(torch.tensor(deltas, dtype=dtype), sizes, **rest)
            if found is not None:
                assert found.dtype == dtype
                near(found.double(), expected)

    def test_it_equals_its_definition(self, seed: int) -> None:
        count = 1 + seed % 7
        rng, deltas = drawn(seed, count)
        sizes = rng.integers(1, 90, count).tolist()
        options = {**self.usual, **self.draw(rng, count)}
        expected = self.oracle(deltas, sizes, **options)
        near(step(self.name, deltas, sizes=sizes, **options), expected)
        found = self.function(torch.from_numpy(deltas), sizes, **options)
        if found is not None:
            near(found, expected)

    def test_one_client_is_the_new_model_bit_for_bit(self, own: Options) -> None:
        w, theta = torch.randn(2, 17, generator=torch.Generator().manual_seed(0)).numpy()
        state = as_state(theta, 0.25, 7)
        assert not np.array_equal(w + (theta - w), theta)  # so that w + (theta - w) does not pass
        bitwise(self.new(w, [state], values=own), state)
        halves = (self.new(w, [state], rule=r, server_lr=0.3, values=own) for r in ("", "fedavg"))
        bitwise(*halves)

    def test_without_change_the_model_stays_bit_for_bit(self, values: Options) -> None:
        w = torch.randn(17, generator=torch.Generator().manual_seed(1)).numpy()
        same = [as_state(w, 0.5, 3) for _ in range(3)]
        bitwise(self.new(w, same, [1, 5, 3], values=values), as_state(w, 0.5, 3))

    def test_updates_that_agree_are_averaged_bit_for_bit(self) -> None:
        w, *ends = torch.randn(6, 17, generator=torch.Generator().manual_seed(2)).numpy()
        states = [as_state(w + np.abs(end - w) + 1e-3) for end in ends]
        for federation in ({}, {"server_lr": 0.7}):
            pair = (
                self.new(w, states, [3, 1, 4, 1, 5], rule=rule, **{**federation, **self.alike})
                for rule in ("", "fedavg")
            )
            bitwise(*pair)

    @pytest.mark.parametrize("lr", [1.0, 0.5])
    @pytest.mark.parametrize(("weighting", "mean"), [("samples", 0.20), ("uniform", 0.7 / 3)])
    def test_buffers_take_the_plain_mean(
        self, values: Options, lr: float, weighting: str, mean: float
    ) -> None:
        """A damped or extrapolated variance could become negative when it shrinks."""
        rows = ([1, 0], [-1, 1], [-0.5, -1])
        states = [
            as_state(row, *buffers)
            for row, buffers in zip(rows, ((0.2, 7), (0.4, 9), (0.1, 12)), strict=True)
        ]
        options = {"server_lr": lr, "weighting": weighting, "values": values}
        new = self.new([0, 0], states, [10, 30, 60], **options)
        assert list(new) == list(states[0])
        assert new["running_mean"].item() == pytest.approx(mean, rel=1e-6)
        assert (new["num_batches_tracked"].item(), new["num_batches_tracked"].dtype) == (
            12,
            torch.int64,
        )

    def test_inputs_stay_and_memory_formats_do_not_matter(self) -> None:
        """Weights that come from another process lose their memory format."""
        w, *ends = torch.randn(4, 17, generator=torch.Generator().manual_seed(3)).numpy()
        plain, mixed = ([as_state(vector, shape=WIDE) for vector in (w, *ends)] for _ in range(2))
        for state in mixed[::2]:
            state["b"] = state["b"].to(memory_format=torch.channels_last)
        new = self.new(plain[0], plain[1:], server_lr=0.3)
        bitwise(self.new(mixed[0], mixed[1:], server_lr=0.3), new)
        for vector, state in zip((w, *ends), plain, strict=True):
            bitwise(state, as_state(vector, shape=WIDE))
        assert [(t.shape, t.dtype) for t in new.values()] == [
            (t.shape, t.dtype) for t in plain[0].values()
        ]

    def test_the_servers_learning_rate_scales_the_step(self) -> None:
        _, deltas = drawn(4, 4)
        half = self.step(deltas, federation={"server_lr": 0.5})
        near(half, self.step(deltas) / 2)

    def test_no_reply_is_passed_on(self) -> None:
        def nobody() -> Iterator[Reply[LocalUpdate]]:
            raise NoReplyError("fit")
            yield

        with pytest.raises(NoReplyError):
            build(self.name, **self.usual).aggregate(serve([0, 0]), nobody())

    def test_the_function_refuses_what_it_does_not_know(self) -> None:
        deltas = torch.eye(2, dtype=torch.float64)
        for options, words in self.wrong:
            with refused(SettingsError, words):
                self.function(deltas, [1, 1], **{**self.usual, **options})

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_a_gpu_gives_what_the_cpu_gives(self) -> None:
        deltas = torch.from_numpy(drawn(5, 4)[1])
        here = self.function(deltas, [1, 1, 1, 1], **self.usual)
        if here is not None:
            there = self.function(deltas.cuda(), [1, 1, 1, 1], **self.usual)
            assert there.is_cuda
            assert_close(there.cpu(), here)


DECLARED = {
    "test_numbers_by_hand": "rows",
    "test_one_client_is_the_new_model_bit_for_bit": "alike",
    "test_updates_that_agree_are_averaged_bit_for_bit": "alike",
    "test_the_function_refuses_what_it_does_not_know": "wrong",
}
"""Check -> the attribute of `RuleTester` without which it is left out."""
