"""Ridge: ridge regression on features, from sums that clients send once; nothing is trained."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Client
from feddg_bench.core.messages import Payload, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_bench.models.tasks import CLASSIFICATION
from feddg_methods.shared.choices import check_linear


class RidgeSettings(MethodSettings):
    """Penalty."""

    labels: ClassVar[tuple[str, ...]] = ("penalty",)

    penalty: float = Field(0.1, gt=0, le=1e6)
    """Penalty on the squared weights, in units of the mean variance of a feature times the number
    of images, so that it depends neither on their number nor on the scale of features."""


class Ridge(Method):
    """Ridge regression on features, in one round (Fed3R, Fanì et al., ICML 2024).

    With features x, extended by 1, and labels y, one-hot or the targets of a regression, each
    client sends the sums of x x^T and of x y^T. From the sums over all clients the server solves

        min_W,b  sum |W z + b - y|^2 + lambda |W|^2,   lambda = penalty * trace(S) / D,

    where S is the centred sum of z z^T; b has no penalty. Sums do not depend on which client holds
    an image, so the result is that of all images in one place. The network is not trained: features
    are those of a pretrained backbone or of a frozen encoder, of images that are not augmented.

    A client sends (D + 1)^2 numbers: 13 MB for D = 1,280.
    """

    tasks = ("classification", "regression")
    Settings = RidgeSettings
    settings: RidgeSettings
    needs: ClassVar = {
        "federation": {"rounds": 1, "per_round": None},
        "evaluation": {"start": 1, "every": 1},
    }
    uplink: ClassVar = {"products": {"gram": "float64 [E, E]", "moments": "float64 [E, C]"}}
    singles = ""
    acts_on = "statistics"
    group = "reference"
    title = "Ridge"
    citation = (
        "Eros Fanì, Raffaello Camoriano, Barbara Caputo, Marco Ciccone: Accelerating Heterogeneous "
        "Federated Learning with Closed-form Classifiers, ICML 2024, arXiv 2406.01116"
    )

    def build(self) -> None:
        check_linear(self)

    # ------------------------------------------------------------------ client half

    @torch.no_grad()
    def products(self, client: Client) -> dict[str, Tensor]:
        self.eval()
        width = self.num_features + 1
        gram = torch.zeros(width, width, dtype=torch.float64, device=self.device)
        moments = gram.new_zeros(width, self.num_classes)
        for images, labels in client.batches(train=False):
            with client.fabric.autocast():
                z = self.features(images).double()  # [B, D]
            x = F.pad(z, (0, 1), value=1.0)
            classes = self.task is CLASSIFICATION
            y = F.one_hot(labels, self.num_classes) if classes else labels[:, None]
            gram += x.T @ x
            moments += x.T @ y.double()
        return {"gram": gram, "moments": moments}

    def tally(self, reply: Reply[Payload], received: Weights) -> Payload:
        return {**reply.value}

    # ------------------------------------------------------------------ server half

    def run_round(self, server: Server) -> None:
        gram = moments = torch.zeros((), dtype=torch.float64)
        for reply in server.ask(self.products, everyone=True):
            gram = gram.to(reply.value["gram"].device) + reply.value["gram"]
            moments = moments.to(gram.device) + reply.value["moments"]
        weight, bias = solve(gram, moments, self.settings.penalty)
        old = server.weights["classifier.weight"]
        head = {"classifier.weight": weight.to(old), "classifier.bias": bias.to(old)}
        server.weights = server.weights | head


def solve(gram: Tensor, moments: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Return weight [C, D] and bias [C] of ridge regression.

    Args:
        gram: Sum of x x^T over images, with features x extended by 1, [D + 1, D + 1].
        moments: Sum of x y^T, [D + 1, C].
        penalty: See `RidgeSettings`.
    """
    n, total = gram[-1, -1], gram[-1, :-1]
    mean, target = total / n, moments[-1] / n
    spread = gram[:-1, :-1] - torch.outer(total, mean)
    ridge = penalty * spread.trace() / len(mean)
    system = spread + ridge.clamp(min=1e-12) * torch.eye(len(mean)).to(spread)
    weight = torch.linalg.solve(system, moments[:-1] - torch.outer(total, target)).T
    return weight, target - weight @ mean


DEVIATIONS = (
    "The paper samples clients over several rounds until each took part. Here one round asks all.",
    "The paper also has random features of a kernel and fine-tuning. Both are left out.",
    "The penalty here is relative to the variance of the features (`penalty`).",
)
"""Where published code differs from its paper, and what this module does."""
