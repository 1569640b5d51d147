"""The page of benchmarks: the GPU's section and its decision rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.gpu import decisions, section, write_section

FOUND: dict[str, Any] = {
    "on a GPU": True,
    "torch": "2",
    "peaks": {"device": "card", "float32": 60.0},
    "steps": {"bf16, batch 32": {"ms": 10.0, "host ms": 9.0}},
    # 1,140 images in 40 bare steps of 10 ms take 0.4 s; here 0.57 and 2.28 s
    "rounds_of": {
        "fedavg, float32": 500.0,
        "fedavg, bf16": 2000.0,
        "fedavg, bf16, not deterministic": 2100.0,
    },
}


def test_decisions_follow_from_the_measurements() -> None:
    launches, around, defaults = decisions(FOUND)
    assert (
        launches == "Launches: the host takes 0.90 of a step in bf16. Capture steps as CUDA graphs."
    )
    assert around.startswith("Around steps: a round takes 1.42 times its bare steps. Draw an epoch")
    assert defaults.startswith(
        "Defaults: the fastest settings are 4.2 times as fast. The line that"
    )
    found = {**FOUND, "steps": {"bf16, batch 32": {"ms": 13.0, "host ms": 9.0}}}
    found["rounds_of"] = {**FOUND["rounds_of"], "fedavg, float32": 900.0}
    said = list(decisions(found))
    assert [words.rpartition(". ")[2] for words in said] == [
        "CUDA graphs would gain little.",
        "Fine.",
        "Defaults are fine.",
    ]


@pytest.mark.parametrize("found", [None, {"on a GPU": False, "peaks": {"device": "cpu"}}])
def test_without_a_gpu_nothing_is_claimed(tmp_path: Path, found: dict[str, Any] | None) -> None:
    file = tmp_path / "gpu.json"
    if found:
        file.write_text(json.dumps(found))
    assert "Not measured: no GPU was available." in section(file)


def test_a_part_that_failed_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({**FOUND, "steps": {"error": "x"}, "peaks": {"error": "x"}}))
    said = section(file)
    assert "a round: fedavg, bf16 | 2000.0 images/s" in said
    assert "error" not in said
    assert "None" not in said
    assert said.count("\n- ") == 1
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{section(tmp_path / 'none')}\n## Others\n\ntext\n")
    write_section(page, file)
    assert page.read_text() == f"# Page\n\n{said}\n## Others\n\ntext\n"
    assert section(tmp_path / "none", page) == said  # measured on another machine
