"""Training steps declared as vectorised compile to one graph with `torch.compile`."""

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
"""Name of a method for each declared training step."""


def captured(method, monkeypatch):
    """Replace a method's training step by its captured graph; return a list of the steps run."""
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
    if not steps:  # FedADG has its own loop; a Trainer uses this step
        run.method.training_step((torch.rand(2, 3, 16, 16), torch.arange(2)), 0)


class Branching(FedAvg):
    """Its training step branches on a tensor's value."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() < 1 else 2 * loss


def test_a_branch_on_a_number_is_not_captured(monkeypatch):
    method = start_toy_run(Branching).method
    captured(Branching, monkeypatch)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="data-dependent"):
        method.training_step((torch.rand(2, 3, 16, 16), torch.arange(2)), 0)
