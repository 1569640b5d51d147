"""Commands that do not train never import PyTorch: one process runs them and checks after each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import feddg_bench as fb
from tests import fabricate_records as fabricate

HEAVY = ("torch", "torchvision", "lightning", "sklearn", "pandas", "matplotlib", "wandb")
COMMANDS = (
    "--help",
    "run --help",
    "run --method pardn",
    "run --rounds -1",
    "run --scenario x-y-z",
    "run --heterogeneity 2",
    "run backbone.name=resnet5",
    "run --method fedavg,scaffold --protocol lodo --dry-run --results records",
    "run --method fedprox hyper.mu=0.5 --dry-run --results records",
    "run --method fedccrl hyper.variant=released --dry-run --results records",
    "run train.lrr=1",
    "run --method fedprox hyper.mx=1",
    "run --method fedprox,fedavg hyper.mx=1",
    "methods",
    "methods show fedavg",
    "runs --results records",
    "tables all --results records --out tables",  # this and the next read a DataFrame
    "report --results records",
)
SCRIPT = """
import sys, time

def look(step, *unwanted):
    found = {*unwanted} & {*sys.modules}
    assert not found, (step, found)

heavy = sys.argv.pop().split()
commands = sys.argv[1:]
import feddg_methods.functional
look("functional", "feddg_bench", "numpy", *heavy)
import feddg_bench
face = dir(feddg_bench)
look("import feddg_bench", *heavy)
from feddg_bench import plugins
assert "pacs" in plugins.names("data set")
look("names", "feddg_methods.fedavg", *heavy)
from feddg_bench import cli
for command in commands:
    sys.argv = ["feddg-bench", *command.split()]
    began = time.process_time()
    try:
        cli.main()
    except SystemExit as stop:
        refused = command.startswith("run ") and not {"--help", "--dry-run"} & {*command.split()}
        assert (stop.code or 0) == 2 * refused, (command, stop.code)
    reads = command.startswith(("tables", "report"))
    look(command, *({*heavy} - {"pandas"} if reads else heavy))
    if command == "methods show fedavg":
        assert time.process_time() - began < 3  # 1.0 with imports, on an idle core
print(*face)
"""


def test_no_command_that_trains_nothing_loads_pytorch(tmp_path: Path) -> None:
    fabricate.population(tmp_path / "records", 4, rounds=2)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *COMMANDS, " ".join(HEAVY)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "weights`: 14 tensors, 395,880 bytes" in done.stdout
    names = done.stdout.splitlines()[-1].split()
    assert {"run", "tables", "Method"} <= set(names)
    assert all(getattr(fb, name) is not None for name in names)
