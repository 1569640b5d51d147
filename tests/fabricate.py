"""Folders in the layouts in which data sets are published, with small made-up images.

``python tests/fabricate.py NAME DIR`` writes one; `fabricate` is the same for tests. The numbers of
images are not the published ones, so whoever reads them takes back the class's promises first.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from feddg_datasets.femnist import FEMNIST
from feddg_datasets.minidomainnet import MiniDomainNet
from feddg_datasets.officehome import OfficeHome
from feddg_datasets.terraincognita import TerraIncognita

SIDE = 10


def draw(path: Path, label: int, domain: int, number: int, *, side: int = SIDE) -> None:
    """Write a coloured image whose hue tells the label, its brightness the domain; grey if PNG."""
    rng = np.random.default_rng([label, domain, number])
    colour = np.array([label % 5, label // 5 % 5, label // 25 % 5]) * 40 + domain * 12
    pixels = (colour + rng.integers(0, 40, (side, side, 3))).clip(0, 255).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image.convert("L") if path.suffix == ".png" else image).save(path)


def officehome(root: Path) -> None:
    """Office-Home's archive: 4 domains, 65 classes, 3 images each."""
    base = root / "OfficeHomeDataset_10072016"
    for d, domain in enumerate(("Art", "Clipart", "Product", "Real World")):
        for c, name in enumerate(OfficeHome.classes):
            for i in range(3):
                draw(base / domain / name / f"{i + 1:05d}.jpg", c, d, i)
    (base / "ImageInfo.csv").write_text("no image\n")


def minidomainnet(root: Path) -> None:
    """DomainNet's folders with the eight lists: 126 classes, 3 images listed and 1 not."""
    base = root / "domainnet"
    (base / "splits_mini").mkdir(parents=True)
    order = sorted(MiniDomainNet.classes, key=lambda name: name[::-1])  # the lists' own numbers
    for d, domain in enumerate(MiniDomainNet.domains):
        lines: dict[str, list[str]] = {"train": [], "test": []}
        for c, name in enumerate(order):
            for i in range(4):
                path = f"{domain}/{name}/{domain}_{c + 1:03d}_{i + 1:06d}.jpg"
                draw(base / path, c, d, i)
                if i < 3:
                    lines["test" if i == 2 else "train"].append(f"{path} {c}\n")
        for kind, text in lines.items():
            (base / "splits_mini" / f"{domain}_{kind}.txt").write_text("".join(text))
        (base / domain / "airplane").mkdir()  # one of DomainNet's other classes
        draw(base / domain / "airplane" / f"{domain}_001_000001.jpg", 0, d, 0)


def terraincognita(root: Path) -> None:
    """The authors' archives: five annotation files, images in one folder, 4 per place and class.

    The first image of every place shows a second animal, in two boxes; images of other places and
    other animals are there too.
    """
    base = root / "terra_incognita"
    categories = [
        {"id": 7 * n, "name": name} for n, name in enumerate((*TerraIncognita.classes, "car"))
    ]
    files = [
        {"info": {}, "images": [], "annotations": [], "categories": categories} for _ in range(5)
    ]
    number = 0
    for d, place in enumerate((38, 43, 46, 100, 33)):
        for c, category in enumerate(categories):
            for i in range(4):
                identifier = f"{number:08x}-23d2-11e8-a6a3-ec086b02610b"
                name = f"{identifier}.jpg"
                draw(base / "eccv_18_all_images_sm" / name, c, d, i)
                file = files[number % 5]
                file["images"].append({"id": identifier, "file_name": name, "location": place})
                boxes = [category["id"]]
                if c == i == 0:
                    boxes += [categories[1]["id"]] * 2
                file["annotations"] += [
                    {"id": f"{identifier}-{k}", "image_id": identifier, "category_id": box}
                    for k, box in enumerate(boxes)
                ]
                number += 1
    folder = base / "eccv_18_annotation_files"
    folder.mkdir(parents=True)
    names = ("train", "cis_val", "cis_test", "trans_val", "trans_test")
    for name, content in zip(names, files, strict=True):
        (folder / f"{name}_annotations.json").write_text(json.dumps(content))


def rmnist(root: Path) -> None:
    """MNIST's four files with 500 training and 100 test digits."""
    base = root / "mnist"
    base.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, count in (("train", 500), ("t10k", 100)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = rng.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[4 : 8 + 2 * label, 10:14] = 220  # the longer the larger
        header = np.array([0x803, count, 28, 28], dtype=">u4").tobytes()
        (base / f"{part}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(header + images.tobytes())
        )
        header = np.array([0x801, count], dtype=">u4").tobytes()
        (base / f"{part}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(header + labels.tobytes())
        )


def femnist(root: Path) -> None:
    """FedDG_Benchmark's folder: grey PNG of 12 writers, 62 classes, and ``metadata.csv``."""
    base = root / "femnist_v1.0"
    rows = []
    for writer in range(12):
        unseen = {10: "val", 11: "test"}.get(writer)
        for label in range(len(FEMNIST.classes)):
            if unseen and label % 2:
                continue
            split = unseen or ("id_val", "id_test", *["train"] * 6)[(label + writer) % 8]
            path = f"images/{writer:03d}/{label:02d}.png"
            draw(base / path, label, writer, 0, side=28)
            rows.append((path, split, writer, label))
    with (base / "metadata.csv").open("w", newline="") as file:
        writer_of_rows = csv.writer(file)
        writer_of_rows.writerow(("", "path", "split", "domain_remapped", "y"))
        writer_of_rows.writerows((n, *row) for n, row in enumerate(rows))


def folder(root: Path) -> None:
    """A data set of one's own: 3 domains, 4 classes, 10 images each, one class lacks once."""
    for d, domain in enumerate(("Day Light", "night", "rainy-day")):
        for c, name in enumerate(("bus", "Car", "Fire Truck", "tram")):
            if (domain, name) != ("rainy-day", "tram"):
                for i in range(10):
                    draw(root / domain / name / f"{i}.jpg", c, d, i)


LAYOUTS: dict[str, Callable[[Path], None]] = {
    make.__name__: make
    for make in (officehome, minidomainnet, terraincognita, rmnist, femnist, folder)
}


def fabricate(name: str, root: Path) -> Path:
    """Write a data set's folder below ``root``, which becomes the ``--data-root``."""
    LAYOUTS[name](root)
    return root


if __name__ == "__main__":
    fabricate(sys.argv[1], Path(sys.argv[2]))
