"""FedDG: train on images with the low-frequency amplitudes of other clients' images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, Client, on_device
from feddg_bench.core.messages import Payload
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server


class FedDGSettings(MethodSettings):
    """Exchanged frequencies, and episodes."""

    labels: ClassVar[tuple[str, ...]] = ("alpha",)

    alpha: float = Field(0.01, ge=0, lt=0.5)
    """Half the width of the exchanged window of low frequencies, as a fraction of the image's side.
    Rounded down, 0.01 gives 2 frequencies at 224 px, and 0, the mean colour, below 100 px; the
    authors' released code takes 0 at 384 px."""
    beta: float = Field(1e-3, ge=0)
    """Step of the inner update, beta in the paper; the value is that of the authors' code."""
    meta_weight: float = Field(1.0, ge=0)
    """Weight of the loss on transformed images. 0 is FedAvg."""
    first_order: bool = False
    """Treat the inner gradient as a constant, as the authors' code does."""


class FedDG(Method):
    """FedDG, episodic learning in continuous frequency space (Liu et al., CVPR 2021).

    Before round 1 every client sends the low-frequency amplitude spectra of its images, and the
    server sends all of them, the distribution bank, to every client. In training each image x gets
    a transformed image T(x): its low-frequency amplitudes are interpolated with those of a random
    image of another client, with lambda ~ U(0, 1), and its phases are kept (Equations 1 and 2).

    An episode takes a step on the image, theta' = theta - beta grad L(x; theta), and evaluates
    theta' on the transformed image. Clients minimise L(x; theta) + L(T(x); theta'), over theta in
    both terms. The server is FedAvg's. The paper's boundary loss, which is for segmentation, is
    left out.

    Spectra are exchanged between clients, so a client can hold one domain or several. A single
    client has no others, and trains as in FedAvg.
    """

    group = "style"
    rgb_only = True
    singles = "sends the spectra of each client to all others"
    title = "FedDG"
    citation = (
        "Liu, Chen, Qin, Dou and Heng: FedDG: Federated Domain Generalization on Medical Image "
        "Segmentation via Episodic Learning in Continuous Frequency Space, CVPR 2021, "
        "arXiv 2103.06030"
    )
    Settings = FedDGSettings
    settings: FedDGSettings
    uplink: ClassVar = {
        "fit": ("weights",),
        "spectra": {"amplitudes": "float32 [n, C, F, F]"},
    }
    downlink = ("bank",)

    # ------------------------------------------------------------------- distribution bank

    def prepare(self, server: Server) -> None:
        if self.settings.meta_weight:
            replies = server.ask(self.spectra, everyone=True, weights=False)
            server.broadcast["bank"] = {r.client: r.value["amplitudes"] for r in replies}

    def spectra(self, client: Client) -> Payload:
        """Return the low-frequency amplitudes of the client's images, [n, C, F, F]."""
        parts = [
            low_amplitudes(images, self.settings.alpha) for images, _ in client.batches(train=False)
        ]
        return {"amplitudes": torch.cat(parts)}

    def drawn(self, client: Client, count: int, generator: torch.Generator) -> Tensor | None:
        """Return amplitudes of random images of random other clients, [count, C, F, F]."""
        others = [own for name, own in client.broadcast["bank"].items() if name != client.name]
        if not others:
            return None
        rows = []
        for n in torch.randint(len(others), (count,), generator=generator).tolist():
            j = int(torch.randint(len(others[n]), (), generator=generator))
            rows.append(others[n][j])
        return torch.stack(rows).clamp(min=0).to(self.device)  # noise may have made them negative

    # ---------------------------------------------------------------------------- episodes

    def batches(self, client: Client, epoch: int) -> Iterator[Batch]:
        generator = client.generator("feddg", epoch)
        for images, labels in super().batches(client, epoch):
            amplitudes = None
            if self.settings.meta_weight:
                amplitudes = self.drawn(client, len(labels), generator)
            if amplitudes is None:
                yield images, labels
            else:
                lam = torch.rand(len(labels), generator=generator)
                (lam,) = on_device([lam], images.device)
                yield images, labels, exchange_amplitudes(images, amplitudes, lam)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels, *transformed = batch
        loss = self.task.loss(self(images), labels, "mean")
        if not transformed:
            return loss
        s = self.settings
        theta = {name: p for name, p in self.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(
            loss,
            list(theta.values()),
            create_graph=not s.first_order,
            retain_graph=True,
            allow_unused=True,
        )
        stepped = {
            name: p if g is None else p - s.beta * g
            for (name, p), g in zip(theta.items(), gradients, strict=True)
        }
        outputs = functional_call(self, stepped, (transformed[0],))
        return loss + s.meta_weight * self.task.loss(outputs, labels, "mean")

    def styled(self, client: Client) -> Tensor | None:
        images = client.broadcast["images"]
        amplitudes = self.drawn(client, len(images), client.generator("styled"))
        if amplitudes is None:
            return None
        lam = torch.ones(len(images), device=images.device)
        return exchange_amplitudes(images, amplitudes, lam).clamp(0, 1)


def low_amplitudes(images: Tensor, alpha: float) -> Tensor:
    """Return the amplitudes of the lowest frequencies, [B, C, F, F] with F = 2 floor(alpha S) + 1.

    Args:
        images: [B, C, H, W]; S is the smaller of H and W.
        alpha: Half the width of the window, as a fraction of S.
    """
    spectrum = torch.fft.fftshift(torch.fft.fft2(images.float()), dim=(-2, -1))
    rows, columns = _window(images, int(alpha * min(images.shape[-2:])))
    amplitudes: Tensor = spectrum[..., rows, columns].abs()
    return amplitudes


def exchange_amplitudes(images: Tensor, amplitudes: Tensor, lam: Tensor) -> Tensor:
    """Return images whose low-frequency amplitudes are (1 - lambda) A + lambda A'.

    Phases and higher frequencies are those of the images. Values can leave [0, 1].

    Args:
        images: [B, C, H, W].
        amplitudes: A', [B, C, F, F], from `low_amplitudes` of images of the same size.
        lam: lambda in [0, 1], [B].
    """
    spectrum = torch.fft.fftshift(torch.fft.fft2(images.float()), dim=(-2, -1))
    rows, columns = _window(images, amplitudes.shape[-1] // 2)
    low = spectrum[..., rows, columns]
    mixed = torch.lerp(low.abs(), amplitudes, lam[:, None, None, None])
    spectrum[..., rows, columns] = torch.polar(mixed, low.angle())
    back: Tensor = torch.fft.ifft2(torch.fft.ifftshift(spectrum, dim=(-2, -1))).real
    return back.to(images.dtype)


def _window(images: Tensor, half: int) -> tuple[slice, slice]:
    """Return rows and columns of the frequencies up to ``half`` in a shifted spectrum."""
    middle = [size // 2 for size in images.shape[-2:]]
    rows, columns = (slice(m - half, m + half + 1) for m in middle)
    return rows, columns


DEVIATIONS = (
    "Equation 1 scales amplitudes outside the window by 1 - lambda, so lambda = 1 would erase all "
    "details. As in the authors' code, ours leaves them as they are.",
    "The paper transforms each image once for every other client. As in the authors' code, ours "
    "enters a step with one transformed image: there may be 100 clients.",
    "The authors' released code exchanges the mean colour alone, entirely (lambda = 1), and clips "
    "the result. We interpolate as the paper does, and do not clip.",
    "The paper adds a contrastive loss on the boundaries of segmented organs. Classes of whole "
    "images have none, so we leave it out.",
    "The paper's gradient passes through the inner step; the authors' code treats the inner "
    "gradient as a constant. We follow the paper (`first_order`).",
    "The authors' code draws from whole spectra of an eighth of the images. Clients here send the "
    "window that is exchanged, of all images.",
    "FedDG_Benchmark has no episodes: it trains on transformed images alone, with windows of "
    "random width up to the whole spectrum and a bank of all training images. We follow the paper.",
)
"""Where published code differs from its paper, and what this module does."""
