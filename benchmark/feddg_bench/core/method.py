"""The plugin base class. As it stands, it is federated averaging."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning import LightningModule
from torch import Tensor, nn

from feddg_bench.config.schema import MethodSettings, TrainSettings
from feddg_bench.core.aggregation import server_step, streaming_mean
from feddg_bench.core.batch_norm import batch_norm_state, batch_norm_statistics, freeze_batch_norm
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Weights
from feddg_bench.core.tasks import TASKS

if TYPE_CHECKING:
    from feddg_bench.core.server import Server
    from feddg_bench.models.backbones import Backbone


class Method(LightningModule):
    """A federated domain generalisation method: a model, a client half and a server half.

    Overrides fall in three groups, and each group has its own world:

    - *model* (``features``, ``forward``): sees tensors only;
    - *client half* (``training_step``, ``fit`` and functions passed to ``server.ask``): sees this
      module, freshly loaded with the global weights, and one ``Client``;
    - *server half* (``prepare``, ``run_round``, ``aggregate``): sees the ``Server``; must neither
      read nor write this module's parameters, which belong to the client half.

    The same object serves every client in turn: whatever a client must remember goes to
    ``client.memory``, whatever the server must remember to ``server.memory``.

    Args:
        settings: The method's own settings, an instance of ``Settings``.
        backbone: Maps images (B, 3, H, W) in [0, 1] to features (B, D).
        num_classes: C, or 1 for a regression: the width of the classifier.
        train: Settings of local training.
        bn: ``average``, ``frozen`` or ``local`` (see ``FederationSettings.bn``).
        clients: Names of the clients that hold images.
        sources: Names of the training domains.
        task: ``classification`` or ``regression``, one of ``tasks``.
    """

    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    version: ClassVar[int] = 1
    """Part of the run key: raise it with every change that can move results."""
    needs: ClassVar[Mapping[str, Any]] = {}
    """Settings this method needs whatever the recipe says, such as a partition."""
    uplink: ClassVar[Mapping[str, tuple[str, ...]]] = {"fit": ("weights",)}
    """What each client function may send to the server, by name; anything else is refused."""
    downlink: ClassVar[tuple[str, ...]] = ()
    """What the server may tell clients besides the model: keys of ``server.broadcast``."""
    local: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of state that stays with each client: never sent, never averaged."""
    frozen: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of state that is the same everywhere and never changes."""
    client_validation: ClassVar[bool] = False
    """Whether clients keep validation images (`feddg_bench.data.partition.validation_parts`)."""
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    """What the method can learn: its mathematics must make sense for it. A training step that is
    good for both takes its loss from ``self.task``."""
    rgb_only: ClassVar[bool] = False
    """Whether images must be red, green and blue in [0, 1], as for a transfer of style."""
    citation: ClassVar[str] = ""
    """Authors, title, venue and year, arXiv number."""
    deviations: ClassVar[tuple[str, ...]] = ()
    """Where published code differs from its paper, and what this class does; one sentence each."""
    group: ClassVar[str] = "aggregation"
    """Kind of method, for tables: reference, local training, aggregation, alignment, style,
    personalisation."""

    def __init__(
        self,
        settings: MethodSettings,
        *,
        backbone: Backbone,
        num_classes: int,
        train: TrainSettings,
        bn: str = "average",
        clients: tuple[str, ...] = (),
        sources: tuple[str, ...] = (),
        task: str = "classification",
    ) -> None:
        super().__init__()
        self.settings = settings
        self.task = TASKS[task]
        self.train_settings = train
        self.num_classes = num_classes
        self.clients = clients
        self.sources = sources
        self.num_features = backbone.num_features
        self.backbone = backbone
        self.classifier = nn.Linear(self.num_features, num_classes)
        self.build()
        if bn == "frozen":
            freeze_batch_norm(self.backbone)
            self.constant = self.frozen + tuple(batch_norm_statistics(self))
        else:
            self.constant = self.frozen
        self.live_batch_norm = bn != "frozen" and bool(batch_norm_state(self.backbone))
        self.private = self.local + (tuple(batch_norm_state(self)) if bn == "local" else ())
        self._client: Client | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self.bind()

    def build(self) -> None:
        """Create the plugin's own modules. Runs once, at the end of construction."""

    # ------------------------------------------------------------------ model

    def features(self, images: Tensor) -> Tensor:
        """Map images (B, 3, H, W) in [0, 1] to features (B, D)."""
        features: Tensor = self.backbone(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Map images to logits (B, C), or a regression's outputs (B, 1). Evaluation calls this."""
        logits: Tensor = self.classifier(self.features(images))
        return logits

    # ------------------------------------------------------------ client half

    @property
    def client(self) -> Client:
        """The client whose task is running.

        Raises:
            RuntimeError: Outside a client task.
        """
        if self._client is None:
            raise RuntimeError(f"{type(self).__name__}.client is only there during a client task")
        return self._client

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of local training, over everything trainable."""
        s = self.train_settings
        parameters = [p for p in self.parameters() if p.requires_grad]
        if s.optimizer == "adam":
            return torch.optim.Adam(
                parameters, lr=s.lr, eps=s.eps, weight_decay=s.weight_decay, fused=True
            )
        return torch.optim.SGD(
            parameters, lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay, fused=True
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # noqa: ARG002 - Lightning's
        """Return the loss of one batch: a scalar."""
        images, labels = batch
        return self.task.loss(self(images), labels, "mean")

    def batches(self, client: Client, epoch: int) -> Iterator[Batch]:
        """Yield the training batches of one local epoch (from 0)."""
        return client.batches(train=True, epoch=epoch)

    def fit(self, client: Client) -> LocalUpdate:
        """Train on the client's data and return the local weights."""
        optimizer = self.start_optimizer(client)
        for epoch in range(client.train.local_epochs):
            for group in optimizer.param_groups:
                group["lr"] = client.train.lr * client.lr_factor(epoch)
            for index, batch in enumerate(self.batches(client, epoch)):
                with client.fabric.autocast():
                    loss = self.training_step(batch, index)
                optimizer.zero_grad()
                client.fabric.backward(loss)
                self.on_before_optimizer_step(optimizer)
                optimizer.step()
                client.log("loss", loss.detach(), len(batch[1]))
        self.keep_optimizer(client, optimizer)
        return LocalUpdate(self.federated_weights())

    def styled(self, client: Client) -> Tensor | None:  # noqa: ARG002 - for methods with a style
        """Return ``client.broadcast["images"]``, (B, 3, H, W), as training here would restyle them.

        For pictures only. ``None`` where a method restyles nothing.
        """
        return None

    # ------------------------------------------------------------ server half

    def prepare(self, server: Server) -> None:
        """Run once before round 1, for instance to collect statistics from all clients."""

    def run_round(self, server: Server) -> None:
        """Run one round: ask clients for work, then update ``server.weights``."""
        server.weights = self.aggregate(server, server.ask(self.fit))

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        """Return the new global weights from the cohort's updates, given in client order."""
        mean = streaming_mean(_shared(server, updates))
        return server_step(server.weights, mean, server.federation.server_lr, self.trainable)

    def global_model(self, server: Server) -> Weights:
        """Return the state with which evaluation measures; it may hold more than is federated.

        What is left out, such as private state, is as it was before round 1.
        """
        return server.weights

    # ------------------------------------------- for the worker, rarely for plugins

    def bind(self) -> None:
        """Look up the state's tensors by name; needed again when buffers have moved."""
        self._state: dict[str, Tensor] = dict(self.state_dict(keep_vars=True))
        out = self.private + self.constant
        self.federated = [name for name in self._state if not name.startswith(out)]
        self.trainable = [name for name in self.federated if self._state[name].requires_grad]

    def federated_weights(self) -> Weights:
        """Return copies of the federated state, on its device."""
        return {name: self._state[name].detach().clone() for name in self.federated}

    def private_weights(self) -> Weights:
        """Return copies of the state that stays with the client."""
        names = [name for name in self._state if name.startswith(self.private)]
        return {name: self._state[name].detach().clone() for name in names}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Write ``weights`` into this module in place; no parameter is replaced."""
        if weights:
            targets = [self._state[name] for name in weights]
            torch._foreach_copy_(targets, list(weights.values()))

    def start_optimizer(self, client: Client) -> torch.optim.Optimizer:
        """Return the optimizer as this task starts with it: fresh, or as the client left it.

        One object serves all tasks: to build one costs more than a step of a small model.
        """
        if self._optimizer is None:
            self._optimizer = self.configure_optimizers()
        self._optimizer.state.clear()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for index, state in client.memory.get("optimizer", {}).items():
            parameter = parameters[int(index)]
            self._optimizer.state[parameter] = {
                # a fused kernel walks memory, so that moments must lie as their parameter does
                key: torch.empty_like(parameter).copy_(value)
                if value.shape == parameter.shape
                else value.to(parameter.device, copy=True)
                for key, value in state.items()
            }
        return self._optimizer

    def keep_optimizer(self, client: Client, optimizer: torch.optim.Optimizer) -> None:
        """Put the optimizer's state into the client's memory where the settings say so."""
        if client.train.optimizer_state == "persist":
            state: Payload = {
                str(index): dict(entry) for index, entry in optimizer.state_dict()["state"].items()
            }
            client.memory["optimizer"] = state

    @contextmanager
    def serving(self, client: Client) -> Iterator[None]:
        """Make ``client`` the current client for a block."""
        self._client = client
        try:
            yield
        finally:
            self._client = None


def _shared(
    server: Server, updates: Iterable[Reply[LocalUpdate]]
) -> Iterator[tuple[Weights, float]]:
    for reply in updates:
        yield reply.value.weights, server.share(reply)
        del reply  # or it would stay while the next client trains
