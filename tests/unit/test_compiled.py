"""A training step that is declared to be vectorised is one graph, as `torch.compile` needs it."""

from __future__ import annotations

import pytest
import torch

from feddg_bench.plugins import load_method, names
from feddg_bench.testing import start_toy_run
from feddg_methods.fedavg import FedAvg
from tests.helpers import no_file, numbers

pytestmark = pytest.mark.nightly

DECLARED = {
    load_method(name).training_step: name
    for name in names("method")
    if load_method(name).vectorised
}
"""A method's name for each training step that is declared."""


def captured(method, monkeypatch):
    """Let a method's steps run as they are captured; return a list that counts them."""
    torch._dynamo.reset()
    steps = []
    graph = torch.compile(method.training_step, backend="eager", fullgraph=True)

    def step(self, batch, index):
        steps.append(index)
        return graph(self, batch, index)

    monkeypatch.setattr(method, "training_step", step)
    return steps


@pytest.mark.parametrize("name", sorted(DECLARED.values()))
def test_a_declared_step_is_captured_whole_with_its_numbers(name, monkeypatch):
    expected = numbers(start_toy_run(name, no_file(name)).rounds(2))
    run = start_toy_run(name, no_file(name))
    steps = captured(type(run.method), monkeypatch)
    assert numbers(run.rounds(2)) == expected
    if not steps:  # FedADG has a loop of its own, and this step under a Trainer
        run.method.training_step((torch.rand(2, 3, 16, 16), torch.arange(2)), 0)


class Branching(FedAvg):
    """Its training step depends on a number."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() < 1 else 2 * loss


def test_a_branch_on_a_number_is_not_captured(monkeypatch):
    method = start_toy_run(Branching).method
    captured(Branching, monkeypatch)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="data-dependent"):
        method.training_step((torch.rand(2, 3, 16, 16), torch.arange(2)), 0)
