"""gPerXAN: instance beside personal batch normalisation, and the global classifier as a guide."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from feddg_bench.common.errors import SettingsError
from feddg_bench.core.client import Batch
from feddg_bench.core.server import Server
from feddg_methods.fedbn import FedBN, FedBNSettings


class GPerXANSettings(FedBNSettings):
    """Weight of the guidance, and batch normalisation for evaluation."""

    lam: float = Field(0.5, ge=0)
    """lambda, the weight of the received classifier's loss; 0.5 in the authors' code."""


class GPerXAN(FedBN):
    """gPerXAN (Le et al., CVPR 2024, arXiv 2403.15605).

    Every batch normalisation becomes an `XAN` layer, w_IN IN(x) + w_BN BN(x). BN stays with its
    client, as in FedBN; all other tensors are averaged. Clients minimise the loss of their own
    classifier plus lambda times that of the classifier as received, a constant, on the same
    features, which the global classifier can therefore use.

    For an unseen domain, BN is the mean of the clients' BN, which they send for evaluation only.
    In a network without batch normalisation, the guidance is the only difference from FedAvg.
    """

    group = "personalisation"
    acts_on = "features"  # type: ignore[assignment] # where FedBN acts on its layers only
    title = "gPerXAN"
    citation = (
        "Khiem Le, Long Ho, Cuong Do, Danh Le-Phuoc, Kok-Seng Wong: Efficiently Assemble "
        "Normalization Layers and Regularization for Federated Domain Generalization, CVPR 2024, "
        "arXiv 2403.15605"
    )
    Settings = GPerXANSettings
    settings: GPerXANSettings
    singles = ""

    def build(self) -> None:
        self.assembled = 0
        if getattr(self.backbone, "head_only", False):
            return
        for name, layer in list(self.backbone.named_modules()):
            if isinstance(layer, nn.BatchNorm2d):
                self.backbone.set_submodule(name, XAN(layer))
                self.assembled += 1

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        z = self.features(images)
        loss = self.task.loss(self.classifier(z), labels, "mean")
        if self.alone or not self.settings.lam:
            return loss
        h_g = {n: self.client.weights[f"classifier.{n}"] for n in self.classifier.state_dict()}
        guided = functional_call(self.classifier, h_g, (z,))
        return loss + self.settings.lam * self.task.loss(guided, labels, "mean")

    def prepare(self, server: Server) -> None:
        if self.assembled:
            super().prepare(server)


class XAN(nn.Module):
    """Explicitly assembled normalisation: w_IN IN(x) + w_BN BN(x), with w = softmax(s).

    IN begins with the scale and the shift of BN. Maps of one pixel have no statistics of their
    own: their IN is the shift.

    Attributes:
        bn: The batch normalisation.
        gamma: Scale of the instance normalisation, [C].
        beta: Its shift, [C].
        s: Scores of IN and BN, [2].

    Args:
        layer: Batch normalisation that this layer takes over.

    Raises:
        SettingsError: If it does more than normalise.
    """

    def __init__(self, layer: nn.BatchNorm2d) -> None:
        super().__init__()
        if type(layer).forward is not nn.BatchNorm2d.forward:
            raise SettingsError(
                f"gperxan cannot take apart this network's {type(layer).__name__}, which does more "
                f"than normalise: choose another backbone.name, such as resnet50"
            )
        self.bn = layer
        like = torch.ones(layer.num_features)
        scale, shift = (like, 0 * like) if layer.weight is None else (layer.weight, layer.bias)
        self.gamma = nn.Parameter(scale.detach().clone())
        self.beta = nn.Parameter(shift.detach().clone())
        self.s = nn.Parameter(torch.zeros(2, device=scale.device))

    def forward(self, x: Tensor) -> Tensor:
        """Return normalised maps of the shape of ``x``, [B, C, H, W]."""
        w_in, w_bn = self.s.softmax(0)
        # `F.instance_norm` rejects maps of one pixel. A view hides the convolution from BN, which
        # evaluation could otherwise fold into it.
        instance = torch.group_norm(x, len(self.gamma), self.gamma, self.beta, self.bn.eps)
        batch: Tensor = self.bn(x.view_as(x))
        assembled: Tensor = w_in * instance.to(batch.dtype) + w_bn * batch
        return assembled


DEVIATIONS = (
    "The formulas are those of the authors' code. We have not read the paper's text.",
    "The authors' code starts from a ResNet-50 that was pretrained with such layers. We start from "
    "ordinary weights: IN begins with the scale and the shift of BN.",
    "The authors' code also keeps BN's score with the client, because its name contains "
    "'batchnorm'. We average both: accounts of the paper keep batch normalisation only.",
    "The authors' code evaluates the round with the best accuracy on the clients' validation "
    "images. We evaluate it as any other method.",
    "As in the authors' code, BN for an unseen domain is the mean of the clients' BN "
    "(`evaluation`).",
)
"""Where published code differs from its paper, and what this module does."""
