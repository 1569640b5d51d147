"""A virtual environment in which packages are installed and commands run, as a user does."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import venv
from contextlib import suppress
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
        done = subprocess.run(
            [self.python, "-m", *map(str, words)],
            cwd=self.place,
            env=self._variables(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stderr if code else done.stdout

    def show(self, *words, code=0):
        """Return what a command shows in a terminal of 80 columns, without colours."""
        command = [self.python, "-m", *map(str, words)]
        done, shown = in_terminal(command, self._variables(), self.place)
        assert (done, "Traceback" in shown) == (code, False), (words, shown)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n")

    def _variables(self):
        own = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        cache = str(self.place / "cache")
        return own | {"COLUMNS": "80", "FEDDG_CACHE": cache, "OMP_NUM_THREADS": "1"}

    def install(self, *folders):
        """Install packages as their authors do, without downloads."""
        self.run("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", *folders)


def in_terminal(command, environment, folder=None, typed=None):
    """Return exit status and output, standard error included, of a command in a terminal.

    ``typed`` is what the user types at once; without it, standard input is that of the test.
    """
    inside, outside = pty.openpty()
    environment = environment | {"TERM": "xterm"}
    read = None if typed is None else outside
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=read, stdout=outside, stderr=outside
    ) as process:
        os.close(outside)
        os.write(inside, (typed or "").encode())
        parts = []
        with suppress(OSError):  # Linux reports the end of a terminal as an error
            while part := os.read(inside, 65536):
                parts.append(part)
    os.close(inside)
    return process.returncode, b"".join(parts).decode().replace("\r\n", "\n")


def draw_images(root, domains, classes=("circle", "square")):
    """Write 20 images of random colours of each class in each domain."""
    draw = np.random.default_rng(0)
    for domain, name in product(domains, classes):
        folder = root / domain / name
        folder.mkdir(parents=True)
        for number in range(20):
            pixels = draw.integers(256, size=(16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
