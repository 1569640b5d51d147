"""Functions and random draws that are the same on every CPU, in place of PyTorch's own.

PyTorch passes the functions below to Intel's MKL. On other makers' CPUs, MKL computes square roots,
logarithms and arc tangents with other instructions, whatever its settings, and its draws use these
functions. Here NumPy computes them in float64, and draws from a stream whose seed is an integer
from PyTorch's generator. Matrix products, convolutions and everything else are fixed by
`feddg_bench.common.portable`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.portable import begin_portable

_installed: list[torch.library.Library] = []


def use_portable(*, wanted: bool, device: str = "cpu", threads: int = 1) -> None:
    """Install the portable functions and draws in this process, or remove them.

    Raises:
        SettingsError: If the process or the device cannot compute portably.
    """
    if not wanted:
        _installed.clear()
        return
    if device != "cpu" or threads != 1:
        raise SettingsError(
            "portable=true needs a CPU and one thread a worker: give --device cpu --threads 1"
        )
    begin_portable()
    torch.set_num_threads(1)
    if not _installed:
        _installed.append(_library())


def _functions() -> dict[str, Callable[..., Any]]:
    """Return the functions that PyTorch leaves to MKL's vector mathematics."""
    from scipy import special  # type: ignore[import-untyped]  # costs other runs a tenth of a second

    return {
        **{name: getattr(np, name) for name in ("exp", "log", "log2", "log10", "sqrt", "tanh")},
        **{name: getattr(np, name) for name in ("sin", "cos", "tan")},
        **{name: getattr(np, f"arc{name[1:]}") for name in ("asin", "acos", "atan")},
        **{name: getattr(special, name) for name in ("erf", "erfc", "erfinv")},
    }


def _library() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they say that kernels are replaced, as intended
        for name, function in _functions().items():
            for suffix, kernel in _kernels(function).items():
                library.impl(f"{name}{suffix}", kernel, "CPU")
        for name, draw in _DRAWS.items():
            library.impl(name, draw, "CPU")
    return library


def _kernels(function: Callable[..., Any]) -> dict[str, Callable[..., Tensor]]:
    def values(x: Tensor) -> Tensor:
        wide = torch.complex128 if x.is_complex() else torch.float64
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.asarray(function(x.detach().to(wide).numpy())))

    def new(x: Tensor) -> Tensor:
        inexact = x.is_floating_point() or x.is_complex()
        dtype = x.dtype if inexact else torch.get_default_dtype()
        return torch.empty_like(x, dtype=dtype).copy_(values(x))

    return {
        "": new,
        "_": lambda x: x.copy_(values(x)),
        ".out": lambda x, *, out: out.resize_(x.shape).copy_(values(x)),
    }


def _stream(generator: torch.Generator | None) -> np.random.Generator:
    """Return a stream seeded with an integer from PyTorch's generator."""
    seed = torch.empty((), dtype=torch.int64).random_(generator=generator)
    return np.random.default_rng(int(seed))


def _normal(
    x: Tensor, mean: float = 0, std: float = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    drawn = _stream(generator).standard_normal(x.shape)
    return x.copy_(torch.from_numpy(np.asarray(drawn * std + mean)))


def _exponential(
    x: Tensor, lambd: float = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    drawn = _stream(generator).standard_exponential(x.shape)
    return x.copy_(torch.from_numpy(np.asarray(drawn / lambd)))


def _bernoulli(x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    drawn = _stream(generator).random(x.shape) < p
    return x.copy_(torch.from_numpy(np.asarray(drawn)))


def _gamma(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    drawn = _stream(generator).standard_gamma(x.detach().double().numpy())
    return torch.empty_like(x).copy_(torch.from_numpy(np.asarray(drawn)))


def _dirichlet(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    drawn = torch._standard_gamma(x.double(), generator)
    return (drawn / drawn.sum(-1, keepdim=True)).to(x.dtype)


_DRAWS: dict[str, Callable[..., Tensor]] = {
    "normal_": _normal,
    "exponential_": _exponential,
    "bernoulli_.float": _bernoulli,
    "_standard_gamma": _gamma,
    "_sample_dirichlet": _dirichlet,
}
"""Draws for which PyTorch uses functions or streams that depend on MKL or on instruction sets."""
