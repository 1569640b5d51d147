"""Figures of models that were trained for them (see `feddg_bench.analysis.figures.training`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddg_bench.analysis.figures.drawing import Picture
from feddg_bench.analysis.figures.embedding import Cloud, draw_clouds, embed, features
from feddg_bench.analysis.figures.gradcam import Seen, draw_maps, explain
from feddg_bench.analysis.figures.landscape import (
    Landscape,
    cosine,
    draw_landscapes,
    grid_losses,
    mean_loss,
    on_plane,
)
from feddg_bench.analysis.figures.styles import draw_styles
from feddg_bench.analysis.figures.training import Trained, sample
from feddg_bench.common.errors import DataError, SettingsError, unknown
from feddg_bench.common.streams import generator
from feddg_bench.core.messages import Weights
from feddg_bench.engine.worker import Worker

CLASSES = 10
"""Classes that an embedding can show apart."""


def tsne_picture(runs: Sequence[Trained], count: int) -> Picture:
    """Draw the features of up to ``count`` images a domain, methods down, rounds across."""
    first = runs[0]
    parts = sample(first, count, keep=lambda labels: labels < CLASSES)
    index = np.concatenate([part for _, part in parts])
    if len(index) < 4:
        raise DataError(
            f"t-SNE needs 4 images at least, and {len(index)} are held out: raise "
            f"data.id_test_fraction or --images"
        )
    domains = np.repeat(np.arange(len(parts)), [len(part) for _, part in parts])
    lines = []
    for run in runs:
        images, labels = run.images(index)
        line = []
        for number, weights in run.models.items():
            rows = features(run.load(weights), images)
            places = embed(rows, run.plan.settings.seed)
            title = f"{run.plan.settings.method}, round {number}"
            line.append(Cloud(title, places, labels.cpu().numpy(), domains))
        lines.append(line)
    title = f"{_title(first)}: t-SNE of features of {len(index)} images that no client holds"
    names = [domain for domain, _ in parts]
    return draw_clouds(_name("tsne", runs), title, lines, first.classes, names)


def gradcam_picture(runs: Sequence[Trained], count: int) -> Picture:
    """Draw what methods look at in ``count`` images of each domain."""
    first = runs[0]
    models, explained = [], []
    parts = sample(first, count)
    for run in runs:
        for number, weights in run.models.items():
            run.load(weights)
            models.append(f"{run.plan.settings.method}\nround {number}")
            explained.append([_explained(run, index) for _, index in parts])
    names = first.classes
    domains = []
    for place, (domain, index) in enumerate(parts):
        images, labels = first.images(index)
        seen = [
            Seen(
                picture,
                names[int(labels[n])],
                tuple((maps[place][0][n], names[maps[place][1][n]]) for maps in explained),
            )
            for n, picture in enumerate(_pictures(images))
        ]
        domains.append((domain, seen))
    return draw_maps(_name("gradcam", runs), f"{_title(first)}: Grad-CAM", models, domains)


def _explained(run: Trained, index: NDArray[np.int64]) -> tuple[NDArray[np.float32], list[int]]:
    images, _ = run.images(index)
    heat, classes = explain(run.method, images)
    return heat.float().cpu().numpy(), classes.tolist()


def landscape_picture(
    runs: Sequence[Trained], pair: Sequence[str], count: int, steps: int
) -> Picture:
    """Draw the losses of two clients around the model that they were sent.

    Args:
        runs: Trained to the round that is drawn.
        pair: Names of two clients; empty takes those whose domains differ most.
        count: Training images of each client, at most.
        steps: Points a side of the grid.

    Raises:
        SettingsError: If a client of the pair did not train in that round.
        DataError: If no two clients did.
    """
    first = runs[0]
    one, other = _pair(first, pair)
    found = []
    for run in runs:
        for client in (one, other):
            if client not in run.updates:
                raise DataError(
                    f"{run.plan.settings.method}: {client} sent no model in round "
                    f"{max(run.models)}; choose others with --pair"
                )
        held = [run.images(_some(run, client, count)) for client in (one, other)]
        found.append(_landscape(run, (one, other), held, steps))
    title = f"{_title(first)}\nloss around the global model, round {max(first.models)}"
    return draw_landscapes(_name("landscape", runs), title, found)


def _landscape(
    run: Trained, pair: tuple[str, str], images: Sequence[tuple[Tensor, Tensor]], steps: int
) -> Landscape:
    trainable = frozenset(run.method.trainable)
    names = sorted(trainable & set(run.before))
    models = (run.before, run.updates[pair[0]], run.updates[pair[1]])

    def losses(weights: Weights) -> tuple[float, ...]:
        return tuple(
            mean_loss(run.load(weights, client), *data)
            for client, data in zip(pair, images, strict=True)
        )

    grid = grid_losses(lambda x, y: on_plane(*models, x, y, trainable), losses, steps)
    corners = np.array([losses(model) for model in models]).T
    held = (_holds(run, pair[0]), _holds(run, pair[1]))
    angle = cosine(*models, names)
    return Landscape(run.plan.settings.method, pair, held, grid, corners, angle)


def _pair(run: Trained, pair: Sequence[str]) -> tuple[str, str]:
    """Return the clients asked for, or the two of the round whose domains differ most."""
    there = sorted(run.updates)
    for client in pair:
        if client not in there:
            raise SettingsError(unknown(f"client of round {max(run.models)}", client, there))
    if len(pair) == 2 and pair[0] != pair[1]:
        return pair[0], pair[1]
    if pair:
        raise SettingsError("expected two clients for --pair, such as client_001,client_014")
    if len(there) < 2:
        raise DataError(
            f"{run.plan.settings.method} trained {len(there)} client in round {max(run.models)}, "
            f"and a landscape needs two: raise --per-round, or choose a method with clients"
        )

    def distance(two: tuple[str, str]) -> float:
        one, other = (_shares(run, client) for client in two)
        return float(np.abs(one - other).sum())

    return max(combinations(there, 2), key=lambda two: (round(distance(two), 9), _back(two)))


def _back(two: tuple[str, str]) -> tuple[int, ...]:
    """Return a key that is larger for names that come first."""
    return tuple(-ord(letter) for letter in "".join(two))


def _shares(run: Trained, client: str) -> NDArray[np.float64]:
    counts = np.bincount(
        run.federation.domains_of(client), minlength=len(run.federation.sources)
    ).astype(np.float64)
    shares: NDArray[np.float64] = counts / counts.sum()
    return shares


def _holds(run: Trained, client: str) -> str:
    shares = _shares(run, client)
    most = np.argsort(-shares, kind="stable")[:2]
    return ", ".join(
        f"{100 * shares[d]:.0f} % {run.federation.sources[d]}" for d in most if shares[d]
    )


def _some(run: Trained, client: str, count: int) -> NDArray[np.int64]:
    """Return some of a client's training images, the same for all methods."""
    rng = generator(run.plan.settings.seed, "figures", "landscape", client)
    chosen: NDArray[np.int64] = np.sort(rng.permutation(run.federation.clients[client])[:count])
    return chosen


def styles_picture(runs: Sequence[Trained], count: int) -> Picture:
    """Draw images of each domain, and what the methods make of them for one client.

    Raises:
        SettingsError: If a method restyles nothing.
    """
    first = runs[0]
    parts = sample(first, count)
    images, _ = first.images(np.concatenate([index for _, index in parts]))
    client = min(first.tasks)
    made = [_pictures(images)]
    for run in runs:
        task = run.tasks[client]
        told = {**task.told, "images": images.to(run.device)}
        worker = Worker(run.spec, run.method)
        styled = worker.run(replace(task, call="styled", told=told)).value
        if styled is None:
            name = run.plan.settings.method
            raise SettingsError(
                f"{name} restyles no images with these settings: choose methods such as pardon, "
                f"ccst and fedccrl"
            )
        made.append(_pictures(styled))
    domains, start = [], 0
    for domain, index in parts:
        rows = [[m[n] for m in made] for n in range(start, start + len(index))]
        domains.append((domain, rows))
        start += len(index)
    methods = [run.plan.settings.method for run in runs]
    title = (
        f"{_title(first)}\nimages as {client} ({_holds(first, client)}) restyles them in round 1"
    )
    return draw_styles(_name("styles", runs), title, methods, domains)


def _pictures(images: Tensor) -> NDArray[np.float32]:
    pictures: NDArray[np.float32] = images.detach().cpu().float().permute(0, 2, 3, 1).numpy()
    return pictures


def _title(run: Trained) -> str:
    s = run.plan.settings
    return f"{s.dataset}, {s.protocol}, scenario {s.scenario}, recipe {run.plan.recipe}"


def _name(figure: str, runs: Sequence[Trained]) -> str:
    s = runs[0].plan.settings
    methods = "-".join(run.plan.settings.method for run in runs)
    text = f"{figure}-{s.dataset}-{s.protocol}-{s.scenario}-{methods}"
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text)
