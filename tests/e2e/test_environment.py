"""Variables that other programs export to their child processes change nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fabricate_records import population

EXPORTED = {
    "jupyter": {
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "JPY_PARENT_PID": "1",
        "JPY_SESSION_NAME": "notebook.ipynb",
        "CLICOLOR": "1",
        "FORCE_COLOR": "1",
        "CLICOLOR_FORCE": "1",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "TERM": "xterm-color",
    },
    "vscode": {
        "TERM_PROGRAM": "vscode",
        "VSCODE_PID": "1",
        "VSCODE_CWD": "/",
        "MPLBACKEND": "module://ipykernel.pylab.backend_inline",
        "PYDEVD_USE_FRAME_EVAL": "NO",
        "PYDEVD_IPYTHON_COMPATIBLE_DEBUGGING": "1",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONUTF8": "1",
    },
    "pycharm": {
        "PYCHARM_HOSTED": "1",
        "PYCHARM_DISPLAY_PORT": "63342",
        "MPLBACKEND": "module://backend_interagg",
        "PYTHONUNBUFFERED": "1",
        "TERMINAL_EMULATOR": "JetBrains-JediTerm",
    },
    "tqdm": {"TQDM_DISABLE": "1", "TQDM_MININTERVAL": "5", "TQDM_NCOLS": "9"},
    "rich": {"NO_COLOR": "1", "COLUMNS": "80", "LINES": "24", "TTY_COMPATIBLE": "1"},
    "slurm": {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "sweep",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_NTASKS_PER_NODE": "2",
        "OMP_PROC_BIND": "spread",
    },
    "kubernetes": {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "KUBERNETES_PORT": "tcp://10.0.0.1:443",
        "MASTER_ADDR": "10.0.0.2",
        "MASTER_PORT": "1234",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "0",
    },
}
"""The variables of each program."""


def command(folder: Path, variables: dict[str, str], *words: str) -> str:
    """Run the command in ``folder``; return its standard output."""
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    done = subprocess.run(
        [sys.executable, "-m", "feddg_bench", *words],
        cwd=folder,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Return a folder of records, and a figure of them drawn without foreign variables."""
    folder = tmp_path_factory.mktemp("drawn")
    population(folder / "runs", 8)
    command(folder, {}, "figures", "overhead", "--out", "plain")
    pictures = _pictures(folder / "plain")
    assert pictures
    return folder, pictures


def _pictures(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.png")}


@pytest.mark.nightly
@pytest.mark.parametrize("program", EXPORTED)
def test_figures_are_the_same(drawn: tuple[Path, dict[str, bytes]], program: str) -> None:
    folder, plain = drawn
    command(folder, EXPORTED[program], "figures", "overhead", "--out", program)
    assert _pictures(folder / program) == plain


@pytest.mark.nightly
def test_a_run_is_the_same(tmp_path: Path, cache: Path) -> None:
    everything = {name: value for each in EXPORTED.values() for name, value in each.items()}
    words = ["run", "--scenario", "ip-o-c", "--rounds", "1", "--clients", "2", "--per-round", "1"]
    found = []
    for variables in ({}, everything):
        variables = {**variables, "FEDDG_CACHE": str(cache)}
        results = tmp_path / str(len(found))
        command(tmp_path, variables, *words, "--results", str(results))
        (path,) = (results / "runs").glob("*.json")
        record = json.loads(path.read_text())
        found.append((record["key"], record["rounds"][-1]["evaluation"]))
    assert found[0] == found[1]
