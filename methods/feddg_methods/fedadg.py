"""FedADG: align every client's features with those of a shared generator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, Client, on_device
from feddg_bench.core.messages import LocalUpdate
from feddg_bench.core.method import Method
from feddg_bench.models.backbones import Backbone
from feddg_methods.shared.choices import choose
from feddg_methods.shared.passes import widened

_DERIVED: dict[str, Any] = {
    "train_generator": False,
    "form": "vlcs",
    "order": "model_first",
    "label_scale": 0.6,
    "relu": "always",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "released_bai": {
        **_DERIVED,
        "ce_weight": 0.15,
        "smoothing": 0.2,
        "smoothing_in": "second",
        "spread": "all",
        "noise": 0.0,
        "first_epochs": 1,
        "second_epochs": 1,
    },
    "released_fedccrl": {
        **_DERIVED,
        "ce_weight": 0.45,
        "smoothing": 0.0,
        "noise": 1.0,
        "discriminator": "averaged",
        "adversary_weight_decay": 1e-4,
        "first_epochs": 3,
        "second_epochs": 3,
    },
}
"""Defaults below that each variant changes."""


Form = Literal["pacs", "vlcs"]
"""Data set of the published program; the two programs differ in the losses of D and G."""


class FedADGSettings(MethodSettings):
    """Variants, loss weights and sizes; the defaults follow the program published for PACS."""

    labels: ClassVar[tuple[str, ...]] = ("variant",)
    toy: ClassVar = {"hidden": 32, "projection": 16}
    presets = VARIANTS
    preset_of = "variant"

    variant: Literal["default", "released_bai", "released_fedccrl"] = "default"
    """Sets the defaults of the settings below, as in FedDG_Benchmark (Bai et al.) or FedCCRL; each
    can still be set individually. In both, the generator keeps its initial weights."""
    ce_weight: float = Field(0.85, ge=0, le=1)
    """w, the weight of the cross-entropy; that of the alignment is 1 - w. 1 is FedAvg."""
    smoothing: float = Field(0.1, ge=0, lt=0.5)
    """Label smoothing: 0.1 by default in the program published for PACS, 0.2 in that for VLCS."""
    smoothing_in: Literal["both", "second"] = "both"
    """Phases with smoothed labels."""
    spread: Literal["others", "all"] = "others"
    """Spread smoothing over the other classes, or over all with the true one, as in PyTorch."""
    label_scale: float = Field(0.7, gt=0)
    """s, the entry of the class in the label vector given to G and D; 0.6 for VLCS."""
    noise: float = Field(0.5, ge=0)
    """q / D, the length of the noise over the width of the features; 2048 / 4096 as published."""
    form: Literal["pacs", "vlcs"] = "pacs"
    """Losses of D and G, see `discriminator_loss` and `generator_loss`."""
    order: Literal["discriminator_first", "model_first"] = "discriminator_first"
    """Update order in a batch of the second phase: D, then F and C, then G; or F and C, then D,
    then G. In the latter, as in the derived programs, F and C stay in evaluation mode after a
    round's first such batch."""
    train_generator: bool = True
    """Train G, or keep its initial weights, as the released code does."""
    discriminator: Literal["local", "averaged"] = "local"
    """D stays at its client between rounds, or is sent and averaged."""
    label: Literal["before", "after"] = "before"
    """Where the label enters D: before its projection, or after it (PACS)."""
    relu: Literal["auto", "always", "never"] = "auto"
    """Whether G ends with a ReLU; ``auto``: if the backbone's features cannot be negative."""
    hidden: int = Field(4096, ge=1)
    """Width of G's hidden layer."""
    projection: int = Field(1024, ge=1)
    """Width of D's projection and hidden layer."""
    adversary_lr: float = Field(7e-4, gt=0)
    """Constant learning rate of D and G. They are trained by SGD, with the momentum and weight
    decay below, regardless of the optimizer of F and C."""
    adversary_momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of D and G."""
    adversary_weight_decay: float = Field(1e-5, ge=0)
    """L2 penalty of D and G."""
    first_epochs: int | None = Field(None, ge=0)
    """E0, local epochs of cross-entropy alone. None: a third of ``train.local_epochs``, rounded
    down: the published 3 of 10 (PACS) and 5 of 15 (VLCS), 0 of 1 or 2."""
    second_epochs: int | None = Field(None, ge=1)
    """E1, local epochs with alignment. None: the rest of ``train.local_epochs`` after E0, so that a
    client sees its images as often as with any other method."""


class FedADG(Method):
    """FedADG (Zhang et al., arXiv 2111.10487), after the programs published for VLCS and PACS.

    F is the backbone, C the classifier. A generator G maps noise and a label to features; a
    discriminator D at each client distinguishes them from the features of images. F and C minimise
    w CE + (1 - w) (1 - D(F))^2, so that the features of all clients, class by class, move towards
    those of G. The server averages F, C and G as FedAvg does.

    With q = D / 2 the generator adds hidden x (q + C + D + 1) + D numbers to the model in each
    direction: 50.5 MB at D = 2048 and C = 7; the discriminator's 12.6 MB stay in the client's
    memory. Batches of one image are left out if batch normalisation would have to train on them.
    """

    Settings = FedADGSettings
    settings: FedADGSettings
    group = "alignment"
    title = "FedADG"
    citation = (
        "Liling Zhang, Xinyu Lei, Yichun Shi, Hongyu Huang, Chao Chen: Federated Learning with "
        "Domain Generalization, 2021, arXiv 2111.10487"
    )
    local: ClassVar[tuple[str, ...]] = ("discriminator.",)
    players: Mapping[str, tuple[Optimizer, dict[str, Any]]]
    """Optimizer and group of each player, during `fit`."""

    def build(self) -> None:
        s, d, classes = self.settings, self.num_features, self.num_classes
        relu = non_negative(self.backbone) if s.relu == "auto" else s.relu == "always"
        self.generator = Generator(
            noise=round(s.noise * d), classes=classes, features=d, hidden=s.hidden, relu=relu
        )
        self.generator.requires_grad_(s.train_generator)
        self.discriminator = Discriminator(
            features=d, classes=classes, projection=s.projection, label=s.label
        )
        if s.discriminator == "averaged":
            self.local = ()  # type: ignore[misc] # this variant sends it
        self.epochs = phases(s, self.train_settings.local_epochs)

    def configure_optimizers(self) -> Optimizer:
        """Return the optimizer of F and C."""
        optimizer = super().configure_optimizers()
        others = {*self.generator.parameters(), *self.discriminator.parameters()}
        group = optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if p not in others]
        return optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of the first phase, which needs neither G nor D."""
        s, (images, labels) = self.settings, batch
        smoothing = s.smoothing if s.smoothing_in == "both" else 0.0
        return smoothed_cross_entropy(self(images), labels, smoothing, s.spread)

    def fit(self, client: Client) -> LocalUpdate:
        s, train, (first, second) = self.settings, client.train, self.epochs
        adversary, noise = self.start_adversary(client), client.generator("noise")
        players = {name: (adversary, adversary.param_groups[n]) for n, name in enumerate("DG")}
        with self.state.optimizer(client) as model, self.temporarily(players=players):
            players["F, C"] = model, model.param_groups[0]
            for epoch in range(first + second):
                # The schedule spans train.local_epochs per round, whatever the number of epochs.
                factor = client.lr_factor(epoch * train.local_epochs // (first + second))
                model.param_groups[0]["lr"] = train.lr * factor
                smoothing = 0.0 if epoch < first and s.smoothing_in == "second" else s.smoothing
                for images, labels in self.batches(client, epoch):
                    if len(labels) == 1 and self.live_batch_norm and self.training:
                        continue
                    if epoch >= first and s.ce_weight < 1:
                        loss = self.align(images, labels, smoothing, noise)
                    else:
                        with client.fabric.autocast():
                            loss = smoothed_cross_entropy(self(images), labels, smoothing, s.spread)
                        self.descend(loss, "F, C")
                    client.log("loss", loss.detach(), len(labels))
        if train.optimizer_state == "persist":
            client.memory["adversary"] = {
                name: adversary.state[p]["momentum_buffer"]
                for name, p in self.named_parameters()
                if "momentum_buffer" in adversary.state.get(p, {})
            }
        return LocalUpdate(self.state.federated_weights())

    def align(
        self, images: Tensor, labels: Tensor, smoothing: float, noise: torch.Generator
    ) -> Tensor:
        """Train all players on a batch of the second phase; return the loss of F and C."""
        s, autocast = self.settings, self.client.fabric.autocast
        like = self.classifier.weight
        y = (s.label_scale * F.one_hot(labels, self.num_classes)).to(like)  # [B, C]
        u = torch.rand(len(labels), self.generator.noise, generator=noise)  # [B, q]
        u = on_device([u], like.device)[0].to(like.dtype)
        # One autocast block per step: a block caches the weights that it has rounded until it ends.
        with autocast():
            f, generated = self.features(images), self.generator(u, y)  # [B, D] each
        if s.order == "model_first":
            return self.align_model_first(images, f, generated, y, labels, smoothing)
        self.discriminate(f, generated, y)
        loss = self.mislead(f, y, labels, smoothing)
        self.generate(generated, y)
        return loss

    def align_model_first(
        self,
        images: Tensor,
        f: Tensor,
        generated: Tensor,
        y: Tensor,
        labels: Tensor,
        smoothing: float,
    ) -> Tensor:
        """Train F and C, then D on new features, then G, as the derived programs do."""
        loss = self.mislead(f, y, labels, smoothing)
        self.eval()
        with torch.no_grad(), self.client.fabric.autocast():
            f = self.features(images)
        self.discriminate(f, generated, y)
        self.generate(generated, y)
        return loss

    def mislead(self, f: Tensor, y: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """Train F and C on features [B, D] of images; return w CE + (1 - w) (1 - D(F))^2."""
        s = self.settings
        with self.client.fabric.autocast():
            ce = smoothed_cross_entropy(self.classifier(f), labels, smoothing, s.spread)
            alignment = alignment_loss(self.discriminator(f, y))
            loss = s.ce_weight * ce + (1 - s.ce_weight) * alignment
        self.descend(loss, "F, C")
        return loss

    def generate(self, generated: Tensor, y: Tensor) -> None:
        """Train G on its features [B, D], unless it keeps its initial weights."""
        if self.settings.train_generator:
            with self.client.fabric.autocast():
                loss_g = generator_loss(self.discriminator(generated, y), self.settings.form)
            self.descend(loss_g, "G")

    def discriminate(self, f: Tensor, generated: Tensor, y: Tensor) -> None:
        """Train D on features of images and generated ones, [B, D] each, with labels y [B, C]."""
        client = self.client
        with client.fabric.autocast():
            on_features = self.discriminator(f.detach(), y)
            on_generated = self.discriminator(generated.detach(), y)
            loss = discriminator_loss(on_generated, on_features, self.settings.form)
        self.descend(loss, "D")
        # Near 0 and 1 the sigmoid is saturated and no player learns, so log the outputs.
        client.log("D on features", on_features.detach().mean(), len(y))
        client.log("D on generated", on_generated.detach().mean(), len(y))

    def descend(self, loss: Tensor, player: Literal["F, C", "D", "G"]) -> None:
        """Take a gradient step with one player's parameters; the others get no gradient."""
        optimizer, group = self.players[player]
        optimizer.zero_grad()
        loss.backward(inputs=group["params"])
        optimizer.step()

    def start_adversary(self, client: Client) -> Optimizer:
        """Return the SGD optimizer of D and G: fresh, or with the momentum that the client kept."""
        s = self.settings
        optimizer = SGD(
            [{"params": list(m.parameters())} for m in (self.discriminator, self.generator)],
            lr=s.adversary_lr,
            momentum=s.adversary_momentum,
            weight_decay=s.adversary_weight_decay,
            fused=True,
        )
        for name, momentum in client.memory.get("adversary", {}).items():
            p = self.get_parameter(name)
            optimizer.state[p]["momentum_buffer"] = momentum.to(p.device, copy=True)
        return optimizer


def non_negative(backbone: Backbone) -> bool:
    """Return whether features cannot be negative: pooled ReLUs, and no linear layer after them."""
    layers = list(backbone.net.modules())
    signed = any(isinstance(m, nn.Hardswish | nn.GELU | nn.SiLU | nn.LeakyReLU) for m in layers)
    last = [m for m in layers if isinstance(m, nn.ReLU | nn.ReLU6 | nn.GroupNorm)][-1:]
    normalised = bool(last) and isinstance(last[0], nn.GroupNorm)
    return isinstance(backbone.projection, nn.Identity) and not signed and not normalised


def phases(settings: FedADGSettings, local_epochs: int) -> tuple[int, int]:
    """Return E0 and E1.

    Raises:
        SettingsError: If E0 leaves no epoch for the second phase.
    """
    first, second = settings.first_epochs, settings.second_epochs
    if first is None:
        first = local_epochs // 3 if second is None else max(local_epochs - second, 0)
    if second is None:
        second = local_epochs - first
    if second < 1:
        raise SettingsError(
            f"hyper.first_epochs={first} leaves none of train.local_epochs={local_epochs} for the "
            f"second phase: give hyper.second_epochs, or more local epochs"
        )
    return first, second


class Generator(nn.Module):
    """G maps noise and a label to a feature of that class: the reference that clients align with.

    Two layers take [u || y] of q + C numbers to ``hidden`` and to D, with a leaky ReLU between.
    Weights start Xavier-uniform with gain 1/2.

    Args:
        noise: q, the length of the noise; 0 gives one feature per class.
        classes: C.
        features: D.
        hidden: Width of the hidden layer.
        relu: End with a ReLU, for features that cannot be negative.
    """

    def __init__(self, *, noise: int, classes: int, features: int, hidden: int, relu: bool) -> None:
        super().__init__()
        self.noise = noise
        first, second = nn.Linear(noise + classes, hidden), nn.Linear(hidden, features)
        for layer in (first, second):
            nn.init.xavier_uniform_(layer.weight, gain=0.5)
        end = nn.ReLU() if relu else nn.Identity()
        self.net = nn.Sequential(first, nn.LeakyReLU(), second, end)

    def forward(self, u: Tensor, y: Tensor) -> Tensor:
        """Map noise u [B, q] in [0, 1] and labels y [B, C] to features [B, D]."""
        features: Tensor = self.net(torch.cat([u, y], dim=1))
        return features


class Discriminator(nn.Module):
    """D maps a feature and its label to the probability that the feature is generated.

    A projection without bias, initially random with Frobenius norm 1, then two layers with a leaky
    ReLU between. As in published code, the projection is trained with the rest.

    Args:
        features: D.
        classes: C.
        projection: Width of the projection and of the layer after it.
        label: Where the label enters: ``before`` the projection or ``after`` it.
    """

    def __init__(
        self, *, features: int, classes: int, projection: int, label: Literal["before", "after"]
    ) -> None:
        super().__init__()
        self.before = choose("place of the label", label, {"before": True, "after": False})
        joint = classes if self.before else 0
        self.projection = nn.Linear(features + joint, projection, bias=False)
        with torch.no_grad():
            self.projection.weight /= self.projection.weight.norm()
        self.net = nn.Sequential(
            nn.Linear(projection + classes - joint, projection),
            nn.LeakyReLU(),
            nn.Linear(projection, 1),
        )

    def forward(self, features: Tensor, y: Tensor) -> Tensor:
        """Map features [B, D] and labels y [B, C] to probabilities [B], at least float32."""
        if self.before:
            score = self.net(self.projection(torch.cat([features, y], dim=1)))
        else:
            score = self.net(torch.cat([self.projection(features), y], dim=1))
        return torch.sigmoid(widened(score)).squeeze(1)


def discriminator_loss(on_generated: Tensor, on_features: Tensor, form: Form = "pacs") -> Tensor:
    """Return the loss of D, averaged over the batch.

    ``pacs``: (1 - D(G))^2 + D(F)^2, least squares; ``vlcs``: -(D(G)^2 + (1 - D(F))^2). Both push
    D up on generated features and down on real ones, with different gradients.

    Args:
        on_generated: D of generated features, [B] in [0, 1].
        on_features: D of the images' features, [B] in [0, 1].
        form: Which of the two.

    Returns:
        A scalar.

    Raises:
        SettingsError: If ``form`` is unknown.
    """
    g, f = on_generated, on_features
    pacs, vlcs = (1 - g).square() + f.square(), -(g.square() + (1 - f).square())
    return choose("form", form, {"pacs": pacs, "vlcs": vlcs}).mean()


def alignment_loss(on_features: Tensor) -> Tensor:
    """Return the mean of (1 - D(F))^2: features should pass for generated ones; a scalar."""
    return (1 - on_features).square().mean()


def generator_loss(on_generated: Tensor, form: Form = "pacs") -> Tensor:
    """Return the loss of G, averaged over the batch.

    ``pacs``: D(G)^2, towards features that D takes for real; ``vlcs``: (1 - D(G))^2, the opposite.

    Args:
        on_generated: D of generated features, [B] in [0, 1].
        form: Which of the two.

    Returns:
        A scalar.

    Raises:
        SettingsError: If ``form`` is unknown.
    """
    g = on_generated
    return choose("form", form, {"pacs": g, "vlcs": 1 - g}).square().mean()


def smoothed_cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float, spread: Literal["others", "all"] = "others"
) -> Tensor:
    """Return the cross-entropy with smoothed labels.

    The class gets 1 - smoothing and each of the C - 1 others smoothing / (C - 1); with ``all``,
    as in PyTorch, smoothing / C goes to every class, the true one included.

    Args:
        logits: [B, C], C at least 2.
        labels: Class ids, [B].
        smoothing: In [0, 1 - 1/C]; 0 is plain cross-entropy, bit for bit.
        spread: Classes that the smoothing goes to.

    Returns:
        A scalar, at least float32.

    Raises:
        SettingsError: If ``spread`` is unknown.
    """
    classes = logits.shape[1]
    factor = choose("spread", spread, {"others": classes / (classes - 1), "all": 1.0})
    return F.cross_entropy(widened(logits), labels, label_smoothing=smoothing * factor)


DEVIATIONS = (
    "The program published for VLCS, FedDG_Benchmark and FedCCRL detach the generator's output "
    "before its loss, so the generator never learns. Ours learns (`train_generator`).",
    "The programs published for PACS and for VLCS have different losses of D and G. Ours are "
    "those for PACS (`form`).",
    "The program published for PACS shows D the label after the projection and undoes the norm of"
    " its initial weights. Like all the others we show it before, with norm 1 (`label`).",
    "FedDG_Benchmark and FedCCRL train F and C before D, and leave them in evaluation mode after "
    "the first such batch. We train D first, and stay in training mode (`order`).",
    "The published programs run F twice for each batch, for D in evaluation mode. We run it once.",
    "FedDG_Benchmark takes w = 0.15 and FedCCRL 0.45. We take 0.85, as the published programs do "
    "(`ce_weight`).",
    "FedDG_Benchmark smooths labels in the second phase only, in PyTorch's form, and FedCCRL not "
    "at all. We follow the published programs (`smoothing_in`, `spread`, `smoothing`).",
    "The program published for VLCS, FedDG_Benchmark and FedCCRL scale labels by 0.6. We scale "
    "them by 0.7, as the one for PACS does (`label_scale`).",
    "FedDG_Benchmark's default for PACS and iWildCam is no noise; FedCCRL has as many numbers of "
    "noise as features. We have half as many, as the published programs do (`noise`).",
    "FedCCRL sends and averages D, and gives D and G a weight decay of 1e-4. We keep D with its "
    "client, with 1e-5 (`discriminator`, `adversary_weight_decay`).",
    "Where other methods train for 1 and 3 epochs, FedDG_Benchmark trains this one for 1 + 1 and "
    "FedCCRL for 3 + 3. We train it for as many as the others (`first_epochs`, `second_epochs`).",
    "The published programs advance their warm-up once an epoch and start it anew in every round,"
    " so the learning rates stay far below those asked for. Ours are those asked for "
    "(`adversary_lr`, `train.lr`).",
    "What the published programs keep as the best weights of a round are references to the last "
    "ones. We keep the last ones.",
    "The program published for PACS unpacks four results of a function that returns three, and "
    "stops. Ours runs.",
    "The published programs average clients equally, the derived ones by their images. So do we "
    "(`federation.weighting`).",
    "FedCCRL leaves out batches of one image in the first phase only. We leave them out in both, "
    "wherever batch normalisation would have to train on them.",
)
"""Where published code differs from its paper, and what this module does."""
