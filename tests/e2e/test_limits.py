"""Limits that shells and batch systems set: one sentence, and the run continues without them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly
RUN = (
    "run --method fedavg --scenario ip-o-c --clients 4 --per-round 2 --rounds 2 data.image_size=8 "
    "data.id_test_fraction=0.5 data.id_val_fraction=0.3 --json"
)


@pytest.mark.parametrize(
    ("limit", "workers", "words"),
    [
        ("-v 1048576", 1, "address space, 1.0 GiB"),
        ("-v 3145728", 1, "address space, 3.0 GiB"),
        ("-f 2", 1, "File too large"),
        ("-n 64", 2, None),
        ("-n 16", 2, "too many open files"),
    ],
)
def test_a_limited_run_ends_in_one_sentence_and_continues(
    tmp_path: Path, cache: Path, limit: str, workers: int, words: str | None
) -> None:
    where = f"--workers {workers} --results {tmp_path / 'r'} --cache-dir {cache}"
    command = f"{sys.executable} -m feddg_bench {RUN} {where}"

    def run(before: str) -> subprocess.CompletedProcess[str]:
        shell = ["bash", "-c", before + command]
        return subprocess.run(shell, capture_output=True, text=True, check=False)

    limited = run(f"ulimit {limit}; ")
    if words is None:
        assert limited.returncode == 0, limited.stderr
    else:
        assert limited.returncode == 2, limited.stderr
        assert "Traceback" not in limited.stderr
        assert words in " ".join(limited.stderr.split())
    free = run("")
    assert free.returncode == 0, free.stderr
    assert len(json.loads(free.stdout)["runs"]) == 1
