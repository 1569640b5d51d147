"""End-to-end tests of ``feddg-bench attack``."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from feddg_attacks import shadow
from feddg_attacks.kinds import membership
from feddg_attacks.kinds.gradient_inversion import GradientInversion
from feddg_attacks.perform import Lab
from feddg_bench.common.errors import RunInterruptedError
from tests.e2e.test_cli import refused

pytestmark = pytest.mark.nightly

Run = Callable[..., Any]
STORED = (
    *("--method", "pardon", "--json", "hyper.style_augment=false"),
    *("data.id_val_fraction=0.06", "data.id_test_fraction=0.06"),
)
SMALL = ("--clients", "40", "--rounds", "1", "--workers", "1", "data.image_size=16")


def attack(feddg: Run, root: Path, *words: str) -> Any:
    return feddg("attack", *SMALL, "--results", str(root), *words)


def test_an_attack_is_recorded_with_both_controls_is_not_repeated_and_is_in_the_table(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MOST_MEMBERS", 80)
    monkeypatch.setattr(shadow, "REPEATS", 1)
    (part,) = json.loads(attack(feddg, tmp_path, *STORED, "--items", "weights").out)
    assert [result["item"] for result in part["results"]] == ["weights"]
    typo = attack(feddg, tmp_path, *STORED, "--items", "style,wieghts")
    refused(typo, "unknown item 'wieghts'", "'weights'")  # although there is a record to extend
    outcome = attack(feddg, tmp_path, *STORED, "--items", "style,weights")
    assert outcome.code == 0, outcome.err
    (record,) = json.loads(outcome.out)
    (path,) = (tmp_path / "attacks").iterdir()
    assert json.loads(path.read_bytes()) == record
    assert record["public"] == 53
    style, weights = record["results"]
    assert weights == part["results"][0]
    assert (style["item"], weights["item"]) == ("style", "weights")
    assert 0.4 < style["no_leak"]["measured"]["value"] < 0.6
    assert style["planted_leak"]["measured"]["value"] > 0.9
    assert weights["figures"]["auc"]["low"] > 0.6
    before = path.stat().st_mtime_ns
    again = attack(feddg, tmp_path, *STORED, "--items", "weights")
    assert json.loads(again.out) == [{**record, "results": [weights]}]
    assert path.stat().st_mtime_ns == before
    done = feddg("tables", "privacy", "--results", str(tmp_path))
    assert done.code == 0, done.err
    assert "privacy: 1 attack\n" in done.out
    text = (tmp_path / "tables" / "privacy.notes.md").read_text()
    assert "## Digits4, recipe quick" in text
    assert "|PARDON|style|24 (another setup)|no|no|yes|0." in text
    assert (
        "Other settings than the recipe's: `membership AUC` has runs with data.image\\_size=16."
        in text
    )
    assert "|PARDON|style|0." in (tmp_path / "tables" / "privacy.md").read_text()
    assert (tmp_path / "tables" / "privacy.csv").read_text().count("membership AUC") == 2


THEIRS = """
import numpy as np
from feddg_bench.core.messages import nbytes
from feddg_attacks.attack import Attack, interval, no_leak, planted_leak
from feddg_attacks.records import AttackResult

class Longest(Attack):
    kind = "longest"

    def measure(self, scene):
        sent = [m for m in scene.messages() if m.up and m.value is not None]
        draw = scene.draw("bootstrap")
        sizes = [np.array([float(nbytes(m.value))]) for m in sent]
        yield AttackResult(
            item=sent[0].item, up=True, call=sent[0].when[1], times=1, messages=len(sent),
            targets=len(sent), bytes=nbytes(sent[0].value),
            no_leak=no_leak(interval([np.array([0.5])], draw), 0.5),
            planted_leak=planted_leak(interval([np.array([1.0])], draw), 0.9),
            figures={"bytes": interval(sizes, draw)},
        )
"""


@pytest.mark.usefixtures("anew")
def test_an_attack_of_another_package_runs_by_name(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_attack.py").write_text(THEIRS)
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    entry = "[feddg_bench.attacks]\nlongest = their_attack:Longest\n"
    (info / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(tmp_path)
    (record,) = json.loads(attack(feddg, tmp_path, "--kind", "longest", "--json").out)
    refused(attack(feddg, tmp_path, "--kind", "longer"), "attack", "longest")
    (result,) = record["results"]
    assert record["public"] > 100
    assert (record["kind"], result["item"]) == ("longest", "weights")
    assert result["figures"]["bytes"]["value"] == result["bytes"] > 0


def test_a_broken_record_is_made_anew(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GradientInversion, "steps", 2)
    words = ("--method", "fedavg", "--kind", "gradient-inversion", "--json")
    (record,) = json.loads(attack(feddg, tmp_path, *words).out)
    (path,) = (tmp_path / "attacks").glob("*.json")
    path.write_bytes(path.read_bytes()[:100])
    (again,) = json.loads(attack(feddg, tmp_path, *words).out)
    assert again["results"] == record["results"]


def test_items_that_an_attack_does_not_read_are_said(feddg: Run, tmp_path: Path) -> None:
    words = ("--method", "fpl", "--kind", "property", "--items")
    both = attack(feddg, tmp_path, *words, "classes,prototypes")
    assert both.code == 0, both.err
    assert "property does not attack classes of fpl" in " ".join(both.out.split())
    none = attack(feddg, tmp_path, *words, "classes")
    assert none.code == 2
    assert "does not attack classes of fpl" in none.err


def test_what_the_messages_cannot_hold_is_refused_before_there_is_a_run(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feddg_attacks.perform.train", None)  # nothing is trained
    style = attack(feddg, tmp_path, "--kind", "style-inversion", "--method", "fedavg")
    assert style.code == 2
    assert "reads styles or statistics of images" in style.err
    assert "of fedavg a server sees weights: choose another --kind" in style.err
    several = ("--method", "fedavg,pardon", "--kind", "style-inversion", "--items", "weights")
    items = attack(feddg, tmp_path, *several)
    assert items.code == 2
    assert "of fedavg a server sees weights" in items.err
    assert "or other --items" in items.err
    hidden = attack(feddg, tmp_path, "--method", "fedavg", "privacy.aggregation=secure")
    assert hidden.code == 2
    assert "under secure sums (privacy.aggregation=secure) a server sees sums over" in hidden.err
    assert "--kind" not in hidden.err


def test_a_card_says_who_sees_what(feddg: Run) -> None:
    card = feddg("methods", "show", "fedavg").out
    assert "## Privacy" in card
    assert "Secure sums (`privacy.aggregation=secure`): yes." in card


def test_an_attack_is_repeated_for_a_judge_that_it_lacks(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GradientInversion, "steps", 2)
    torch.manual_seed(0)
    weights = tmp_path / "squeezenet.safetensors"
    save_file(torchvision.models.squeezenet1_1(weights=None).state_dict(), weights)
    words = ("--kind", "gradient-inversion", "--method", "fedavg")
    first = attack(feddg, tmp_path, *words)
    assert "LPIPS of pictures: not measured; give --lpips" in first.out
    judged = (*words, "--lpips", str(weights))
    (record,) = json.loads(attack(feddg, tmp_path, *judged, "--json").out)
    assert set(record["judges"]) == {"lpips"}
    (path,) = (tmp_path / "attacks").glob("*.json")
    before = path.stat().st_mtime_ns
    for again in (words, judged):  # neither call adds anything
        assert attack(feddg, tmp_path, *again).code == 0
        assert path.stat().st_mtime_ns == before
    refused(attack(feddg, tmp_path, *words, "--lpips", str(tmp_path / "none")), "no weights file")


def test_ctrl_c_says_how_to_go_on(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise RunInterruptedError(signal.SIGINT)

    monkeypatch.setattr(Lab, "attack", stopped)
    outcome = attack(feddg, tmp_path)
    assert outcome.code == 130
    assert (
        "Stopped. Run the same command again to continue.\n0 of 1 attacks are recorded."
        in outcome.err
    )
    assert "Traceback" not in outcome.err
