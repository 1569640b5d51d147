"""FedSAM: clients search for flat minima."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate
from feddg_bench.core.method import Method


class FedSAMSettings(MethodSettings):
    """Size of the neighbourhood."""

    labels: ClassVar[tuple[str, ...]] = ("rho",)

    rho: float = Field(0.05, ge=0)
    """Radius of the neighbourhood, rho in the papers; published values run from 0.02 to 0.1."""


class FedSAM(Method):
    """FedSAM (Qu et al., ICML 2022, Algorithm 1; Caldarola et al., ECCV 2022).

    Each local step goes from theta along the gradient at theta + rho g / ||g||, where g is the
    batch's gradient at theta over all parameters (SAM, Foret et al., ICLR 2021). Both gradients use
    the same batch and the same dropout masks. The statistics of batch normalisation and the logged
    loss are those at theta. The server is FedAvg's.
    """

    Settings = FedSAMSettings
    settings: FedSAMSettings
    group = "local training"
    tasks = ("classification", "regression")
    title = "FedSAM"
    citation = (
        "Z. Qu, X. Li, R. Duan, Y. Liu, B. Tang, Z. Lu: Generalized Federated Learning via "
        "Sharpness Aware Minimization, ICML 2022, arXiv 2206.02618; D. Caldarola, B. Caputo, "
        "M. Ciccone: Improving Generalization in Federated Learning by Seeking Flat Minima, "
        "ECCV 2022, arXiv 2203.11834"
    )

    def fit(self, client: Client) -> LocalUpdate:
        with self.temporarily(_again=None):
            return super().fit(client)

    def batches(self, client: Client, epoch: int) -> Iterator[Batch]:
        for index, batch in enumerate(super().batches(client, epoch)):
            self.on_train_batch_start(batch, index)
            yield batch

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self._again = batch, batch_idx, random_state(self.device)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if not self.settings.rho:
            return
        theta = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        epsilon = perturbation([p.grad for p in theta if p.grad is not None], self.settings.rho)
        values = [p.detach().clone() for p in theta]
        with torch.no_grad():
            torch._foreach_add_(theta, epsilon)
        optimizer.zero_grad()
        batch, index, states = self._again
        with still_statistics(self), same_random_numbers(states, self.device):
            with self.autocast():
                loss = self.training_step(batch, index)
            loss.backward()
        with torch.no_grad():
            torch._foreach_copy_(theta, values)  # subtracting epsilon would leave rounding errors

    def autocast(self) -> AbstractContextManager[None]:
        """Return the mixed-precision context of the client's Fabric or of the Trainer."""
        if self.alone:
            return self.trainer.precision_plugin.forward_context()
        return self.client.fabric.autocast()


def perturbation(gradient: list[Tensor], rho: float) -> list[Tensor]:
    """Return rho g / ||g||, tensor by tensor, with one norm over all; 0 where g is 0."""
    norm = torch.stack(torch._foreach_norm(gradient)).norm()
    scale = torch.where(norm > 0, rho / norm, 0)
    return list(torch._foreach_mul(gradient, scale))


@contextmanager
def still_statistics(module: nn.Module) -> Iterator[None]:
    """Let batch normalisation use the batch's statistics without storing them."""
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True


def random_state(device: torch.device) -> list[Tensor]:
    """Return the states of the global generators that layers draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextmanager
def same_random_numbers(states: list[Tensor], device: torch.device) -> Iterator[None]:
    """Repeat the draws that followed ``states`` in the block; afterwards restore the generators."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)
        yield


DEVIATIONS: tuple[str, ...] = ()
"""Where published code differs from its paper, and what this module does."""
