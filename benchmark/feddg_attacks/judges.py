"""Networks that judge pictures, each loaded from a weights file that the user gives.

LPIPS (Zhang et al., CVPR 2018) compares two pictures by the features of a SqueezeNet; its linear
heads come with torchmetrics. The Frechet distance FID (Heusel et al., NeurIPS 2017), the unbiased
kernel distance KID (Binkowski et al., ICLR 2018) and the Inception Score (Salimans et al., NeurIPS
2016) use the outputs of TensorFlow's Inception network for pictures, in torch-fidelity's port.
These three measure how good a set of pictures is, not whose it is. FID is larger for small sets.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddg_attacks.records import Interval
from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.config.keys import file_digest
from feddg_bench.models.weights import load_tensors

BATCH = 64
SIDE = 64
"""Pixels to which smaller pictures are enlarged for LPIPS, whose network halves them five times."""
FEWEST = 20
"""Fewest pictures for which FID, KID and the Inception Score are measured."""
LAYERS = ("2048", "logits_unbiased")
FOLDS = 20
"""Folds of a jackknife."""

Perceptual = Callable[[Tensor, Tensor], Tensor]
Features = Callable[[Tensor], "Seen"]


@dataclass(frozen=True)
class Seen:
    """Outputs of the Inception network for n pictures: float64."""

    pooled: np.ndarray  # [n, 2048]
    logits: np.ndarray  # [n, 1008], without bias

    def __getitem__(self, chosen: np.ndarray) -> Seen:
        return Seen(self.pooled[chosen], self.logits[chosen])


@dataclass(frozen=True)
class Judges:
    """The judges whose weights the user gives.

    Attributes:
        lpips: Takes two sets of pictures [n, 3, H, W] in [0, 1] and returns distances [n].
        inception: Takes one such set and returns the network's outputs, a `Seen`.
        digests: SHA-256 of each judge's file, by name.
    """

    lpips: Perceptual | None = None
    inception: Features | None = None
    digests: Mapping[str, str] = field(default_factory=dict)


NOBODY = Judges()


def open_judges(lpips: Path | None = None, inception: Path | None = None) -> Judges:
    """Return judges from weights files.

    Args:
        lpips: Weights of torchvision's squeezenet1_1.
        inception: Weights of torch-fidelity's Inception network.

    Raises:
        DataError: If a file is missing, damaged, or of another network.
        SettingsError: If a package is missing.
    """
    given = {"lpips": lpips, "inception": inception}
    return Judges(
        lpips=None if lpips is None else _squeezenet(lpips),
        inception=None if inception is None else _inception(inception),
        digests={name: file_digest(path) for name, path in given.items() if path},
    )


def _squeezenet(path: Path) -> Perceptual:
    from torchmetrics.functional.image.lpips import _LPIPS

    network = _LPIPS(net="squeeze", pnet_rand=True)  # the heads; the rest comes from the file
    tensors = load_tensors(path)
    # The layer `features.3.squeeze` in the file is `slices.1.3.squeeze` here.
    wanted = {name: f"features.{name.split('.', 2)[2]}" for name in network.net.state_dict()}
    _fill(network.net, {name: tensors[of] for name, of in wanted.items() if of in tensors}, path)

    def distance(guesses: Tensor, truth: Tensor) -> Tensor:
        value: Tensor = network(_large(guesses), _large(truth), normalize=True)
        return value.flatten()

    return distance


def _large(pictures: Tensor) -> Tensor:
    """Return pictures that are at least `SIDE` pixels wide and high."""
    if min(pictures.shape[-2:]) >= SIDE:
        return pictures
    return F.interpolate(pictures, (SIDE, SIDE), mode="bilinear", align_corners=False)


def _inception(path: Path) -> Features:
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError as error:
        raise SettingsError(
            "--inception needs torch-fidelity: run pip install 'feddg-bench[privacy]'"
        ) from error
    tensors = load_tensors(path)
    with tempfile.NamedTemporaryFile(suffix=".pth") as own:
        torch.save(tensors, own.name)  # the extractor unpickles its file, so it gets one of ours
        try:
            network = FeatureExtractorInceptionV3("inception", [*LAYERS], own.name)
        except RuntimeError as error:
            raise _other(path, "torch-fidelity's Inception network") from error

    def features(pictures: Tensor) -> Seen:
        with torch.no_grad():
            pixels = (pictures * 255).round().to(torch.uint8)
            parts = [network(part) for part in pixels.split(BATCH)]
        pooled, logits = (torch.cat(of).double().numpy() for of in zip(*parts, strict=True))
        return Seen(pooled, logits)

    return features


def _fill(network: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        network.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise _other(path, "torchvision's squeezenet1_1") from error


def _other(path: Path, wanted: str) -> DataError:
    return DataError(f"{path} does not hold the weights of {wanted}: give the path of those")


def fid(one: np.ndarray, other: np.ndarray) -> float:
    """Return the Frechet distance of two sets of features.

    |m - m'|^2 + tr(S + S' - 2 (S S')^{1/2}), with the unbiased covariances S and S'.

    Args:
        one: [n, d].
        other: [m, d].
    """
    a, b = one - one.mean(0), other - other.mean(0)
    # With S = a'a / (n - 1) the last trace is the sum of the singular values of a b' over
    # sqrt((n - 1) (m - 1)): a matrix of n x m instead of d x d.
    scale = np.sqrt((len(a) - 1) * (len(b) - 1))
    cross = np.linalg.norm(a @ b.T, "nuc") / scale
    traces = np.square(a).sum() / (len(a) - 1) + np.square(b).sum() / (len(b) - 1)
    return float(np.square(one.mean(0) - other.mean(0)).sum() + traces - 2 * cross)


def kid(one: np.ndarray, other: np.ndarray) -> float:
    """Return the squared maximum mean discrepancy, unbiased, for the kernel (x'y / d + 1)^3.

    Args:
        one: [n, d].
        other: [m, d].
    """

    def kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        products: np.ndarray = (x @ y.T / x.shape[1] + 1) ** 3
        return products

    def within(x: np.ndarray) -> float:
        products = kernel(x, x)
        return float((products.sum() - np.trace(products)) / (len(x) * (len(x) - 1)))

    return within(one) + within(other) - 2 * float(kernel(one, other).mean())


def inception_score(logits: np.ndarray) -> float:
    """Return exp(mean_i KL(p(y | x_i) || p(y))), at least 1, of logits [n, C]."""
    shifted = logits - logits.max(1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    mean = np.log(np.exp(log).mean(0).clip(min=1e-300))
    return float(np.exp((np.exp(log) * (log - mean)).sum(1).mean()))


def jackknife(measure: Callable[[np.ndarray], float], count: int) -> Interval:
    """Return a measure of a set with its 95 % interval, by leaving out one fold at a time.

    A bootstrap would draw pictures twice, which these measures would treat as less variety.

    Args:
        measure: Returns the measure of the pictures at some indices.
        count: Number of pictures.
    """
    places = np.arange(count)
    folds = min(FOLDS, count)
    left = np.array([measure(places[places % folds != fold]) for fold in range(folds)])
    spread = 1.96 * float(np.sqrt((folds - 1) / folds * np.square(left - left.mean()).sum()))
    value = measure(places)
    return Interval(value=value, low=value - spread, high=value + spread)


def judged(drawn: Seen, truth: Seen) -> dict[str, Interval]:
    """Return FID, KID and the Inception Score of found pictures, and that of the true ones."""
    count = len(truth.pooled)
    if count < FEWEST:
        return {}
    return {
        "fid": jackknife(lambda at: fid(drawn.pooled[at], truth.pooled[at]), count),
        "kid": jackknife(lambda at: kid(drawn.pooled[at], truth.pooled[at]), count),
        "inception_score": jackknife(lambda at: inception_score(drawn.logits[at]), count),
        "true_inception_score": jackknife(lambda at: inception_score(truth.logits[at]), count),
    }
