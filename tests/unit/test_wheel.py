"""Code and shipped files name only files that the wheel contains."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_text_names_a_file_that_the_wheel_lacks() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = built["targets"]["wheel"]
    shipped = [*wheel["packages"], *wheel["force-include"]]
    files = [
        path
        for folder in (*wheel["packages"], "sweeps")
        for ending in ("py", "yaml", "html")
        for path in (ROOT / folder).rglob(f"*.{ending}")
    ]
    assert len(files) > 200
    named = {
        (str(path.relative_to(ROOT)), word)
        for path in files
        for word in re.findall(r"(?:[\w-]+/)+[\w-]+(?:\.\w+)*|\b\w+\.md\b", path.read_text())
        if (ROOT / word).exists()
        # sweep files name results folders of their commands
        and not (path.suffix == ".yaml" and (ROOT / word).is_dir())
    }
    assert ("benchmark/feddg_bench/common/files.py", "sweeps/recipes") in named
    inside = tuple(f"{folder}/" for folder in shipped)
    assert sorted(one for one in named if not f"{one[1]}/".startswith(inside)) == []
