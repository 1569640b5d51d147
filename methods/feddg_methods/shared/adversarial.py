"""The two networks of FedADG, a generator of features and their discriminator, and their losses."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddg_methods.shared.choices import choose

Form = Literal["pacs", "vlcs"]
"""The data set that the published program is for: they differ in the losses of D and G."""


class Generator(nn.Module):
    """G: noise and a label to a feature of that class, the reference that clients align with.

    [u || y] of q + C numbers to ``hidden`` to D, with a leaky ReLU between. Weights start
    Xavier-uniform with gain 1/2.

    Args:
        noise: q, numbers of noise; 0 leaves one feature a class.
        classes: C.
        features: D.
        hidden: Width between.
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
        """Map noise u (B, q) in [0, 1] and labels y (B, C) to features (B, D)."""
        features: Tensor = self.net(torch.cat([u, y], dim=1))
        return features


class Discriminator(nn.Module):
    """D: a feature and its label to the probability of one of the two origins.

    A projection without bias, which starts random with Frobenius norm 1, then two layers with a
    leaky ReLU between. As in published code, the projection is trained with the rest.

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
        """Map features (B, D) and labels y (B, C) to probabilities (B,), at least float32."""
        if self.before:
            score = self.net(self.projection(torch.cat([features, y], dim=1)))
        else:
            score = self.net(torch.cat([self.projection(features), y], dim=1))
        return torch.sigmoid(_widened(score)).squeeze(1)


def discriminator_loss(on_generated: Tensor, on_features: Tensor, form: Form = "pacs") -> Tensor:
    """Return what D minimises, the mean over the batch.

    ``pacs``: (1 - D(G))^2 + D(F)^2, least squares; ``vlcs``: -(D(G)^2 + (1 - D(F))^2). Both push
    D up on generated features and down on real ones, with different gradients.

    Args:
        on_generated: D of generated features, (B,) in [0, 1].
        on_features: D of the images' features, (B,) in [0, 1].
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
    """Return what G minimises, the mean over the batch.

    ``pacs``: D(G)^2, towards what D takes for real features; ``vlcs``: (1 - D(G))^2, the opposite.

    Args:
        on_generated: D of generated features, (B,) in [0, 1].
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
    as in PyTorch, smoothing / C goes to every class, the right one included.

    Args:
        logits: (B, C), C at least 2.
        labels: Class ids, (B,).
        smoothing: In [0, 1 - 1/C]; 0 is plain cross-entropy, bit for bit.
        spread: Over which classes.

    Returns:
        A scalar, at least float32.

    Raises:
        SettingsError: If ``spread`` is unknown.
    """
    classes = logits.shape[1]
    factor = choose("spread", spread, {"others": classes / (classes - 1), "all": 1.0})
    return F.cross_entropy(_widened(logits), labels, label_smoothing=smoothing * factor)


def _widened(values: Tensor) -> Tensor:
    """Return half precision as float32, other types as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
