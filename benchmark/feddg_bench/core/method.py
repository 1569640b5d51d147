"""The base class of method plugins; without overrides it is federated averaging."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.titles import WITHOUT_EFFECT
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import BackboneSettings, MethodSettings, TrainSettings
from feddg_bench.core.aggregation import server_step, streaming_mean
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.flaws import check_loss
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Weights
from feddg_bench.core.state import ModuleState, bare_step
from feddg_bench.models.backbones import NETWORK, Backbone, TextClassifier, build_backbone
from feddg_bench.models.batch_norm import batch_norm_state, batch_norm_statistics, freeze_batch_norm
from feddg_bench.models.networks import sum_depthwise
from feddg_bench.models.predictor import Accepts, Predictor
from feddg_bench.models.tasks import TASKS

if TYPE_CHECKING:
    from feddg_bench.core.server import Server, Uplink


class Method(Predictor):
    """A federated domain generalisation method: a model, a client half and a server half.

    Overrides fall into three groups, which have access to different objects:

    - *model* (``features``, ``forward``): sees tensors only;
    - *client half* (``training_step``, ``fit`` and functions passed to ``server.ask``): sees this
      module, freshly loaded with the global weights, and one ``Client``;
    - *server half* (``prepare``, ``run_round``, ``aggregate``): sees the ``Server``; must neither
      read nor write this module's parameters, which belong to the client half.

    The same object serves all clients in turn: state of a client goes into ``client.memory``, state
    of the server into ``server.memory``. Neither half may leave another value in an attribute;
    `temporarily` sets one for the duration of a block.

    Under ``lightning.Trainer`` it trains on batches of images and labels without a federation.
    Parts that need messages from others, such as styles, prototypes or the received model, are then
    left out (`alone`). It logs ``train_loss``, and ``val_`` and ``test_`` ``loss`` and ``accuracy``
    (``pearson`` for a regression), and can be restored with ``load_from_checkpoint(path)``.

    Args:
        settings: The method's own settings, an instance of ``Settings`` or its values.
        backbone: Maps images [B, 3, H, W] in [0, 1] to features [B, D]; or the values of
            `BackboneSettings` and of the other arguments of `build_backbone`. A module is not saved
            as a hyper-parameter: pass it to ``load_from_checkpoint`` again.
        num_classes: C, or 1 for a regression: the width of the classifier.
        train: Settings of local training, or their values.
        bn: ``average``, ``frozen`` or ``local`` (see ``FederationSettings.bn``).
        clients: Names of the clients that hold images.
        sources: Names of the training domains.
        task: ``classification`` or ``regression``, one of ``tasks``.
        text: If the method needs them, text features of the classes' names, normalised and times
            the scale of logits, [C, D]; random by default.
    """

    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    version: ClassVar[int] = 1
    """Part of the run key: raise it with every change that can affect results."""
    needs: ClassVar[Mapping[str, Any]] = {}
    """Settings that this method needs regardless of the recipe, such as a partition."""
    uplink: ClassVar[Uplink] = {"fit": ("weights",)}
    """Names of the values that each client function may send to the server; others are refused. A
    mapping, such as ``{"style": "float32 [2, C]"}``, also gives the form, and replies of any other
    form are dropped."""
    downlink: ClassVar[tuple[str, ...]] = ()
    """Keys of ``server.broadcast`` that clients may receive in addition to the model."""
    local: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of state that stays with each client: never sent, never averaged."""
    frozen: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of state that is the same everywhere and never changes."""
    client_validation: ClassVar[bool] = False
    """Whether clients keep validation images (`feddg_bench.data.partition.validation_parts`)."""
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    """Tasks that the method can learn: its mathematics must make sense for them. A training step
    that suits both tasks takes its loss from ``self.task``."""
    acts_on: ClassVar[Literal["", "features", "batch_norm", "maps", "statistics"]] = ""
    """What the method changes in comparison with FedAvg: ``features`` below the classifier, through
    a loss on them; ``batch_norm``, its layers; ``maps`` inside the network. A run in which nothing
    of the kind is trained equals FedAvg, and says so; without ``maps`` it is refused. A method with
    ``statistics`` computes its classifier from sums or texts: it takes no step, so tables do not
    compare its learning rate."""
    needs_text: ClassVar[bool] = False
    """Whether the classifier is made of text features of the classes' names and never trained."""
    rgb_only: ClassVar[bool] = False
    """Whether images must be red, green and blue in [0, 1], as for style transfer."""
    singles: ClassVar[str] = ""
    """Why the server half needs single replies, as a phrase that follows "its server half"; "" if
    means weighted by `Server.share` and the sums of `tally` are enough. A class that overrides
    ``prepare``, ``run_round`` or ``aggregate`` without setting this counts as needing them."""
    title: ClassVar[str] = ""
    """Name as written in papers, such as ``FedDG-GA``; "" if it is the method's name."""
    citation: ClassVar[str] = ""
    """Authors, title, venue and year, arXiv number."""
    group: ClassVar[str] = "aggregation"
    """Kind of method, for tables: reference, local training, aggregation, alignment, style,
    personalisation."""

    def __init__(
        self,
        settings: MethodSettings | Mapping[str, Any],
        *,
        backbone: Backbone | Mapping[str, Any],
        num_classes: int,
        train: TrainSettings | Mapping[str, Any],
        bn: str = "average",
        clients: Sequence[str] = (),
        sources: Sequence[str] = (),
        task: str = "classification",
        text: Tensor | None = None,
    ) -> None:
        super().__init__()
        if isinstance(settings, Mapping):  # from a checkpoint, which holds plain values
            settings = validate(self.Settings, settings, "hyper.")
        if isinstance(train, Mapping):
            train = validate(TrainSettings, train, "train.")
        self.settings, self.train_settings = settings, train
        self.task = TASKS[task]
        self.num_classes = num_classes
        self.clients = tuple(clients)
        self.sources = tuple(sources)
        values: dict[str, Any] = {
            "settings": settings.model_dump(mode="json"),
            "num_classes": num_classes,
            "train": train.model_dump(mode="json"),
            "bn": bn,
            "clients": list(clients),
            "sources": list(sources),
            "task": task,
        }
        if isinstance(backbone, Mapping):
            values["backbone"] = {**backbone, "pretrained": False, "weights": None}
            backbone = _backbone(**backbone)
        self.save_hyperparameters(values)
        if isinstance(backbone, Backbone):  # any other module is assumed to need RGB images
            channels = len(backbone.mean)
            self.accepts = Accepts(channels, rgb=channels == 3)
        self.num_features = backbone.num_features
        self.backbone = backbone
        self.classifier = self.new_classifier()
        if text is not None:
            if text.shape != self.classifier.weight.shape:
                raise SettingsError(
                    f"text features are {list(text.shape)}, but image features have the width "
                    f"{self.num_features}: leave out backbone.hidden and backbone.projection"
                )
            self.classifier.weight = nn.Parameter(text.clone())
        self.build()
        if train.depthwise_sums:
            sum_depthwise(self.backbone)
        if bn == "frozen":
            freeze_batch_norm(self)
            constant = self.frozen + tuple(batch_norm_statistics(self))
        else:
            constant = self.frozen
        if self.needs_text:
            self.classifier.requires_grad_(requires_grad=False)
            constant += ("classifier.",)
        norm = batch_norm_state(self)
        if isinstance(self.backbone, Backbone) and self.backbone.head_only:
            self.backbone.net.requires_grad_(requires_grad=False)  # with layers made by `build`
            constant += (f"backbone.{NETWORK}",)
            norm = [name for name in norm if not name.startswith(constant)]
        self.live_batch_norm = bn != "frozen" and any(n.startswith("backbone.") for n in norm)
        private = self.local + (tuple(norm) if bn == "local" else ())
        self.state = ModuleState(self, private=private, constant=constant)
        self.federated, self.trainable = self.state.federated, self.state.trainable
        plain = type(self).features is Method.features  # else they can pass layers of the method
        inside = [name for name in self.trainable if not name.startswith("classifier.")]
        below = [name for name in inside if name.startswith("backbone.") or not plain]
        there = {"features": bool(below), "batch_norm": bool(norm)}.get(self.acts_on, True)
        frozen = self.acts_on == "batch_norm" and batch_norm_state(self.backbone)
        why = "no batch normalisation is trained" if frozen else WITHOUT_EFFECT.get(self.acts_on)
        self.same_as_fedavg = "" if there else why or ""
        """Why the method equals FedAvg with this network; "" if it can differ."""

    @classmethod
    def sends(cls, settings: Any) -> Uplink:  # noqa: ARG003 - most send all
        """Return the values that clients may send with these `Settings`: `uplink` or part of it."""
        return cls.uplink

    def new_classifier(self) -> nn.Linear:
        """Return a classifier of ``num_features`` features with random weights."""
        if self.needs_text:
            return TextClassifier(self.num_features, self.num_classes, bias=False)
        backbone = self.backbone
        if not isinstance(backbone, Backbone) or backbone.num_features != self.num_features:
            return nn.Linear(self.num_features, self.num_classes)
        return backbone.new_classifier(self.num_classes)

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
    def alone(self) -> bool:
        """Whether no client's task is running, as under ``lightning.Trainer``."""
        return self.state.client is None

    @property
    def client(self) -> Client:
        """The client whose task is running.

        Raises:
            RuntimeError: Outside a client task.
        """
        if self.state.client is None:
            raise RuntimeError(f"{type(self).__name__}.client is only there during a client task")
        return self.state.client

    @contextmanager
    def temporarily(self, **values: Any) -> Iterator[None]:
        """Set attributes for a block, such as values of one task that ``training_step`` reads.

        Afterwards they have their earlier values again, or are gone if there were none.
        """
        own = vars(self)
        before = {name: own[name] for name in values if name in own}
        own.update(values)
        try:
            yield
        finally:
            for name in values:
                own.pop(name, None)
            own.update(before)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of local training, over all trainable parameters."""
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
        losses: list[Tensor] = []
        sizes: list[int] = []
        with self.state.optimizer(client) as optimizer:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            step = bare_step(optimizer)
            for epoch in range(client.train.local_epochs):
                for group in optimizer.param_groups:
                    group["lr"] = client.train.lr * client.lr_factor(epoch)
                for index, batch in enumerate(self.batches(client, epoch)):
                    with client.fabric.autocast():
                        loss = self.training_step(batch, index)
                    check_loss(self, loss)
                    for parameter in trained:  # `zero_grad` without its profiler entry
                        parameter.grad = None
                    loss.backward()
                    self.on_before_optimizer_step(optimizer)
                    step()
                    losses.append(loss.detach())
                    sizes.append(len(batch[1]))
        client.log_all("loss", losses, sizes)
        return LocalUpdate(self.state.federated_weights())

    def tally(self, reply: Reply[Any], received: Weights) -> Payload:
        """Return the values whose sums the server half needs if single replies are hidden.

        A client computes them from its reply and the weights it received. The server half then gets
        one reply for all clients: sums under these names, and means, weighted by `Server.share`, of
        all other values.
        """
        return {}

    def styled(self, client: Client) -> Tensor | None:
        """Return ``client.broadcast["images"]``, [B, 3, H, W], restyled as in training here.

        Used for figures only. ``None`` if the method restyles nothing.
        """
        return None

    def personal_model(self, client: Client) -> Weights | None:
        """Return the whole state of the client's own model, ``None`` if there is none.

        A method whose clients keep state returns the model with which a client predicts for itself.
        This runs after each training of a client that holds test images, before aggregation, with
        the module as training left it. The record keeps the last accuracy of each client.
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
        """Return the state to evaluate; it may hold more than the federated tensors.

        Tensors that are left out, such as private state, have their values from before round 1.
        """
        return server.weights


def _backbone(
    *, channels: int = 3, rgb: bool | None = None, size: int | None = None, **values: Any
) -> Backbone:
    settings = validate(BackboneSettings, values, "backbone.")
    return build_backbone(settings, channels, rgb=rgb, size=size)
