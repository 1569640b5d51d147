"""Draw the README's pictures: the domains of Digits4, and PACS images in PARDON's style.

python tests/benchmarks/draw_pictures.py digits4 results/figures/digits4.png
python tests/benchmarks/draw_pictures.py transfer results/figures/transfer.jpg \
    --data-root DIR --style-weights vgg19_16x_adain.safetensors
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from feddg_bench.config.schema import Resources
from feddg_bench.data.dataset import DomainDataset
from feddg_bench.engine.executors import SerialExecutor
from feddg_bench.plugins import load_dataset
from feddg_bench.runs.request import Request
from feddg_bench.runs.setup import RunData, open_run
from feddg_methods.pardon import Pardon

GAP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["digits4", "transfer"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--style-weights")
    args = parser.parse_args()
    rows = digits() if args.what == "digits4" else transfers(args.data_root, args.style_weights)
    args.path.parent.mkdir(parents=True, exist_ok=True)
    names = ("as it is", "released", "paper") * 3 if args.what == "transfer" else ()
    sheet(rows, names).save(args.path, optimize=True, quality=85)


def digits() -> dict[str, list[np.ndarray]]:
    """Return one row per domain: a digit of each class, at twice its size."""
    dataset = load_dataset("digits4")()
    return {
        domain: [dataset.read(first(dataset, domain, label), 64) for label in range(10)]
        for domain in dataset.domains
    }


def transfers(root: Path, weights: str) -> dict[str, list[np.ndarray]]:
    """Return one row per domain: three images, each unchanged and restyled by both presets."""
    dataset = load_dataset("pacs")(root)
    backends = [prepared(dataset, weights, preset) for preset in ("released", "paper")]
    rows = {}
    for domain in ("photo", "art_painting", "cartoon", "sketch"):
        row = []
        for label in (0, 3, 4):
            pixels = dataset.read(first(dataset, domain, label), 128)
            row.append(pixels)
            images = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 255
            for method, style in backends:
                made = method.style.transfer(images, style, method.settings.strength)
                made = made.clamp(0, 1)[0].permute(1, 2, 0) * 255
                row.append(made.round().byte().numpy())
        rows[domain.replace("_", " ")] = row
    return rows


def prepared(dataset: DomainDataset, weights: str, preset: str) -> tuple[Pardon, torch.Tensor]:
    """Return PARDON with the interpolation style of the clients of scheme cs-a-p."""
    settings = {
        "backbone": {"name": "small_cnn", "pretrained": False},
        "hyper": {"style": "vgg19_16x", "style_weights": weights, "preset": preset},
    }
    resources = Resources(data_root=dataset.data_root)
    request = Request("pardon", "ltdo", "pacs", "cs-a-p", "quick", [0], settings, resources)
    (plan,) = request.plan()
    run = open_run(plan, RunData(None), SerialExecutor(), resources)
    method = run.method
    method.prepare(run.server)
    assert isinstance(method, Pardon)
    return method, run.server.broadcast["style"]


def first(dataset: DomainDataset, domain: str, label: int) -> int:
    """Return the index of the third image of a class in a domain."""
    records = dataset.records()
    chosen = (records.domains == dataset.domains.index(domain)) & (records.labels == label)
    return int(np.flatnonzero(chosen)[2])


def sheet(rows: Mapping[str, list[np.ndarray]], columns: Sequence[str] = ()) -> Image.Image:
    """Return a sheet of images on white, with the names of rows and columns."""
    images = list(rows.values())
    side = images[0][0].shape[0] + GAP
    font = ImageFont.load_default(14)
    left = 2 * GAP + int(max(font.getlength(name) for name in rows)) + GAP
    top = 20 if columns else 0
    page = Image.new("RGB", (left + side * len(images[0]), top + side * len(rows)), "white")
    pen = ImageDraw.Draw(page)
    for x, name in enumerate(columns):
        pen.text((left + side * x + side // 2, top // 2), name, "black", font, anchor="mm")
    for y, (name, row) in enumerate(rows.items()):
        middle = top + side * y + side // 2
        pen.text((left - 2 * GAP, middle), name, "black", font, anchor="rm")
        for x, image in enumerate(row):
            page.paste(Image.fromarray(image), (left + side * x, top + side * y))
    return page


if __name__ == "__main__":
    main()
