"""Operation counts and the arithmetic of a profile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from feddg_bench.core.messages import encode
from feddg_bench.engine.flop import Tally, count_flop, peak_flops
from feddg_bench.plugins import names
from feddg_bench.testing import TaskRecorder, start_toy_run, toy_federation
from feddg_methods.fedavg import FedAvg

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_a_convolution_costs_twice_backward(groups):
    layer = nn.Conv2d(8, 16, 3, padding=1, groups=groups, bias=False)
    images = torch.randn(2, 8, 10, 10, requires_grad=True)
    forward = 2 * (2 * 16 * 10 * 10) * (8 // groups) * 9
    assert count_flop(lambda: layer(images)) == forward
    assert count_flop(lambda: layer(images).sum().backward()) == 3 * forward
    assert count_flop(lambda: torch.autograd.grad(layer(images).sum(), images)) == 2 * forward


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
    assert peak_flops(torch.device("cpu"), "32-true", 1) > 1e8


class Uncountable(FedAvg):
    """Fails if its operations are counted."""

    def training_step(self, batch, batch_idx):
        if torch._C._len_torch_dispatch_stack():
            raise TypeError("no modes")
        return super().training_step(batch, batch_idx)


def test_the_first_task_of_each_call_is_counted_and_again_in_round_2():
    seen = TaskRecorder()
    start_toy_run("fediir", executor=seen, counts=True).rounds(3)
    counted = [
        (t.round, t.call) for t, r in zip(seen.tasks, seen.replies, strict=True) if r.counted
    ]
    assert counted == list(dict.fromkeys((t.round, t.call) for t in seen.tasks if t.round < 3))
    assert len(counted) > 2


def test_validation_images_are_counted_in_proportion():
    """Of 400 training and 40 validation images, eight and one are counted, not eight and 40."""
    draw = np.random.default_rng(0)
    images = draw.integers(0, 255, (440, 16, 16, 3), dtype=np.uint8)
    federation = replace(
        toy_federation(),
        images=images,
        labels=np.arange(440) % 3,
        domain_ids=np.zeros(440, dtype=np.int64),
        clients={"client_0": np.arange(400)},
        evaluation=(),
        validation={"client_0": np.arange(400, 440)},
    )
    found = {}
    for method in ("fedavg", "feddg_ga"):
        seen, tally = TaskRecorder(), Tally()
        every = {"federation": {"per_round": None}}
        run = start_toy_run(method, every, federation=federation, executor=seen, counts=True)
        run.rounds(1)
        for task, reply in zip(seen.tasks, seen.replies, strict=True):
            tally.add(task, reply)
        found[method] = tally.flop
    assert 1 < found["feddg_ga"] / found["fedavg"] < 1.1


def test_what_is_counted_is_what_is_computed():
    """One forward and backward pass per image; the first layer's input takes no gradient."""
    once = {"train": {"local_epochs": 1}, "federation": {"per_round": None}}
    seen, tally = TaskRecorder(), Tally()
    run = start_toy_run("fedavg", once, executor=seen, counts=True)
    run.rounds(1)
    for task, reply in zip(seen.tasks, seen.replies, strict=True):
        tally.add(task, reply)
    images = sum(reply.num_examples for reply in seen.replies)
    batch = torch.zeros(1, 3, 16, 16)
    step = count_flop(
        lambda: run.method.training_step((batch, torch.zeros(1).long()), 0).backward()
    )
    assert tally.flop == pytest.approx(step * images)


def test_a_step_that_bears_no_counter_is_not_counted():
    runs = [start_toy_run(method, counts=True) for method in (Uncountable, FedAvg)]
    tallies = [Tally(), Tally()]
    for run, tally in zip(runs, tallies, strict=True):
        run.executor.on_reply = tally.add
        run.rounds(2)
    assert encode(runs[0].server.state()) == encode(runs[1].server.state())
    assert tallies[0].flop is None
    assert tallies[1].flop is not None


@pytest.mark.parametrize("method", names("method"))
def test_counting_leaves_no_trace(method):
    hyper = {"style": "pixel"} if method in ("ccst", "pardon") else {}
    layer = {"hyper": hyper}
    runs = [start_toy_run(method, layer, counts=counts) for counts in (False, True)]
    for run in runs:
        run.rounds(2)
    assert encode(runs[0].server.state()) == encode(runs[1].server.state())
