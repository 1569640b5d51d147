"""Gradient inversion: recover the images of one training step from its update.

A client that takes one plain SGD step on a batch sends its gradient: g = (w - w') / lr. The server
looks for images x whose gradient equals g. ``dlg`` minimises |g(x) - g|^2 by L-BFGS (Zhu,
Liu and Han, NeurIPS 2019); ``cosine`` minimises 1 - cos(g(x), g) + b TV(x) by Adam with signed
gradients (Geiping et al., NeurIPS 2020). Labels are known, as in the latter; the loss is
cross-entropy, without the terms that a method adds. Clients of the attacked runs hold 1, 4 or
16 images and take one step on images as stored. Their network is small and has no projection: a
search needs thousands of second-order gradients, which take hours for an EfficientNet.
``backbone.name`` sets another network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from threading import Event
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from feddg_attacks.attack import Attack, Pictures, Scene, interval, no_leak, planted_leak
from feddg_attacks.capture import Message
from feddg_attacks.judges import Perceptual
from feddg_attacks.kinds.membership import MOST_OTHERS, percentiles
from feddg_attacks.pictures import sheet
from feddg_attacks.records import AttackResult
from feddg_attacks.shadow import PLAIN
from feddg_bench.common.parallel import in_threads
from feddg_bench.common.streams import torch_generator
from feddg_bench.core.messages import nbytes
from feddg_bench.core.method import Method
from feddg_bench.data.augment import to_float
from feddg_bench.engine.construction import build_run_method

Objective = Literal["cosine", "dlg"]
OBJECTIVES: tuple[Objective, ...] = ("cosine", "dlg")
SMOOTH = 0.2
"""b, weight of the total variation."""
DRAWS = 4
"""Number of attacked clients."""
FOUND = 0.8
"""Rank that a planted leak must reach."""

Gradient = dict[str, Tensor]


def gradient_of(
    method: Method, images: Tensor, labels: Tensor, names: Sequence[str], *, graph: bool = False
) -> Gradient:
    """Return the gradient of the mean loss at the module's weights, by parameter.

    Args:
        method: Holds the weights that the client received.
        images: [B, 3, H, W].
        labels: [B].
        names: Names of the parameters.
        graph: Whether the gradient is differentiated again.
    """
    parameters = dict(method.named_parameters())
    loss = method.task.loss(method(images), labels, "mean")
    gradients = torch.autograd.grad(
        loss, [parameters[n] for n in names], create_graph=graph, allow_unused=True
    )
    pairs = zip(names, gradients, strict=True)
    return {n: torch.zeros_like(parameters[n]) if g is None else g for n, g in pairs}


def mismatch(gradient: Gradient, wanted: Gradient, objective: Objective) -> Tensor:
    """Return the distance between two gradients: a scalar."""
    if objective == "dlg":
        return torch.stack([(gradient[n] - wanted[n]).square().sum() for n in wanted]).sum()
    product = torch.stack([(gradient[n] * wanted[n]).sum() for n in wanted]).sum()
    lengths = [torch.stack([g.norm() for g in one.values()]).norm() for one in (gradient, wanted)]
    found_cosine: Tensor = product / (lengths[0] * lengths[1]).clamp(min=1e-15)
    return 1 - found_cosine


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference down the columns plus that along the rows: a scalar.

    Args:
        images: [B, C, H, W].
    """
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    return down + (images[..., 1:] - images[..., :-1]).abs().mean()


def invert(
    method: Method,
    wanted: Gradient,
    labels: Tensor,
    shape: Sequence[int],
    objective: Objective,
    generator: torch.Generator,
    steps: int,
    smooth: float = SMOOTH,
    stop: Event | None = None,
) -> Tensor:
    """Return the images [B, C, H, W] in [0, 1] whose gradient is nearest to ``wanted``.

    Args:
        method: Holds the weights that the client received.
        wanted: The gradient that the client sent, by parameter.
        labels: Labels of the images, [B].
        shape: C, H and W.
        objective: See the module.
        generator: Draws the initial images of the search.
        steps: Steps of the search.
        smooth: b, for ``cosine`` only.
        stop: Set when the images are no longer needed.

    Raises:
        CancelledError: If ``stop`` is set.
    """
    begin = torch.rand(len(labels), *shape, generator=generator)
    x = begin.requires_grad_()
    names = list(wanted)

    def distance() -> Tensor:
        if stop is not None and stop.is_set():
            raise CancelledError
        gradient = gradient_of(method, x, labels, names, graph=True)
        prior = smooth * total_variation(x) if objective == "cosine" else x.new_zeros(())
        return mismatch(gradient, wanted, objective) + prior

    if objective == "dlg":
        scale = 1 / mismatch({n: torch.zeros_like(g) for n, g in wanted.items()}, wanted, "dlg")
        search = torch.optim.LBFGS(
            [x], lr=1, max_iter=steps, max_eval=steps, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            loss = distance() * scale
            (x.grad,) = torch.autograd.grad(loss, [x])
            return loss

        search.step(closure)
        return x.detach().nan_to_num(0.5).clamp(0, 1)
    adam = torch.optim.Adam([x], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for _ in range(steps):
        (slope,) = torch.autograd.grad(distance(), [x])
        x.grad = slope.sign()
        adam.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(0, 1)
    return x.detach()


class GradientInversion(Attack):
    """The scorer's half: are the client's own images nearer to the found ones than others are?"""

    kind = "gradient-inversion"
    wants = "the weights that two clients or more train"
    judged = True
    steps = 250
    sizes: ClassVar[tuple[int, ...]] = (1, 4, 16)
    overrides: ClassVar[Mapping[str, Any]] = {
        "federation": {"rounds": 1, "per_round": DRAWS},
        "train": {
            "optimizer": "sgd",
            "lr": 0.01,
            "momentum": 0.0,
            "weight_decay": 0.0,
            "local_epochs": 1,
            "batch_size": 32,
        },
        "augment": PLAIN.model_dump(mode="json"),
        "backbone": {"name": "small_cnn", "pretrained": False, "projection": 0},
    }

    def reads(self, item: str) -> bool:
        """Return whether the item is a model."""
        return item == "weights"

    def measure(self, scene: Scene) -> Iterator[AttackResult]:
        """Invert the first updates of some clients with every objective."""
        sent = [m for m in scene.messages() if m.up and self.reads(m.item)]
        first = [m for m in sent if m.when[0] == 1 and m.when[1] == "fit"][:DRAWS]
        if len(first) < 2:
            raise self.nothing(scene)
        method = build_run_method(scene.settings, scene.federation)
        method.train()
        method.state.load(first[0].exchange.task.weights)
        others = scene.part("id_test", MOST_OTHERS)
        held = [scene.pictures(scene.federation.clients[m.client]) for m in first]
        wanted = [self.gradient(m, scene, method) for m in first]
        for objective in OBJECTIVES:
            yield self._result(scene, method, objective, held, wanted, others)

    @staticmethod
    def gradient(message: Message, scene: Scene, method: Method) -> Gradient:
        """Return the gradient that an update implies, if it was one SGD step."""
        old = message.exchange.task.weights
        names = [n for n, _ in method.named_parameters() if n in message.value and n in old]
        return {n: (old[n] - message.value[n]) / scene.settings.train.lr for n in names}

    def _result(
        self,
        scene: Scene,
        method: Method,
        objective: Objective,
        held: Sequence[Pictures],
        wanted: Sequence[Gradient],
        others: Pictures,
    ) -> AttackResult:
        candidates = to_float(torch.from_numpy(others.images))
        shape = tuple(candidates.shape[1:])
        truth = [to_float(torch.from_numpy(h.images)) for h in held]
        places = range(len(held))
        away = [(place + 1) % len(held) for place in places]
        plants = scene.draw("planted").permutation(len(others))[: len(held)].tolist()
        names = list(wanted[0])
        # Gradients to invert: those of updates that were sent, and those of a single image each.
        sought: list[tuple[Gradient, np.ndarray, tuple[str | int, ...]]] = [
            (g, h.labels, (i,)) for i, g, h in zip(places, wanted, held, strict=True)
        ]
        for plant in plants:
            labels = torch.from_numpy(others[[plant]].labels)
            image = candidates[[plant]].contiguous()  # layout as in searches: bits depend on it
            leak = gradient_of(method, image, labels, names)
            alone = {n: g.detach() for n, g in leak.items()}
            sought.append((alone, others[[plant]].labels, ("planted", plant)))

        def search(number: int) -> Tensor:
            gradient, labels, called = sought[number]
            draw = torch_generator(scene.settings.seed, "attack", objective, *called)
            own = copy.deepcopy(method)  # threads share nothing that a forward pass writes
            wide = torch.from_numpy(labels)
            return invert(own, gradient, wide, shape, objective, draw, self.steps, SMOOTH, stop)

        stop = Event()
        images: list[Tensor] = []
        scene.step(f"{self.kind} by {objective}", 0, len(sought))
        for searched in in_threads(search, range(len(sought)), scene.workers, stop):
            images.append(searched)
            scene.step(f"{self.kind} by {objective}", len(images), len(sought))
        guesses, leaked = images[: len(held)], images[len(held) :]
        rest = [np.arange(len(others)) != plant for plant in plants]
        planted = [
            rank(one, candidates[[at]], others[[at]], candidates[of], others[of])
            for one, at, of in zip(leaked, plants, rest, strict=True)
        ]
        draw = scene.draw("bootstrap", objective)
        ranks = [rank(guesses[i], truth[i], held[i], candidates, others) for i in places]
        wrong = [
            rank(guesses[a], truth[i], held[i], candidates, others) for i, a in enumerate(away)
        ]
        pairs = [nearest(guesses[i], truth[i]) for i in places]
        worth = {
            name: [measure(*pair).numpy() for pair in zip(pairs, truth, strict=True)]
            for name, measure in measures_of(scene, shape[0]).items()
        }
        near, true = torch.cat(pairs), torch.cat(truth)
        result = AttackResult(
            item="weights",
            about=objective,
            up=True,
            call="fit",
            times=1,
            messages=len(held),
            targets=sum(map(len, held)),
            bytes=nbytes(wanted[0]),
            no_leak=no_leak(interval(wrong, draw), 0.5),
            planted_leak=planted_leak(interval(planted, draw), FOUND),
            figures={
                "rank": interval(ranks, draw),
                **{name: interval(values, draw) for name, values in worth.items()},
            },
        ).withheld()
        if result.figures and near.shape[1] == 3:
            self.pictures[objective] = sheet(true, near, psnr(near, true))
        return result


def rank(
    guesses: Tensor, truth: Tensor, who: Pictures, candidates: Tensor, others: Pictures
) -> np.ndarray:
    """Return for each true image the share of other images of its domain that are further away.

    The distance is the mean squared error to the nearest found image.
    """
    return percentiles(
        -_error(truth, guesses), who.domains, -_error(candidates, guesses), others.domains
    )


def _error(images: Tensor, guesses: Tensor) -> Tensor:
    """Return the mean squared error of images [n, C, H, W] to the nearest found image."""
    errors = [(images - one).square().flatten(1).mean(1) for one in guesses]
    return torch.stack(errors).min(0).values


def nearest(guesses: Tensor, truth: Tensor) -> Tensor:
    """Return for each true image [n, C, H, W] the nearest found one."""
    errors = (truth[:, None] - guesses[None]).square().flatten(2).mean(2)
    return guesses[errors.argmin(1)]


def psnr(guesses: Tensor, truth: Tensor) -> Tensor:
    """Return the peak signal to noise ratio of each image in [0, 1], in dB, at most 100: [n].

    >>> psnr(torch.zeros(1, 3, 4, 4), torch.full((1, 3, 4, 4), 0.1)).round(decimals=3)
    tensor([20.])
    """
    error = (guesses - truth).square().flatten(1).mean(1)
    return -10 * error.clamp(min=1e-10).log10()


def ssim(guesses: Tensor, truth: Tensor) -> Tensor:
    """Return the structural similarity of each image in [0, 1] (Wang et al., 2004): [n]."""
    measure: Callable[..., Any] = structural_similarity_index_measure
    values: Tensor = measure(guesses, truth, data_range=1.0, reduction="none").reshape(-1)
    return values


def measures_of(scene: Scene, channels: int) -> dict[str, Perceptual]:
    """Return measures that compare found pictures with true ones; LPIPS needs three channels."""
    measures: dict[str, Perceptual] = {"psnr": psnr, "ssim": ssim}
    if scene.judges.lpips is not None and channels == 3:
        measures["lpips"] = scene.judges.lpips
    return measures
