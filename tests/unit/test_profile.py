"""Counting operations, and the arithmetic of a profile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from feddg_bench.runs.profile import count_flop, peak_flops


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_a_convolution_costs_twice_backward(groups):
    layer = nn.Conv2d(8, 16, 3, padding=1, groups=groups, bias=False)
    images = torch.randn(2, 8, 10, 10, requires_grad=True)
    forward = 2 * (2 * 16 * 10 * 10) * (8 // groups) * 9
    assert count_flop(lambda: layer(images)) == forward
    assert count_flop(lambda: layer(images).sum().backward()) == 3 * forward


def test_no_gradient_of_the_input_is_not_counted():
    layer = nn.Conv2d(3, 4, 3, bias=False)
    images = torch.randn(1, 3, 6, 6)
    forward = 2 * (4 * 4 * 4) * 3 * 9
    assert count_flop(lambda: layer(images).sum().backward()) == 2 * forward


def test_a_linear_layer():
    layer = nn.Linear(5, 7, bias=False)
    rows = torch.randn(3, 5)
    assert count_flop(lambda: layer(rows).sum().backward()) == 2 * 2 * 3 * 5 * 7


def test_the_peak_is_a_rate():
    assert peak_flops(torch.device("cpu"), "32-true") > 1e8
