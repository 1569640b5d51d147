"""The data set on generated images: replace them by a few that look like yours."""

import numpy as np
import pytest
from PIL import Image
from shapes import Shapes

import feddg_bench as fb

PER_CLASS = 20


@pytest.fixture
def root(tmp_path):
    """Write images of random colours as <domain>/<class>/<image>."""
    draw = np.random.default_rng(0)
    for domain in Shapes.domains:
        for name in Shapes.classes:
            folder = tmp_path / "images" / domain / name
            folder.mkdir(parents=True)
            for number in range(PER_CLASS):
                pixels = draw.integers(256, size=(32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "images"


def test_every_image_is_found_with_its_class_and_domain(root):
    data = Shapes(root)
    images = data.records()
    assert len(images.paths) == len(Shapes.domains) * len(Shapes.classes) * PER_CLASS
    for path, label, domain in zip(images.paths, images.labels, images.domains, strict=True):
        assert path.startswith(f"{Shapes.domains[domain]}/{Shapes.classes[label]}/")
    assert data.read(0, 32).shape == (32, 32, 3)


def test_a_method_trains_on_it(root, tmp_path):
    (record,) = fb.run(
        "fedavg",
        dataset="shapes",  # found by the entry point: install the package first
        protocol="lodo",
        scenario=Shapes.domains[0],
        settings={"rounds": 1, "clients": 4, "per_round": 2, "data.image_size": 32},
        data_root=root,
        results=tmp_path / "runs",
        cache_dir=tmp_path / "cache",
    )
    assert record.dataset == "shapes"
