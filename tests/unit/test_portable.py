"""Functions and draws of portable runs: their values, and that they can be uninstalled."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from feddg_bench.common import portable as environment
from feddg_bench.common.errors import SettingsError
from feddg_bench.engine import portable_functions
from feddg_bench.engine.portable_functions import use_portable
from tests.helpers import refused

pytestmark = pytest.mark.skipif(
    "avx2" not in environment.cpu_flags(), reason="this CPU has no AVX2"
)
NAMES = sorted(portable_functions._functions())


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    """Set the required environment and install the functions."""
    for name, value in environment.FIXED.items():
        monkeypatch.setenv(name, value)
    for name in environment.ABSENT:
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    use_portable(wanted=True)
    yield
    use_portable(wanted=False)
    torch.set_num_threads(threads)


def inputs():
    return torch.linspace(0.01, 0.99, 101)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_functions_are_those_of_pytorch(name, dtype):
    """Up to the precision of the type, in every form of the call, and with a gradient."""
    x = inputs().to(dtype)
    function = getattr(torch, name)
    found = function(x)
    use_portable(wanted=False)
    expected = function(x)
    use_portable(wanted=True)
    assert found.dtype == dtype
    assert_close(found, expected)
    out = torch.empty(0, dtype=dtype)
    assert function(x, out=out) is out
    assert_close(out, found, rtol=0, atol=0)
    if hasattr(torch.Tensor, f"{name}_"):
        assert_close(getattr(x.clone(), f"{name}_")(), found, rtol=0, atol=0)
    z = x.clone().requires_grad_()
    function(z).sum().backward()
    assert z.grad.isfinite().all()


def test_square_roots_are_exact():
    x = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 100
    assert np.array_equal(x.sqrt().numpy(), np.sqrt(x.numpy()))
    edge = torch.tensor([0.0, math.inf, -1.0])
    assert edge.sqrt().tolist()[:2] == [0.0, math.inf]
    assert math.isnan(edge.sqrt()[2])


def test_layout_and_integers():
    x = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert x.exp().stride() == x.stride()
    assert_close(torch.tensor([1, 4, 9]).sqrt(), torch.tensor([1.0, 2.0, 3.0]))
    assert torch.tensor(4.0).sqrt().item() == 2
    assert torch.empty(0).log().shape == (0,)


DRAWS = {
    "randn": lambda g: torch.randn(20_000, generator=g),
    "normal_": lambda g: torch.empty(20_000).normal_(2.0, 3.0, generator=g),
    "exponential_": lambda g: torch.empty(20_000).exponential_(2.0, generator=g),
    "bernoulli_": lambda g: torch.empty(20_000).bernoulli_(0.3, generator=g),
    "gamma": lambda g: torch._standard_gamma(torch.full((20_000,), 0.7), generator=g),
    "dirichlet": lambda g: torch._sample_dirichlet(torch.full((20_000, 2), 0.5), generator=g)[:, 0],
}
MOMENTS = {
    "randn": (0, 1),
    "normal_": (2, 9),
    "exponential_": (0.5, 0.25),
    "bernoulli_": (0.3, 0.21),
    "gamma": (0.7, 0.7),
    "dirichlet": (0.5, 0.125),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_their_distribution_and_their_seed(name):
    first, again, other = (DRAWS[name](torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    mean, variance = MOMENTS[name]
    assert first.mean().item() == pytest.approx(mean, abs=6 * math.sqrt(variance / 20_000))
    assert first.var().item() == pytest.approx(variance, rel=0.1)


def test_draws_go_on_in_their_stream():
    generator = torch.Generator().manual_seed(0)
    assert not torch.equal(*(torch.randn(5, generator=generator) for _ in range(2)))
    torch.manual_seed(3)
    first = torch.nn.functional.dropout(torch.ones(100))
    assert not torch.equal(first, torch.nn.functional.dropout(torch.ones(100)))
    torch.manual_seed(3)
    assert torch.equal(first, torch.nn.functional.dropout(torch.ones(100)))


def test_nothing_stays_when_it_is_taken_away():
    """A non-portable run in the same process keeps PyTorch's draws."""
    use_portable(wanted=False)
    before = torch.randn(50, generator=torch.Generator().manual_seed(0))
    use_portable(wanted=True)
    portably = torch.randn(50, generator=torch.Generator().manual_seed(0))
    use_portable(wanted=False)
    after = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(before, after)
    assert not torch.equal(before, portably)


@pytest.mark.parametrize(("device", "threads"), [("cuda:0", 1), ("cpu", 2)])
def test_what_cannot_be_portable_is_refused(device, threads):
    with refused(SettingsError, "--device cpu --threads 1"):
        use_portable(wanted=True, device=device, threads=threads)
