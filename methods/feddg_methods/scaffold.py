"""SCAFFOLD: control variates correct a client's gradients for the drift towards its own data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from feddg_bench.core.aggregation import watched
from feddg_bench.core.client import Client
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Weights
from feddg_bench.core.server import Server
from feddg_methods.shared.step_lengths import MeasuredSGD


class Scaffold(MeasuredSGD):
    """SCAFFOLD (Karimireddy et al., ICML 2020, arXiv 1910.06378, Algorithm 1, option II).

    The server keeps a control variate c, every client its own c_k, both initially 0 and in the
    shape of the trainable parameters. Clients add c - c_k to each gradient, before momentum and
    weight decay; after tau steps with learning rates lr, a client that moved from w to theta sets
    c_k+ = c_k - c + (w - theta) / sum(lr) and sends its weights and c_k+ - c_k: twice FedAvg's
    message in both directions. The server steps as FedAvg does, and moves c by the sum of these
    changes times the clients' shares among all N. The logged loss is that of the model alone.

    Shares follow ``federation.weighting`` for both w and c: ``uniform`` is the paper's, where c
    moves by K/N times the mean change. With ``samples`` c stays the mean of all c_k weighted by
    images, so that drifts cancel in the mean of the models, which has the same weights.

    It needs SGD: the length of a step must determine the gradient. The paper has no momentum. With
    momentum m a gradient also moves the model in later steps, and (w - theta) / (tau lr) would be
    up to 1 / (1 - m) times the gradient, so that controls diverge; we divide by the sum of the
    weights with which gradients entered theta, tau lr if m = 0.

    From its first round on, a client's control takes one more model in its memory.
    """

    group = "local training"
    tasks = ("classification", "regression")
    title = "SCAFFOLD"
    measured = "scaffold"
    citation = (
        "Sai Praneeth Karimireddy, Satyen Kale, Mehryar Mohri, Sashank J. Reddi, Sebastian U. "
        "Stich, Ananda Theertha Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated "
        "Learning, ICML 2020, arXiv 1910.06378"
    )
    uplink: ClassVar = {"fit": {"weights": "model", "control": "part of model"}, "count": ()}
    downlink = ("control",)
    singles = ""

    def build(self) -> None:
        super().build()
        self.correction: Weights = {}

    # ------------------------------------------------------------------------ client half

    def count(self, client: Client) -> Payload:
        """Return nothing: the reply itself holds the client's image count."""
        return {}

    def fit(self, client: Client) -> LocalUpdate:
        device = self.classifier.weight.device
        c = {name: client.broadcast["control"][name].to(device) for name in self.trainable}
        kept = client.memory.get("control")
        c_k = {n: kept[n].to(device) if kept else torch.zeros_like(c[n]) for n in c}
        correction = {name: c[name] - c_k[name] for name in c}
        update, entered = self.fit_measured(client, correction=correction)
        if not entered:  # no batch, no step
            return LocalUpdate(update.weights, {"control": {n: torch.zeros_like(c[n]) for n in c}})
        change = {
            name: control_change(
                client.weights[name].to(device), update.weights[name], c[name], entered
            )
            for name in c
        }
        client.memory["control"] = {name: c_k[name] + change[name] for name in c}
        return LocalUpdate(update.weights, {"control": change})

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for name, theta in self.named_parameters():
            if theta.grad is not None and name in self.correction:
                theta.grad += self.correction[name]
        super().on_before_optimizer_step(optimizer)

    # ------------------------------------------------------------------------ server half

    def prepare(self, server: Server) -> None:
        replies = server.ask(self.count, everyone=True, weights=False)
        server.memory["shares"] = sum(server.share(reply) for reply in replies)
        server.broadcast["control"] = {
            name: torch.zeros_like(server.weights[name]) for name in self.trainable
        }

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        control = {name: c.clone() for name, c in server.broadcast["control"].items()}

        def count(reply: Reply[LocalUpdate]) -> None:
            share = server.share(reply) / server.memory["shares"]
            for name, change in reply.value.extra["control"].items():
                control[name] += share * change

        weights = super().aggregate(server, watched(updates, count))
        server.broadcast["control"] = control
        return weights


def control_change(w: Tensor, theta: Tensor, c: Tensor, entered: float) -> Tensor:
    """Return c_k+ - c_k = (w - theta) / (tau lr) - c, in the tensors' shape.

    Args:
        w: Parameters as received.
        theta: Parameters after local training.
        c: The server's control.
        entered: tau lr; in general the sum of the weights with which gradients entered theta.
    """
    return (w - theta) / entered - c


DEVIATIONS = (
    "FedDG_Benchmark divides a client's move by its local epochs. We divide it, as the paper "
    "does, by the number of steps and their learning rate.",
    "FedDG_Benchmark corrects by a second move of the parameters after a step of Adam. We correct"
    " the gradient, and refuse Adam.",
    "FedDG_Benchmark also keeps controls for the buffers of batch normalisation. We keep them for"
    " trainable parameters only.",
    "FedDG_Benchmark replaces c by the mean over the sampled clients. We move c by the sum of "
    "their changes, each times the client's share n_k/n of all images. That is the paper's K/N "
    "times the mean change with `federation.weighting=uniform` only.",
    "FedDG-GA's code leaves out 1 / lr, so its controls are lr times too small. We keep it.",
    "The paper averages clients equally. We weight them by their images unless told otherwise "
    "(`federation.weighting`).",
)
"""Where published code differs from its paper, and what this module does."""
