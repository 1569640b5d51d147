"""Completion: names and settings by the protocol of shells, and in real ones."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from feddg_bench import plugins
from feddg_bench.config.layers import dotted_keys
from feddg_bench.config.recipes import recipe_names
from tests.environment import in_terminal

Run = Callable[..., Any]
METHODS, DATA_SETS = plugins.names("method"), plugins.names("data set")


@pytest.fixture
def found(feddg: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Return a function from the line before the cursor to the completions of its last word."""
    monkeypatch.setenv("_FEDDG_BENCH_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")

    def complete(line: str) -> list[str]:
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", f"feddg-bench {line}")
        done = feddg()
        assert (done.code, done.err) == (0, "")
        return [one.partition("\t")[0] for one in done.out.split("\n") if one]

    return complete


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("re", ["resume", "report", "results", "recipes"]),
        ("results ", ["list", "check", "pack", "unpack"]),
        ("run --metho", ["--method", "--methods"]),
        ("run --method ", [*METHODS, "all"]),
        ("run --method fedp", ["fedproto", "fedprox"]),
        ("run --method=fedp", ["fedproto", "fedprox"]),
        ("run --methods pardon,fedp", ["pardon,fedproto", "pardon,fedprox"]),
        ("run --method pardon,pard", []),
        ("profile --method sca", ["scaffold"]),
        ("tune --method sca", ["scaffold"]),
        ("methods show par", ["pardon"]),
        ("run --dataset ", [*DATA_SETS]),
        ("data check pa", ["pacs"]),
        ("datasets show pa", ["pacs"]),
        ("run --recipe ", [*recipe_names()]),
        ("recipes show desk", ["desktop"]),
        ("run --protocol lodo,l", ["lodo,ltdo"]),
        ("run --scenario ip", ["ip-o-c", "ip-c-o"]),
        ("run --scenario c", ["chalk"]),
        ("run --scenario oc-i-p,ch", ["oc-i-p,chalk"]),
        ("run --dataset pacs --scenario c", ["cartoon", "cs-a-p", "cs-p-a"]),
        ("run --dataset pacs --protocol lodo --scenario acs", ["acs-p"]),
        ("run --dataset nosuch --scenario c", []),
        ("run --dataset folder --data-root /no/such --scenario ", []),
        ("run train.l", ["train.lr=", "train.local_epochs="]),
        ("run --set train.l", ["train.lr=", "train.local_epochs="]),
        ("run train.optimizer=", ["train.optimizer=adam", "train.optimizer=sgd"]),
        ("run optimizer=s", ["optimizer=sgd"]),
        ("run portable=", ["portable=true", "portable=false"]),
        ("run fold_b", ["fold_batch_norm="]),
        ("run lr", ["lr="]),
        ("run lr=", []),
        ("run worke", []),
        (
            "run fold_batch_norm=",
            ["fold_batch_norm=auto", "fold_batch_norm=true", "fold_batch_norm=false"],
        ),
        ("run evaluation.metrics=", []),
        ("run train.lr=", []),
        ("run no.such=", []),
        ("run federation.client_t", []),
        ("run backbone.name=len", ["backbone.name=lenet"]),
        ("run hyper.", []),
        ("run --method fedprox hyper.", ["hyper.mu=", "hyper.norm="]),
        (
            "run --method FedProx,Ridge hyper.",
            ["hyper.mu=", "hyper.norm=", "hyper.penalty="],
        ),
        ("methods show fedprox hyper.m", ["hyper.mu="]),
        ("run --method fedprox hyper.norm=", ["hyper.norm=squared", "hyper.norm=l2"]),
        ("run --dataset planted_tint world.con", ["world.contrast="]),
        ("sweep lo", ["lodo"]),
        ("sweep lambda federation.ro", ["federation.rounds="]),
        ("sweep tune/fedav", ["tune/fedavg"]),
        ("tables pardon-", ["pardon-1", "pardon-2", "pardon-3", "pardon-5"]),
        ("attack --kind mem", ["membership"]),
        ("run --engine ", ["processes", "ray", "slurm"]),
        ("settings --method fedpro", ["fedproto", "fedprox"]),
    ],
)
def test_completions(found: Callable[[str], list[str]], line: str, expected: list[str]) -> None:
    assert sorted(found(line)) == sorted(expected)


def test_a_run_to_resume_is_completed(found: Callable[[str], list[str]], tmp_path: Path) -> None:
    for folder, key in (("runs", "ab12"), ("mine", "ab34")):
        (tmp_path / folder / "checkpoints").mkdir(parents=True)
        (tmp_path / folder / f"checkpoints/{key}.safetensors").touch()
    assert found("resume a") == ["ab12"]
    assert found("resume --results mine a") == ["ab34"]
    assert found("resume --results none a") == []


def test_every_setting_is_completed(found: Callable[[str], list[str]]) -> None:
    assert {*dotted_keys()} - {key.rstrip("=") for key in found("run ")} == {
        "federation.client_timeout"  # removed
    }


SCRIPT = """
import os, sys
from feddg_bench import cli
sys.argv = ["feddg-bench"]
for line, slow in (
    ("r", {"torch", "numpy", "feddg_bench.config.schema", "feddg_bench.cli.run"}),
    ("run --method fedprox --dataset digits4 hyper.", {"torch", "pandas", "lightning"}),
):
    os.environ["_TYPER_COMPLETE_ARGS"] = f"feddg-bench {line}"
    try:
        cli.main()
    except SystemExit:
        print(*(slow & {*sys.modules}), file=sys.stderr)
"""


def test_a_completion_loads_no_pytorch_and_names_of_commands_no_settings() -> None:
    variables = {
        "_FEDDG_BENCH_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    program = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        program, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert (done.stderr.split(), "hyper.mu=" in done.stdout) == ([], True)


TYPED = {
    "rep": "report ",
    "run --rec": "run --recipe ",
    "run --method fedavg,par": "run --method fedavg,pardon ",
    "run federation.serv": "run federation.server_lr=",
    "run train.optimizer=s": "run train.optimizer=sgd ",
}
"""Line before the tabulator -> line after it."""
SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
LOAD = {
    "bash": 'eval "$(feddg-bench --show-completion)"',
    "zsh": "autoload -Uz compinit; compinit -u; bindkey -e\n"
    'eval "$(feddg-bench --show-completion)"',
}


@pytest.mark.nightly
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes(shell: str, tmp_path: Path) -> None:
    """Ctrl-A and ``echo`` after the tabulator print the completed line.

    Fish needs no script of its own: the other tests here use its protocol.
    """
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    typed = "".join(f"feddg-bench {line}\t\x01echo '<\x05>'\n" for line in TYPED)
    script = f"{LOAD[shell]}\n{typed}exit\n"
    environment = {
        "HOME": str(tmp_path),
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "COLUMNS": "200",
    }
    _, shown = in_terminal(SHELLS[shell], environment, tmp_path, typed=script)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n")
    printed = re.findall(r"^<feddg-bench (.*)>$", shown, flags=re.M)
    if shell == "zsh":  # takes its space away before the bracket
        printed = [line if line.endswith("=") else f"{line} " for line in printed]
    assert printed == [*TYPED.values()], shown
