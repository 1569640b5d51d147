"""Folders in the layouts of published data sets, with small made-up images.

``python tests/fabricate.py NAME DIR`` writes one; `fabricate` is the same for tests. The numbers of
images are not the published ones, so override the class's promised counts before reading.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat

from feddg_bench.data.image_folders import ImageFolderDataset
from feddg_datasets.digitsdg import DigitsDG
from feddg_datasets.domainnet import DomainNet
from feddg_datasets.femnist import FEMNIST
from feddg_datasets.fmow import FMoW
from feddg_datasets.handwritten import TABLES
from feddg_datasets.minidomainnet import MiniDomainNet
from feddg_datasets.office31 import Office31
from feddg_datasets.officecaltech10 import OfficeCaltech10
from feddg_datasets.officehome import OfficeHome
from feddg_datasets.poverty import COUNTRIES
from feddg_datasets.terraincognita import TerraIncognita
from feddg_datasets.vlcs import VLCS

SIDE = 10


def draw(
    path: Path, label: int, domain: int, number: int, *, side: int = SIDE, grey: bool | None = None
) -> None:
    """Write an image whose hue encodes the label and whose brightness encodes the domain.

    By default, PNG files are grey.
    """
    grey = path.suffix == ".png" if grey is None else grey
    rng = np.random.default_rng([label, domain, number])
    colour = np.array([label % 5, label // 5 % 5, label // 25 % 5]) * 40 + domain * 12
    pixels = (colour + rng.integers(0, 40, (side, side, 3))).clip(0, 255).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image.convert("L") if grey else image).save(path)


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
    order = sorted(MiniDomainNet.classes, key=lambda name: name[::-1])  # the lists' own numbering
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
        (base / domain / "airplane").mkdir()  # a class of DomainNet that miniDomainNet leaves out
        draw(base / domain / "airplane" / f"{domain}_001_000001.jpg", 0, d, 0)


def in_folders(
    base: Path, dataset: type[ImageFolderDataset], number: int = 4, places: Sequence[str] = ("",)
) -> None:
    """Images of all domains and classes, in ``<domain>/<place>/<class>`` for each of the places."""
    for d, domain in enumerate(dataset.domains):
        for c, name in enumerate(dataset.classes):
            for place in places:
                for i in range(number // len(places)):
                    folder = base / domain / place / name
                    draw(folder / f"frame_{i:04d}.jpg", c, d, i + len(place))


def vlcs(root: Path) -> None:
    """DomainBed's folder."""
    in_folders(root / "VLCS", VLCS, 8)


def office31(root: Path) -> None:
    """The authors' archive, with a folder ``images`` in each domain."""
    in_folders(root / "office31", Office31, places=["images"])


def officecaltech10(root: Path) -> None:
    """The archive that comes with FedBN."""
    in_folders(root / "office_caltech_10", OfficeCaltech10)


def digitsdg(root: Path) -> None:
    """The archive of Dassl, with training and validation images."""
    in_folders(root / "digits_dg", DigitsDG, places=["train", "val"])


def domainnet(root: Path) -> None:
    """DomainNet's folders and cleaned lists: 345 classes, and duplicates that are not listed."""
    base = root / "domainnet"
    (base / "splits").mkdir(parents=True)
    for d, domain in enumerate(DomainNet.domains):
        lines: dict[str, list[str]] = {"train": [], "test": []}
        for c, name in enumerate(DomainNet.classes):
            for i in range(1 + c % 2):
                path = f"{domain}/{name}/{domain}_{c + 1:03d}_{i + 1:06d}.jpg"
                draw(base / path, c, d, i)
                lines["test" if i else "train"].append(f"{path} {c}\n")
            if c < 3 and domain != "quickdraw":
                draw(base / domain / name / f"{domain}_{c + 1:03d}_000009.jpg", c, d, 0)
        for kind, text in lines.items():
            (base / "splits" / f"{domain}_{kind}.txt").write_text("".join(text))


def digits5(root: Path) -> None:
    """Digit-Five's files with 60 training and 20 test digits each."""
    base, rng = root / "Digit-Five", np.random.default_rng(0)
    base.mkdir(parents=True)

    def made(count: int, *shape: int) -> tuple[Any, Any]:
        labels = np.arange(count) % 10
        images = rng.integers(0, 60, (count, *shape), dtype=np.uint8)
        images[:, 4:20, 10:14] = 100 + 15 * labels.reshape(-1, *[1] * len(shape))
        return images, labels[:, None]

    def saved(name: str, **arrays: Any) -> None:
        savemat(base / name, arrays)

    for name, keys, channels in (
        ("mnist_data", ("train_32", "test_32"), ()),
        ("mnistm_with_label", ("train", "test"), (3,)),
    ):
        (train, a), (test, b) = made(60, 32, 32, *channels), made(20, 32, 32, *channels)
        labels = {"label_train": np.eye(10)[a[:, 0]], "label_test": np.eye(10)[b[:, 0]]}
        saved(f"{name}.mat", **dict(zip(keys, (train, test), strict=True)), **labels)
    for part, count in (("train", 60), ("test", 20)):
        images, labels = made(count, 32, 32, 3)
        labels[labels == 0] = 10  # as in SVHN
        saved(f"svhn_{part}_32x32.mat", X=images.transpose(1, 2, 3, 0), y=labels)
    (train, a), (test, b) = made(60, 32, 32, 3), made(20, 32, 32, 3)
    saved("syn_number.mat", train_data=train, train_label=a, test_data=test, test_label=b)
    cells = np.empty((2, 2), dtype=object)
    for place, count in enumerate((60, 20)):
        images, labels = made(count, 28, 28)
        cells[place] = [images[:, None] / 255, labels]
    saved("usps_28x28.mat", dataset=cells)


def coloredmnist(root: Path) -> None:
    """MNIST's files."""
    rmnist(root)


def terraincognita(root: Path) -> None:
    """The authors' archives: five annotation files, images in one folder, 4 per place and class.

    The first image of every place shows a second animal, in two boxes; there are also images of
    other places and other animals.
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


def rmnist(root: Path, folder: str = "mnist") -> None:
    """MNIST's four files with 500 training and 100 test digits."""
    base = root / folder
    base.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, count in (("train", 500), ("t10k", 100)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = rng.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[4 : 8 + 2 * label, 10:14] = 220  # larger labels are longer
        header = np.array([0x803, count, 28, 28], dtype=">u4").tobytes()
        (base / f"{part}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(header + images.tobytes())
        )
        header = np.array([0x801, count], dtype=">u4").tobytes()
        (base / f"{part}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(header + labels.tobytes())
        )


def handwritten(root: Path) -> None:
    """UCI's files with 400 digits of optdigits and 200 of the others, and MNIST's."""
    rmnist(root, "handwritten")
    base, rng = root / "handwritten", np.random.default_rng(0)
    for name, table in TABLES.items():
        size = 200
        labels = np.arange(size) * 10 // size if name == "mfeat-pix" else np.arange(size) % 10
        pixels = rng.integers(0, 2, (size, *table.shape))
        for image, label in zip(pixels, labels, strict=True):
            image[: 2 + table.shape[0] * label // 15, 2:5] = table.highest
        rows = pixels.reshape(size, -1)
        if table.label_columns:
            more = np.eye(10, dtype=int)[labels] if table.label_columns == 10 else labels[:, None]
            rows = np.hstack([rows, more])
        form, between = ("%d", ",") if table.folder == "optdigits" else ("%.4f", " ")
        np.savetxt(base / name, rows, form, between)


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
    """A user's own data set: 3 domains, 4 classes, 10 images each; one class is missing once."""
    for d, domain in enumerate(("Day Light", "night", "rainy-day")):
        for c, name in enumerate(("bus", "Car", "Fire Truck", "tram")):
            if (domain, name) != ("rainy-day", "tram"):
                for i in range(10):
                    draw(root / domain / name / f"{i}.jpg", c, d, i)


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def iwildcam(root: Path) -> None:
    """iWildCam-WILDS: 12 camera traps (8 train, 2 validate, 2 test), 10 classes, 36 images each.

    One class occurs only at the test places, one image is grey, and ``categories.csv`` names more
    classes than there are.
    """
    base = root / "iwildcam_v2.0"
    rows = []
    for place in range(12):
        unseen = "val" if place in (3, 7) else "test" if place in (5, 11) else None
        for i in range(36):
            label = 9 if place == 11 and i < 4 else (i + place) % 9
            split = unseen or ("id_val", "id_test", *["train"] * 10)[i % 12]
            name = f"{place:02d}{i:02d}8b-21bc-11ea-a13a-137349068a90.jpg"
            draw(base / "train" / name, label, place, i, side=32, grey=place == i == 0)
            time = f"2013-06-{1 + i % 28:02d} 05:{i:02d}:19.000"
            rows.append((split, place * 7, name, label * 3, label, place, i + 36 * place, time))
    columns = (
        "split", "location", "filename", "category_id", "y", "location_remapped",
        "sequence_remapped", "datetime",
    )  # fmt: skip
    write_table(base / "metadata.csv", columns, rows)
    names = [(3 * n, f"species {n}", n) for n in range(182)] + [(999, "animal", 99999)]
    write_table(base / "categories.csv", ("category_id", "name", "y"), names)
    (base / "RELEASE_v2.0.txt").write_text("")


def camelyon17(root: Path) -> None:
    """Camelyon17-WILDS: patches of 2 slides of each of the 5 hospitals, 30 a slide."""
    base = root / "camelyon17_v1.0"
    rows = []
    for center in range(5):
        for slide in (10 * center, 10 * center + 3):
            patient, node = f"{slide + 4:03d}", slide % 5
            for i in range(30):
                tumor = (i + slide) % 2
                x, y = 32 * i, 3328 + slide
                folder = f"patient_{patient}_node_{node}"
                file = base / f"patches/{folder}/patch_{folder}_x_{x}_y_{y}.png"
                draw(file, tumor, center, i, grey=False)
                split = 1 if center in (0, 3, 4) and i % 10 == 9 else 0
                rows.append((len(rows), patient, node, x, y, tumor, slide, center, split))
    columns = ("", "patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split")
    write_table(base / "metadata.csv", columns, rows)
    (base / "RELEASE_v1.0.txt").write_text("")


def fmow(root: Path) -> None:
    """FMoW-WILDS: 62 classes and 16 years, 8 images a class and 7 rows without an image.

    As in the original, most times have no fractions of a second. Some rows are sequestered, so that
    numbers of images and rows differ, and some images are in no split.
    """
    base = root / "fmow_v1.1"
    countries = [("DEU", "Europe"), ("KEN", "Africa"), ("BRA", "Americas"), ("CHN", "Asia")]
    countries += [("AUS", "Oceania"), ("ATA", "")]
    rows = []
    for i in range(8):
        for label, category in enumerate(FMoW.classes):
            if len(rows) % 71 == 70:
                rows.append(("seq", category, "DEU", "2031-01-01T00:00:00Z"))
            year = 2002 + (label * 5 + i * 11) % 16
            old = year < 2013
            split = ("train", "train", "train", "val", "test")[i % 5]
            split = split if old else "val" if year < 2016 else "test"
            if i == label == 0:
                split, year = "train", 2015  # in no split: wilds trains on earlier years
            fraction = ".643" if len(rows) % 50 == 3 else ""
            country = "XXX" if len(rows) % 20 == 7 else countries[len(rows) % 5][0]
            file = base / "images" / f"rgb_img_{len(rows)}.png"
            draw(file, label, year - 2002, i, grey=False)
            time = f"{year}-0{1 + i}-12T02:48:56{fraction}Z"
            rows.append((split, category, country, time))
    columns = ("split", "category", "country_code", "timestamp")
    write_table(base / "rgb_metadata.csv", columns, rows)
    mapping = [(code, code[:2], region) for code, region in countries]
    write_table(base / "country_code_mapping.csv", ("alpha-3", "alpha-2", "region"), mapping)
    (base / "RELEASE_v1.1.txt").write_text("")


def poverty(root: Path) -> None:
    """PovertyMap-WILDS: 164 places in each of the 23 countries, of 64 different images.

    There are so many because wilds sets aside 2,000 images of the training countries. Wealth rises
    with the night lights, which are the last band.
    """
    base = root / "poverty_v1.1"
    (base / "images").mkdir(parents=True)
    rng = np.random.default_rng(0)
    originals = []
    for n in range(64):
        image = rng.normal(0, 1, (8, 12, 12)).astype(np.float32)
        image[-1] += n / 16
        originals.append(root / f"original_{n}.npz")
        np.savez(originals[-1], x=image)
    rows = []
    for country in COUNTRIES:
        for i in range(164):
            n = int(rng.integers(64))
            os.link(originals[n], base / "images" / f"landsat_poverty_img_{len(rows)}.npz")
            rows.append((len(rows), country, 2009 + i % 8, round(n / 24 - 1.3, 6), n % 3 == 0))
    for original in originals:
        original.unlink()
    write_table(base / "dhs_metadata.csv", ("", "country", "year", "wealthpooled", "urban"), rows)
    (base / "RELEASE_v1.1.txt").write_text("")


LAYOUTS: dict[str, Callable[[Path], None]] = {
    make.__name__: make
    for make in (
        officehome, minidomainnet, terraincognita, rmnist, handwritten, femnist, folder,
        vlcs, office31, officecaltech10, digitsdg, domainnet, digits5, coloredmnist,
        iwildcam, camelyon17, fmow, poverty,
    )
}  # fmt: skip


def fabricate(name: str, root: Path) -> Path:
    """Write a data set's folder below ``root``, which serves as the ``--data-root``."""
    LAYOUTS[name](root)
    return root


if __name__ == "__main__":
    fabricate(sys.argv[1], Path(sys.argv[2]))
