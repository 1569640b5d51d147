"""Figures of images: Grad-CAM maps (Selvaraju et al., ICCV 2017) and restyled images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from feddg_bench.analysis.figures.drawing import Picture, layout
from feddg_bench.analysis.figures.training import (
    Trained,
    figure_stem,
    holding,
    image_grid,
    pixels,
    sample,
    title_of,
)
from feddg_bench.common.errors import SettingsError
from feddg_bench.core.method import Method
from feddg_bench.engine.worker import Worker
from feddg_bench.plugins import load_method, method_title
from feddg_bench.runs.request import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALLEST_MAP = 4
"""Positions per side below which a map cannot localise; earlier layers have larger maps."""


def grad_cam(maps: Tensor, gradients: Tensor) -> Tensor:
    """Return ReLU(sum over k of alpha_k A_k), alpha_k the mean gradient over positions.

    Maps A and the gradients of a class's score with respect to them are [B, K, H, W].

    Returns:
        [B, H, W], non-negative, not scaled.
    """
    alpha = gradients.mean(dim=(-2, -1), keepdim=True)
    return (alpha * maps).sum(dim=1).relu()


def explain(method: Method, images: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the maps of images, and the class that each map explains.

    They come from the backbone's last layer whose maps have at least `SMALLEST_MAP` positions per
    side; if there is none, from the last layer with the largest maps.

    Args:
        method: The model, in evaluation mode.
        images: [B, 3, H, W] in [0, 1].
        target: Classes [B]; by default the predicted ones.

    Returns:
        Maps [B, H, W] of the images' size, each divided by its largest value, in [0, 1]; 0 without
        evidence for the class. Classes [B].

    Raises:
        SettingsError: If the backbone has no maps.
    """
    with torch.enable_grad(), _maps_of(method.backbone) as found:
        images = images.detach().requires_grad_(True)  # so that autograd has a graph to the maps
        logits = method(images)
        classes = logits.argmax(dim=1) if target is None else target
        if not found:
            raise SettingsError(
                "Grad-CAM needs a backbone with convolutional maps, and this one has none"
            )
        side = [min(maps.shape[-2:]) for maps in found]
        least = min(SMALLEST_MAP, max(side))
        maps = [m for m, s in zip(found, side, strict=True) if s >= least][-1]
        scores = logits.gather(1, classes[:, None]).sum()
        (gradients,) = torch.autograd.grad(scores, maps)
    heat = grad_cam(maps.detach(), gradients)
    heat = heat / heat.amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(heat.dtype).tiny)
    size = (images.shape[-2], images.shape[-1])
    large = F.interpolate(heat[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]
    return large.clamp(0, 1), classes


@contextmanager
def _maps_of(backbone: nn.Module) -> Iterator[list[Tensor]]:
    """Collect all maps [B, K, H, W] from the first convolution on, in order of execution."""
    found: list[Tensor] = []
    convolved = [False]

    def keep(layer: nn.Module, _: Any, output: Any) -> None:
        convolved[0] |= isinstance(layer, nn.Conv2d)
        if convolved[0] and isinstance(output, Tensor) and output.dim() == 4:
            found.append(output)

    handles = [layer.register_forward_hook(keep) for layer in backbone.modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


Seen = tuple[NDArray[np.float32], str, list[tuple[NDArray[np.float32], str]]]
"""An image [H, W, 3] in [0, 1], its class, and each model's map [H, W] and predicted class."""


def gradcam_picture(runs: Sequence[Trained], count: int) -> Picture:
    """Draw ``count`` images of each domain, plain and lit by each model's Grad-CAM map."""
    first, names = runs[0], runs[0].classes
    parts = sample(first, count)
    domains: list[tuple[str, list[Seen]]] = []
    for domain, index in parts:
        images, labels = first.images(index)
        truth = [names[label] for label in labels.tolist()]
        shown = zip(pixels(images), truth, strict=True)
        domains.append((domain, [(image, name, []) for image, name in shown]))
    heads = ["image"]
    for run in runs:
        for number, weights in run.models.items():
            run.load(weights)
            heads.append(f"{method_title(run.plan.settings.method)}\nround {number}")
            for (_, index), (_, seen) in zip(parts, domains, strict=True):
                heat, classes = explain(run.method, run.images(index)[0])
                maps = heat.float().cpu().numpy()
                for n, (_, _, found) in enumerate(seen):
                    found.append((maps[n], names[int(classes[n])]))
    figure = image_grid(heads, domains, _draw_seen, row_height=1.15)
    said = "bright: what speaks for the class below; line: half of the maximum"
    title = f"{title_of(first)}: Grad-CAM"
    return layout(figure_stem("gradcam", runs), figure, title, said, photos=True)


def _draw_seen(seen: Seen, line: Sequence[Axes]) -> None:
    from matplotlib.patheffects import withStroke

    image, truth, found = seen
    pictures = (image, *(_lit(image, heat) for heat, _ in found))
    for axes, shown, said in zip(
        line, pictures, (truth, *(guess for _, guess in found)), strict=True
    ):
        axes.imshow(shown, vmin=0, vmax=1, interpolation="nearest")
        right = said == truth
        axes.set_xlabel(
            said if right else f"{said} (wrong)",
            labelpad=2,
            fontsize=7,
            fontweight="normal" if right else "bold",
        )
    for axes, (heat, _) in zip(line[1:], found, strict=True):
        if heat.max() > 0:
            edge = axes.contour(heat, levels=[0.5], colors=["white"], linewidths=0.8)
            edge.set_path_effects([withStroke(linewidth=2, foreground="black")])


def _lit(image: NDArray[np.float32], heat: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return an image in grey, dark where the map is 0, so that it is readable without colour."""
    grey = image @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    lit = (0.25 + 0.75 * grey) * (0.15 + 0.85 * heat)
    return np.repeat(lit[..., None], 3, axis=2)


def styles_picture(runs: Sequence[Trained], count: int) -> Picture:
    """Draw ``count`` images of each domain, and how each method restyles them on one client.

    Raises:
        SettingsError: If a method restyles nothing.
    """
    first = runs[0]
    parts = sample(first, count)
    images, _ = first.images(np.concatenate([index for _, index in parts]))
    client = min(first.tasks)
    made = [pixels(images)]
    for run in runs:
        task = run.tasks[client]
        told = {**task.told, "images": images.to(run.device)}
        worker = Worker(run.spec, run.method)
        styled = worker.run(replace(task, call="styled", told=told), stays=True).value
        if styled is None:
            raise _restyles_none(f"{run.plan.settings.method}, with these settings,")
        made.append(pixels(styled))
    domains, start = [], 0
    for domain, index in parts:
        rows = [[m[n] for m in made] for n in range(start, start + len(index))]
        domains.append((domain, rows))
        start += len(index)
    heads = ("image", *(method_title(run.plan.settings.method) for run in runs))
    figure = image_grid(heads, domains, _draw_line, row_height=0.98)
    said = f"images as {client} ({holding(first, client)}) restyles them in round 1"
    return layout(figure_stem("styles", runs), figure, title_of(first), said, photos=True)


def check_restyling(plans: Iterable[Plan]) -> None:
    """Reject methods that restyle no images, whatever their settings.

    Raises:
        SettingsError: If there is one.
    """
    for plan in plans:
        if load_method(plan.settings.method).styled is Method.styled:
            raise _restyles_none(plan.settings.method)


def _restyles_none(who: str) -> SettingsError:
    return SettingsError(
        f"{who} restyles no images: choose methods such as pardon, ccst and fedccrl"
    )


def _draw_line(versions: Sequence[NDArray[np.float32]], line: Sequence[Axes]) -> None:
    for axes, version in zip(line, versions, strict=True):
        axes.imshow(np.clip(version, 0, 1), interpolation="nearest")
