"""Planted worlds: the images follow their tables."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import validate
from feddg_bench.data.protocols import scenarios
from feddg_bench.plugins import make_dataset, names
from feddg_datasets.shared.planted import CLASSES, DOMAINS, Planted
from tests.conftest import Outcome

WORLDS = [name for name in names("data set") if name.startswith("planted_")]


def world(name: str, **own: Any) -> Planted:
    made = make_dataset(name).adjusted(own)
    assert isinstance(made, Planted)
    return made


def test_there_are_seven_worlds() -> None:
    assert [
        f"planted_{name}" for name in ["hard", "label", "null", "place", "style", "texture", "tint"]
    ] == WORLDS


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        # By hand: the cue of the training domains is right with probability 0.9, more than the
        # grating's 0.75; on the test domain it names the class with probability (1 - 0.9) / 3.
        ("planted_tint", (0.75, 0.1 / 3, 0.9)),
        ("planted_place", (0.75, 0.1 / 3, 0.9)),
        ("planted_texture", (0.75, 0.1 / 3, 0.9)),
        ("planted_hard", (0.75, 0.1 / 3, 0.9)),
        ("planted_null", (0.75, 0.75, 0.75)),
        ("planted_style", (1.0, 1.0, 1.0)),
        # ERM's rule never predicts the rare classes c and d: y = a is right for s = a, c or d
        # (0.6 + 2 x 0.4 / 3), y = b for s = b only; each is a thirtieth of the test domain.
        ("planted_label", (0.6, (0.6 + 0.8 / 3 + 0.6) / 30, 0.9)),
    ],
)
def test_answers_by_hand(name: str, answers: tuple[float, float, float]) -> None:
    found = world(name).answers(("one", "two"), "four")
    assert tuple(found.values()) == pytest.approx(answers, abs=1e-12)


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("scenario", ["ot-h-f", "hf-o-t", "tf-h-o"])
def test_answers_agree_with_a_simulation_of_the_world(name: str, scenario: str) -> None:
    """Draw class and cues in turn, as documented, and count."""
    made, rng, n = world(name), np.random.default_rng(0), 200_000
    own = made.settings.model_dump()
    (roles,) = scenarios("ltdo", made.domains, made.letters, scenario)

    def other(cue: Any, right: Any) -> Any:
        return np.where(right, cue, (cue + rng.integers(1, CLASSES, n)) % CLASSES)

    def draw(domain: str) -> tuple[Any, Any, Any]:
        e = DOMAINS.index(domain)
        y = rng.integers(0, CLASSES, n)
        if "share" in own:
            y = other(np.full(n, e), rng.random(n) < own["share"][e])
        s = other(y, rng.random(n) < own["q"])
        p = own["p"][e] if "p" in own else 0.25
        h = other(y if p >= 0 else (y + 1) % CLASSES, rng.random(n) < abs(p))
        return y, s, h

    seen, (y, s, h) = [draw(domain) for domain in roles.train], draw(roles.test)

    def rule(*worlds: tuple[Any, Any, Any]) -> Any:
        counts = np.zeros((CLASSES,) * 3)
        for drawn in worlds:
            np.add.at(counts, drawn, 1)
        return counts.argmax(0)

    found = made.answers(roles.train, roles.test)
    assert np.mean(s == y) == pytest.approx(found["invariant"], abs=0.006)
    assert np.mean(rule((y, s, h))[s, h] == y) == pytest.approx(found["best"], abs=0.006)
    ties = name in ("planted_tint", "planted_place", "planted_texture", "planted_hard")
    if not (ties and scenario != "ot-h-f"):  # with nearly equal cues, a sample can choose either
        assert np.mean(rule(*seen)[s, h] == y) == pytest.approx(found["erm"], abs=0.006)


@pytest.mark.parametrize("name", WORLDS)
def test_the_default_scenario_is_the_worst_for_erm(name: str) -> None:
    made = world(name)
    known = scenarios("ltdo", made.domains, made.letters)
    erm = {scenario.name: made.answers(scenario.train, scenario.test)["erm"] for scenario in known}
    assert erm[made.default_scenario["ltdo"]] == pytest.approx(min(erm.values()))


def tint_rule(v: float, scale: float = 1.0) -> tuple[Any, Any]:
    """Return logits and probabilities [y, s, h] of a rule for tints: ERM's rule at v = 1, the
    invariant rule at v = 0."""
    made = world("planted_tint")
    seen = (made.table("one") + made.table("two")) / 2
    logits = scale * np.log(4 * (seen.sum(2)[:, :, None] * (4 * seen.sum(1)[:, None]) ** v))
    return logits, np.exp(logits) / np.exp(logits).sum(0)


def on_training_domains(v: float, scale: float = 1.0) -> tuple[Any, Any, Any]:
    """Return each domain's risk, its derivative by the scale, and gradient terms of a linear head.

    The head's features are one-hot s, one-hot h and a bias. Of the gradient, it returns the mean
    squared distance from its mean over domains, and the mean square for single images.
    """
    logits, p = tint_rule(v, scale)
    tables = [world("planted_tint").table(domain) for domain in DOMAINS[:2]]
    errors = [p * t.sum(0) - t for t in tables]
    heads = np.array([np.hstack([e.sum(2), e.sum(1), e.sum((1, 2))[:, None]]) for e in errors])
    squares = [3 * (t * ((p**2).sum(0) - 2 * p + 1)).sum() for t in tables]
    return (
        np.array([-(t * np.log(p)).sum() for t in tables]),
        np.array([(e * logits).sum() for e in errors]),
        (((heads - heads.mean(0)) ** 2).sum((1, 2)).mean(), np.mean(squares)),
    )


@pytest.mark.parametrize(
    ("penalty", "weight", "accuracy"),
    [
        (lambda risks, _: risks.var(), 10, 0.1 / 3),  # V-REx's default
        (lambda risks, _: risks.var(), 30, 0.75),
        (lambda _, slopes: (slopes**2).mean(), 10, 0.1 / 3),
        (lambda _, slopes: (slopes**2).mean(), 50, 0.75),  # IRM's default is 100
    ],
)
def test_weights_from_which_exact_penalties_undo_a_tint(
    penalty: Callable[..., Any], weight: float, accuracy: float
) -> None:
    def objective(at: tuple[float, float]) -> float:
        risks, slopes, _ = on_training_domains(*at)
        return float(risks.mean() + weight * penalty(risks, slopes))

    best = min(product(np.linspace(0, 1, 21), np.linspace(0.5, 1.5, 11)), key=objective)
    s, h = np.indices((CLASSES, CLASSES))
    chosen = tint_rule(*best)[0].argmax(0)
    assert world("planted_tint").table("four")[chosen, s, h].sum() == pytest.approx(accuracy)


def test_why_penalties_fail_in_the_world_of_tints() -> None:
    """Check the numbers in docs/worlds.md."""
    (erm, _, (distance, noise)) = on_training_domains(1)
    (invariant, _, (_, noisier)) = on_training_domains(0)
    assert invariant.mean() - erm.mean() == pytest.approx(0.537, abs=5e-4)
    # IRM's penalty between the constant prediction and the invariant rule
    between = [(on_training_domains(0, a)[1] ** 2).mean() for a in np.linspace(0, 1, 101)]
    assert max(between) == pytest.approx(0.0758, abs=1e-4)
    # FedIIR's penalty in a batch of n is distance + noise / n: which n prefers the invariant rule?
    assert distance == pytest.approx(0.00076, abs=1e-5)
    assert (noisier - noise) / distance == pytest.approx(1030, abs=20)
    # FedSR's bottleneck: nats of class information in a cue, and nats beyond the class
    made = world("planted_tint")
    seen = (made.table("one") + made.table("two")) / 2
    for axis, says, beyond in ((2, 0.55, 0.84), (1, 0.95, 0.43)):
        share = 4 * seen.sum(axis)
        entropy = -(share * np.log(share)).sum() / 4
        assert (np.log(4) - entropy, entropy) == pytest.approx((says, beyond), abs=0.006)


@pytest.mark.parametrize("name", WORLDS)
def test_images_follow_the_table_to_within_one(name: str) -> None:
    made = world(name, images=997)
    for number, domain in enumerate(DOMAINS):
        counts = np.zeros((CLASSES,) * 3)
        np.add.at(counts, tuple(made.cells[:3, made.cells[3] == number]), 1)
        assert counts.sum() == 997
        assert np.abs(counts - 997 * made.table(domain)).max() <= 1


@given(
    st.sampled_from([name for name in WORLDS if name not in ("planted_style", "planted_label")]),
    st.floats(0.26, 1),
    st.lists(st.floats(-1, 1), min_size=4, max_size=4),
)
def test_a_table_is_a_distribution_and_the_best_rule_is_best(
    name: str, q: float, p: list[float]
) -> None:
    made = world(name, q=q, **({} if name == "planted_null" else {"p": p}))
    for domain in DOMAINS:
        assert made.table(domain).sum() == pytest.approx(1)
        assert (made.table(domain) >= 0).all()
    for test in DOMAINS:
        found = made.answers([d for d in DOMAINS if d != test], test)
        assert max(found["invariant"], found["erm"]) <= found["best"] + 1e-12


@pytest.mark.parametrize("name", WORLDS)
def test_images_are_those_of_every_machine(name: str) -> None:
    """Pixels are the same as on the machine where this test was written."""
    made = world(name)
    pixels = [made.read(index, 16) for index in range(0, 16_000, 997)]
    assert all(image.shape == (16, 16, 3) and image.dtype == np.uint8 for image in pixels)
    assert sum(int(image.astype(np.int64).sum()) for image in pixels) == PIXELS[name]


PIXELS = {
    "planted_hard": 856_436,
    "planted_label": 1_364_623,
    "planted_null": 888_836,
    "planted_place": 1_480_292,
    "planted_style": 1_589_485,
    "planted_texture": 1_299_082,
    "planted_tint": 838_432,
}


def test_cues_are_where_they_should_be() -> None:
    _, s, h, _ = world("planted_place").cells
    place = world("planted_place", noise=0)
    for cue, index in ((cue, int(np.flatnonzero(h == cue)[0])) for cue in range(CLASSES)):
        image = place.read(index, 16)
        lit = {(r, c): image[r, c].min() for r, c in product((0, 15), (0, 15))}
        assert max(lit, key=lambda corner: lit[corner]) == (15 * (cue // 2), 15 * (cue % 2))
    tint = world("planted_tint", noise=0)
    brightest = [
        tint.read(int(np.flatnonzero(h == cue)[0]), 16).mean((0, 1)).argmax() for cue in range(3)
    ]
    assert brightest == [0, 1, 2]
    null = world("planted_null", noise=0)
    across, down = (null.read(int(np.flatnonzero(s == cue)[0]), 16)[..., 0] for cue in (0, 1))
    assert (across == across[:, :1]).all()
    assert (down == down[:1]).all()


def test_own_settings_are_checked() -> None:
    assert world("planted_tint").adjusted({}) is not None
    for own, words in (
        ({"q": 2}, "world.q"),
        ({"p": [0.5]}, "world.p"),
        ({"tint": 1}, "unknown setting 'world.tint'"),
    ):
        with pytest.raises(SettingsError, match=words.replace(".", r"\.")):
            world("planted_tint", **own)
    with pytest.raises(SettingsError, match="world"):
        make_dataset("digits4").adjusted({"q": 0.5})
    assert validate(world("planted_tint").Settings, {}).model_dump()["q"] == 0.75


def test_strengths_are_in_the_key_and_change_the_images(
    feddg: Callable[..., Outcome], tmp_path: Path
) -> None:
    def plan(*pairs: str) -> dict[str, Any]:
        code, out, err = feddg(
            "run", "--dataset", "planted_tint", "--results", str(tmp_path), *pairs, "--dry-run",
            "--json",
        )  # fmt: skip
        assert code == 0, err
        (run,) = json.loads(out)
        return run  # type: ignore[no-any-return]

    usual, same, other = plan(), plan("world.q=0.75"), plan("world.q=0.8")
    assert usual["settings"]["scenario"] == "ot-h-f"
    assert usual["key"] == same["key"] != other["key"]
    code, _, err = feddg("run", "world.q=0.8", "--dry-run", "--results", str(tmp_path))
    assert code == 2
    assert "unknown setting 'world.q'" in err


def test_a_record_holds_the_answers(feddg: Callable[..., Outcome], tmp_path: Path) -> None:
    code, _, err = feddg(
        "run", "--dataset", "planted_tint", "world.images=200", "rounds=1", "--results", tmp_path,
        "--workers", 1,
    )  # fmt: skip
    assert code == 0, err
    (file,) = (tmp_path / "runs").glob("*.json")
    record = json.loads(file.read_bytes())
    assert record["data"]["answers"] == pytest.approx(
        {"invariant": 0.75, "erm": 0.1 / 3, "best": 0.9}
    )
    assert record["settings"]["world"]["images"] == 200


def test_the_table_shows_the_part_that_is_undone(
    feddg: Callable[..., Outcome],
) -> None:
    for name, more in (("planted_tint", ()), ("planted_null", ("world.q=0.5",))):
        code, _, err = feddg(
            "run", "--dataset", name, "world.images=200", "rounds=1", *more, "--results", "runs",
            "--workers", 1,
        )  # fmt: skip
        assert code == 0, err
    code, out, err = feddg("tables", "worlds", "--results", "runs", "--out", "tables")
    assert code == 0, out + err
    Path("none").mkdir()
    code, out, err = feddg("tables", "all", "--results", "none", "--out", "empty")
    assert not any(line.startswith("worlds:") for line in (out + err).splitlines())
    assert not list(Path("empty").glob("worlds*"))
    accuracy = {}
    for path in Path("runs/runs").glob("*.json"):
        record = json.loads(path.read_bytes())
        accuracy[record["dataset"]] = record["rounds"][-1]["evaluation"]["test"]["four"]["accuracy"]
    tint = 100 * (accuracy["planted_tint"] - 0.1 / 3) / (0.75 - 0.1 / 3)
    null = 100 * (accuracy["planted_null"] - 0.5)
    shown = Path("tables/worlds.md").read_text()
    assert f"|FedAvg|{null:.1f}|{tint:.1f}|" in shown


def test_a_curve_over_the_strength_of_the_invariant_cue(feddg: Callable[..., Outcome]) -> None:
    for q in (0.5, 1):
        code, _, err = feddg(
            "run", "--dataset", "planted_tint", "--method", "agrsum,erm,fedavg", "world.images=200",
            "rounds=1", f"world.q={q}", "--results", "runs", "--workers", 1,
        )  # fmt: skip
        assert code == 0, err
    code, out, err = feddg("figures", "strength", "--results", "runs", "--out", "figures")
    assert code == 0, out + err
    (sheet,) = Path("figures").glob("strength-planted_tint*.csv")
    with sheet.open() as file:
        rows = [(row["series"], row["strength"], row["mean"]) for row in csv.DictReader(file)]
    assert [row[:2] for row in rows] == [
        (name, q)
        for name in ("AgrSum", "ERM", "ERM's rule", "FedAvg", "Invariant rule")  # AgrSum: K=4
        for q in ("0.5", "1")
    ]
    known = {row[:2]: float(row[2]) for row in rows if "rule" in row[0]}
    assert known == pytest.approx(
        {
            ("ERM's rule", "0.5"): 10 / 3,
            ("ERM's rule", "1"): 100,
            ("Invariant rule", "0.5"): 50,
            ("Invariant rule", "1"): 100,
        }
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("planted_hard", "world.p=[0.25, 0.25, 0.25, 0.25]"),
        ("planted_texture", "world.p=[0.25, 0.25, 0.25, 0.25]"),
        ("planted_label", "world.share=[0.25, 0.25, 0.25, 0.25]"),
    ],
)
def test_a_network_with_the_invariant_cue_alone_attains_its_rule(
    feddg: Callable[..., Outcome], name: str, alone: str
) -> None:
    """Only the shift, not the network or the noise, keeps it from the invariant rule."""
    code, _, err = feddg("run", "--dataset", name, alone, "--results", "runs", "--workers", 1)
    assert code == 0, err
    (file,) = Path("runs/runs").glob("*.json")
    record = json.loads(file.read_bytes())
    reached = record["rounds"][-1]["evaluation"]["test"]["four"]["accuracy"]
    assert reached == pytest.approx(record["data"]["answers"]["invariant"], abs=0.02)
