"""FedCCRL: align two augmented views in the colours of other clients with the original."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchvision.transforms import v2

from feddg_bench.common.streams import torch_generator, torch_stream
from feddg_bench.core.client import Batch, Client, on_device, rows_on_device
from feddg_bench.core.messages import LocalUpdate
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.choices import choose
from feddg_methods.shared.draws import draw_rows, share_count
from feddg_methods.shared.passes import features_of_each, to_bytes, widened
from feddg_methods.shared.perturbation import PerturbationSettings

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "released": {"lambda2": 0.1, "count_self": True, "clamp": False, "upload_rounding": "floor"},
    "paper_mean_ce": {"classification": "mean"},
}
"""Defaults that each variant changes: the authors' code, and the paper's mean over views."""

MIN_PROBABILITY = 1e-7
"""Smallest mean probability inside the logarithm of the Jensen-Shannon divergence."""

EPS = 1e-6
"""Added to each variance before the root, so that a constant image can be divided by its std."""

MOST_CHAINS = 3
"""Maximum number of chains, if the number is drawn."""


class FedCCRLSettings(PerturbationSettings):
    """Variants, loss weights and ablation switches; the defaults are the paper's."""

    labels: ClassVar[tuple[str, ...]] = ("variant", "ccdt", "difp", "ra", "js")
    presets = VARIANTS
    preset_of = "variant"
    impossible = tuple(
        (
            {alignment: True, "ccdt": False, "difp": False},
            "ra and js align augmented views, but ccdt and difp, which make them, are both off: "
            "turn one of these on, or ra and js off",
        )
        for alignment in ("ra", "js")
    )

    variant: Literal["default", "released", "paper_mean_ce"] = "default"
    """Sets the defaults of the settings below; each can still be set individually."""
    ccdt: bool = True
    """Cross-client domain transfer: views take on other clients' channel statistics."""
    difp: bool = True
    """Domain-invariant feature perturbation: views go through AugMix. Without this and ``ccdt``
    there are no views: the loss is the cross-entropy of the originals."""
    ra: bool = True
    """Representation alignment; needs views."""
    js: bool = True
    """Prediction alignment; needs views."""
    upload_ratio: float = Field(0.1, gt=0, le=1)
    """r: share of a client's images whose statistics it sends."""
    upload_rounding: Literal["ceil", "floor"] = "ceil"
    """max(1, ceil(r n)) pairs as in FedCCRL's paper, or floor(r n), perhaps 0, as in its code."""
    upload_subset: Literal["each_round", "fixed"] = "each_round"
    """Draw of the images whose statistics are sent: anew in each round, or once for the run."""
    alpha: float = Field(0.1, gt=0)
    """Parameter of the Beta(alpha, alpha) distribution that weights an image's own statistics."""
    clamp: bool = True
    """Clamp and round images before AugMix; FedCCRL's code lets them wrap around at 0 and 255."""
    chains: int | None = Field(3, ge=1)
    """AugMix's chains: 3 as in FedCCRL's code; null draws 1 to 3 for each batch as in its text."""
    per_image: bool = False
    """Draw AugMix's operations per image as in FedCCRL's paper, or per batch as in its code."""
    classification: Literal["sum", "mean"] = "sum"
    """Sum of the views' three cross-entropies as in FedCCRL's code, or mean as in its text."""
    temperature: float = Field(0.1, gt=0)
    """tau of the representation alignment."""
    contrast: Literal["mean", "sum"] = "mean"
    """Mean over the 2B anchors of the representation alignment, or their sum as in FedCCRL's text,
    which grows with the batch."""
    count_self: bool = False
    """Count an anchor among its own positives, as FedCCRL's code does."""
    lambda1: float = Field(0.1, ge=0)
    """Weight of the representation alignment."""
    lambda2: float = Field(1.0, ge=0)
    """Weight of the prediction alignment; 1.0 in the paper's study, 0.1 by default in the code."""


class FedCCRL(Method):
    """FedCCRL (Wang et al., 2024, arXiv 2410.11267).

    In each round every client sends the channel means and standard deviations of some images, and
    each training client receives those of all others. Two views of each batch, X1 and X2, are
    restyled to statistics drawn from these and perturbed by AugMix. A client minimises
    L = CE + CE1 + CE2 + lambda 1 RA + lambda 2 JS. The server is FedAvg's.
    """

    Settings = FedCCRLSettings
    settings: FedCCRLSettings
    uplink: ClassVar = {"fit": ("weights",), "statistics": {"statistics": "float32 [n, 2, 3]"}}
    downlink = ("pool",)
    singles = "tells clients the statistics of single others"
    group = "style"
    rgb_only = True
    title = "FedCCRL"
    citation = (
        "X. Wang, Y. Guo, X. Tang: FedCCRL: Federated Domain Generalization with Cross-Client "
        "Representation Learning, 2024, arXiv 2410.11267"
    )

    def build(self) -> None:
        self.generator: torch.Generator | None = None

    # ---------------------------------------------------------------- statistics, each round

    def run_round(self, server: Server) -> None:
        tell = None
        if self.settings.ccdt:
            replies = server.ask(self.statistics, everyone=True, weights=False)
            sent = {reply.client: reply.value["statistics"] for reply in replies}
            nothing = next(iter(sent.values()))[:0]
            tell = {
                client: {"pool": torch.cat([nothing, *(s for c, s in sent.items() if c != client)])}
                for client in server.cohort
            }
        server.weights = self.aggregate(server, server.ask(self.fit, tell=tell))

    @torch.no_grad()
    def statistics(self, client: Client) -> dict[str, Tensor]:
        """Return channel means and deviations of some stored images, [m, 2, 3] in [0, 1]."""
        s = self.settings
        if "statistics" not in client.memory:
            batches = client.batches(train=False)
            parts = [torch.stack(channel_statistics(images), dim=1) for images, _ in batches]
            # Perturbed once: fresh noise would average out over many rounds.
            client.memory["statistics"] = s.perturbed(torch.cat(parts), client)
        known = client.memory["statistics"]  # [n, 2, 3]
        if s.upload_subset == "fixed":
            generator = torch_generator(client.seed, "upload", client.name)
        else:
            generator = client.generator("upload")
        count = share_count(len(known), s.upload_ratio, s.upload_rounding)
        rows = draw_rows(len(known), count, generator)
        return {"statistics": known[rows.to(known.device)]}

    # -------------------------------------------------------------- training, each round

    def fit(self, client: Client) -> LocalUpdate:
        with self.temporarily(generator=client.generator("views")):
            return super().fit(client)

    def styled(self, client: Client) -> Tensor | None:
        if not (self.settings.ccdt or self.settings.difp):
            return None
        images = client.broadcast["images"]
        with self.temporarily(generator=client.generator("views")):
            return self.view(images, channel_statistics(images))

    @torch.no_grad()
    def view(self, images: Tensor, own: tuple[Tensor, Tensor]) -> Tensor:
        """Return one augmented view DIFP(CCDT(X)) of images [B, 3, H, W]; ``own``: statistics."""
        s, generator = self.settings, self.generator or torch.default_generator
        if s.ccdt:
            pool = images[:0] if self.alone else self.client.broadcast["pool"]
            if not len(pool):  # no other client sent any: use the batch's own, as MixStyle does
                pool = torch.stack(own, dim=1)
            rows = self.chosen(len(pool), len(images), generator)
            mean, std = rows_on_device(pool, rows, images.device).unbind(1)  # [B, 3] each
            (mix,) = on_device([draw_beta(s.alpha, len(images), generator)], images.device)
            images = _moved(images, own, mean, std, mix)
        if s.difp:
            pixels = to_bytes(images, clamp=s.clamp)
            images = augmix(pixels, generator, chains=s.chains, per_image=s.per_image) / 255
        return images

    def chosen(self, count: int, size: int, generator: torch.Generator) -> Tensor:
        """Return the rows, of ``count`` in the pool, whose styles ``size`` images take on."""
        return draw_rows(count, size, generator)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        s = self.settings
        images, labels = batch
        if not (s.ccdt or s.difp):
            return super().training_step(batch, batch_idx)
        own = channel_statistics(images)
        views = [images, self.view(images, own), self.view(images, own)]
        z = features_of_each(self, views)  # Z, Z1, Z2: [B, D] each
        logits = [self.classifier(features) for features in z]
        losses = torch.stack([F.cross_entropy(scores, labels) for scores in logits])
        loss = losses.mean() if s.classification == "mean" else losses.sum()
        if s.ra and s.lambda1:
            loss = loss + s.lambda1 * self.alignment(z, labels)
        if s.js and s.lambda2:
            wide = torch.promote_types(z[0].dtype, torch.float32)
            predictions = [F.softmax(scores, dim=1, dtype=wide) for scores in logits]
            loss = loss + s.lambda2 * jensen_shannon(predictions)
        return loss

    def alignment(self, z: list[Tensor], labels: Tensor) -> Tensor:
        """Return RA = (SC(Z1, Z) + SC(Z2, Z)) / 2 of the features of the three views."""
        s = self.settings
        terms = [
            supervised_contrastive(
                torch.cat([view, z[0]]),
                labels,
                temperature=s.temperature,
                reduction=s.contrast,
                count_self=s.count_self,
            )
            for view in z[1:]
        ]
        return torch.stack(terms).mean()


def supervised_contrastive(
    z: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    reduction: Literal["mean", "sum"] = "mean",
    count_self: bool = False,
) -> Tensor:
    """Contrast features of one class with all others, over the views of a batch: SC.

    The mean over anchors i of -1/|P(i)| sum_{p in P(i)} log(e^{z_i z_p / tau} / sum_{a != i}
    e^{z_i z_a / tau}), with z normalised and P(i) the other features of the class of i.

    An anchor whose class has no other feature contributes 0.

    Source: Khosla et al., NeurIPS 2020, Eq. 2; FedCCRL's representation alignment is the mean of
    two such terms. FedCCRL's text sums over anchors; its code takes the mean, and counts the
    anchor among its own positives (``count_self``), which weakens their pull.

    Args:
        z: Features, [2B, D], one view after the other, not normalised.
        labels: Class ids of the features, [2B], or of one view, [B].
        temperature: Divides the cosine similarities, above 0.
        reduction: Combination of the anchors' losses.
        count_self: Count an anchor as a positive of itself; for the authors' code.

    Returns:
        A scalar.

    Raises:
        SettingsError: If ``reduction`` is unknown.
    """
    labels = labels.repeat(len(z) // len(labels))
    with torch.autocast(z.device.type, enabled=False):
        z = F.normalize(widened(z), dim=1, eps=1e-12)
        similarity = z @ z.T / temperature  # [2B, 2B]
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

    JS = 1/V sum_v KL(p_v || mean p), averaged over the batch.

    Gradients flow through the mean prediction too.

    Source: FedCCRL's prediction alignment, with three predictions; as in its code the mean
    prediction is at least 1e-7 inside the logarithm.

    Args:
        probabilities: V tensors [B, C], rows in the simplex.

    Returns:
        A scalar between 0 and log V, up to the clamp.
    """
    views = torch.stack([widened(p) for p in probabilities])  # [V, B, C]
    mean = views.mean(dim=0).clamp(MIN_PROBABILITY, 1)
    # A softmax can underflow to 0, where p log p has no finite gradient.
    logs = views.clamp(min=torch.finfo(views.dtype).tiny).log()
    return (views * (logs - mean.log())).sum(dim=-1).mean()


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of every channel of every image.

    Args:
        images: [B, C, H, W], any affine scale of pixel values.

    Returns:
        Mean and standard deviation, [B, C] each. The variance is unbiased. Images of a single pixel
        have no unbiased variance and get the biased one, 0.
    """
    several = images.shape[-2] * images.shape[-1] > 1
    variance = images.var(dim=(-2, -1), correction=int(several))
    return images.mean(dim=(-2, -1)), (variance + EPS).sqrt()


def restyle(images: Tensor, mean: Tensor, std: Tensor, mix: Tensor) -> Tensor:
    """Move every image towards a foreign style: cross-client domain transfer (CCDT).

    sigma' (x - mu(x)) / sigma(x) + mu', with mu' = l mu(x) + (1 - l) mean, and sigma' likewise.

    mu(x) and sigma(x) are each channel's own statistics, constants to autograd, and l is ``mix``.
    The map commutes with a normalisation of the channels as long as the foreign statistics are on
    the scale of the images. Nothing is clamped: the result can leave the range of the images.

    FedCCRL (Wang et al., 2024) puts the weight on the foreign pair; for its symmetric Beta
    distribution this is equivalent.

    Args:
        images: [B, 3, H, W].
        mean: Foreign mean of each image and channel, [B, 3].
        std: Foreign standard deviation, [B, 3], not negative.
        mix: Weight of the image's own statistics, [B], in [0, 1].

    Returns:
        Images, [B, 3, H, W].
    """
    return _moved(images, channel_statistics(images), mean, std, mix)


def _moved(
    images: Tensor, own: tuple[Tensor, Tensor], mean: Tensor, std: Tensor, mix: Tensor
) -> Tensor:
    """Return the result of `restyle` for images with known `channel_statistics`."""
    own_mean, own_std = (s.detach()[..., None, None] for s in own)
    mix = mix[:, None, None, None]
    new_mean = mix * own_mean + (1 - mix) * mean[..., None, None]
    new_std = mix * own_std + (1 - mix) * std[..., None, None]
    return new_std * (images - own_mean) / own_std + new_mean


class _WithoutWaiting(TorchFunctionMode):
    """Creates torchvision's small tensors on the CPU and moves them with `on_device`."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        device = given.pop("device", None)
        if function is not torch.tensor or device is None:
            return function(*args, **(kwargs or {}))
        return on_device([function(*args, **given)], torch.device(device))[0]


class _AugMix(v2.AugMix):  # type: ignore[misc]  # torchvision has no types
    """Draws the mixing weights on the CPU, where torchvision draws everything else."""

    def _sample_dirichlet(self, params: Tensor) -> Tensor:
        known = torch.full(params.shape[1:], self.alpha).expand(params.shape)  # no device sync
        return on_device([torch._sample_dirichlet(known)], params.device)[0]


def augmix(
    images: Tensor,
    generator: torch.Generator,
    *,
    chains: int | None = 3,
    per_image: bool = False,
) -> Tensor:
    """Return AugMix of images: a mixture of each with itself after chains of random operations.

    Chains are 1 to 3 operations long, out of 13 at severity 3; mixing weights come from a flat
    Dirichlet distribution over chains and a flat Beta distribution between the mixture and the
    image. The weights are drawn for each image, the operations for the whole batch unless
    ``per_image``, which is no slower on a CPU but makes a GPU work on one image at a time.

    Args:
        images: uint8 [B, 3, H, W], on any device.
        generator: On the CPU; it always advances by one number.
        chains: Number of chains; ``None`` draws 1, 2 or 3 each time operations are drawn.
        per_image: Draw operations, their order and strengths for each image separately.

    Returns:
        uint8 [B, 3, H, W].
    """
    seed = int(torch.randint(2**62, (), generator=generator))
    groups = images.split(1) if per_image else (images,)
    # torchvision draws from the global generator, and autocast would round its pixel coordinates.
    plain = torch.autocast(images.device.type, enabled=False)
    with torch_stream(seed, "augmix"), plain, _WithoutWaiting():
        return torch.cat([_mixed(group, chains) for group in groups])


def _mixed(images: Tensor, chains: int | None) -> Tensor:
    width = int(torch.randint(1, MOST_CHAINS + 1, ())) if chains is None else chains
    mixed: Tensor = _AugMix(mixture_width=width)(images)
    return mixed


def draw_beta(alpha: float, size: int, generator: torch.Generator) -> Tensor:
    """Draw ``size`` numbers from Beta(alpha, alpha), float32 (size,) in [0, 1].

    Args:
        alpha: Above 0; small values put most of the mass next to 0 and 1.
        size: Number of draws.
        generator: On the CPU.
    """
    # G1 / (G1 + G2) for Gamma draws G, in logarithms because both underflow for small alpha.
    # Gamma(alpha) is drawn as Gamma(alpha + 1) U^(1 / alpha).
    shape = torch.full((2, size), alpha + 1, dtype=torch.float64)
    uniform = 1 - torch.rand(2, size, dtype=torch.float64, generator=generator)
    first, second = torch._standard_gamma(shape, generator=generator).log() + uniform.log() / alpha
    return torch.sigmoid(first - second).float()


DEVIATIONS = (
    "The paper averages the cross-entropies of the three views; the code adds them up. So do we "
    "(`classification`).",
    "The paper sums the representation alignment over the 2B anchors; the code takes the mean. So"
    " do we (`contrast`).",
    "The code counts an anchor among its own positives, which weakens their pull. The paper does "
    "not, and neither do we (`count_self`).",
    "The prediction alignment has weight 1.0 in the paper's sensitivity study and 0.1 by default "
    "in the code. We take 1.0 (`lambda2`).",
    "The code sends int(r n) pairs of statistics, which may be none. We send max(1, ceil(r n)) "
    "(`upload_rounding`).",
    "The code casts to 8 bits without clamping, so bright and dark pixels wrap around. We clamp "
    "and round (`clamp`).",
    "The paper draws AugMix's operations for every image; the code draws them once for a batch. "
    "So do we (`per_image`).",
    "The paper draws 1, 2 or 3 AugMix chains; the code always has 3. So do we (`chains`).",
    "The paper's algorithm box exchanges the mixed mean and the mixed deviation. The code does "
    "not, and neither do we.",
    "The paper puts lambda on the foreign statistics; the code and we put it on the image's own, "
    "which has the same distribution.",
    "The code decodes images anew in every round to measure a random part of them. We measure all"
    " of them once and draw a part in every round.",
)
"""Where published code differs from its paper, and what this module does."""
