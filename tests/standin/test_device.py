"""The stand-in must refuse what a GPU refuses; otherwise the other tests here prove nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import bitwise, rng

ONE, TWO = "standin:0", "standin:1"

pytestmark = pytest.mark.usefixtures("standin")


def on(device: str, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=rng()).to(device)


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(3) + x,
        lambda x: x + x.to(TWO),
        lambda x: x.to(TWO)[x.long()],
        lambda x: x * torch.ones(1),
        lambda x: torch.ones(3).add_(x),
        lambda x: torch.tensor(0.0).add_(x.sum()),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: torch.stack([x.sum(), torch.tensor(1.0)]),
        lambda x: torch.ones(3)[x.long()],
        lambda x: x.index_select(0, torch.tensor([0])),
        lambda x: x.index_add_(0, torch.tensor([0]), x[:1]),
        lambda x: torch._foreach_lerp_([x], [torch.ones(3)], 0.5),
        lambda x: nn.Linear(3, 2)(x),
        lambda x: torch.equal(x, torch.ones(3)),
        lambda x: x.bernoulli_(0.5, generator=rng()),
        lambda x: torch.rand(3, device=x.device, generator=rng()),
        lambda x: x.pin_memory(),
    ],
)
def test_what_a_gpu_refuses_is_refused(mix) -> None:
    with pytest.raises(RuntimeError, match=r"device|generator|pin"):
        mix(on(ONE, 3))


def test_no_numpy_of_a_device() -> None:
    with pytest.raises(TypeError, match="numpy"):
        on(ONE, 3).numpy()


@pytest.mark.parametrize(
    "fine",
    [
        lambda x: x + torch.tensor(2.0),
        lambda x: torch.tensor(2.0) * x,
        lambda x: torch.where(x > 0, x, torch.tensor(0.0)),
        lambda x: x[torch.tensor([2, 0])],
        lambda x: x[[2, 0]],
        lambda x: torch.zeros(3, device=x.device).copy_(torch.arange(3)),
        lambda x: torch.tensor([1.0, 2.0, 3.0], device=x.device) - x,
        lambda x: torch.arange(3, device=x.device) + x,
        lambda x: torch.stack(torch._foreach_norm([x, torch.ones(3, device=x.device)])),
        lambda x: x.new_tensor([1.0]),
        lambda x: x.clone().unsqueeze_(0).squeeze_(0).t_(),
        lambda x: torch.quantile(x, 0.5),
        lambda x: x.unique(return_inverse=True)[1],
        lambda x: x.sum().item() + torch.ones(3),
    ],
)
def test_what_a_gpu_does_has_the_cpu_s_numbers(fine) -> None:
    bitwise(fine(on(ONE, 3)).cpu(), fine(on("cpu", 3)))
    assert fine(on(TWO, 3)).device.type in ("cpu", "standin")


def test_lists_may_hold_tensors_of_several_devices() -> None:
    norms = torch._foreach_norm([on(ONE, 3), on("cpu", 3), on(TWO, 3)])
    assert [str(norm.device) for norm in norms] == [ONE, "cpu", TWO]


def step(device: str, precision: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return the parameters of a small network after two steps, on the CPU."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=rng(parameter.numel())) - 0.5)
    same = list(net.parameters())
    net.to(device)
    assert all(a is b for a, b in zip(same, net.parameters(), strict=True))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, fused=True)
    images, labels = on(device, 6, 3, 8, 8), torch.arange(6, device=device) % 5
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, precision, enabled=precision is not None):
            loss = nn.functional.cross_entropy(net(images) + net(images.flip(0)), labels)
        loss.backward()
        assert same[0].grad is not None
        assert str(same[0].grad.device) == device
        optimizer.step()
    return [parameter.detach().cpu() for parameter in net.parameters()]


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_training_has_the_cpu_s_numbers(precision) -> None:
    bitwise(step(TWO, precision), step("cpu", precision))


def test_autocast_casts() -> None:
    x = on(ONE, 3, 3)
    with torch.autocast("standin", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert nn.functional.mse_loss(x @ x, x).dtype == torch.float32
    assert (x @ x).dtype == torch.float32


def test_each_device_draws_from_a_generator_of_its_own(standin) -> None:
    state = torch.get_rng_state()
    standin.manual_seed_all(7)
    one, two = torch.rand(4, device=ONE), torch.rand(4, device=TWO)
    bitwise(one.cpu(), two.cpu())
    assert not torch.equal(one, torch.rand(4, device=ONE))
    assert torch.equal(torch.get_rng_state(), state)


def test_pinned_memory_is_the_cpu_s() -> None:
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned()
    assert str(pinned.to(ONE, non_blocking=True).device) == ONE


def test_what_has_no_deterministic_algorithm_is_refused() -> None:
    x, to = on(ONE, 3), torch.tensor([0, 0, 1]).to(ONE)
    torch.use_deterministic_algorithms(True)
    try:
        for wrong in (
            lambda: x.median(0),
            lambda: x.scatter_reduce(0, to, x, "amin"),
            lambda: x.histc(2),
        ):
            with pytest.raises(RuntimeError, match="deterministic"):
                wrong()
        x.sort()
    finally:
        torch.use_deterministic_algorithms(False)
