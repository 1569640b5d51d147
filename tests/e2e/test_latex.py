"""Every LaTeX table that is shipped compiles, and fits the width of a page."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("**/tables/tables.tex"))
FORMATS = {folder: sorted(folder.glob("*.tex")) for folder in FOLDERS}

PDFLATEX = shutil.which("pdflatex")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        PDFLATEX is None,
        reason="pdflatex is not installed (Debian: texlive-latex-recommended)",
    ),
]


@pytest.mark.parametrize("folder", [pytest.param(f, id=f.parent.name) for f in FOLDERS])
def test_the_tables_of_a_folder_compile(folder: Path, tmp_path: Path) -> None:
    for path in FORMATS[folder]:
        shutil.copy(path, tmp_path)
    document = (tmp_path / "tables.tex").read_text()
    named = set(re.findall(r"\\input\{(.+?)\.tex\}", document))
    assert named == {path.stem for path in FORMATS[folder]} - {"tables"}
    done = subprocess.run(
        [str(PDFLATEX), "-interaction=nonstopmode", "-halt-on-error", "tables.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "tables.pdf").stat().st_size > 10_000
    wide = [float(x) for x in re.findall(r"Overfull \\hbox \((.+?)pt too wide\)", done.stdout)]
    assert max(wide, default=0.0) < 5, done.stdout[-4000:]
    assert "Float too large" not in done.stdout
