"""Training steps do not wait for the device: they read none of its numbers and copy none back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from feddg_bench.testing import start_toy_run
from tests.standin.conftest import METHODS, UNCROPPED

WAITS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "_unique2")
"""Operations whose result's value or shape the CPU needs at once."""

pytestmark = pytest.mark.usefixtures("standin")


class Watch(TorchDispatchMode):
    """Notes the operations that make a program wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        name = op.__name__.partition(".")[0]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        remote = any(not x.is_cpu for x in given)
        masked = name.startswith("index") and any(x.dtype == torch.bool for x in given[1:])
        if remote and (name in WAITS or masked or any(x.is_cpu for x in made)):
            self.found.add(name)
        return result


def waits(name: str, layer: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return what two rounds of a method wait for in their training steps."""
    run = start_toy_run(name, UNCROPPED, layer, device="standin:0")
    watch, steps = Watch(), []
    for each in ("training_step", "on_before_optimizer_step"):
        real = getattr(type(run.method), each)

        def watched(self: Any, *given: Any, real: Any = real) -> Any:
            steps.append(1)
            with watch:
                return real(self, *given)

        monkeypatch.setattr(type(run.method), each, watched)
    run.rounds(2)
    assert steps or name == "fedadg"  # which has a loop of its own
    return watch.found


DOMAINS = {"_unique2", "nonzero"}
WAITING = {
    **dict.fromkeys(("irm", "mmd", "vrex"), DOMAINS),  # parts of a batch, by domain
    "coral": DOMAINS | {"equal"},  # of PyTorch, while it takes covariances
    "fedccrl": {"_to_copy"},  # AugMix transforms bytes on the CPU
}
"""Methods whose step waits, and why; no other may, and these for nothing else."""


@pytest.mark.parametrize(("name", "layer"), METHODS.items(), ids=str)
def test_a_training_step_does_not_wait_for_the_device(name, layer, monkeypatch) -> None:
    assert waits(name, layer, monkeypatch) <= WAITING.get(name, set())


@pytest.mark.parametrize(
    "wait",
    [
        lambda device: device.sum().item(),
        lambda device: bool(device[0] > 0),
        lambda device: device.cpu(),
        lambda device: device[device > 0],
        lambda device: torch.equal(device, device),
    ],
    ids=["item", "bool", "cpu", "mask", "equal"],
)
def test_what_waits_is_seen(wait) -> None:
    device = torch.ones(3, device="standin:0")
    with Watch() as watch:
        wait(device)
    assert watch.found
