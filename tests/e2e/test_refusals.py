"""A table of refused commands: exit status 2, one sentence, nothing computed."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import one_sentence

TINY = "--clients 4 --per-round 2 data.image_size=8"
DP = "privacy.mechanism=dp_client federation.weighting=uniform"
SECURE = "privacy.aggregation=secure"
LONG = "9" * 5000
SWEEP = """\
program: feddg-bench
command: ["${env}", feddg-bench, run, "${args_no_hyphens}"]
method: grid
parameters: {seed: {value: 1}}
"""

COMMANDS: list[tuple[str, ...]] = [
    # names
    ("run --method pardn", "'pardn'", "did you mean 'pardon'"),
    ("run --method fedavg,fedpro", "did you mean 'fedprox'?"),
    ("run --method ''", "nothing after --method"),
    ("run --method ../fedavg", "../fedavg"),
    ("run --method all,", "give it alone"),
    ("run --method fedavg.Settings", "fedavg.Settings"),
    ("run --protocol ltod", "'ltod'", "did you mean 'ltdo'"),
    ("run --protocol lodo,loto", "unknown protocol 'loto'"),
    ("run --protocol wilds", "needs a data set with published splits"),
    ("run --dataset pasc", "'pasc'", "did you mean 'pacs'"),
    ("run --dataset ../digits4", "../digits4"),
    ("run --dataset ''", "nothing after --dataset"),
    ("run --scenario ip-o-x", "ip-o-x", "did you mean"),
    ("run --scenario ''", "nothing after --scenario"),
    ("run --scenario ip-o-c,../x", "unknown scenario '../x'"),
    ("run --recipe quik", "'quik'", "did you mean 'quick'"),
    ("run --recipe none.yaml", "none.yaml"),
    ("run --recipe ''", "recipe"),
    ("run --recipe /dev/zero", "/dev/zero"),
    ("run --recipe ../../quick", "quick"),
    ("methods show fedpro", "did you mean 'fedprox'?"),
    ("methods show fedavg --backbone resnet19", "resnet18"),
    ("methods new 3fed", "cannot name a method"),
    ("recipes show quik", "did you mean 'quick'"),
    ("datasets show pasc", "did you mean 'pacs'"),
    ("settings --dataset pasc", "did you mean 'pacs'"),
    ("settings --method pardn", "did you mean 'pardon'"),
    ("settings lr=0.1", "no setting of fedavg has 'lr=0.1' in its key"),
    ("settings --recipe ppdg", "'digits4'", "rmnist"),
    # settings
    ("run train.lrr=0.1", "train.lrr", "did you mean 'train.lr'"),
    ("run hyper.margn=0.1 --method pardon", "hyper.margn", "'hyper.margin'"),
    ("run train.lr", "KEY=VALUE"),
    ("run fedavg", "expected KEY=VALUE; did you mean --method fedavg?"),
    ("run --seeds 0 1 2", "did you mean --seeds 0,1,2?"),
    ("run seeds=0 1 2", "did you mean --seeds 0,1,2?"),
    ("sweep ltdo seeds=0 1", "such as seed=0, and commas between several values"),
    ("figures partition --lambda 0 0.1", "'0.1'", "commas between several values"),
    ("run --seeds '0 1 2'", "separated by commas, such as 0,1,2"),
    ("run --method fedavg fedprox", "did you mean --method fedavg,fedprox?"),
    ("run --scenario chalk ink", "did you mean --scenario chalk,ink?"),
    ("tables --rows fedavg pardon", "leave out 'pardon'", "write several --rows as fedavg,pardon"),
    ("run --scenario chlk", "unknown scenario 'chlk'", "test on: ink, poster, outline, chalk"),
    ("run --num-seeds 2 --seed 1", "seeds and num_seeds give the same"),
    ("run train.lr=fast", "train.lr", "'fast'"),
    ("run backbone.name=resnet5", "resnet5", "resnet50"),
    ("run --heterogeneity 1.5", "partition.heterogeneity", "1.5", "less than or equal to 1"),
    *((f"run --heterogeneity {x}", "heterogeneity") for x in ("-0.1", "nan", "inf", "x")),
    ("run --clients 4 --per-round 9", "per_round is 9", "clients is 4"),
    ("run --clients 100000", "100000", "images"),
    *((f"run --clients {x}", "lients") for x in ("0", "-1", "x", "1000001", str(10**30))),
    *((f"run --per-round {x}", "per") for x in ("0", "-1", "x", str(10**30))),
    *((f"run --rounds {x}", "rounds") for x in ("-1", "0.5", "x", "1.5", "1000001", LONG, "''")),
    ("run --seeds a,b", "seeds 'a,b'", "0,1,2"),
    *((f"run --seeds {x}", "seeds") for x in ("''", "-1", "1.5", "0-", "3-1", str(2**63), LONG)),
    ("run backbone.weights=nowhere.pth pretrained=true", "nowhere.pth"),
    ("run partition.min_client_size=400", "min_client_size"),
    ("run --method pardon hyper.style=vgg19", "hyper.style_weights", "pixel"),
    ("run partition.kind=domain --per-round 5", "per_round is 5", "clients that hold images (2)"),
    *(
        (f"run {more} {words}", *told)
        for words, *told in (
            ("backbone.pretrained=true", "small_cnn has no pretrained weights"),
            ("backbone.padding=tf", "backbone.padding=tf is for mobilenet_v2, not for small_cnn"),
            ("data.image_size=111 backbone.name=mobilenet_v2 padding=tf", "multiple of 32"),
            (
                "partition.kind=domain --per-round 10",
                "per_round is 10",
                "clients that hold images (2)",
            ),
            ("--clients 999", "images"),
        )
        for more in ("", "--dry-run")
    ),
    ("sweep s.yaml --dry-run backbone.pretrained=true", "seed 1 would fail: small_cnn has no"),
    ("tune --trials 2 --dry-run --clients 999", "would fail", "images"),
    ("profile --scenario ip-o-c --rounds=0", "give --rounds 1"),
    ("profile --scenario ip-o-c rounds=1", "give --rounds 1"),
    # resources, files and folders
    ("run --device tpu", "tpu", "cpu"),
    ("run --device cuda:99", "cuda:99", "cpu"),
    *((f"run --device {x}", "device") for x in ("''", "cuda:0,", f"cuda:{LONG}", "cpu:x", "meta")),
    *((f"run --workers {x}", "workers") for x in ("-1", "x", "100000", str(10**30))),
    ("run --workers two", "--workers 'two' is not valid: input should be a valid integer; see"),
    *((f"run --threads {x}", "threads") for x in ("0", "-1", "x", "100000")),
    *((f"run --checkpoint-every {x}", "checkpoint") for x in ("0", "-1", "x", str(10**30))),
    *((f"run --keep {x}", "keep") for x in ("first", "'last;best'")),
    ("run --config nowhere.yaml", "nowhere.yaml"),
    ("run --config /dev/zero", "/dev/zero"),
    ("run --config /", "/"),
    ("run --wandb on", "'on'", "'offline'"),
    ("run --wandb ''", "wandb"),
    ("run --wandb-project ''", "wandb-project"),
    ("run --wandb-project mine", "give --wandb offline or online with it"),
    ("run --dry-run --results ''", "nothing after --results: give a"),
    ("run --dry-run --results=", "nothing after --results: give a"),
    ("run --dry-run --data-root ''", "nothing after --data-root: give a"),
    (f"run {TINY} --results file", "file", "another place"),
    ("results list --results nope", "there is no results folder nope"),
    ("resume ''", "nothing after resume"),
    ("resume zzz", "no checkpoint"),
    # privacy
    (f"run --method pardon {TINY} {DP}", "also send style"),
    (f"run --method fpl {TINY} {DP}", "also send prototypes"),
    (f"run --method scaffold {TINY} {DP}", "also send control"),
    (f"run --method fedgma {TINY} {DP}", "tally"),
    (f"run --method erm {TINY} {DP}", "no crowd to hide it in"),
    (f"run {TINY} privacy.mechanism=dp_style", "nothing besides their weights"),
    (f"run --method fedccrl {TINY} privacy.mechanism=dp_style", "each round"),
    (f"run --method pardon {TINY} {SECURE}", "clusters single clients' styles"),
    (f"run --method ppdg {TINY} {SECURE}", "compares the updates of every two clients"),
    (f"run {TINY} privacy.mechanism=dp_client", "federation.weighting=uniform"),
    (f"run {TINY} privacy.clip_norm=2", "no effect"),
    (f"run {TINY} privacy.mechanism=dp", "'dp_client'"),
    # tables, reports and figures
    ("tables pardon-9", "unknown table 'pardon-9'", "pardon-1", ".yaml"),
    ("tables none.yaml", "none.yaml"),
    ("tables --format md,pdf", "unknown format 'pdf'", "tex"),
    ("tables --select best", "unknown selection rule 'best'", "best_by_val"),
    ("tables --against quick pardon-1 --metric loss", "two sets", "no name of a table", "--metric"),
    ("results check --results empty", "nothing to check in empty/"),
    ("tables --against fedavgg", "unknown method 'fedavgg'", "fedavg"),
    ("tables --against old-runs", "names no folder and no recipe", "old-runs"),
    ("tables --against ./old", "there is no results folder", "--results DIR"),
    ("tables --results nowhere", "nowhere", "--results"),
    ("tables generic --metric f1 --results empty", "unknown metric 'f1'", "macro_f1"),
    ("tables --results empty", "no record in empty/ belongs in a table", "run something first"),
    ("report --results nowhere", "nowhere", "--results"),
    ("report --results empty --filter method", "KEY=VALUE"),
    ("figures convergence", "there is no results folder"),
    ("figures convergence --split tset --results .", "did you mean 'test'"),
    ("figures leaderboard --select lasst --results .", "did you mean 'last'"),
    ("figures leaderbord", "did you mean 'leaderboard'"),
    ("figures leaderboard --format pgn", "did you mean 'png'"),
    ("figures overhead --results .", "make some: feddg-bench run"),
    ("figures partition --lambda 0,many", "expected numbers in [0, 1], such as 0,0.1,0.5,1"),
    ("figures partition --lambda 2", "heterogeneity"),
    ("figures partition --by domian", "did you mean 'domain'"),
    ("figures partition --scenario all", "takes one scenario and all names 12"),
    ("figures partition --dataset digit4", "did you mean 'digits4'"),
    ("figures tsne --rounds 2 --at 3", "expected rounds from 0 to 2"),
    ("figures tsne --dataset poverty", "shows classes of RGB images, and PovertyMap has none"),
    (f"figures tsne --out file {TINY}", "file is a file, not a folder"),
    (f"figures tsne --out file/x {TINY}", "file is a file, not a folder"),
    ("figures gradcam --method pardn", "did you mean 'pardon'"),
    (f"figures styles --method pardon,fedavg {TINY}", "fedavg restyles no images"),
    # attacks
    (f"attack {TINY} --kind guess", "unknown attack", "membership"),
    (f"attack {TINY} --attacker eve", "attacker", "eavesdropper"),
    (f"attack {TINY} data.id_val_fraction=0", "public images", "id_val_fraction"),
    (f"attack {TINY} --sizes 10,x", "--sizes", "numbers"),
    (f"attack {TINY} --sizes 10,30", "--sizes", "their number is given"),
    ("attack --sizes 10 partition.kind=domain", "partition.kind=domain does not take it"),
    ("attack --method erm", "one client", "two or more"),
    ("attack partition.kind=pooled", "one client", "two or more"),
    (f"attack {TINY} --results file", "cannot write", "file is a file, not a folder"),
    (f"attack {TINY} --kind style-inversion --method fedavg", "styles", "choose another --kind"),
    (f"attack {TINY} --method fedavg {SECURE}", "under secure sums", "a server sees sums over"),
    # sweeps
    ("sweep s.yaml --engine slurm", "--dry-run shows the script"),
    ("sweep s.yaml --jobs 3", "--engine slurm"),
]

USAGE: list[tuple[str, ...]] = [
    ("run --metod pardon", "--metod", "did you mean --method?"),
    ("run --epochs 1", "--epochs", "train.local_epochs=VALUE"),
    ("run --lr 0.1", "--lr", "train.lr=VALUE"),
    ("run --learning-rate 1", "--learning-rate", "did you mean train.lr=VALUE?"),
    ("run --test-domain chalk", "--test-domain", "did you mean --scenario?"),
    ("run --domain chalk", "--domain", "did you mean --scenario?"),
    ("run --root DIR", "--root", "did you mean --data-root?"),
    ("run --num-clients 9", "--num-clients", "did you mean --clients?"),
    ("run --frac 0.1", "--frac", "did you mean --per-round?"),
    ("run --batch-size 8", "--batch-size", "train.batch_size=VALUE"),
    ("run --rounds two", "--rounds", "integer"),
    ("run --method", "--method", "requires an argument"),
    ("resume", "missing argument"),
    ("runs --seeds 0 1 2", "'1 2' belongs to no option", "separated by commas"),
    ("figurs", "unknown command 'figurs'", "did you mean 'figures'?"),
    ("figures nosuch", "unknown command 'nosuch'", "convergence"),
    ("methods shwo pardon", "did you mean 'show'?"),
    ("datasets show", "missing argument"),
    ("--nosuch", "--nosuch"),
]
"""Usage errors, which point to ``--help``."""


def name(value: Any) -> str | None:
    """Return a test's name: its command, shortened."""
    return value[0][:60] if isinstance(value, tuple) else None


@pytest.mark.parametrize("row", [*COMMANDS, *((*row, "--help") for row in USAGE)], ids=name)
def test_a_command_is_refused_in_one_sentence(
    feddg: Callable[..., Any], row: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no sbatch
    for module in ("feddg_attacks.perform", "feddg_bench.analysis.figures.training"):
        monkeypatch.setattr(f"{module}.train", None)  # nothing is trained
    Path("file").touch()
    Path("empty").mkdir()
    command = 'command: ["${env}", feddg-bench, run, "${args_no_hyphens}"]\n'
    Path("s.yaml").write_text(
        f"method: grid\nprogram: feddg-bench\n{command}parameters: {{seed: {{value: 1}}}}"
    )
    command, *words = row
    one_sentence(feddg(*shlex.split(command)), *words)
    assert not list(Path("runs").glob("*/*"))
