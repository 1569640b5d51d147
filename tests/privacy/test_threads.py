"""Searches run in threads: their number changes no figure, and abandoned searches end."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Event

import pytest
import torch

from feddg_attacks.attack import Attack
from feddg_attacks.kinds.gradient_inversion import GradientInversion, gradient_of, invert
from feddg_attacks.kinds.style_inversion import StyleInversion, new_painter, train_painter
from feddg_bench.common.parallel import in_threads
from feddg_bench.engine.construction import build_method
from tests.privacy.scenes import attacked_federation, scene_of
from tests.privacy.test_gradient_inversion import ONE_STEP
from tests.privacy.test_style_inversion import PIXEL


@pytest.mark.parametrize(
    ("attack", "method", "layer"),
    [(GradientInversion, "fedavg", ONE_STEP), (StyleInversion, "pardon", PIXEL)],
)
def test_no_figure_depends_on_how_many_threads_search(
    attack: type[Attack], method: str, layer: object
) -> None:
    few = attacked_federation(each=2, public=12)
    scene = scene_of(method, layer, federation=few)  # type: ignore[arg-type]

    def found(workers: int) -> object:
        one = attack()
        one.steps = one.epochs = 3  # type: ignore[attr-defined]
        results = list(one.measure(replace(scene, workers=workers)))
        return results, one.pictures

    assert found(1) == found(3)


def gradients_are_inverted(stop: Event) -> None:
    method = build_method("fedavg", num_classes=3)
    image, labels = torch.rand(1, 3, 16, 16), torch.tensor([1])
    names = [name for name, _ in method.named_parameters()]
    wanted = {n: g.detach() for n, g in gradient_of(method, image, labels, names).items()}
    draw = torch.Generator().manual_seed(0)
    invert(method, wanted, labels, (3, 16, 16), "cosine", draw, 10**7, stop=stop)


def a_generator_trains(stop: Event) -> None:
    colours = torch.rand(40, 3).double()
    images = torch.rand(40, 3, 16, 16)
    train_painter(new_painter(colours, images, 0), colours, images, 0, 10**7, stop=stop)


@pytest.mark.parametrize("search", [gradients_are_inverted, a_generator_trains])
def test_a_search_ends_when_nobody_waits_for_it(search: Callable[[Event], None]) -> None:
    stop, begun = Event(), Event()

    def work(number: int) -> int:
        if number:
            begun.set()
            search(stop)
        else:
            begun.wait()
        return number

    def interrupted() -> Iterator[int]:
        for number in in_threads(work, range(4), 2, stop):
            yield number
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(interrupted())
    assert time.monotonic() - start < 60
