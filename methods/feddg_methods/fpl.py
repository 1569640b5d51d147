"""FPL: pull features towards class prototypes that the server clusters over clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import watched
from feddg_bench.core.client import Batch, Client, on_device
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.choices import choose
from feddg_methods.shared.finch import finch_gram
from feddg_methods.shared.passes import widened


class FPLSettings(MethodSettings):
    """Temperature, divisor, and variants of published code."""

    labels: ClassVar[tuple[str, ...]] = ("divide_by", "pardon_bugs")

    temperature: float = Field(0.02, gt=0)
    """tau, by which cosine similarities are divided; 0.02 in the authors' code and in PARDON's."""
    divide_by: Literal["matched", "batch"] = "matched"
    """Divisor of the summed loss: images whose class has prototypes (PARDON's code), or all of the
    batch (the authors' code), which weakens the loss where classes are missing."""
    pardon_bugs: bool = False
    """As in PARDON's copy: no contrast for the class stored first, which changes from round to
    round, and only the first prototype of every other class among the negatives."""
    keep_absent: int = Field(0, ge=0)
    """Rounds that prototypes are kept while no sampled client holds their class; 0 in both
    codes."""


class FPL(Method):
    """FPL (Huang et al., CVPR 2023, "Rethinking federated learning with domain shift").

    In its last local epoch client k computes the mean feature p_k^c of each of its classes. For
    each class the server clusters these by FINCH (cosine, last partition); the means of the
    clusters are the cluster prototypes P_c, and their mean is the unbiased prototype u_c. In the
    next round clients minimise L = L_CE + the contrast of z with P_c + the mean square of z - u_c;
    in round 1, L_CE alone. The table of prototypes is replaced each round, even if a class is
    absent; a skipped round leaves it unchanged. The server averages models as FedAvg does.
    """

    Settings = FPLSettings
    settings: FPLSettings
    uplink: ClassVar = {
        "fit": {"weights": "model", "prototypes": "float32 [n, D]", "classes": "int64 [n]"}
    }
    downlink = ("prototypes",)
    singles = "clusters single clients' prototypes"
    group = "alignment"
    acts_on = "features"
    title = "FPL"
    citation = (
        "W. Huang, M. Ye, Z. Shi, H. Li, B. Du: Rethinking Federated Learning with Domain Shift: "
        "A Prototype View, CVPR 2023, https://openaccess.thecvf.com/content/CVPR2023/html/"
        "Huang_Rethinking_Federated_Learning_With_Domain_Shift_A_Prototype_View_CVPR_2023_paper.html"
    )

    def build(self) -> None:
        self.table: dict[int, Tensor] = {}
        self.sums = ClassSums(self.num_classes, self.num_features)

    # ------------------------------------------------------------------ client half

    def fit(self, client: Client) -> LocalUpdate:
        received = client.broadcast.get("prototypes", {})
        table = {int(c): p.to(self.device) for c, p in received.items()}
        with self.temporarily(table=table, sums=self.sums):
            update = super().fit(client)
            classes, prototypes = self.sums.means()
        return LocalUpdate(update.weights, {"prototypes": prototypes, "classes": classes})

    def batches(self, client: Client, epoch: int) -> Iterator[Batch]:
        # Reset in every epoch, so that the sums of the last one remain.
        self.sums = ClassSums(self.num_classes, self.num_features, self.device)
        return super().batches(client, epoch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        z = self.features(images)  # [B, D]
        if not self.alone:
            self.sums.add(z.detach(), labels)
        loss = F.cross_entropy(self.classifier(z), labels)
        if self.table:
            s = self.settings
            loss = loss + prototype_loss_by(
                z, labels, self.table, s.temperature, s.divide_by, pardon_bugs=s.pardon_bugs
            )
        return loss

    # ------------------------------------------------------------------ server half

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        prototypes: dict[str, list[Tensor]] = {}  # by class, in order of arrival

        def note(reply: Reply[LocalUpdate]) -> None:
            extra = reply.value.extra
            rows = extra["prototypes"].cpu()
            for c, p in zip(extra["classes"].tolist(), rows, strict=True):
                prototypes.setdefault(str(c), []).append(p)

        new = super().aggregate(server, watched(updates, note))
        table = {c: cluster_prototypes(torch.stack(rows)) for c, rows in prototypes.items()}
        made = dict.fromkeys(table, server.round)
        for c, when in server.memory.get("made", {}).items():
            if c not in table and server.round - when <= self.settings.keep_absent:
                table[c], made[c] = server.broadcast["prototypes"][c], when
        server.broadcast["prototypes"], server.memory["made"] = table, made
        return new


class ClassSums:
    """Running sums of features by class, from which a client computes its prototypes.

    Args:
        num_classes: C.
        num_features: D.
        device: Device of the features.
    """

    def __init__(
        self, num_classes: int, num_features: int, device: torch.device | str = "cpu"
    ) -> None:
        self.sums = torch.zeros(num_classes, num_features, device=device)
        self.labels = [torch.zeros(0, dtype=torch.int64, device=device)]

    def add(self, z: Tensor, labels: Tensor) -> None:
        """Add features [B, D] to the sums of their classes, labels [B], in float32."""
        classes = torch.arange(len(self.sums), device=z.device)
        with torch.autocast(z.device.type, enabled=False):
            self.sums += (classes[:, None] == labels).to(self.sums) @ z.to(self.sums)
        self.labels.append(labels)

    def means(self) -> tuple[Tensor, Tensor]:
        """Return classes [M], in order of first appearance, and their mean features [M, D]."""
        labels = torch.cat(self.labels)
        classes = torch.tensor(list(dict.fromkeys(labels.tolist())), dtype=torch.int64)
        index = classes.to(labels.device)
        counts = labels.bincount(minlength=len(self.sums))
        return classes, self.sums[index] / counts[index, None]


def cluster_prototypes(prototypes: Tensor) -> Tensor:
    """Cluster the n clients' prototypes [n, D] of one class; return the clusters' means [J, D].

    FINCH by cosine distance, last partition; all clients have equal weight.
    """
    points = prototypes.to("cpu", torch.float64)
    labels = finch_gram(points @ points.T)[-1]
    sums = points.new_zeros(int(labels.max()) + 1, points.shape[1]).index_add_(0, labels, points)
    return (sums / labels.bincount()[:, None]).to(prototypes)


def prototype_loss(
    z: Tensor,
    labels: Tensor,
    prototypes: Mapping[int, Tensor],
    *,
    temperature: float,
    divide_by: Literal["matched", "batch"] = "matched",
) -> Tensor:
    """Pull features to the cluster prototypes of their class and to the mean of the prototypes.

    The mean over images of -log(sum_own e^s / (sum_own e^s + sum_others e^s)) + ||z - u_c||^2 / D,
    with s the cosine similarity of z with a prototype over tau, and u_c the mean of the prototypes
    P_c of the image's class. Prototypes are constants. Images whose class has no prototype do not
    count; if no image counts, the loss is 0 and still part of the graph.

    Args:
        z: Features, [B, D].
        labels: Class ids, [B].
        prototypes: P_c, the cluster prototypes of each known class, [J, D].
        temperature: tau, above 0.
        divide_by: The number of images whose class has a prototype, or of all (authors' code).

    Returns:
        A scalar, 0 or more.

    Raises:
        SettingsError: If ``divide_by`` is unknown.
    """
    return prototype_loss_by(z, labels, prototypes, temperature, divide_by, pardon_bugs=False)


def prototype_loss_by(
    z: Tensor,
    labels: Tensor,
    prototypes: Mapping[int, Tensor],
    temperature: float,
    divide_by: str,
    *,
    pardon_bugs: bool,
) -> Tensor:
    """Return `prototype_loss`, or PARDON's copy of it (`CONTRASTS`)."""
    z = widened(z)
    if not prototypes:
        return 0 * z.sum()
    bundles = [p.detach().to(z) for p in prototypes.values()]
    owner = [(c, j) for c, p in prototypes.items() for j in range(len(p))]
    known = torch.tensor(list(prototypes)), torch.tensor(owner).T
    classes, (row_class, row_rank) = on_device(known, z.device)  # [M] each row
    table = torch.cat(bundles)  # [M, D]
    u = torch.stack([p.mean(dim=0) for p in bundles])  # [classes, D]
    hit = labels[:, None] == classes  # [B, classes]
    matched = hit.any(dim=1)
    own = labels[:, None] == row_class  # [B, M]
    others, left_out = CONTRASTS[pardon_bugs](own, row_rank, hit)

    with torch.autocast(z.device.type, enabled=False):
        cosine = F.normalize(z, dim=1, eps=1e-12) @ F.normalize(table, dim=1, eps=1e-12).T
    s = cosine / temperature
    # -log(p / (p + q)) from log p - log q: exact where q is far below p, and never negative.
    contrast = -F.logsigmoid(_masked_logsumexp(s, own) - _masked_logsumexp(s, others))
    contrast = contrast.masked_fill(left_out, 0)
    spread = (z - u[hit.int().argmax(dim=1)]).square().mean(dim=1)
    losses = torch.where(matched, contrast + spread, 0)
    count = {"matched": matched.sum().clamp(min=1), "batch": torch.tensor(len(z))}
    return losses.sum() / choose("divisor", divide_by, count)


def _masked_logsumexp(values: Tensor, mask: Tensor) -> Tensor:
    # With -inf the gradient of rows without any entry would be NaN.
    return values.masked_fill(~mask, torch.finfo(values.dtype).min).logsumexp(dim=1)


def _paper(own: Tensor, rank: Tensor, hit: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return ~own, torch.zeros_like(hit[:, 0])


def _pardon(own: Tensor, rank: Tensor, hit: Tensor) -> tuple[Tensor, Tensor]:
    """Take only the first prototype of every other class, and leave out the class stored first."""
    return ~own & (rank == 0), hit[:, 0]


CONTRASTS = {False: _paper, True: _pardon}
"""Rules for negatives [B, M] and images without contrast [B], without and with `pardon_bugs`.

Arguments: prototypes of the image's class [B, M], prototype numbers within a class [M] and the
image's class [B, classes].
"""


DEVIATIONS = (
    "PARDON's copy gives no contrastive term to the class stored first, which changes from round "
    "to round, and takes only the first prototype of every other class as a negative. We take all"
    " prototypes, for every class (`pardon_bugs`).",
    "PARDON's copy fails where only one class has prototypes. Our contrastive term is then 0.",
    "The authors' code divides the summed loss by the batch; PARDON's divides it by the images "
    "whose class has prototypes. So do we (`divide_by`).",
    "Both codes keep the features of the last epoch with their autograd graphs. We sum them "
    "detached, which gives the same prototypes.",
    "In the second term both codes take the mean of the squares over coordinates, not their sum. "
    "So do we.",
    "In the authors' code the lone prototype of a class that one client holds loses a dimension, "
    "and its mean becomes a number. Our prototypes are always [J, D].",
    "Both codes forget a class that no client of the round holds. So do we (`keep_absent`).",
)
"""Where published code differs from its paper, and what this module does."""
