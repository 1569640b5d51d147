"""Networks that judge pictures: formulas compared with torchmetrics, and weights by path."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
import torchvision
from safetensors.torch import save_file
from torch import Tensor
from torchmetrics.image.fid import _compute_fid
from torchmetrics.image.kid import poly_mmd

from feddg_attacks.judges import (
    Judges,
    Seen,
    fid,
    inception_score,
    jackknife,
    judged,
    kid,
    open_judges,
)
from feddg_attacks.kinds.style_inversion import StyleInversion
from feddg_attacks.records import PERCEPTUAL
from feddg_bench.common.errors import DataError
from tests.helpers import refused
from tests.privacy.scenes import attacked_federation, scene_of

LAYERS = (1, 4, 7, 9, 10, 11, 12)  # outputs that LPIPS compares
SHIFT, SCALE = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])


def sets(one: int = 50, other: int = 40, width: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((one, width)), 1.5 * rng.standard_normal((other, width)) + 0.3


def test_fid_is_that_of_torchmetrics() -> None:
    one, other = sets()
    moments = [
        torch.from_numpy(m) for x in (one, other) for m in (x.mean(0), np.cov(x, rowvar=False))
    ]
    assert fid(one, other) == pytest.approx(float(_compute_fid(*moments)), rel=1e-9)


def test_fid_of_a_shifted_set_is_the_square_of_the_shift() -> None:
    one, _ = sets()
    assert fid(one, one + 0.5) == pytest.approx(8 * 0.25, rel=1e-9)
    assert fid(one, one) == pytest.approx(0, abs=1e-9)


def test_kid_is_that_of_torchmetrics() -> None:
    one, other = sets(40, 40)  # torchmetrics expects sets of equal size
    theirs = poly_mmd(torch.from_numpy(one), torch.from_numpy(other))
    assert kid(one, other) == pytest.approx(float(theirs), rel=1e-9)


def test_the_inception_score_is_between_one_and_the_number_of_classes() -> None:
    sure = 100 * np.eye(5)[np.arange(20) % 5]
    assert inception_score(sure) == pytest.approx(5)
    assert inception_score(np.zeros((7, 5))) == pytest.approx(1)
    assert inception_score(sure[:1].repeat(9, 0)) == pytest.approx(1)


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = np.random.default_rng(1).standard_normal(20)
    found = jackknife(lambda at: float(values[at].mean()), 20)
    error = values.std(ddof=1) / np.sqrt(20)
    assert (found.value, found.high - found.value) == pytest.approx((values.mean(), 1.96 * error))


def test_few_pictures_are_not_judged_as_a_set() -> None:
    one, other = sets(20, 20)
    assert judged(Seen(one[:19], one[:19]), Seen(other[:19], other[:19])) == {}
    found = judged(Seen(one, one), Seen(other, other))
    assert set(found) == {"fid", "kid", "inception_score", "true_inception_score"}
    assert found["fid"].low < found["fid"].value < found["fid"].high


@pytest.fixture(scope="module")
def squeezenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "squeezenet.safetensors"
    save_file(torchvision.models.squeezenet1_1(weights=None).state_dict(), path)
    return path


def test_lpips_by_hand(squeezenet: Path) -> None:
    distance = open_judges(lpips=squeezenet).lpips
    assert distance is not None
    pictures = torch.rand(6, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    network = torchvision.models.squeezenet1_1(weights=None)
    network.load_state_dict(
        {k: v for k, v in open_tensors(squeezenet).items() if k in network.state_dict()}
    )
    heads = torch.load(
        Path(torchmetrics.__file__).parent / "functional/image/lpips_models/squeeze.pth",
        map_location="cpu",
        weights_only=True,
    )

    def features(x: Tensor) -> list[Tensor]:
        x = (2 * x - 1 - SHIFT[:, None, None]) / SCALE[:, None, None]
        found = []
        for place, layer in enumerate(network.features):
            x = layer(x)
            if place in LAYERS:
                found.append(x / (x.square().sum(1, keepdim=True).sqrt() + 1e-8))
        return found

    with torch.no_grad():
        pairs = zip(features(pictures[:3]), features(pictures[3:]), strict=True)
        expected = sum(
            ((a - b).square() * heads[f"lin{n}.model.1.weight"]).sum(1).mean((1, 2))
            for n, (a, b) in enumerate(pairs)
        )
        torch.testing.assert_close(distance(pictures[:3], pictures[3:]), expected)
        assert float(distance(pictures, pictures).abs().max()) == 0


def open_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def test_inception_is_loaded_without_unpickling_the_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    cls = network.FeatureExtractorInceptionV3
    with monkeypatch.context() as patch:
        patch.setattr(network.torch, "load", lambda *_, **__: {})
        patch.setattr(cls, "load_state_dict", lambda *_: None)
        torch.manual_seed(0)
        made = cls("inception", ["2048", "logits_unbiased"], "none")
    path = tmp_path / "inception.safetensors"
    save_file(made.state_dict(), path)
    features = open_judges(inception=path).inception
    assert features is not None
    pictures = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = features(pictures)
    pooled, logits = made((pictures * 255).round().to(torch.uint8))
    np.testing.assert_array_equal(found.pooled, pooled.double().numpy())
    assert found.logits.shape == (3, 1008)
    np.testing.assert_array_equal(found.logits, logits.double().numpy())


@pytest.mark.parametrize("judge", ["lpips", "inception"])
def test_a_file_that_is_no_such_network_is_refused(judge: str, tmp_path: Path) -> None:
    if judge == "inception":
        pytest.importorskip("torch_fidelity")
    wrong = tmp_path / "wrong.safetensors"
    save_file({"features.0.weight": torch.zeros(1)}, wrong)
    with refused(DataError, str(wrong), "does not hold the weights"):
        open_judges(**{judge: wrong})  # type: ignore[arg-type]
    code = tmp_path / "code.pth"
    code.write_bytes(pickle.dumps(Path("unpickled"), protocol=2))
    with refused(DataError, str(code), "run code"):
        open_judges(**{judge: code})  # type: ignore[arg-type]
    with refused(DataError, "no weights file"):
        open_judges(**{judge: tmp_path / "none.pth"})  # type: ignore[arg-type]


def means(pictures: Tensor) -> Seen:
    """Replace a large network: return means of quarters."""
    pooled = torch.nn.functional.adaptive_avg_pool2d(pictures, 2).flatten(1).double().numpy()
    return Seen(pooled, 9 * pooled)


@pytest.mark.nightly
def test_style_inversion_is_judged_and_trained_on_lpips(squeezenet: Path) -> None:
    layers: dict[str, Any] = {"hyper": {"style": "pixel", "style_augment": False}}
    scene = scene_of("pardon", layers, federation=attacked_federation(4, public=40))
    judges = replace(open_judges(lpips=squeezenet), inception=means)
    plain, *none = measured(scene)
    assert none == []
    first, second = measured(replace(scene, judges=judges))
    kept = {name: figure for name, figure in first.figures.items() if name in plain.figures}
    assert kept == plain.figures, "judges change nothing that is measured without them"
    names = {"lpips", "fid", "kid", "inception_score", "true_inception_score"}
    forms = ("{}", "sample_{}", "{}_of_images")
    assert {form.format(name) for form in forms for name in names} <= set(first.figures)
    assert second.about == first.about + PERCEPTUAL
    assert second.figures["lpips_of_images"] != first.figures["lpips_of_images"]
    assert list(first.by_domain) == ["dark", "bright"]
    both = [figures["psnr"].value for figures in first.by_domain.values()]
    assert min(both) < first.figures["psnr"].value < max(both)
    assert {"lpips", "sample_fid", "psnr_of_images"} <= set(first.by_domain["dark"])


def measured(scene: Any, judge: Callable[[], StyleInversion] = StyleInversion) -> list[Any]:
    attack = judge()
    attack.epochs = 4
    return list(attack.measure(scene))


def test_judges_are_optional() -> None:
    assert Judges() == open_judges()
