"""COPA: one shared feature extractor and an ensemble of classifiers, one for each domain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import server_step, streaming_mean
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.choices import check_linear

MAX_CLIENT_SLOTS = 16
"""Maximum number of clients with a classifier each by default; every client receives them all."""


class CopaSettings(MethodSettings):
    """Owners of classifiers, use of other classifiers in the loss, and normalisation."""

    labels: ClassVar[tuple[str, ...]] = ("slot", "norm")
    added: ClassVar[tuple[str, ...]] = ("affine_norm",)

    slot: Literal["auto", "client", "domain"] = "auto"
    """Owner of a classifier: each client, or each source domain, where a client belongs to the
    domain of most of its images. ``auto``: clients if there are at most 16, else domains. In the
    paper both are the same, as every domain is one client."""
    beta: float = Field(1.0, ge=0)
    """Weight of the mean loss of the other slots' frozen classifiers; 0 leaves them out."""
    norm: Literal["bin", "bn"] = "bin"
    """Replace every batch normalisation of the backbone by batch-instance normalisation, as in the
    paper, or keep it. A backbone without batch normalisation is unchanged."""
    affine_norm: bool = False
    """Compute batch-instance normalisation as one scale and shift for each image and channel: the
    same function up to rounding, in less than half the time. If batch statistics are live
    (``federation.bn`` other than ``frozen``), training is not affected."""
    ensemble: Literal["probabilities", "logits"] = "probabilities"
    """Quantity that the prediction averages over the classifiers."""


class Copa(Method):
    """COPA (Wu & Gong, ICCV 2021): a reconstruction from publications, without any code.

    The model is a feature extractor f and M classifiers c_1 ... c_M, one for each slot. A client
    receives them all and trains f and the classifier c_i of its slot on

        CE(c_i(f(x)), y) + beta / (M - 1) sum over j != i of CE(c_j(f(x)), y)

    where the other classifiers are frozen but pass gradients to f. It sends f and c_i. The server
    averages the extractors with equal shares and puts classifiers into their slots; clients of the
    same slot are averaged, and a slot without a reply keeps its classifier. The prediction is the
    mean of the classifiers' probabilities. All slots start from the same classifier.
    """

    title = "COPA"
    citation = (
        "Guile Wu, Shaogang Gong: Collaborative Optimization and Aggregation for Decentralized "
        "Domain Generalization and Adaptation, ICCV 2021, https://openaccess.thecvf.com/content/"
        "ICCV2021/html/Wu_Collaborative_Optimization_and_Aggregation_for_Decentralized_Domain_"
        "Generalization_and_Adaptation_ICCV_2021_paper.html"
    )
    Settings = CopaSettings
    settings: CopaSettings
    needs: ClassVar = {"federation": {"weighting": "uniform"}}
    singles = "puts single classifiers into their slots"
    uplink: ClassVar = {
        "fit": {
            "weights": "model without ensemble.",
            "classifier": {"weight": "float32 [C, D]", "bias": "float32 [C]"},
            "slot": "int",
        }
    }

    def build(self) -> None:
        s = self.settings
        check_linear(self)
        if s.norm == "bin":
            mix_batch_norm(self.backbone, affine=s.affine_norm)
        few = len(self.clients) <= MAX_CLIENT_SLOTS
        self.by_domain = s.slot == "domain" or (s.slot == "auto" and not few)
        self.slots = self.sources if self.by_domain else self.clients
        self.slot = 0
        self.ensemble = Ensemble(self.classifier, max(1, len(self.slots)))
        # The client's own classifier is a working copy of its slot in the ensemble, which is the
        # state that is sent; as separate state it would be sent or stored needlessly.
        self.classifier.register_state_dict_post_hook(_leave_out)
        self.register_load_state_dict_pre_hook(_put_back)  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------------- model

    def forward(self, images: Tensor) -> Tensor:
        z = self.features(images)
        if self.training:
            own: Tensor = self.classifier(z)
            return own
        return ensemble_logits(self.ensemble(z), self.settings.ensemble)

    # ------------------------------------------------------------------- client half

    def slot_of(self, client: Client) -> int:
        """Return the client's slot number; among domains with equally many images, the first."""
        if len(self.slots) < 2:
            return 0
        if self.by_domain:
            counts = [client.domains.get(domain, 0) for domain in self.slots]
            return counts.index(max(counts))
        return self.slots.index(client.name)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: clip_rho(self.backbone))
        return optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        z = self.features(images)
        loss = F.cross_entropy(self.classifier(z).to(self.dtype), labels)
        if self.settings.beta and len(self.slots) > 1:
            loss = loss + self.settings.beta * frozen_loss(self.ensemble(z), labels, self.slot)
        return loss

    def fit(self, client: Client) -> LocalUpdate:
        slot = self.slot_of(client)
        with torch.no_grad():
            for name, parameter in self.classifier.named_parameters():
                parameter.copy_(self.ensemble.get_buffer(name)[slot])
        with self.temporarily(slot=slot):
            weights = super().fit(client).weights
        extractor = {n: tensor for n, tensor in weights.items() if not n.startswith("ensemble.")}
        own = {name: p.detach().clone() for name, p in self.classifier.named_parameters()}
        # The server knows a client by its name, but not the domains of its images.
        return LocalUpdate(
            extractor, {"classifier": own, **({"slot": slot} if self.by_domain else {})}
        )

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        with torch.no_grad():  # under a Trainer no server does this
            for name, parameter in self.classifier.named_parameters():
                self.ensemble.get_buffer(name)[self.slot] = parameter

    # ------------------------------------------------------------------- server half

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        number = {name: i for i, name in enumerate(self.slots)}
        received: dict[int, list[tuple[Weights, float]]] = {}

        def extractor(reply: Reply[LocalUpdate]) -> tuple[Weights, float]:
            share, extra = server.share(reply), reply.value.extra
            slot = extra.get("slot", number.get(reply.client, 0))
            received.setdefault(slot, []).append((extra["classifier"], share))
            return reply.value.weights, share

        lr = server.federation.server_lr
        new = server_step(
            server.weights, streaming_mean(map(extractor, updates)), lr, self.trainable
        )
        for name in self.trainable:
            if name.endswith(".rho"):  # a server step above 1 leaves the clients' convex hull
                new[name].clamp_(0, 1)
        old = {name: server.weights[f"ensemble.{name}"] for name in ("weight", "bias")}
        classifiers = assemble(old, received, lr)
        return new | {f"ensemble.{name}": tensor for name, tensor in classifiers.items()}


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Remove a module's own parameters from the new state dict."""
    for name, _ in module.named_parameters():
        del state[prefix + name]


def _put_back(_module: nn.Module, state: dict[str, Any], prefix: str, *_args: Any) -> None:
    """Restore the entries that `_leave_out` removed from a state dict."""
    for name in ("weight", "bias"):
        state[f"{prefix}classifier.{name}"] = state[f"{prefix}ensemble.{name}"][0]


class Ensemble(nn.Module):
    """The classifiers of all slots, as buffers: weight [S, C, D] and bias [S, C].

    Args:
        classifier: Initial classifier of every slot.
        slots: S.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, classifier: nn.Linear, slots: int) -> None:
        super().__init__()
        self.register_buffer("weight", classifier.weight.detach().repeat(slots, 1, 1))
        self.register_buffer("bias", classifier.bias.detach().repeat(slots, 1))

    def forward(self, z: Tensor) -> Tensor:
        """Map features [B, D] to the logits of every slot, [B, S, C], in the buffers' type."""
        logits = F.linear(z, self.weight.flatten(0, 1), self.bias.flatten())
        return logits.view(len(z), *self.bias.shape).to(self.bias.dtype)


def ensemble_logits(
    logits: Tensor, mean: Literal["probabilities", "logits"] = "probabilities"
) -> Tensor:
    """Return the logits [B, C] of an ensemble whose members have the logits [B, S, C].

    The logarithm of the mean of probabilities, or the mean of logits; for one member, its logits.
    """
    if logits.shape[1] == 1 or mean == "logits":
        return logits.mean(dim=1)
    return logits.log_softmax(dim=2).logsumexp(dim=1) - math.log(logits.shape[1])


def frozen_loss(logits: Tensor, labels: Tensor, slot: int) -> Tensor:
    """Return the mean cross-entropy of all slots but one, over slots and images: a scalar.

    Args:
        logits: Logits of all slots, [B, S, C], with S at least 2.
        labels: Class ids, [B].
        slot: Slot to leave out.
    """
    others = torch.cat([logits[:, :slot], logits[:, slot + 1 :]], dim=1)
    return F.cross_entropy(others.flatten(0, 1), labels.repeat_interleave(others.shape[1]))


def assemble(
    old: Mapping[str, Tensor], received: Mapping[int, list[tuple[Weights, float]]], lr: float = 1.0
) -> Weights:
    """Return new tensors with classifiers put into their slots; other slots are unchanged.

    Args:
        old: Tensors of all slots, [S, ...] each.
        received: For each slot, its clients' tensors, (...) each, with their shares in its mean.
        lr: Step from a slot's old classifier to its new one.
    """
    new = {name: tensor.clone() for name, tensor in old.items()}
    for slot, states in received.items():
        before = {name: tensor[slot] for name, tensor in old.items()}
        after = server_step(before, streaming_mean(states), lr, before)
        for name, tensor in after.items():
            new[name][slot] = tensor
    return new


class BatchInstanceNorm(nn.Module):
    """A mixture of batch and instance normalisation: rho BN(x) + (1 - rho) IN(x).

    Both share the affine part of the batch normalisation. rho has one entry per channel and starts
    at 1, so that a network's initial output is unchanged, bit for bit. Maps of a single pixel have
    no statistics of their own: their instance normalisation is the affine bias.

    Source: Nam & Kim, NeurIPS 2018, arXiv 1805.07925. As there, rho stays in [0, 1] because it is
    clipped after every optimizer step (`clip_rho`).

    The batch normalisation remains a separate layer, so that code that searches for this type still
    finds it. Freezing it freezes its statistics only; keeping it at a client leaves rho shared.

    Attributes:
        batch: The batch normalisation.
        rho: Share of batch normalisation, [C], in [0, 1].

    Args:
        layer: Batch normalisation that this layer wraps.
        affine: Compute one scale and shift for each image and channel where the batch normalisation
            uses running statistics and both have the type of rho; see `mixed_norm`.
    """

    def __init__(self, layer: nn.BatchNorm2d, *, affine: bool = False) -> None:
        super().__init__()
        self.batch, self.affine = layer, affine
        like = layer.running_mean if layer.weight is None else layer.weight
        device = None if like is None else like.device
        self.rho = nn.Parameter(torch.ones(layer.num_features, device=device))

    def forward(self, maps: Tensor) -> Tensor:
        """Return normalised maps of the shape of ``maps``, [B, C, H, W]."""
        layer = self.batch
        known = layer.track_running_stats and not layer.training
        if self.affine and known and layer.affine and maps.dtype == self.rho.dtype:
            return mixed_norm(maps, self.rho, layer)
        together: Tensor = layer(maps)
        # One group per channel; `F.instance_norm` rejects maps of one pixel.
        alone = torch.group_norm(maps, layer.num_features, layer.weight, layer.bias, layer.eps)
        # Not in half precision, which cannot resolve the steps of rho near 1.
        rho = self.rho[:, None, None]
        mixed = torch.lerp(alone.to(rho.dtype), together.to(rho.dtype), rho)
        return mixed.to(together.dtype)


def mixed_norm(maps: Tensor, rho: Tensor, layer: nn.BatchNorm2d) -> Tensor:
    """Return rho BN(x) + (1 - rho) IN(x) of maps [B, C, H, W]; BN uses running statistics.

    Both are affine in the pixels of one channel of an image, and so is the mixture:

        x s + t + u (x - mu) / sqrt(var + eps)

    with mu and var of that channel, u = (1 - rho) w, and s and t from the running mean and
    variance, w, the bias and rho.
    """
    buffers = dict(layer.named_buffers())
    scale = rho * layer.weight * torch.rsqrt(buffers["running_var"] + layer.eps)
    shift = layer.bias - scale * buffers["running_mean"]
    result: Tensor = _Mixture.apply(maps, scale, shift, (1 - rho) * layer.weight, layer.eps)[0]
    return result


LARGE = 1024
"""Number of pixels from which PyTorch's group normalisation is the faster way to centre a map."""


class _Mixture(torch.autograd.Function):
    """The formula of `mixed_norm`, in few passes over the maps; the input is not kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, s: Tensor, t: Tensor, u: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        images, channels, height, width = x.shape
        if height * width >= LARGE:
            sizes = images, channels, height * width, channels
            centred, mu, r = torch.native_group_norm(x, None, None, *sizes, eps)
            mu, r = (each.view(images, channels, 1, 1) for each in (mu, r))
            unit = r
        else:
            mu = x.mean((2, 3), keepdim=True)
            centred = x - mu
            r = torch.rsqrt((centred * centred).mean((2, 3), keepdim=True) + eps)
            unit = torch.ones_like(r)
        s, t, u = (each[:, None, None] for each in (s, t, u))
        return torch.addcmul(t + s * mu, centred, (s + u * r) / unit), centred, mu, r, unit

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, s, _, u, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # otherwise the backward pass fills maps with zeros
        ctx.save_for_backward(s, u, *output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_none: None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 5
        s, u, centred, mu, r, unit = ctx.saved_tensors  # x = mu + centred / unit
        s, u = s[:, None, None], u[:, None, None]
        pixels = g.shape[2] * g.shape[3]
        total = g.sum((2, 3), keepdim=True)
        along = (g * centred).sum((2, 3), keepdim=True) / unit
        # dr = u along; dvar = -r^3 dr / 2; dmu = -u r total
        dx = torch.addcmul(-u * r * total / pixels, centred, -(r**3) * u * along / pixels / unit)
        dx = dx.addcmul_(g, s + u * r)
        ds, du = (along + mu * total).sum((0, 2, 3)), (r * along).sum((0, 2, 3))
        return dx, ds, total.sum((0, 2, 3)), du, None


def mix_batch_norm(module: nn.Module, *, affine: bool = False) -> None:
    """Replace every ``BatchNorm2d`` inside ``module`` by a `BatchInstanceNorm` that holds it.

    A second call, or a call on a module without such layers, changes nothing.
    """
    for parent in list(module.modules()):
        if isinstance(parent, BatchInstanceNorm):
            continue
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, BatchInstanceNorm(child, affine=affine))


@torch.no_grad()
def clip_rho(module: nn.Module) -> None:
    """Clip every rho inside ``module`` to [0, 1], in place."""
    shares: list[Tensor] = [
        layer.rho for layer in module.modules() if isinstance(layer, BatchInstanceNorm)
    ]
    if shares:
        torch._foreach_clamp_min_(shares, 0.0)
        torch._foreach_clamp_max_(shares, 1.0)


DEVIATIONS = (
    "No published code was found: this is a reconstruction from the paper's abstract and from its"
    " description as a baseline of PPDG. The agreement of predictions, which is for domain "
    "adaptation only, is left out.",
    "The losses of the frozen classifiers are averaged. M - 1 times the weight gives their sum "
    "(`beta`).",
    "The paper has one client for each domain. With more clients, a classifier belongs to a "
    "client or to a domain, depending on how many clients there are (`slot`).",
    "Extractors are averaged with equal shares. Shares by image counts are a setting "
    "(`federation.weighting`).",
    "The ensemble averages probabilities. A mean of logits predicts differently (`ensemble`).",
    "Batch-instance normalisation starts as batch normalisation, so that pretrained networks keep"
    " their worth. It can be left out (`norm`).",
)
"""Where published code differs from its paper, and what this module does."""
