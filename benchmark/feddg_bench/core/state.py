"""The state of a method's module on a worker: its weights, optimizer and current client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as optimizers

from feddg_bench.core.client import Client
from feddg_bench.core.messages import Payload, Weights


class ModuleState:
    """A method's tensors by name, split into those that are sent and those that are private.

    Attributes:
        tensors: All of the module's state: its own tensors, not copies.
        federated: Names of the tensors that server and clients exchange.
        trainable: Federated names whose tensors take gradients.
        private: Names of the tensors that stay with each client.
        client: The client whose task is running; ``None`` outside a task.

    Args:
        module: The method.
        private: Name prefixes of state that stays with each client.
        constant: Name prefixes of state that is the same everywhere and never changes.
    """

    def __init__(self, module: Any, *, private: tuple[str, ...], constant: tuple[str, ...]) -> None:
        self.client: Client | None = None
        self._module = module
        self._optimizers: dict[tuple[bool, ...], torch.optim.Optimizer] = {}
        self._groups: dict[tuple[bool, ...], list[dict[str, Any]]] = {}
        self.bind()
        self.federated = [n for n in self.tensors if not n.startswith(private + constant)]
        self.trainable = [n for n in self.federated if self.tensors[n].requires_grad]
        self.private = [n for n in self.tensors if n.startswith(private)]

    def bind(self) -> None:
        """Look up the tensors by name; needed again once the module has moved."""
        self.tensors: dict[str, Tensor] = dict(self._module.state_dict(keep_vars=True))

    def federated_weights(self) -> Weights:
        """Return copies of the federated tensors, on their device."""
        return self._copies(self.federated)

    def private_weights(self) -> Weights:
        """Return copies of the tensors that stay with the client."""
        return self._copies(self.private)

    def _copies(self, names: Iterable[str]) -> Weights:
        # Contiguous, as they arrive from another process: randn_like draws in the order of memory.
        layout = torch.contiguous_format
        return {name: self.tensors[name].detach().clone(memory_format=layout) for name in names}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Write ``weights`` into the module in place; no parameter is replaced."""
        if weights:
            targets = [self.tensors[name] for name in weights]
            with torch.no_grad():
                torch._foreach_copy_(targets, list(weights.values()))

    @contextmanager
    def serving(self, client: Client) -> Iterator[None]:
        """Make ``client`` the current client for a block."""
        self.client = client
        try:
            yield
        finally:
            self.client = None

    @contextmanager
    def optimizer(self, client: Client) -> Iterator[torch.optim.Optimizer]:
        """Yield the optimizer of one task: reset, or with the state that the client kept.

        One object serves all tasks in which the same tensors take gradients: building one costs
        more than a step of a small model. It is reset before each task.
        """
        trained = tuple(tensor.requires_grad for tensor in self.tensors.values())
        if trained not in self._optimizers:
            made = self._optimizers[trained] = self._module.configure_optimizers()
            self._groups[trained] = [*map(_copied, made.param_groups)]
        optimizer = self._optimizers[trained]
        optimizer.state.clear()
        optimizer.param_groups[:] = map(_copied, self._groups[trained])
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        restore(optimizer, parameters, client.memory.get("optimizer", {}))
        yield optimizer
        if client.train.optimizer_state == "persist":
            client.memory["optimizer"] = kept(optimizer, parameters)


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Return ``optimizer.step`` without its profiler entry, which costs as much as a small step.

    If steps have hooks, return ``optimizer.step`` itself.
    """
    step = type(optimizer).step
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    )
    if any(hooks) or "step" in vars(optimizer) or not getattr(step, "hooked", False):
        return optimizer.step
    return partial(step.__wrapped__, optimizer)  # type: ignore[attr-defined]  # by functools.wraps


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**group, "params": [*group["params"]]}


def restore(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], entries: Mapping[str, Any]
) -> None:
    """Restore an optimizer's state for these parameters from the result of `kept`."""
    for index, entry in entries.items():
        parameter = parameters[int(index)]
        optimizer.state[parameter] = {
            # a fused kernel walks raw memory, so moments need their parameter's memory layout
            key: torch.empty_like(parameter).copy_(value)
            if value.shape == parameter.shape
            else value.to(parameter.device, copy=True)
            for key, value in entry.items()
        }


def kept(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Payload:
    """Return an optimizer's state for these parameters, such as moments, by their index."""
    found = {str(i): optimizer.state[p] for i, p in enumerate(parameters) if p in optimizer.state}
    return {index: dict(entry) for index, entry in found.items()}
