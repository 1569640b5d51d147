"""Names of Python that Windows lacks: a run needs none of them. Nothing was tested on Windows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import asyncio, multiprocessing.context, os, signal, subprocess, sys, tempfile
LACKING = "curses fcntl grp pty pwd readline resource syslog termios tty"
for name in LACKING.split():
    sys.modules[name] = None
NAMES = {
    multiprocessing.context: ("ForkContext", "ForkServerContext"),
    os: ("chown", "fchmod", "fork", "getpgid", "getuid", "killpg", "memfd_create",
         "sched_getaffinity", "setsid"),
    signal: ("SIGALRM", "SIGHUP", "SIGUSR1", "setitimer"),
}
for module, names in NAMES.items():
    for name in names:
        delattr(module, name)
from feddg_bench.cli import main
main()
"""


@pytest.mark.nightly
def test_two_rounds_without_modules_that_windows_lacks(tmp_path: Path, cache: Path) -> None:
    settings = (
        "run --method fedavg --scenario ip-o-c --clients 4 --per-round 2 --rounds 2 --workers 1 "
        "data.image_size=8 data.id_test_fraction=0.5 data.id_val_fraction=0.3 --json"
    )
    where = ["--results", str(tmp_path), "--cache-dir", str(cache)]
    command = [sys.executable, "-c", WITHOUT, *settings.split(), *where]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert len(json.loads(found.stdout)["runs"]) == 1
