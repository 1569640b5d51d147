"""NCM: nearest class mean, from sums that clients send once; nothing is trained."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from feddg_bench.core.client import Client
from feddg_bench.core.messages import Payload, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.choices import check_linear


class NCM(Method):
    """Nearest class mean of features, in one round (FedNCM, Legate et al., NeurIPS 2023).

    Each client sends the sum s_c of its features z and the number n_c of its images by class. With
    mu_c, the sum of all s_c divided by that of all n_c, an image belongs to the class whose mean is
    nearest:

        argmin_c |z - mu_c|^2 = argmax_c mu_c z - |mu_c|^2 / 2

    which is a linear classifier. Sums do not depend on which client holds an image, so the result
    is that of all images in one place. The network is not trained: features are those of a
    pretrained backbone or of a frozen encoder, of images that are not augmented. A class without
    images is never predicted.
    """

    needs: ClassVar = {
        "federation": {"rounds": 1, "per_round": None},
        "evaluation": {"start": 1, "every": 1},
    }
    uplink: ClassVar = {"class_sums": {"sums": "float64 [C, D]", "counts": "float64 [C]"}}
    singles = ""
    acts_on = "statistics"
    group = "reference"
    title = "NCM"
    citation = (
        "Gwen Legate, Nicolas Bernier, Lucas Page-Caccia, Edouard Oyallon, Eugene Belilovsky: "
        "Guiding The Last Layer in Federated Learning with Pre-Trained Models, NeurIPS 2023, arXiv "
        "2306.03937"
    )

    def build(self) -> None:
        check_linear(self)

    # ------------------------------------------------------------------ client half

    @torch.no_grad()
    def class_sums(self, client: Client) -> dict[str, Tensor]:
        self.eval()
        shape = self.num_classes, self.num_features
        sums = torch.zeros(shape, dtype=torch.float64, device=self.device)
        counts = sums.new_zeros(self.num_classes)
        for images, labels in client.batches(train=False):
            with client.fabric.autocast():
                z = self.features(images).double()  # [B, D]
            one_hot = F.one_hot(labels, self.num_classes).double()  # [B, C]
            sums += one_hot.T @ z
            counts += one_hot.sum(0)
        return {"sums": sums, "counts": counts}

    def tally(self, reply: Reply[Payload], received: Weights) -> Payload:
        return {**reply.value}

    # ------------------------------------------------------------------ server half

    def run_round(self, server: Server) -> None:
        sums = counts = torch.zeros((), dtype=torch.float64)
        for reply in server.ask(self.class_sums, everyone=True):
            sums = sums.to(reply.value["sums"].device) + reply.value["sums"]
            counts = counts.to(sums.device) + reply.value["counts"]
        weight, bias = nearest_mean(sums, counts)
        old = server.weights["classifier.weight"]
        head = {"classifier.weight": weight.to(old), "classifier.bias": bias.to(old)}
        server.weights = server.weights | head


def nearest_mean(sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [C, D] and bias [C] of the classifier by the nearest mean.

    Args:
        sums: Sums of the features of each class, [C, D].
        counts: Numbers of images, [C]; a class without any gets a score below all others'.
    """
    means = sums / counts.clamp(min=1)[:, None]
    bias = -(means**2).sum(1) / 2
    return means, torch.where(counts > 0, bias, bias.min() - NEVER)


NEVER = 1e6
"""Distance by which the bias of a class without images lies below the others'."""

DEVIATIONS = (
    "The paper goes on to fine-tune the network from this classifier. Here the classifier is the "
    "result.",
)
"""Where published code differs from its paper, and what this module does."""
