"""Processes end, whatever they were doing."""

from __future__ import annotations

import struct
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from feddg_bench.common.parallel import end_pool, process_context


def _half_an_answer(begun: str) -> None:
    """Begin an answer to the parent, and never complete it."""
    frame = sys._getframe()
    while "result_queue" not in frame.f_locals:
        assert frame.f_back
        frame = frame.f_back
    answers = frame.f_locals["result_queue"]._writer
    answers._send(struct.pack("!i", 1000) + b"half")
    Path(begun).touch()
    time.sleep(60)


def test_a_pool_ends_while_a_killed_process_was_answering(tmp_path: Path) -> None:
    pool = ProcessPoolExecutor(1, process_context("cpu"))
    begun = tmp_path / "begun"
    pool.submit(_half_an_answer, str(begun))
    while not begun.exists():
        time.sleep(0.05)
    statuses: list[int] = []
    ends = threading.Thread(target=lambda: statuses.extend(end_pool(pool)), daemon=True)
    ends.start()
    ends.join(20)
    assert statuses == [-9]
