"""SagNet: learn from content under random styles, and unlearn what styles tell of the class."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, Client, on_device
from feddg_bench.core.messages import LocalUpdate
from feddg_bench.core.method import Method
from feddg_methods.shared.stages import changed, check_stages

EPSILON = 1e-5
"""Added to variances, as in the authors' code."""


class SagNetSettings(MethodSettings):
    """Where styles are randomised, and how strongly the features unlearn them."""

    stage: int = Field(2, ge=1)
    """Stage of the backbone that ends G_f, from 1; the authors' code cuts a ResNet after its
    second."""
    weight: float = Field(0.1, ge=0)
    """lambda_adv, the weight of the adversarial loss; the paper's is 0.1."""
    clip: float = Field(0.1, gt=0)
    """Largest norm of the adversarial loss's gradient; 0.1 in the authors' code."""


class SagNet(Method):
    """Style-agnostic networks (Nam et al., CVPR 2021, arXiv 1910.11645, Sections 3.1 and 3.2).

    A stage cuts the network into G_f, which gives maps z, and G_c, the rest with the classifier;
    G_s is a second G_c. G_f and G_c learn the class from SR(z, z'), the content of an image in a
    random style between its own and that of another image. G_s learns it from CR(z, z'), the
    content of another image in its own style. The adversarial loss makes the predictions of G_s
    uniform, by the scales and shifts of the normalisation in G_f alone; without such layers, by
    all of G_f.

    All parts are averaged, as FedAvg averages its model; G_s takes no part in predictions. Styles
    are those of a client's own images.
    """

    group = "local training"
    acts_on = "maps"
    title = "SagNet"
    citation = (
        "Hyeonseob Nam, HyunJae Lee, Jongchan Park, Wonjun Yoon, Donggeun Yoo: Reducing Domain Gap "
        "by Reducing Style Bias, CVPR 2021, arXiv 1910.11645"
    )
    Settings = SagNetSettings
    settings: SagNetSettings

    def build(self) -> None:
        check_stages(self.backbone, "stage", self.settings.stage)
        self.style_net = self.backbone.after(self.settings.stage)
        self.style_classifier = self.new_classifier()
        own, rest = (dict(net.named_parameters()) for net in (self.backbone.net, self.style_net[0]))
        g_f = [name for name in own if name not in rest]
        scales = {
            n.removesuffix("weight") for n in g_f if n.endswith("weight") and own[n].dim() == 1
        }
        norm = [n for n in g_f if n.rpartition(".")[0] + "." in scales]
        self.adversaries = norm or g_f
        self.push: list[Tensor] = []

    def fit(self, client: Client) -> LocalUpdate:
        with self.temporarily(push=[]):
            return super().fit(client)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        z: list[Tensor] = []
        b = len(labels)
        draws = [torch.rand(b), torch.randperm(b), torch.randperm(b)]
        a, styles, contents = on_device(draws, images.device)

        def randomised(maps: Tensor) -> Tensor:
            z.append(maps)
            return style_randomised(maps, styles, a)

        with changed(self.backbone.stages[self.settings.stage - 1], randomised):
            loss = self.task.loss(self(images), labels, "mean")
        mixed = content_randomised(z[0], contents)
        cut = mixed.detach().requires_grad_()  # G_s learns, and what is before it does not
        scores = self.style_classifier(self.style_net(cut)).log_softmax(1)
        self.push[:] = self.adversarial_gradient(-scores.mean(), mixed, cut)
        return loss + F.nll_loss(scores, labels)

    def adversarial_gradient(self, loss: Tensor, mixed: Tensor, cut: Tensor) -> list[Tensor]:
        """Return the gradient of L_adv for the parameters that it trains, clipped.

        Args:
            loss: Minus the mean logarithm of G_s's probabilities.
            mixed: CR(z, z'), [B, C, H, W].
            cut: The same values, from which the loss was computed.
        """
        if not self.settings.weight:
            return []
        own = dict(self.backbone.net.named_parameters())
        (at_cut,) = torch.autograd.grad(self.settings.weight * loss, cut, retain_graph=True)
        found = torch.autograd.grad(
            mixed, [own[name] for name in self.adversaries], at_cut, retain_graph=True
        )
        norm = torch.stack(torch._foreach_norm(found)).norm()
        return [g * (self.settings.clip / norm).clamp(max=1) for g in found]

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        own = dict(self.backbone.net.named_parameters())
        for name, g in zip(self.adversaries, self.push, strict=False):  # none if lambda is 0
            old = own[name].grad
            own[name].grad = g if old is None else old + g


def style_randomised(maps: Tensor, other: Tensor, a: Tensor) -> Tensor:
    """Return SR(z, z'): the maps' content in a style between their own and that of others.

    Args:
        maps: z, [B, C, H, W].
        other: Position of each z' in the batch, int64 [B].
        a: Share of the own style in [0, 1], [B].
    """
    mu, sigma = style(maps)
    a = a.to(maps.dtype).view(-1, 1, 1, 1)
    new_mu, new_sigma = (a * s + (1 - a) * s[other] for s in (mu, sigma))
    return new_sigma * ((maps - mu) / sigma) + new_mu


def content_randomised(maps: Tensor, other: Tensor) -> Tensor:
    """Return CR(z, z'): the content of other maps, as a constant, in the maps' own style.

    Args:
        maps: z, [B, C, H, W].
        other: Position of each z' in the batch, int64 [B].
    """
    mu, sigma = style(maps)
    content = ((maps - mu) / sigma).detach()
    return sigma * content[other] + mu


def style(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel over its positions, [B, C, 1, 1]."""
    variance, mean = torch.var_mean(maps, (2, 3), correction=0, keepdim=True)
    return mean, (variance + EPSILON).sqrt()


DEVIATIONS = (
    "The paper takes a step with each loss in turn. We take one step with all three gradients; the "
    "authors' code computes them at the same weights, with an optimiser for each.",
    "The authors' code mixes variances. We mix standard deviations, as the paper does.",
    "As the authors' code does, we take the content of the other image as a constant.",
    "G_s begins with the weights of G_c, as in the authors' code, also where the network starts "
    "at random.",
    "The authors' code drops out half of the features. We leave this out.",
    "DomainBed randomises pooled features, and trains all of G_f by the adversarial loss. We "
    "follow the paper, unless G_f has no normalisation.",
)
"""Where published code differs from its paper, and what this module does."""
