"""The plugin base class. As it stands, it is federated averaging."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning import LightningModule
from torch import Tensor, nn

from feddg_bench.config.schema import MethodSettings, TrainSettings
from feddg_bench.core.aggregation import server_step, streaming_mean
from feddg_bench.core.batch_norm import batch_norm_state, batch_norm_statistics, freeze_batch_norm
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.state import ModuleState
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
        backbone: Maps images [B, 3, H, W] in [0, 1] to features [B, D].
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
            constant = self.frozen + tuple(batch_norm_statistics(self))
        else:
            constant = self.frozen
        self.live_batch_norm = bn != "frozen" and bool(batch_norm_state(self.backbone))
        private = self.local + (tuple(batch_norm_state(self)) if bn == "local" else ())
        self.state = ModuleState(self, private=private, constant=constant)
        self.federated, self.trainable = self.state.federated, self.state.trainable

    def build(self) -> None:
        """Create the plugin's own modules. Runs once, at the end of construction."""

    # ------------------------------------------------------------------ model

    def features(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] in [0, 1] to features [B, D]."""
        features: Tensor = self.backbone(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Map images to logits [B, C], or a regression's outputs [B, 1]. Evaluation calls this."""
        logits: Tensor = self.classifier(self.features(images))
        return logits

    # ------------------------------------------------------------ client half

    @property
    def client(self) -> Client:
        """The client whose task is running.

        Raises:
            RuntimeError: Outside a client task.
        """
        if self.state.client is None:
            raise RuntimeError(f"{type(self).__name__}.client is only there during a client task")
        return self.state.client

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

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one batch: a scalar."""
        images, labels = batch
        return self.task.loss(self(images), labels, "mean")

    def batches(self, client: Client, epoch: int) -> Iterator[Batch]:
        """Yield the training batches of one local epoch (from 0)."""
        return client.batches(train=True, epoch=epoch)

    def fit(self, client: Client) -> LocalUpdate:
        """Train on the client's data and return the local weights."""
        with self.state.optimizer(client) as optimizer:
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
        return LocalUpdate(self.state.federated_weights())

    def styled(self, client: Client) -> Tensor | None:
        """Return ``client.broadcast["images"]``, [B, 3, H, W], as training here would restyle them.

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
        mean = streaming_mean(server.with_shares(updates))
        return server_step(server.weights, mean, server.federation.server_lr, self.trainable)

    def global_model(self, server: Server) -> Weights:
        """Return the state with which evaluation measures; it may hold more than is federated.

        What is left out, such as private state, is as it was before round 1.
        """
        return server.weights
