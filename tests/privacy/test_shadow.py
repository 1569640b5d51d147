"""The simulated message of a client with a single image, and how messages are read."""

import numpy as np
import pytest
import torch

from feddg_attacks.attack import Scene
from feddg_attacks.shadow import MOST_NUMBERS, Shadow, read, sketch
from feddg_bench.core.messages import Task
from feddg_methods.fpl import FPL
from feddg_methods.pardon import Pardon
from feddg_methods.shared.adain import image_moments
from tests.privacy.scenes import scene_of

PIXEL = {"hyper": {"style": "pixel", "style_augment": False}}
TASK = Task("client_0", "fit", 1, {"w": torch.tensor([1.0, 2.0])}, {})


def shadow_of(scene: Scene) -> Shadow:
    return Shadow(scene.settings, scene.federation, scene.part("id_val", 100))


def first_task(scene: Scene, call: str) -> Task:
    return next(e.task for e in scene.exchanges if e.task.call == call)


def test_an_image_alone_has_its_own_moments() -> None:
    scene = scene_of("ccst", PIXEL)
    shadow = shadow_of(scene)
    vectors = shadow.vectors(first_task(scene, "local_styles"), "overall", range(5))
    pixels = torch.from_numpy(scene.part("id_val", 100).images[:5]).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(vectors, image_moments(pixels).flatten(1), atol=2e-5, rtol=0)


def test_a_pooled_style_is_the_mean_of_what_its_images_would_send() -> None:
    scene = scene_of("ccst", PIXEL)
    held = scene.pictures(scene.federation.clients["client_3"])
    shadow = Shadow(scene.settings, scene.federation, held)
    message = next(m for m in scene.messages() if m.item == "overall" and m.client == "client_3")
    alone = shadow.vectors(message.exchange.task, "overall", range(len(held)))
    rows = shadow.rows(message)
    assert rows is not None
    assert rows.mean
    assert not rows.each
    torch.testing.assert_close(rows.vectors[0], alone.mean(0), atol=2e-5, rtol=0)


def test_the_attacker_does_not_know_the_noise_that_a_client_draws() -> None:
    noisy = {"hyper": {"style": "pixel", "style_augment": False, "perturb_noise": 0.1}}
    scene = scene_of("pardon", noisy)
    quiet = scene_of("pardon", PIXEL)
    task = first_task(scene, "local_style")
    real = next(m.value for m in scene.messages() if m.item == "style")
    true_noise = real - next(m.value for m in quiet.messages() if m.item == "style")
    guessed = (
        shadow_of(scene).sent(task, 0, 0)["style"] - shadow_of(quiet).sent(task, 0, 0)["style"]
    )
    assert float((guessed - true_noise)[0].abs().min()) > 1e-4


def test_a_shadow_holds_no_image_of_a_client() -> None:
    scene = scene_of("fedavg")
    public = scene.part("id_val", 100)
    known = Shadow(scene.settings, scene.federation, public).worker.spec.federation
    assert np.array_equal(known.images, public.images)
    assert not known.evaluation
    assert not known.validation


def test_styles_are_read_as_moments() -> None:
    style = torch.tensor([[1.0, 2.0], [3.0, 0.5]])  # means and deviations of two channels
    rows = read(style, "style", "local_style", Pardon, TASK, {"style": style})  # type: ignore[arg-type]
    assert rows is not None
    assert rows.vectors.tolist() == [[1.0, 2.0, 10.0, 4.25]]


def test_weights_are_read_as_their_change() -> None:
    new = {"w": torch.tensor([1.5, 1.0]), "steps": torch.tensor(3)}
    rows = read(new, "weights", "fit", Pardon, TASK, {})  # type: ignore[arg-type]
    assert rows is not None
    assert rows.vectors.tolist() == [[0.5, -1.0]]


def test_prototypes_are_rows_of_classes() -> None:
    sent = {"prototypes": torch.ones(2, 4), "classes": torch.tensor([2, 0])}
    rows = read(sent["prototypes"], "prototypes", "fit", FPL, TASK, sent)  # type: ignore[arg-type]
    assert rows is not None
    assert rows.each
    assert rows.keys is not None
    assert rows.keys.tolist() == [2, 0]


@pytest.mark.parametrize("value", [3, "a", torch.tensor([1, 2]), {"n": torch.tensor(3)}])
def test_what_measures_nothing_is_not_read(value: object) -> None:
    assert read(value, "count", "fit", FPL, TASK, {}) is None  # type: ignore[arg-type]


def test_a_sketch_keeps_scalar_products_on_average() -> None:
    vector = torch.randn(10 * MOST_NUMBERS, generator=torch.Generator().manual_seed(0)).double()
    short = sketch(vector)
    assert short.shape == (MOST_NUMBERS,)
    assert abs(float(short @ short / (vector @ vector)) - 1) < 0.2
    torch.testing.assert_close(sketch(2 * vector), 2 * short)
    assert torch.equal(sketch(vector[:5]), vector[:5])
