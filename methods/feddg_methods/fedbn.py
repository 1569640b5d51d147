"""FedBN: average everything except batch normalisation, which stays at its client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import server_step, streaming_mean
from feddg_bench.core.client import Client
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server


class FedBNSettings(MethodSettings):
    """Batch normalisation for evaluation."""

    labels: ClassVar[tuple[str, ...]] = ("evaluation",)

    evaluation: Literal["average", "batch"] = "average"
    """Batch normalisation for images of no client: the mean of the round's clients, or their mean
    affine part with the statistics of the evaluation batch. ``batch`` depends on
    ``evaluation.batch_size`` and on which images share a batch; a single image is evaluated with
    the mean statistics."""


class FedBN(Method):
    """FedBN (Li et al., ICLR 2021, arXiv 2102.07623).

    All of a client's batch normalisation stays at the client: scale, shift and running statistics,
    found by layer type. A client that trains for the first time starts with the initial values. The
    server averages every other tensor, as FedAvg does.

    It personalises: an unseen domain has no batch normalisation of its own. For evaluation there,
    clients also send their batch normalisation; the server averages it, with the same shares, for
    evaluation only and does not send it back. So clients send as much as in FedAvg and receive
    less.
    """

    tasks = ("classification", "regression")
    acts_on = "batch_norm"
    title = "FedBN"
    citation = (
        "Xiaoxiao Li, Meirui Jiang, Xiaofei Zhang, Michael Kamp, Qi Dou: FedBN: Federated Learning "
        "on Non-IID Features via Local Batch Normalization, ICLR 2021, arXiv 2102.07623"
    )
    group = "personalisation"
    Settings = FedBNSettings
    settings: FedBNSettings
    needs: ClassVar = {"federation": {"bn": "local"}}
    uplink: ClassVar = {"fit": ("weights", "norm")}
    singles = ""

    def prepare(self, server: Server) -> None:
        if not self.same_as_fedavg and not self.state.private:
            raise SettingsError(
                f"federation.bn={server.federation.bn} does not go with fedbn, which keeps batch "
                f"normalisation with the clients: leave it out, or set federation.bn=local"
            )

    def fit(self, client: Client) -> LocalUpdate:
        weights = super().fit(client).weights
        norm = self.state.private_weights()
        return LocalUpdate(weights, {"norm": norm} if norm else {})

    def personal_model(self, client: Client) -> Weights:
        return {**self.state.federated_weights(), **self.state.private_weights()}

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        def whole(reply: Reply[LocalUpdate]) -> tuple[Weights, float]:
            return reply.value.weights | reply.value.extra.get("norm", {}), server.share(reply)

        mean = streaming_mean(map(whole, updates))
        norm = {name: mean.pop(name) for name in self.state.private if name in mean}
        if norm:
            server.memory["norm"] = norm
        return server_step(server.weights, mean, server.federation.server_lr, self.trainable)

    def global_model(self, server: Server) -> Weights:
        return {**server.weights, **server.memory.get("norm", {})}

    def forward(self, images: Tensor) -> Tensor:
        averaged = self.settings.evaluation == "average" or len(images) == 1
        if self.training or averaged or not self.alone:  # a client has statistics of its own
            return super().forward(images)
        with batch_statistics(self):
            return super().forward(images)


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[None]:
    """Within the block, let batch normalisation use batch statistics without storing them."""
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    before = [(layer.training, layer.track_running_stats) for layer in layers]
    for layer in layers:
        layer.training, layer.track_running_stats = True, False
    try:
        yield
    finally:
        for layer, state in zip(layers, before, strict=True):
            layer.training, layer.track_running_stats = state


DEVIATIONS = (
    "The authors' code finds batch normalisation by names that contain 'bn', which misses 4 of "
    "ResNet-50's 53 layers and all 121 of DenseNet-121. We go by the type of the layer.",
    "The authors' code weights clients equally. We weight them as FedAvg does, so that batch "
    "normalisation is the only difference (`federation.weighting`).",
    "The paper measures each client's model on that client's own domain, which tables show as "
    "`personal_mean` if clients hold test images (`data.client_test_fraction`). For a new domain "
    "we average the clients' batch normalisation, which they send for this purpose (`evaluation`).",
)
"""Where published code differs from its paper, and what this module does."""
