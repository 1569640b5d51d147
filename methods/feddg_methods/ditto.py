"""Ditto: every client also keeps a model of its own, close to the global one."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field
from torch.optim import Optimizer

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate, Weights
from feddg_bench.core.method import Method
from feddg_methods.fedprox import proximal_gradient


class DittoSettings(MethodSettings):
    """How close personal models stay."""

    lam: float = Field(0.1, ge=0)
    """lambda: 0 trains each client alone, and large values give the global model. The paper tunes
    it for each data set."""


class Ditto(Method):
    """Ditto (Li et al., ICML 2021, arXiv 2012.04221, Algorithm 1) with FedAvg as its solver.

    In each of its rounds client k trains the global model w as in FedAvg and sends it. It then
    trains its personal model v_k on its loss F_k plus lambda / 2 ||v_k - w||^2, with w as received,
    for as many epochs and with the same optimiser. v_k begins as the first w that the client
    receives, and never leaves it. The global model is FedAvg's; an unseen domain has no other.
    Personal models are measured on the clients' test images (`data.client_test_fraction`).

    Local training costs twice as much as in FedAvg. The logged loss is the mean of both.
    """

    Settings = DittoSettings
    settings: DittoSettings
    tasks = ("classification", "regression")
    group = "personalisation"
    title = "Ditto"
    citation = (
        "Tian Li, Shengyuan Hu, Ahmad Beirami, Virginia Smith: Ditto: Fair and Robust Federated "
        "Learning Through Personalization, ICML 2021, arXiv 2012.04221"
    )

    def build(self) -> None:
        self.personal = False

    def fit(self, client: Client) -> LocalUpdate:
        memory = client.memory
        update = super().fit(client)
        # Each of the two models has an optimizer, whose state may persist.
        shared, own = memory.pop("optimizer", None), memory.pop("own_optimizer", None)
        if own is not None:
            memory["optimizer"] = own
        self.state.load(memory.get("own", client.weights))
        with self.temporarily(personal=True):
            super().fit(client)
        memory["own"] = self.state.federated_weights()
        if "optimizer" in memory:
            memory["own_optimizer"] = memory["optimizer"]
            memory["optimizer"] = shared
        return update

    def batches(self, client: Client, epoch: int) -> Iterator[Batch]:
        return super().batches(client, epoch + self.personal * client.train.local_epochs)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if not self.personal:
            return
        w = self.client.weights
        for name, v in self.named_parameters():
            if v.grad is not None and name in w:
                v.grad += proximal_gradient(v.detach(), w[name], mu=self.settings.lam)

    def personal_model(self, client: Client) -> Weights:
        return {**self.state.federated_weights(), **self.state.private_weights()}


DEVIATIONS = (
    "Algorithm 1 takes s steps for the personal model, and the authors' code as many as for the "
    "global one, interleaved with them. We take the recipe's local epochs, after the global ones.",
    "In the authors' code the order of batches is the same for both models. Ours have one each.",
)
"""Where published code differs from its paper, and what this module does."""
