"""The first day of a user as one script: own images, methods and data set, sweep, table, model.

Everything runs as a user runs it: packages are installed with pip, and commands are started in an
environment of their own, in a window of 80 columns.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddg_bench.cli.templates import EXAMPLES
from tests.environment import Environment, draw_images

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        find_spec("pip") is None or find_spec("hatchling") is None, reason="needs pip, hatchling"
    ),
]

DOMAINS = ("photo", "drawing", "clipart")
NETWORK = ("backbone.name=small_cnn", "backbone.pretrained=false", "data.image_size=8")
TINY = ("--clients", 4, "--per-round", 2, "--rounds", 2, "--workers", 1, *NETWORK)
SWEEP = """\
name: mixtures
method: grid
parameters:
  method: {values: [fedavg, new_server]}
  dataset: {value: folder}
  data.image_size: {value: 8}
  backbone.name: {value: small_cnn}
  backbone.pretrained: {value: false}
  clients: {value: 4}
  per_round: {value: 2}
  rounds: {value: 2}
  lambda: {values: [0.0, 1.0]}
  scenario: {value: photo}
"""


def odd_images(root: Path) -> None:
    """Write three domains of two classes, with files as users have them."""
    draw_images(root, DOMAINS)
    colours = np.random.default_rng(1).integers(256, size=(20, 30, 3), dtype=np.uint8)
    image, folder = Image.fromarray(colours), root / "photo" / "circle"
    image.convert("CMYK").save(folder / "printed.JPEG", format="JPEG")
    image.convert("L").save(folder / "grey.png")
    image.convert("P").save(folder / "palette.gif")
    image.convert("RGBA").save(folder / "clear.png")
    (folder / "second batch").mkdir()
    image.save(folder / "second batch" / "10.JPG", format="JPEG")
    whole = (folder / "second batch" / "10.JPG").read_bytes()
    (folder / "no end.jpg").write_bytes(whole[:-2])
    (folder / "notes.txt").write_text("a square is no circle")
    (folder / ".DS_Store").write_bytes(bytes(8))


def narrow(text: str) -> str:
    """Return text of which no line is wider than the window."""
    assert [line for line in text.splitlines() if len(line) > 80] == []
    return text


def test_the_first_day(tmp_path: Path) -> None:
    user = Environment(tmp_path)
    feddg = "feddg_bench"
    odd_images(tmp_path / "shapes")
    own = ("--dataset", "folder", "--data-root", "shapes")

    # One level too deep, an unknown word, an unreadable image: one sentence each, nothing is lost.
    deep = ("run", "--dataset", "folder", "--data-root", "shapes/photo", *TINY)
    assert "give the folder above" in user.run(feddg, *deep, code=2)
    assert "train.lr" in user.run(feddg, "run", *own, "learning_rate=0.1", code=2)
    (tmp_path / "shapes/photo/circle/broken.png").write_bytes(b"\x89PNG")
    assert "data.skip_unreadable=true" in user.run(feddg, "run", *own, *TINY, code=2)
    (tmp_path / "shapes/photo/circle/broken.png").unlink()
    assert not [*tmp_path.glob("runs/runs/*")]

    # Own images: checked, planned, run and printed under the folder's name.
    assert "clean: no fault was found" in user.run(feddg, "data", "check", "folder", *own[2:])
    assert "3 runs: 3 pending" in narrow(user.run(feddg, "run", *own, *TINY, "--dry-run"))
    shown = narrow(user.show(feddg, "run", *own, *TINY, "--keep", "last"))
    assert "planning 3 runs on shapes, " in shown
    assert "shapes, leave one domain out" in shown
    assert "Fewer than 20 images in" in shown

    # A method of each kind and a data set, written, installed, checked and run by name.
    for kind in EXAMPLES:
        user.run(feddg, "methods", "new", f"New-{kind}", "--kind", kind)
    user.run(feddg, "datasets", "new", "New-Images")
    user.install("./new_images", *(f"./new_{kind}" for kind in EXAMPLES))
    with ThreadPoolExecutor(2) as pool:
        names = [f"new_{kind}" for kind in EXAMPLES]
        for said in pool.map(partial(user.run, feddg, "methods", "check"), names):
            assert re.search(r"(\d+) of \1 checks passed", said), said
    methods = ",".join(["fedavg", *(f"new_{kind}" for kind in EXAMPLES)])
    compared = narrow(user.run(feddg, "run", "--method", methods, *own, *TINY))
    assert all(f"New-{kind}" in compared for kind in EXAMPLES)
    draw_images(tmp_path / "images", ("photo", "drawing", "clipart", "sketch"))
    ours = ("--dataset", "new_images", "--data-root", "images")
    narrow(user.run(feddg, "run", *ours, *TINY, "--scenario", "sketch"))

    # A sweep over lambda ends with a table.
    (tmp_path / "mixtures.yaml").write_text(SWEEP)
    swept = narrow(user.run(feddg, "sweep", "mixtures.yaml", "--data-root", "shapes"))
    assert "lambda=0" in swept
    assert "4 of 4 runs" in swept

    # Tables, the list of runs, and a prediction by the first letters of a key.
    assert "runs/tables/folder-shapes-lodo-quick." in narrow(user.run(feddg, "tables", "all"))
    assert "shapes, recipe quick; accuracy (%)" in narrow(user.run(feddg, "runs"))
    listed = json.loads(user.run(feddg, "runs", "--dataset", "folder", "--json"))
    kept = [run for run in listed if run["models"]]
    assert len(kept) == len(DOMAINS)
    key = kept[0]["key"][:8]
    seen = user.run(feddg, "predict", key, "shapes/photo/circle/printed.JPEG")
    assert re.search("circle|square", seen)
