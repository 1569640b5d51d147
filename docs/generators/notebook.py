"""Notebooks with the outputs of their cells.

A Jupyter kernel would take longer to install than the site to build, and these notebooks need none.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

from generators import ROOT, Page

FOLDER = ROOT / "docs/tutorials"


def pages() -> Iterator[Page]:
    """Yield a page, its pictures and the executed notebook, for each notebook of the tutorials."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        execute(notebook["cells"])
        yield Page(f"tutorials/{path.name}", json.dumps(notebook, indent=1))
        text = []
        for number, cell in enumerate(notebook["cells"]):
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                text.append(source.replace("](../", "](../../"))
                continue
            text.append(f"```python\n{source}\n```")
            for output in cell["outputs"]:
                data = output.get("data", {})
                if "image/png" in data:
                    picture = f"{path.stem}-{number}.png"
                    yield Page(f"tutorials/{picture}", base64.b64decode(data["image/png"]))
                    text.append(f"![The figure that this cell draws]({picture})")
                elif "text/html" in data:
                    text.append(f"```{{raw}} html\n{''.join(data['text/html'])}\n```")
                else:
                    text.append(f"```text\n{output.get('text') or data['text/plain']}\n```")
        text.append(f"{{download}}`Download this notebook with its outputs <{path.name}>`")
        yield Page(f"tutorials/{path.stem}.md", "\n\n".join(text) + "\n")


def execute(cells: list[dict[str, Any]]) -> None:
    """Run the code of a notebook from its folder, and add outputs as Jupyter does.

    Files that the code writes go nowhere: paths of results lead up and out of a temporary folder.
    """
    matplotlib.use("agg")
    from matplotlib import pyplot

    names: dict[str, Any] = {}
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        inner = Path(place, "docs/tutorials")
        inner.mkdir(parents=True)
        Path(place, "results").symlink_to(ROOT / "results")
        os.chdir(inner)
        try:
            for number, cell in enumerate(each for each in cells if each["cell_type"] == "code"):
                cell["execution_count"] = number + 1
                cell["outputs"] = [*_outputs("".join(cell["source"]), names, number + 1)]
                for drawn in map(pyplot.figure, pyplot.get_fignums()):
                    file = io.BytesIO()
                    drawn.savefig(file, dpi=150, metadata={"Software": None})
                    png = {"image/png": base64.b64encode(file.getvalue()).decode()}
                    cell["outputs"].append(
                        {"output_type": "display_data", "data": png, "metadata": {}}
                    )
                pyplot.close("all")
        finally:
            os.chdir(here)


def _outputs(source: str, names: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Execute a cell; yield its text, then the value of its last line unless ``;`` ends it."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    if printed.getvalue():
        yield {"output_type": "stream", "name": "stdout", "text": printed.getvalue()}
    if value is not None and not source.rstrip().endswith(";"):
        data = {"text/plain": repr(value)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_()
        yield {
            "output_type": "execute_result",
            "data": data,
            "metadata": {},
            "execution_count": number,
        }
