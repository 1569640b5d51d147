"""``make pacs``: the data it requires, and the recipe it selects."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from feddg_bench.data.locations import NETWORK_FILES, NETWORKS

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

ROOT = Path(__file__).parents[2]


def test_make_pacs_asks_for_the_data_before_it_installs() -> None:
    command = ["make", "--no-print-directory", "pacs", "DATA="]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("make pacs needs DATA")


@pytest.mark.parametrize(("there", "recipe"), [(True, "desktop"), (False, "laptop")])
def test_make_pacs_takes_styles_of_a_network_if_it_is_there(
    tmp_path: Path, there: bool, recipe: str
) -> None:
    if there:
        path = tmp_path / NETWORKS / NETWORK_FILES["vgg19_16x"]
        path.parent.mkdir()
        path.touch()
    command = ["make", "--no-print-directory", "-n", "pacs", f"DATA={tmp_path}"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall("--recipe ([a-z]+)", said) == [recipe, recipe]
    assert f"cat demo-pacs/tables/pacs-ltdo-{recipe}.md" in said
