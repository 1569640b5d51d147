"""How far plain SGD goes: the weights with which gradients entered a client's model."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.optim import Optimizer

from feddg_bench.common.errors import SettingsError
from feddg_bench.core.client import Client
from feddg_bench.core.messages import LocalUpdate
from feddg_bench.core.method import Method


class MeasuredSGD(Method):
    """Local training with SGD that also measures how far a constant gradient would go.

    A gradient moves the model by its learning rate in its own step, and with momentum m again in
    later steps. `entered` is the sum of these factors over all gradients of a task: tau lr for tau
    steps without momentum. A constant gradient g moves the model by -entered g, and Adam has no
    such number, since the length of its steps does not depend on that of the gradient.
    """

    needs: ClassVar = {"train": {"optimizer": "sgd"}}

    def build(self) -> None:
        used = self.train_settings.optimizer
        if used != "sgd":
            raise SettingsError(
                f"{self.measured} needs to know how far each gradient moved the model, which "
                f"train.optimizer={used} does not tell: set train.optimizer=sgd and a learning "
                f"rate for it"
            )
        self.entered = 0.0
        self.repeat = 0.0  # how often the momentum buffer holds a gradient: 1 + m + m^2 + ...

    measured: ClassVar[str]
    """The method's name in an error."""

    def fit_measured(self, client: Client, **values: Any) -> tuple[LocalUpdate, float]:
        """Train as `fit` does, with attributes set for its duration; return `entered` as well."""
        repeat = client.memory.get("repeat", 0.0)
        with self.temporarily(entered=0.0, repeat=repeat, **values):
            update = super().fit(client)
            entered, repeat = self.entered, self.repeat
        if entered and client.train.optimizer_state == "persist":
            client.memory["repeat"] = repeat
        return update, entered

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        group = optimizer.param_groups[0]
        self.repeat = 1 + group["momentum"] * self.repeat
        self.entered += group["lr"] * self.repeat
