"""Losses of PARDON, FedCCRL, FPL and FedSR, as functions of features and labels.

Half-precision inputs are widened to float32 and matrix products leave autocast, because distances
and exponents of similarities lose their meaning in half precision. Other types are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from feddg_bench.common.errors import SettingsError
from feddg_methods.shared.choices import choose

DISTANCE_EPS = 1e-7
"""Added to every coordinate of a difference: the distance of equal features has a gradient."""

MIN_PROBABILITY = 1e-7
"""Smallest mean probability inside the logarithm of the Jensen-Shannon divergence."""

MIN_STD = 1e-6
"""Smallest standard deviation inside a Gaussian divergence: softplus can underflow to 0."""


def _widened(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


# ------------------------------------------------------------------------------- PARDON


def random_negatives(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draw for every anchor one index among the examples of other classes, uniformly.

    The generator advances by one number an anchor, whatever the labels are.

    Args:
        labels: Class ids, (B,).
        generator: Source of randomness, usually on the CPU whatever device the labels are on.

    Returns:
        Indices (B,), int64; of no meaning in a batch of one class.
    """
    differs = labels[:, None] != labels  # (B, B)
    uniform = torch.rand(
        len(labels), dtype=torch.float64, generator=generator, device=generator.device
    )
    rank = (uniform.to(labels.device) * differs.sum(dim=1)).long()
    # The negative of rank r is the first column where more than r negatives have been counted.
    index = (differs.cumsum(dim=1) <= rank[:, None]).sum(dim=1)
    return index.clamp(max=len(labels) - 1)


def triplet_loss(
    z: Tensor,
    z_styled: Tensor,
    labels: Tensor,
    *,
    margin: float,
    negatives: Literal["random_one", "set_mean", "hardest"] = "random_one",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Pull features to those of the same image restyled, push them off other classes.

    Anchors are the features of original images, positives those of the same images after style
    transfer, negatives those of transferred images of other classes. Features are normalised and
    compared by Euclidean distance, not squared. Gradients flow through all three. In a batch of one
    class nothing is negative: the loss is 0 and still part of the graph.

    Source: PARDON (Nguyen et al., ICDCS 2025, arXiv 2410.22622), Eq. 7; one random negative for
    an anchor as in FISC, its earlier version, and in the authors' code. ``set_mean`` is the
    expectation of ``random_one``, ``hardest`` takes the nearest negative; both hold a
    (B, B, D) tensor.

    Args:
        z: Features of original images, (B, D).
        z_styled: Features of the same images after style transfer, (B, D).
        labels: Class ids, (B,).
        margin: Distance by which a negative must be farther than the positive, 0 or more.
        negatives: Which negatives an anchor meets.
        generator: Draws the negatives of ``random_one``.

    Returns:
        A scalar, 0 or more.

    Raises:
        SettingsError: For an unknown name, or if ``random_one`` has no generator.
    """
    anchors = F.normalize(_widened(z), dim=1, eps=1e-12)
    styled = F.normalize(_widened(z_styled), dim=1, eps=1e-12)
    near = F.pairwise_distance(anchors, styled, eps=DISTANCE_EPS)  # (B,)
    differs = labels[:, None] != labels  # (B, B)
    counts = differs.sum(dim=1)
    all_negatives = choose(
        "choice of negatives",
        negatives,
        {"random_one": False, "set_mean": True, "hardest": True},
    )
    if all_negatives:
        far = F.pairwise_distance(anchors[:, None], styled, eps=DISTANCE_EPS)  # (B, B)
        every = F.relu(near[:, None] - far + margin) * differs
        mean = every.sum(dim=1) / counts.clamp(min=1)
        hinges = every.amax(dim=1) if negatives == "hardest" else mean
    elif generator is None:
        raise SettingsError(
            "negatives='random_one' needs randomness: pass generator=torch.Generator(), "
            "or choose 'set_mean' or 'hardest'"
        )
    else:
        other = styled[random_negatives(labels, generator)]
        hinges = F.relu(near - F.pairwise_distance(anchors, other, eps=DISTANCE_EPS) + margin)
    # Either every image of a batch has one of another class beside it, or none has.
    return (hinges * (counts > 0)).mean()


def feature_penalty(
    z: Tensor, z_styled: Tensor, reduction: Literal["elements", "samples"] = "elements"
) -> Tensor:
    """Return the mean square of the features of original and transferred images.

    Source: PARDON's L_reg. The authors' code takes the mean over all B x D elements; the text
    reads like a mean over samples, which is D times larger and does not go with its coefficient.

    Args:
        z: Features of original images, (B, D).
        z_styled: Features of the same images after style transfer, (B, D).
        reduction: What the sum of squares is divided by.

    Returns:
        A scalar, 0 or more.

    Raises:
        SettingsError: If ``reduction`` is unknown.
    """
    count = choose("reduction", reduction, {"elements": z.numel(), "samples": len(z)})
    return (_widened(z).square() + _widened(z_styled).square()).sum() / count


# ------------------------------------------------------------------------------ FedCCRL


def supervised_contrastive(
    z: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    reduction: Literal["mean", "sum"] = "mean",
    count_self: bool = False,
) -> Tensor:
    """Contrast features of one class with all others, over the views of a batch.

    An anchor's loss is the mean, over the other features of its class, of the negative
    log-softmax of their cosine similarities; the softmax runs over all features but the anchor.
    An anchor whose class has no other feature counts as 0.

    Source: Khosla et al., NeurIPS 2020, Eq. 2; FedCCRL's representation alignment is the mean of
    two such terms. FedCCRL's text sums over anchors; its code takes the mean, and counts the
    anchor among its own positives (``count_self``), which weakens their pull.

    Args:
        z: Features, (2B, D), one view after the other, not normalised.
        labels: Class ids of the features, (2B,), or of one view, (B,).
        temperature: Divides the cosine similarities, above 0.
        reduction: How anchors are put together.
        count_self: Count an anchor as a positive of itself; for the authors' code.

    Returns:
        A scalar.

    Raises:
        SettingsError: If ``reduction`` is unknown.
    """
    labels = labels.repeat(len(z) // len(labels))
    with torch.autocast(z.device.type, enabled=False):
        z = F.normalize(_widened(z), dim=1, eps=1e-12)
        similarity = z @ z.T / temperature  # (2B, 2B)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    positive = labels[:, None] == labels
    if not count_self:
        positive = positive & ~itself
    others = similarity.masked_fill(itself, -torch.inf)
    log_softmax = similarity - others.logsumexp(dim=1, keepdim=True)
    pulls = log_softmax.masked_fill(~positive, 0).sum(dim=1)
    losses = -pulls / positive.sum(dim=1).clamp(min=1)
    return losses.sum() / choose("reduction", reduction, {"mean": len(z), "sum": 1})


def jensen_shannon(probabilities: Sequence[Tensor]) -> Tensor:
    """Return the Jensen-Shannon divergence of several predictions for the same images, in nats.

    It is the mean over predictions of their Kullback-Leibler divergence from the mean prediction,
    averaged over the batch. Gradients flow through the mean prediction too.

    Source: FedCCRL's prediction alignment, with three predictions; as in its code the mean
    prediction is at least 1e-7 inside the logarithm.

    Args:
        probabilities: V tensors (B, C), rows in the simplex.

    Returns:
        A scalar between 0 and log V, up to the clamp.
    """
    views = torch.stack([_widened(p) for p in probabilities])  # (V, B, C)
    mean = views.mean(dim=0).clamp(MIN_PROBABILITY, 1)
    # A softmax can underflow to 0, where p log p has no finite gradient.
    logs = views.clamp(min=torch.finfo(views.dtype).tiny).log()
    return (views * (logs - mean.log())).sum(dim=-1).mean()


# ---------------------------------------------------------------------------------- FPL


def prototype_loss(
    z: Tensor,
    labels: Tensor,
    prototypes: Mapping[int, Tensor],
    *,
    temperature: float,
    divide_by: Literal["matched", "batch"] = "matched",
    variant: Literal["official", "pardon"] = "official",
) -> Tensor:
    """Pull features to the cluster prototypes of their class and to the mean of these.

    The first term contrasts the prototypes of the example's class with those of all other classes
    by cosine similarity; the second is the mean square over coordinates of the difference between
    the feature, not normalised, and the class's unbiased prototype. Prototypes are constants.
    Examples whose class has no prototype do not count; without any, the loss is 0 and still part
    of the graph.

    Source: FPL (Huang et al., CVPR 2023). PARDON's copy of the authors' code leaves out the first
    term for the class stored first, and contrasts with the first prototype only of every other
    class (``pardon``).

    Args:
        z: Features, (B, D).
        labels: Class ids, (B,).
        prototypes: Cluster prototypes of each known class, (J, D).
        temperature: Divides the cosine similarities, above 0.
        divide_by: The number of examples whose class has a prototype, or of all (authors' code).
        variant: Whose loss.

    Returns:
        A scalar, 0 or more.

    Raises:
        SettingsError: For an unknown name.
    """
    z = _widened(z)
    if not prototypes:
        return 0 * z.sum()
    bundles = [p.detach().to(z) for p in prototypes.values()]
    classes = torch.tensor(list(prototypes), device=z.device)
    owner = [(c, j) for c, p in prototypes.items() for j in range(len(p))]
    row_class, row_rank = torch.tensor(owner, device=z.device).T  # (M,) each
    table = torch.cat(bundles)  # (M, D)
    centres = torch.stack([p.mean(dim=0) for p in bundles])  # (classes, D)
    hit = labels[:, None] == classes  # (B, classes)
    matched = hit.any(dim=1)
    own = labels[:, None] == row_class  # (B, M)
    foreign = ~own & (row_rank < choose("variant", variant, {"official": len(table), "pardon": 1}))

    with torch.autocast(z.device.type, enabled=False):
        cosine = F.normalize(z, dim=1, eps=1e-12) @ F.normalize(table, dim=1, eps=1e-12).T
    logits = cosine / temperature
    # -log(p / (p + q)) from log p - log q: exact where p is all but certain, and never negative.
    contrast = -F.logsigmoid(_masked_logsumexp(logits, own) - _masked_logsumexp(logits, foreign))
    if variant == "pardon":
        contrast = contrast.masked_fill(hit[:, 0], 0)
    spread = (z - centres[hit.int().argmax(dim=1)]).square().mean(dim=1)
    losses = torch.where(matched, contrast + spread, 0)
    count = {"matched": matched.sum().clamp(min=1), "batch": torch.tensor(len(z))}
    return losses.sum() / choose("divisor", divide_by, count)


def _masked_logsumexp(values: Tensor, mask: Tensor) -> Tensor:
    # The lowest finite number keeps the gradient of rows without any entry finite.
    return values.masked_fill(~mask, torch.finfo(values.dtype).min).logsumexp(dim=1)


# -------------------------------------------------------------------------------- FedSR


def conditional_mutual_information(
    mean: Tensor,
    std: Tensor,
    reference_mean: Tensor,
    reference_std: Tensor,
    labels: Tensor,
    *,
    scale: float | Tensor = 1.0,
) -> Tensor:
    """Bound the information that a feature has on its image beyond the class.

    The mean over the batch of the Kullback-Leibler divergence, in nats, of the feature's
    distribution N(scale * mean, (scale * std)^2) from its class's reference distribution.
    Gradients flow into the features and into the reference.

    Source: FedSR (Nguyen et al., NeurIPS 2022), the CMI regulariser; ``scale`` is a learned
    positive number in the authors' code and 1 in FedDG_Benchmark's.

    Args:
        mean: Means of the features, (B, D).
        std: Their standard deviations, (B, D), taken as 1e-6 where smaller.
        reference_mean: Mean of each class's reference distribution, (C, D).
        reference_std: Its standard deviations, (C, D), taken as 1e-6 where smaller.
        labels: Class ids, (B,), int64.
        scale: Factor on features, above 0.

    Returns:
        A scalar, 0 or more.
    """
    mean, std = scale * _widened(mean), scale * _widened(std).clamp(min=MIN_STD)
    target_mean = _widened(reference_mean)[labels]  # (B, D)
    target_std = _widened(reference_std).clamp(min=MIN_STD)[labels]
    square = std.square() + (mean - target_mean).square()
    divergence = (target_std / std).log() + square / (2 * target_std.square()) - 0.5
    return divergence.sum(dim=1).mean()
