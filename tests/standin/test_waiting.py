"""Training steps never wait for a device, nor does the server's mean of replies on the device.

They neither read its numbers nor copy them back, and copy to it only from pinned memory.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from feddg_bench.config.schema import AugmentSettings, TrainSettings
from feddg_bench.core.aggregation import RunningMean
from feddg_bench.core.client import on_device
from feddg_bench.data.client_images import ClientImages, ImageBank
from feddg_bench.testing import start_toy_run, toy_federation
from tests.helpers import UNTRAINED, bitwise, rng
from tests.standin.conftest import METHODS, UNCROPPED

WAITS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "_unique2")
"""Operations whose result's value or shape the CPU needs immediately."""

pytestmark = [pytest.mark.usefixtures("standin"), pytest.mark.nightly]


class Watch(TorchDispatchMode):
    """Records operations that make a program wait for a device, and counts copies to it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.copies = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        name = op.__name__.partition(".")[0]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        remote = any(not x.is_cpu for x in given)
        indexed = given[1:] if name.startswith("index") else []
        masked = any(x.dtype == torch.bool or x.is_cpu for x in indexed)
        if remote and (name in WAITS or masked or any(x.is_cpu for x in made)):
            self.found.add(name)
        if name in ("_to_copy", "copy_") and given[-1].is_cpu and not made[0].is_cpu:
            self.copies += 1
            non_blocking = (kwargs or {}).get("non_blocking") or args[2:] == (True,)
            if not (non_blocking and given[-1].is_pinned()):
                self.found.add("copy to the device")
        return result


def waits(name: str, layer: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return waiting operations of two rounds of a method, in training steps and model means."""
    run = start_toy_run(name, UNCROPPED, layer, device="standin:0")
    model = run.server.weights
    watch, steps = Watch(), []
    for each in STEPS.get(name, ("training_step", "on_before_optimizer_step")):
        real = getattr(type(run.method), each)

        @functools.wraps(real)
        def watched(self: Any, *given: Any, real: Any = real) -> Any:
            steps.append(1)
            with watch:
                return real(self, *given)

        monkeypatch.setattr(type(run.method), each, watched)
    add, means = RunningMean.add, []

    def watched_mean(self: RunningMean, state: Any, share: float) -> None:
        with watch:
            add(self, state, share)
        means.append(self.mean)

    monkeypatch.setattr(RunningMean, "add", watched_mean)
    run.rounds(2)
    assert steps
    of_models = [tensor for mean in means for name, tensor in mean.items() if name in model]
    assert {str(tensor.device) for tensor in of_models} <= {"standin:0"}
    return watch.found


STEPS = {"fedadg": ("fit",)}
"""Methods that override the training loop -> the functions that contain their steps."""


@pytest.mark.parametrize(
    ("name", "layer"), [pair for pair in METHODS.items() if pair[0] not in UNTRAINED], ids=str
)
def test_steps_and_means_of_models_do_not_wait_for_the_device(name, layer, monkeypatch) -> None:
    assert not waits(name, layer, monkeypatch)


def test_tensors_of_any_type_and_shape_travel_by_one_copy() -> None:
    given = [
        torch.arange(3),
        torch.tensor([[True], [False]]),
        torch.rand(2, 3, generator=rng()).T,
        torch.zeros(0, 4, dtype=torch.int64),
        torch.tensor(7, dtype=torch.uint8),
        torch.tensor([0.5], dtype=torch.float64).expand(5),
        torch.ones(4, dtype=torch.float16)[::3][:1],
    ]
    with Watch() as watch:
        there = on_device(given, torch.device("standin:1"))
    assert (watch.copies, watch.found) == (1, set())
    assert {str(tensor.device) for tensor in there} == {"standin:1"}
    bitwise([tensor.cpu() for tensor in there], given)
    assert on_device([], torch.device("standin:1")) == []


@pytest.mark.parametrize(("resident", "copies"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("views", [1, 2])
def test_what_is_drawn_for_a_batch_travels_together(resident, copies, views, monkeypatch) -> None:
    """Indices into the store are included; images that are not on the device travel separately."""
    monkeypatch.setenv("STANDIN_FREE_GIB", "80" if resident else "0")
    federation = toy_federation()
    bank = ImageBank(federation, torch.device("standin:0"))
    clients = [
        ClientImages(bank, index, AugmentSettings(grayscale=0.5), TrainSettings(batch_size=4))
        for index in federation.clients.values()
    ]
    with Watch() as watch:
        batches = [
            batch
            for client in clients
            for batch in client.batches(
                shuffle=True,
                augment=True,
                views=views,
                companions=None,
                generator=rng(),
                domains=torch.arange(len(client)),
            )
        ]
    assert watch.copies == copies * len(batches) > 0
    assert not watch.found
    assert {str(tensor.device) for batch in batches for tensor in batch[:2]} == {"standin:0"}
    assert {str(batch[2].device) for batch in batches} == {"cpu"}


@pytest.mark.parametrize(
    "wait",
    [
        lambda device: device.sum().item(),
        lambda device: bool(device[0] > 0),
        lambda device: device.cpu(),
        lambda device: device[device > 0],
        lambda device: torch.equal(device, device),
        lambda device: device[torch.tensor([0])],
        lambda device: torch.ones(3).to(device),
        lambda device: device.copy_(torch.ones(3).pin_memory()),
    ],
    ids=["item", "bool", "cpu", "mask", "equal", "positions", "unpinned", "blocking"],
)
def test_what_waits_is_seen(wait) -> None:
    device = torch.ones(3, device="standin:0")
    with Watch() as watch:
        wait(device)
    assert watch.found
