"""Shared checks for methods: a test file declares a method's numbers in a subclass.

pytest collects the subclasses, whose names begin with ``Test``. A check without its declaration is
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import validate
from feddg_bench.core.messages import Weights, nbytes
from feddg_bench.core.method import Method
from feddg_bench.data.federated import Federation
from feddg_bench.plugins import load_method
from feddg_bench.testing import ToyRun, start_toy_run, toy_federation
from tests.helpers import bitwise, hyper, refused

Layer = Mapping[str, Any]


def alone() -> Federation:
    """Return the toy federation with its first client only."""
    federation = toy_federation()
    return replace(federation, clients=dict([next(iter(federation.clients.items()))]))


def one_domain() -> Federation:
    """Return the toy federation with all images in one domain."""
    return replace(toy_federation(), domain_ids=np.zeros(60, dtype=np.int64))


ONE_CLIENT = {"partition": {"clients": 1}, "federation": {"per_round": 1}}
"""Settings that fit `alone`."""


@dataclass(frozen=True)
class Twin:
    """Settings under which a method trains exactly as another one, bit for bit.

    Attributes:
        values: The method's own settings.
        layer: Settings of both.
        theirs: The other method, as name or class.
        only_theirs: Settings of the other method only, such as equal weights.
        rounds: Number of rounds before the comparison.
        federation: Data of both methods.
        logs: Whether both log the same; false if one loss has an additional constant.
        sends: Whether both send the same number of bytes.
        close: Whether numbers may differ by rounding.
    """

    values: Layer = field(default_factory=dict)
    layer: Layer = field(default_factory=dict)
    theirs: str | type[Method] = "fedavg"
    only_theirs: Layer = field(default_factory=dict)
    rounds: int = 2
    federation: Callable[[], Federation] = toy_federation
    logs: bool = True
    sends: bool = True
    close: bool = False

    def __str__(self) -> str:
        parts = (self.values, self.layer, self.federation.__name__.removeprefix("toy_"))
        return "-".join(str(part) for part in parts if part and part != "federation")


class MethodTester:
    """Runs of a method on toy data; each subclass tests one method.

    Attributes:
        name: The method.
        layer: Settings of all runs; ``twins`` use only its section ``hyper``.
        federation: Makes the data of all runs except ``twins``.
        twins: Settings under which it equals another method.
        apart: Settings of its own, each of which changes the model after ``rounds`` rounds,
        base: compared with these.
        rounds: See ``apart``.
        wrong: Refused settings; the error names the first.
        models: Data that each participant sends and receives, in model sizes.
        half: Layer for training in half precision; ``None`` skips the check.
    """

    name: ClassVar[str]
    layer: ClassVar[Layer] = {}
    federation: ClassVar[Callable[[], Federation]] = staticmethod(toy_federation)
    twins: ClassVar[Sequence[Twin]] = ()
    apart: ClassVar[Sequence[Layer]] = ()
    base: ClassVar[Layer] = {}
    rounds: ClassVar[int] = 1
    wrong: ClassVar[Sequence[Layer]] = ()
    models: ClassVar[tuple[int, int] | None] = None
    half: ClassVar[Layer | None] = {}

    def __init_subclass__(cls) -> None:
        for test, declared in DECLARED.items():
            wanted = getattr(cls, declared) not in ((), None)
            setattr(cls, test, getattr(_Checks, test) if wanted else None)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for argument, declared in (("twin", "twins"), ("values", "apart"), ("mistake", "wrong")):
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, getattr(self, declared), ids=str)

    @classmethod
    def run(cls, *layers: Layer, rounds: int) -> ToyRun:
        """Return a run of the method after some rounds; assert that all numbers are finite."""
        run = start_toy_run(cls.name, cls.layer, *layers, federation=cls.federation())
        assert [result.ledger.dropped for result in run.rounds(rounds)] == [[]] * (rounds + 1)
        assert all(bool(tensor.isfinite().all()) for tensor in run.server.weights.values())
        return run


@cache
def _usual(tester: type[MethodTester]) -> dict[str, Tensor]:
    return dict(tester.run(hyper(**tester.base), rounds=tester.rounds).server.weights)


class _Checks:
    """The checks of `MethodTester`."""

    def test_it_is_another_method_bit_for_bit(self: Any, twin: Twin) -> None:
        data = twin.federation()
        theirs = start_toy_run(twin.theirs, twin.layer, twin.only_theirs, federation=data)
        own = hyper(**self.layer.get("hyper", {}))
        ours = start_toy_run(self.name, own, twin.layer, hyper(**twin.values), federation=data)
        expected, found = theirs.rounds(twin.rounds), ours.rounds(twin.rounds)
        names = theirs.server.weights
        _same({name: ours.server.weights[name] for name in names}, dict(names), twin.close)
        if twin.logs and not twin.close:
            assert [r.ledger.means() for r in found] == [r.ledger.means() for r in expected]
            assert [r.evaluation for r in found] == [r.evaluation for r in expected]
        if twin.sends:
            assert [r.ledger.bytes for r in found] == [r.ledger.bytes for r in expected]

    def test_a_setting_changes_what_is_learnt(self: Any, values: Layer) -> None:
        found = self.run(hyper(**values), rounds=self.rounds).server.weights
        usual = _usual(type(self))
        assert found.keys() != usual.keys() or any(
            not torch.equal(found[name], usual[name]) for name in usual
        )

    def test_settings_out_of_range_are_refused(self: Any, mistake: Layer) -> None:
        with refused(SettingsError, f"hyper.{next(iter(mistake))}"):
            validate(load_method(self.name).Settings, mistake, "hyper.")

    def test_how_many_bytes_travel(self: Any) -> None:
        run = start_toy_run(self.name, self.layer, federation=self.federation())
        once, *results = run.rounds(2)
        assert once.ledger.bytes == {"up": 0, "down": 0}
        for result in results:
            each = nbytes(run.server.weights) * len(result.cohort)
            up, down = self.models
            assert result.ledger.bytes == {"up": up * each, "down": down * each}

    def test_it_trains_in_half_precision(self: Any) -> None:
        run = self.run({"train": {"precision": "bf16-mixed"}}, self.half, rounds=2)
        assert {t.dtype for t in run.server.weights.values()} <= {torch.float32, torch.int64}


DECLARED = {
    "test_it_is_another_method_bit_for_bit": "twins",
    "test_a_setting_changes_what_is_learnt": "apart",
    "test_settings_out_of_range_are_refused": "wrong",
    "test_how_many_bytes_travel": "models",
    "test_it_trains_in_half_precision": "half",
}
"""Check -> the attribute of `MethodTester` without which it is left out."""


def _same(found: Weights, expected: Weights, close: bool) -> None:
    if close:
        assert_close(found, expected, rtol=1e-4, atol=1e-5)
    else:
        bitwise(found, expected)
