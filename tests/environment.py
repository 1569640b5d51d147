"""A virtual environment in which packages are installed and commands run, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image


class Environment:
    """A virtual environment with the tested tree and packages that are written and installed."""

    def __init__(self, place):
        self.place, self.python = place, place / "env/bin/python"
        venv.create(place / "env", with_pip=False)
        (site,) = (place / "env/lib").glob("python*/site-packages")
        ours = [Path(path).absolute() for path in sys.path if path and Path(path).is_dir()]
        (site / "tested.pth").write_text("\n".join(map(str, ours)))

    def run(self, *words, code=0):
        """Return the output of a command, or its error where it has to end with another status."""
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environment |= {
            "COLUMNS": "80",
            "FEDDG_CACHE": str(self.place / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [self.python, "-m", *map(str, words)],
            cwd=self.place,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stderr if code else done.stdout

    def install(self, *folders):
        """Install packages as their authors do, without downloads."""
        self.run("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", *folders)


def draw_images(root, domains, classes=("circle", "square")):
    """Write 20 images of random colours of each class in each domain."""
    draw = np.random.default_rng(0)
    for domain, name in product(domains, classes):
        folder = root / domain / name
        folder.mkdir(parents=True)
        for number in range(20):
            pixels = draw.integers(256, size=(16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
