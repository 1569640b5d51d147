"""Figure of images of every domain, beside the same images restyled by methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from feddg_bench.analysis.figures.drawing import Picture, entitle
from feddg_bench.analysis.figures.shared import figure_stem, holding, image_grid, pixels, title_of
from feddg_bench.analysis.figures.training import Trained, sample
from feddg_bench.analysis.tables.titles import method_title
from feddg_bench.common.errors import SettingsError
from feddg_bench.core.method import Method
from feddg_bench.engine.worker import Worker
from feddg_bench.plugins import load_method
from feddg_bench.runs.request import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    entitle(figure, title_of(first), said)
    return Picture(figure_stem("styles", runs), figure, photos=True)


def check_restyling(plans: Iterable[Plan]) -> None:
    """Refuse methods that restyle no images, whatever their settings.

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
