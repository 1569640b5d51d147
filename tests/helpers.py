"""What several tests need: exact comparison, layers of settings, made-up records."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.testing import assert_close

from feddg_bench.plugins import load_method

bitwise = partial(assert_close, rtol=0, atol=0)
"""Equal tensors, or trees of them, bit for bit."""

ALL = {"federation": {"per_round": None}}
"""Every client takes part in every round."""

UNIFORM = {"federation": {"weighting": "uniform"}}
"""Every client counts the same."""

PLAIN = {
    "augment": {
        "crop_scale": None,
        "flip": 0.0,
        "brightness": 0.0,
        "contrast": 0.0,
        "saturation": 0.0,
        "hue": 0.0,
        "grayscale": 0.0,
    }
}
"""Images as they are."""


def hyper(**values: Any) -> dict[str, Any]:
    """Return a layer of a method's own settings."""
    return {"hyper": values}


def rng(seed: int = 0) -> torch.Generator:
    """Return a generator that starts at a seed."""
    return torch.Generator().manual_seed(seed)


def no_file(name: str) -> dict[str, Any]:
    """Return a layer with which a method needs no file of weights."""
    return pixel() if "style" in load_method(name).Settings.model_fields else hyper()


pixel = partial(hyper, style="pixel")
"""A layer of a method's own settings, with styles of raw pixels, which need no weights."""
