"""Equal tuning: trials, ledgers made from records, and their use by `tuned`."""

from __future__ import annotations

import json
import math
import operator
from functools import reduce
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddg_bench.analysis.tables.build import build
from feddg_bench.analysis.tables.describe import Description
from feddg_bench.analysis.tables.generic import frames
from feddg_bench.common.errors import DataError, FeddgError, SettingsError
from feddg_bench.config.schema import Resources
from feddg_bench.plugins import load_method, names
from feddg_bench.records.frame import read_frame
from feddg_bench.records.record import RunRecord, TunedRecord
from feddg_bench.records.runs import read_runs
from feddg_bench.records.store import ResultsStore
from feddg_bench.records.tuning import (
    RULE,
    Trial,
    TuningLedger,
    ledger_path,
    load_ledger,
    pack_ledgers,
    unpack_ledgers,
    winners,
    with_leads,
    worth,
)
from feddg_bench.runs.request import Request, _say_once
from feddg_bench.sweeps.definition import Choice, Range
from feddg_bench.sweeps.jobs import Failures
from feddg_bench.sweeps.search import Search
from feddg_bench.sweeps.trials import RATES, Tuning, Worths, open_tuning, trial_points
from tests import simulate_tuning
from tests.fabricate_records import record, save
from tests.helpers import entry, refused, stretched
from tests.simulate_tuning import errors

FRAME = ("digits4", "ltdo", "quick")
SPACE = {
    "train.lr": None,
    "hyper.a": Range(0.001, 1.0, log=True),
    "hyper.b": Choice(("x", "y", "z")),
    "hyper.c": Range(1, 9, integer=True),
}


@pytest.fixture
def none_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide all ledgers but the test's own: those of the working folder and of the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("feddg_bench.records.tuning.shipped", lambda folder: tmp_path / folder)


def write(root: Path, method: str, *trials: Trial, **more: Any) -> Path:
    dataset, protocol, recipe = FRAME
    values: dict[str, Any] = {
        "scenario": "ip-o-c",
        "seeds": (100,),
        "given": (),
        "metric": "accuracy",
    }
    values |= {"method": method, "dataset": dataset, "protocol": protocol, "recipe": recipe}
    values |= {"trials": trials, "chosen": best(*trials), **more}
    return TuningLedger(**values).save(root)


def best(*trials: Trial) -> int | None:
    """Return the trial that the first rule chooses."""
    return next(iter(winners(trials, "mean_last_fifth")), None)


def trial(value: float | None, **settings: Any) -> Trial:
    found = {name.replace("_", ".", 1): value for name, value in settings.items()}
    return Trial(settings=found, keys=("ab",), id_val=value, seconds=1.0)


def seeded(*values: float) -> Trial:
    return Trial(
        settings={}, keys=("ab",), id_val=sum(values) / len(values), values=values, seconds=1.0
    )


def asked(root: Path, **words: Any) -> Request:
    return Request(**{"scenario": "ip-o-c", "resources": Resources(results=root), **words})


def tuning_of(root: Path, **words: Any) -> list[Tuning]:
    return open_tuning(asked(root, seeds="100", **words), 8)[0]


# -------------------------------------------------------------------------------- trials


def test_the_first_trials_are_the_recipe_and_learning_rates_alone() -> None:
    points = trial_points(0.01, SPACE, 8)
    assert points[:4] == [{}, *({"train.lr": 0.01 * factor} for factor in RATES[1:])]
    for point in points[4:]:
        assert set(point) == set(SPACE)
        assert 0.01 * min(RATES) <= point["train.lr"] <= 0.01 * max(RATES)
        assert 0.001 <= point["hyper.a"] <= 1
        assert point["hyper.b"] in ("x", "y", "z")
        assert point["hyper.c"] in range(1, 10)
    assert len({point["hyper.b"] for point in points[4:]}) > 1


@given(count=st.integers(1, 40), more=st.integers(0, 40))
def test_more_trials_begin_as_fewer_do_and_none_repeats(count: int, more: int) -> None:
    points = trial_points(0.01, SPACE, count + more)
    assert points[:count] == trial_points(0.01, SPACE, count)
    assert len({json.dumps(point) for point in points}) == count + more


def test_every_method_sees_the_same_learning_rates_far_from_each_other() -> None:
    alone = [p.get("train.lr", 1.0) for p in trial_points(1.0, {"train.lr": None}, 8)]
    assert alone == [p.get("train.lr", 1.0) for p in trial_points(1.0, SPACE, 8)]
    ordered = sorted(alone)
    assert min(b / a for a, b in pairwise(ordered)) > 1.1


def test_all_methods_have_as_many_trials_each_time_the_same(tmp_path: Path) -> None:
    found = tuning_of(tmp_path, method="all")
    on_features = {"fedclip", "zeroshot"}  # left out: they need features of texts
    assert [t.plan.settings.method for t in found] == sorted({*names("method")} - on_features)
    again = tuning_of(tmp_path, method="fedprox,pardon")
    same = [t for t in found if t.plan.settings.method in ("fedprox", "pardon")]
    assert [(t.points, t.jobs) for t in again] == [(t.points, t.jobs) for t in same]
    for one in found:
        assert len({job.key for job in one.jobs}) == len(one.jobs) == 8
        assert one.jobs[0].key == one.plan.key
        assert not {key for point in one.points for key in point} & {"seed", "scenario"}
        files = load_method(one.plan.settings.method).Settings.files
        assert not {f"hyper.{name}" for name in files} & set(one.points[-1])


def test_what_is_given_is_not_tuned(tmp_path: Path) -> None:
    (one,) = tuning_of(tmp_path, method="fedprox", settings={"hyper.mu": 0.5, "rounds": 2})
    assert {key for point in one.points for key in point} == {"train.lr"}
    measured = 'evaluation.splits=["id_val"]'
    assert one.given == ("hyper.mu=0.5", "federation.rounds=2", measured)
    with refused(SettingsError, "nothing left to tune"):
        tuning_of(tmp_path, method="fedavg", settings={"lr": 0.5})


def test_each_method_is_tuned_with_the_settings_that_it_has(tmp_path: Path) -> None:
    given = {"hyper.mu": 0.5, "rounds": 2}
    fedavg, fedprox = tuning_of(tmp_path, method="fedavg,fedprox", settings=given)
    (alone,) = tuning_of(tmp_path, method="fedprox", settings=given)
    assert (fedprox.given, fedprox.jobs) == (alone.given, alone.jobs)
    assert fedavg.given == fedprox.given[1:]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"seeds": "100,3"}, "seed 3 is that of 1 run "),
        ({"protocol": "ltdo,lodo"}, "one protocol"),
        ({"scenario": "all"}, "one scenario"),
        ({"settings": {"data.id_val_fraction": 0.0}}, "holds out none"),
        ({"method": "fedpox"}, "did you mean 'fedprox'"),
        ({"seeds": "3"}, "tune with others"),
    ],
)
def test_dishonest_tuning_is_refused(tmp_path: Path, words: dict[str, Any], said: str) -> None:
    save(tmp_path, record(seed=3))
    with refused(FeddgError, said):
        open_tuning(asked(tmp_path, **{"seeds": "100", **words}), 8)


def test_a_method_of_ones_own_has_its_ranges_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "fedprox.yaml").write_text("parameters:\n  hyper.mu: {values: [7.0]}\n")
    both = asked(tmp_path, seeds="100", method="fedprox,moon")
    fedprox, moon = open_tuning(both, 5, tmp_path)[0]
    assert fedprox.points[-1]["hyper.mu"] == 7.0
    assert set(moon.points[-1]) == {"train.lr"}


# ------------------------------------------------------------------------------- ledgers


def made(
    tuning: Tuning,
    number: int,
    id_val: list[float],
    test: float,
    place: int = 0,
    *,
    whole: bool = True,
) -> RunRecord:
    """Return a trial's record with the seed at ``place``; if ``whole``, with all its rounds."""
    job = tuning.trials[number][place]
    plan = Request.read(pairs=job.pairs).plan(check=False)[0]
    rounds = [
        entry(
            n + 1,
            {
                split: {domain: {"accuracy": value, "images": 449}}
                for split, domain, value in (
                    ("id_val", "ink", on_id_val),
                    ("val", "outline", test),
                    ("test", "chalk", test),
                )
                if split in (plan.settings.evaluation.splits or ("id_val", "val", "test"))
            },
        )
        for n, on_id_val in enumerate(id_val)
    ]
    rounds = stretched(rounds, plan.canonical) if whole else rounds
    base = record(seed=tuning.seeds[place]).as_json() | {
        "key": plan.key,
        "settings": plan.canonical,
    }
    base |= {"method": plan.settings.method, "method_version": plan.version, "rounds": rounds}
    for split in ("id_val", "id_test"):
        base["data"]["images"][split] = {"ink": 449}
    return RunRecord.model_validate(base)


def test_held_out_images_of_training_domains_choose(tmp_path: Path) -> None:
    """Better results on the test domain or in early rounds do not count."""
    (one,) = open_tuning(asked(tmp_path, seeds="100-102", method="fedavg"), 8)[0]
    root = tmp_path / "tuning"
    for number, place in product(range(8), range(3)):
        assert not one.is_done(Worths(root))
        last, test = (0.9, 0.1) if number == 5 else (0.8, 1.0)
        save(root, made(one, number, [1.0, 1.0, last, last, last], test, place))
    assert one.is_done(Worths(root))
    ledger = one.ledger(Worths(root))
    assert ledger.chosen == 5
    assert ledger.settings == one.points[5]
    assert [t.id_val for t in ledger.trials] == pytest.approx([0.8] * 5 + [0.9] + [0.8] * 2)
    assert ledger == one.ledger(Worths(root))  # from records alone
    ledger.save(tmp_path)
    assert load_ledger(tmp_path, *FRAME, "fedavg") == ledger


def test_a_lead_over_three_seeds_chooses_and_is_in_the_ledger(tmp_path: Path) -> None:
    (one,) = open_tuning(asked(tmp_path, seeds="100-102", method="fedavg"), 2)[0]
    assert [len(runs) for runs in one.trials] == [3, 3]
    assert len({job.key for job in one.jobs}) == 6
    root = tmp_path / "tuning"
    for number, values in enumerate(([0.9, 0.1, 0.2], [0.95, 0.16, 0.24])):
        for seed, value in enumerate(values):
            assert not one.is_done(Worths(root))
            save(root, made(one, number, [value], 0, seed))
    ledger = one.ledger(Worths(root))
    assert (ledger.rule, ledger.seeds) == (RULE, (100, 101, 102))
    recipe, other = ledger.trials
    assert [t.id_val for t in (recipe, other)] == pytest.approx([0.4, 0.45])
    assert other.values == pytest.approx((0.95, 0.16, 0.24))
    assert (recipe.lead, recipe.standard_error) == (None, None)
    assert other.lead == pytest.approx(0.05)
    assert other.standard_error == pytest.approx(0.01 / math.sqrt(3))
    assert ledger.chosen == 1
    assert ledger.trials[0].keys == tuple(job.key for job in one.trials[0])
    ledger.save(tmp_path)
    assert load_ledger(tmp_path, *FRAME, "fedavg") == ledger
    asking = asked(tmp_path, method="fedavg", tuned=True)
    assert asking.plan(check=False)[0].tuned == TunedRecord(
        trials=2, settings=ledger.settings, seeds=3, scenario="ip-o-c"
    )
    with refused(SettingsError, "seed 102 chose"):
        asked(tmp_path, method="fedavg", tuned=True, seeds="102").plan(check=False)
    with refused(SettingsError, "tuned settings are those of one protocol"):
        asked(tmp_path, method="fedavg", tuned="ltdo,lodo").plan(check=False)


def test_all_leaves_out_methods_that_were_not_tuned(tmp_path: Path, caplog: Any) -> None:
    _say_once.cache_clear()
    path = tmp_path / "mine.yaml"
    path.write_text("datasets: {digits4: {}}")
    words: dict[str, Any] = {"recipe": str(path)}
    (one,) = open_tuning(asked(tmp_path, seeds="100", method="fedavg", **words), 1)[0]
    save(tmp_path / "tuning", made(one, 0, [0.5], 0.5))
    one.ledger(Worths(tmp_path / "tuning")).save(tmp_path)
    request = asked(tmp_path, method="all", tuned=True, **words)
    assert [plan.settings.method for plan in request.plan(check=False)] == ["fedavg"]
    said = "left out: moon was not tuned on digits4, ltdo, recipe mine"
    assert said in [record.getMessage() for record in caplog.records]


def test_a_lead_within_the_noise_keeps_the_recipe() -> None:
    """The one-sided t quantile of two degrees of freedom is 2.92 at 5 %, 4.30 at 2.5 %."""
    recipe = seeded(0.5, 0.6, 0.7)
    for lead, won in ((2.9, 0), (2.94, 1)):  # in standard errors of differences that scatter by 1
        step = lead / math.sqrt(3)
        other = seeded(0.5 + (step - 1) / 100, 0.6 + step / 100, 0.7 + (step + 1) / 100)
        found = with_leads([recipe, other])
        assert found[1].lead / found[1].standard_error == pytest.approx(lead)  # type: ignore[operator]
        assert winners(found, RULE) == (won,)
        assert winners(found, "mean_last_fifth") == (1,)
        assert winners([*found, trial(None)], RULE) == (won,)  # failed trials do not count


def test_of_several_clear_leads_the_largest_wins_and_ties_go_to_the_first() -> None:
    recipe, lower = seeded(0.5, 0.6, 0.7), seeded(0.7, 0.81, 0.9)
    higher = seeded(0.8, 0.91, 1.0)
    assert winners([recipe, lower, higher, higher], RULE) == (2, 3)


def test_a_diverging_trial_does_not_hide_another() -> None:
    """Before, the median of two standard errors was their mean."""
    recipe, wild = seeded(0.5, 0.6, 0.7), seeded(0.4, 0.1, 0.6)
    trials = with_leads([recipe, wild, seeded(0.55, 0.649, 0.751)])
    assert winners(trials, RULE) == (2,)
    assert winners(trials, "paired") == (0,)  # earlier ledgers stay valid
    assert winners(with_leads([recipe, wild, wild]), RULE) == (0,)


def raced(root: Path, seeds: str = "100-102", trials: int = 3) -> tuple[Tuning, Search]:
    words = {"seeds": seeds, "method": "fedavg"}
    (one,), search = open_tuning(asked(root, **words), trials, race=True)
    return one, search


def test_a_race_stops_a_trial_that_cannot_lead_any_more(tmp_path: Path) -> None:
    """Of three seeds, one that is lost is too many; the recipe's trial has as many as the rest."""
    one, search = raced(tmp_path)
    root = tmp_path / "tuning"
    worths = Worths(root)

    def due() -> list[int]:
        return [len(runs) for runs in one.due(worths.read(one.jobs))]

    values = [0.5, 0.6, 0.7], [0.6, 0.71, 0.8], [0.4, 0.9, 0.9]
    for number in (2, 0):
        save(root, made(one, number, values[number][:1], 0))
    assert (due(), len(search.jobs()), search.left()) == ([1, 1, 1], 3, 6)
    save(root, made(one, 1, values[1][:1], 0))
    assert (due(), len(search.jobs()), search.left()) == ([2, 2, 1], 5, 4)
    for place, number in product((1, 2), (0, 1)):
        assert not one.is_done(worths)
        save(root, made(one, number, [values[number][place]], 0, place))
    assert one.is_done(worths)
    assert (due(), len(search.jobs()), search.left()) == ([3, 3, 1], 7, 0)
    ledger = one.ledger(worths)
    assert (ledger.rule, ledger.chosen) == ("raced", 1)
    for trial, row in zip(ledger.trials, (values[0], values[1], values[2][:1]), strict=True):
        assert trial.values == pytest.approx(row)
    assert ledger.trials[2].lead == pytest.approx(-0.1)
    ledger.save(tmp_path)
    assert load_ledger(tmp_path, *FRAME, "fedavg") == ledger
    tuned = asked(tmp_path, method="fedavg", tuned=True).plan(check=False)[0].tuned
    assert tuned is not None
    assert tuned.words == "3 trials of at most 3 seeds on ip-o-c"
    for place in (1, 2):  # runs that another command made do not count
        save(root, made(one, 2, [values[2][place]], 0, place))
    assert one.ledger(worths) == ledger


def test_a_race_ends_if_the_recipe_is_left_alone(tmp_path: Path) -> None:
    one, search = raced(tmp_path)
    root = tmp_path / "tuning"
    for number, value in enumerate((0.5, 0.5, 0.4)):  # a tie is no win
        save(root, made(one, number, [value], 0))
    assert one.is_done(Worths(root))
    assert search.left() == 0
    ledger = one.ledger(Worths(root))
    assert [len(trial.keys) for trial in ledger.trials] == [1, 1, 1]
    assert ledger.chosen == 0


def test_a_failed_trial_leaves_the_race_and_without_the_first_nobody_does(tmp_path: Path) -> None:
    one, _ = raced(tmp_path)
    root = tmp_path / "tuning"
    failures = Failures(root)
    failures.save(one.trials[1][0], "it broke")
    for number, value in ((0, 0.8), (2, 0.9)):
        save(root, made(one, number, [value], 0))
    assert [len(runs) for runs in one.due(Worths(root).read(one.jobs))] == [2, 1, 2]
    failures.forget([one.trials[1][0].key])
    save(root, made(one, 1, [0.7], 0))
    failures.save(one.trials[0][1], "it broke")
    save(root, made(one, 2, [0.1], 0, 1))
    assert [len(runs) for runs in one.due(Worths(root).read(one.jobs))] == [3, 1, 3]
    for number in (0, 2):
        save(root, made(one, number, [0.6], 0, 2))
    ledger = one.ledger(Worths(root))
    assert ledger.trials[0].error == "it broke"
    assert ledger.chosen == 2  # its mean is 0.53; the larger one of trial 1 is of a single seed


@given(st.data())
def test_a_race_chooses_as_if_all_its_trials_had_been_finished(data: st.DataObject) -> None:
    seeds, count = data.draw(st.integers(3, 6)), data.draw(st.integers(2, 5))
    value = st.integers(0, 20).map(lambda n: n / 20)
    rows = [data.draw(st.lists(value, min_size=seeds, max_size=seeds)) for _ in range(count)]
    stops = simulate_tuning.raced(np.array(rows))
    whole = with_leads([seeded(*row) for row in rows])
    stopped = with_leads([seeded(*row[:n]) for row, n in zip(rows, stops, strict=True)])
    assert winners(stopped, "raced") == winners(whole, "raced")


def test_a_race_of_too_few_seeds_is_refused(tmp_path: Path) -> None:
    with refused(SettingsError, "a race needs at least 3 seeds, and 2 are given"):
        raced(tmp_path, "100,101")


def test_one_or_two_seeds_keep_the_recipe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for values in ((0.5,), (0.5, 0.5)):
        pair = with_leads([seeded(*values), seeded(*(v + 0.4 for v in values))])
        assert winners(pair, RULE) == (0,)
        assert pair[1].lead == pytest.approx(0.4)
    tuning_of(tmp_path, method="fedavg")
    assert "fewer than 3 seeds choose nothing" in caplog.text
    assert "--seeds 100-102" in caplog.text


def test_without_the_recipe_s_own_value_the_largest_mean_wins() -> None:
    assert winners(with_leads([trial(None), seeded(0.2, 0.3, 0.4)]), RULE) == (1,)
    assert winners([trial(None), trial(None)], RULE) == ()


def test_a_ledger_whose_choice_its_rule_does_not_make_is_refused(tmp_path: Path) -> None:
    pair = with_leads([seeded(0.5, 0.6, 0.7), seeded(0.7, 0.6, 0.8)])
    path = write(tmp_path, "fedavg", *pair, rule="paired", chosen=0, seeds=(1, 2, 3))
    path.write_text(path.read_text().replace('"chosen": 0', '"chosen": 1'))
    with pytest.raises(DataError, match="no ledger of tuning"):
        load_ledger(tmp_path, *FRAME, "fedavg")


def test_ledgers_of_all_rules_are_valid_and_written_back_as_they_were() -> None:
    rules = set()
    for path in (Path(__file__).parents[2] / "results").glob("**/tuning/*.jsonl"):
        for line in path.read_text().splitlines():
            ledger = TuningLedger.model_validate_json(line)
            first = ledger.rule == "mean_last_fifth"
            assert (ledger.seeds == (100,)) == first
            assert ("lead" in ledger.model_dump_json()) != first
            rules.add(ledger.rule)
    assert rules >= {"mean_last_fifth", "paired"}


def test_the_rule_s_errors_are_as_the_guide_says() -> None:
    """Three seeds, four trials, differences with a standard deviation of 1 and of 4 points."""
    for noise, least, most in ((1.0, 0.2, 0.4), (4.0, 0.8, 0.96)):
        false, missed, runs = errors(3, noise, draws=300)
        assert false < 0.1
        assert least < missed < most
        assert runs == 12
    assert errors(3, 1.0, "mean_last_fifth", draws=300)[0] > 0.65
    false, missed, runs = errors(3, 1.0, "raced", draws=300)
    assert false < 0.1
    assert 0.5 < missed < 0.66
    assert 7 < runs < 8


def test_a_ledger_of_the_first_form_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "fedavg", trial(0.1), trial(0.2, train_lr=0.5))
    first = json.loads(path.read_text())
    first |= {"format": 1, "seed": first.pop("seeds")[0]}
    for one in first["trials"]:
        (one["key"],) = one.pop("keys")
    path.write_text(json.dumps(first))
    found = load_ledger(tmp_path, *FRAME, "fedavg")
    assert found.seeds == (100,)
    assert found.trials[0].keys == ("ab",)
    assert found.settings == {"train.lr": 0.5}
    assert asked(tmp_path, tuned=True).plan(check=False)[0].tuned.seeds is None


def test_the_mean_of_the_last_fifth_of_the_rounds_counts(tmp_path: Path) -> None:
    (one,) = tuning_of(tmp_path, method="fedavg")
    assert worth(made(one, 0, [0.0] * 16 + [0.1, 0.2, 0.3, 0.6], 0, whole=False)) == pytest.approx(
        0.3
    )
    assert worth(made(one, 0, [0.0, 0.3, 0.6], 0, whole=False)) == pytest.approx(0.3)
    assert worth(made(one, 0, [], 0, whole=False)) is None


def test_equal_trials_and_failed_ones() -> None:
    assert best(trial(0.5), trial(0.5), trial(None)) == 0
    assert best(trial(None), trial(-0.5)) == 1
    assert best(trial(None), trial(None)) is None


def test_the_last_bit_of_a_mean_chooses_no_trial() -> None:
    """Means of the same shares, summed in another order, must not be ranked."""
    shares = [34 / 40, 35 / 40, 36 / 40, 34 / 40, 35 / 40, 35 / 40]
    means = sorted({reduce(operator.add, order) / 6 for order in permutations(shares)})
    assert len(means) == 2
    assert best(*map(trial, means)) == 0
    assert best(trial(-3e9), trial(-2.9e9), trial(-3e9)) == 1


def test_a_ledger_that_chose_the_later_of_two_equal_trials_is_still_read(tmp_path: Path) -> None:
    path = write(tmp_path, "fedavg", trial(0.5), trial(math.nextafter(0.5, 1)), trial(0.25))
    text = path.read_text()
    path.write_text(text.replace('"chosen": 0', '"chosen": 1'))
    assert load_ledger(tmp_path, *FRAME, "fedavg").chosen == 1
    path.write_text(text.replace('"chosen": 0', '"chosen": 2'))
    with pytest.raises(DataError, match="no ledger of tuning"):
        load_ledger(tmp_path, *FRAME, "fedavg")


# --------------------------------------------------------------------------------- tuned


def test_tuned_wins_over_recipe_and_method_and_loses_to_the_user(tmp_path: Path) -> None:
    write(tmp_path, "fedprox", trial(0.1), trial(0.2, train_lr=0.5, hyper_mu=0.25))
    (plan,) = asked(tmp_path, method="fedprox", tuned=True).plan(check=False)
    assert (plan.settings.train.lr, plan.settings.hyper["mu"]) == (0.5, 0.25)
    chosen = {"train.lr": 0.5, "hyper.mu": 0.25}
    assert plan.tuned == TunedRecord(trials=2, settings=chosen, scenario="ip-o-c")
    same = asked(tmp_path, method="fedprox", settings={"lr": 0.5, "hyper.mu": 0.25})
    assert same.plan(check=False)[0].key == plan.key
    user = asked(tmp_path, method="fedprox", tuned="ltdo", settings={"lr": 0.125})
    assert user.plan(check=False)[0].settings.train.lr == 0.125
    assert user.plan(check=False)[0].settings.hyper["mu"] == 0.25


def test_tuned_is_said_in_words(tmp_path: Path) -> None:
    write(tmp_path, "fedavg", trial(0.1), trial(0.2, train_lr=0.5))
    where = Resources(results=tmp_path)
    for pair in ("tuned=true", "tuned=ltdo"):
        read = Request.read(pairs=[pair, "scenario=ip-o-c"], resources=where)
        assert read.plan(check=False)[0].settings.train.lr == 0.5
    off = Request.read(pairs=["tuned=false", "scenario=ip-o-c"], resources=where)
    assert off.plan(check=False)[0].tuned is None
    lodo = Request.read(pairs=["tuned=ltdo", "protocol=lodo"], resources=where)
    assert {plan.settings.train.lr for plan in lodo.plan(check=False)} == {0.5}
    assert {plan.tuned and plan.tuned.protocol for plan in lodo.plan(check=False)} == {"ltdo"}


def test_a_run_says_what_else_its_tuning_was_given(tmp_path: Path) -> None:
    given = ("federation.rounds=3", "train.batch_size=8", 'evaluation.splits=["id_val"]')
    write(tmp_path, "fedavg", trial(0.1), given=given)
    (plan,) = asked(tmp_path, method="fedavg", tuned=True).plan(check=False)
    assert plan.tuned is not None
    assert plan.tuned.given == ["federation.rounds=3", "train.batch_size=8"]
    assert (
        plan.tuned.words
        == "1 trial of one seed on ip-o-c with federation.rounds=3, train.batch_size=8"
    )
    same: dict[str, Any] = {"federation": {"rounds": 3}}
    (plan,) = asked(tmp_path, method="fedavg", tuned=True, settings=same).plan(check=False)
    assert plan.tuned is not None
    assert plan.tuned.given == ["train.batch_size=8"]
    same["train"] = {"batch_size": 8}
    (plan,) = asked(tmp_path, method="fedavg", tuned=True, settings=same).plan(check=False)
    assert plan.tuned == TunedRecord(trials=1, scenario="ip-o-c")


def test_tuning_in_one_reading_of_a_recipe_is_not_that_of_the_other(tmp_path: Path) -> None:
    words: dict[str, Any] = {"method": "fedprox", "readings": "corrected"}
    (one,) = tuning_of(tmp_path, **words)
    assert one.given[-1] == "readings=corrected"
    write(tmp_path, "fedprox", trial(0.1), given=one.given)
    (plan,) = asked(tmp_path, method="fedprox", tuned=True).plan(check=False)
    assert plan.tuned is not None
    assert plan.tuned.given == ["readings=corrected"]
    (plan,) = asked(tmp_path, tuned=True, **words).plan(check=False)
    assert plan.tuned is not None
    assert plan.tuned.given is None
    with refused(SettingsError, "readings=corrected, where this command has nothing more"):
        tuning_of(tmp_path, method="fedprox")


def test_tuning_does_not_take_the_place_of_one_made_otherwise(tmp_path: Path) -> None:
    words: dict[str, Any] = {"method": "fedavg", "settings": {"federation": {"rounds": 7}}}
    given = ("federation.rounds=7", 'evaluation.splits=["id_val"]')
    path = write(tmp_path, "fedavg", trial(0.1), given=given)
    tuning_of(tmp_path, **words)
    for change, said in (
        ({"settings": {}}, "federation.rounds=7, where this command has nothing more"),
        ({"settings": {"federation": {"rounds": 9}}}, "this command has federation.rounds=9"),
        ({"scenario": "oc-i-p"}, "scenario ip-o-c, where this command has oc-i-p"),
    ):
        with refused(SettingsError, said, "fedavg.json"):
            tuning_of(tmp_path, **{**words, **change})
    pack_ledgers(tmp_path)
    assert not path.exists()
    with refused(SettingsError, ".jsonl"):
        tuning_of(tmp_path, method="fedavg")


def test_ranges_that_are_nowhere_are_refused(tmp_path: Path) -> None:
    with refused(SettingsError, "--ranges", "is no folder"):
        open_tuning(asked(tmp_path, seeds="100", method="fedprox"), 8, tmp_path / "none")
    (tmp_path / "fedprx.yaml").write_text("parameters: {hyper.mu: {values: [1.0]}}\n")
    with refused(SettingsError, "fedprx.yaml", "did you mean 'fedprox'?"):
        open_tuning(asked(tmp_path, seeds="100", method="fedprox"), 8, tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"method": "fedavg,moon"}, "moon was not tuned"),
        ({"protocol": "lodo", "scenario": None}, "fedavg was not tuned on digits4, lodo"),
        ({"seeds": "0,100"}, "give other seeds"),
        ({"method": "fedbn"}, "every trial of fedbn failed"),
        ({"tuned": "ltod"}, "did you mean 'ltdo'"),
    ],
)
@pytest.mark.usefixtures("none_shipped")
def test_what_was_not_tuned_is_refused(tmp_path: Path, words: dict[str, Any], said: str) -> None:
    write(tmp_path, "fedavg", trial(0.1))
    write(tmp_path, "fedbn", trial(None))
    with refused(SettingsError, said):
        asked(tmp_path, **{"tuned": True, **words}).plan(check=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-20],
        lambda text: text.replace('"chosen": 1', '"chosen": 0'),
        lambda text: text.replace("train.lr", "data.split_csv"),
        lambda text: text.replace("0.5", "[0.5]"),
        lambda text: text.replace('"format": 2', '"format": 3'),
    ],
)
def test_a_ledger_that_was_changed_is_refused(tmp_path: Path, change: Any) -> None:
    path = write(tmp_path, "fedavg", trial(0.1), trial(0.2, train_lr=0.5))
    assert path == ledger_path(tmp_path, *FRAME, "fedavg")
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    with refused(DataError, "no ledger"):
        asked(tmp_path, tuned=True).plan(check=False)


@pytest.mark.usefixtures("none_shipped")
def test_ledgers_are_packed_and_unpacked(tmp_path: Path) -> None:
    """One file per setup; later ledgers are stored next to it and take precedence."""
    kept = write(tmp_path, "fedavg", trial(0.1), trial(0.2, train_lr=0.5)).read_bytes()
    write(tmp_path, "ccst", trial(0.1))
    ledgers = [load_ledger(tmp_path, *FRAME, method) for method in ("ccst", "fedavg")]
    (packed,) = pack_ledgers(tmp_path)
    sums = packed.with_name("SHA256SUMS")
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {packed, sums}
    assert [load_ledger(tmp_path, *FRAME, m) for m in ("ccst", "fedavg")] == ledgers
    assert asked(tmp_path, tuned=True).plan(check=False)[0].tuned.trials == 2
    assert pack_ledgers(tmp_path) == []
    with refused(SettingsError, "fedprox was not tuned"):
        load_ledger(tmp_path, *FRAME, "fedprox")

    write(tmp_path, "ccst", trial(0.1), trial(0.3, train_lr=0.5))
    later = load_ledger(tmp_path, *FRAME, "ccst")
    assert later.chosen == 1
    pack_ledgers(tmp_path)
    assert load_ledger(tmp_path, *FRAME, "ccst") == later
    single = ledger_path(tmp_path, *FRAME, "fedavg")
    single.parent.mkdir(exist_ok=True)
    single.write_text("broken")
    assert unpack_ledgers(tmp_path) == [packed]
    assert single.with_name("fedavg.json.broken").read_text() == "broken"
    assert not packed.exists()
    assert ledger_path(tmp_path, *FRAME, "fedavg").read_bytes() == kept
    packed.write_text("{}\n")
    (path := ledger_path(tmp_path, *FRAME, "fedavg")).unlink()
    with refused(DataError, str(packed), "no ledger"):
        load_ledger(tmp_path, *FRAME, "fedavg")
    path.write_bytes(kept)
    with refused(DataError, str(packed), "cannot be added to"):
        pack_ledgers(tmp_path)
    assert path.exists()


def test_a_ledger_names_no_file(tmp_path: Path) -> None:
    write(tmp_path, "ccst", trial(0.1), trial(0.2, hyper_style_weights="/etc/passwd"))
    assert "style_weights" in load_method("ccst").Settings.files
    with refused(SettingsError, "no files"):
        asked(tmp_path, method="ccst", tuned=True).plan(check=False)


def test_a_record_that_was_there_is_told_that_it_is_tuned(tmp_path: Path) -> None:
    """If the recipe's own settings are chosen, the run can already exist."""
    save(tmp_path, record())
    (there,) = store = list(ResultsStore(tmp_path))
    assert "tuned" not in there.as_json()
    tuned = TunedRecord(trials=8)
    ResultsStore(tmp_path).note_tuned(there, tuned)
    (noted,) = ResultsStore(tmp_path)
    assert noted.tuned == tuned
    assert noted.numbers() == store[0].numbers()
    assert noted.key == there.key


# -------------------------------------------------------------------------------- tables


def tuned_record(method: str, seed: int, trials: int, **chosen: Any) -> RunRecord:
    rate = chosen.get("train.lr", 0.002)
    made = record(method, seed=seed, settings={"train": {"lr": rate}})
    tuned = TunedRecord(trials=trials, settings=chosen, scenario="ip-o-c")
    return made.model_copy(update={"tuned": tuned})


def test_tuned_runs_have_a_table_of_their_own_that_says_the_trials(tmp_path: Path) -> None:
    """A run that was tuned, but keeps the recipe's settings, is in both tables."""
    plain = [record(m, seed=1, settings={"train": {"lr": 0.002}}) for m in ("fedprox", "moon")]
    tuned = [tuned_record("fedprox", 0, 8, **{"train.lr": 0.004}), tuned_record("fedavg", 0, 8)]
    save(tmp_path, *plain, *tuned)
    first, second = frames(read_frame(tmp_path))
    assert (first.name, second.name) == ("digits4-ltdo-quick", "digits4-ltdo-quick-tuned")
    assert {run.method for run in first.runs} == {"fedprox", "moon", "fedavg"}
    assert {run.method for run in second.runs} == {"fedprox", "fedavg"}
    captions = [" ".join(build(t.name, t.description, t.runs).notes) for t in (first, second)]
    assert "tuned by" not in captions[0]
    assert "training domains, 8 trials of one seed on ip-o-c each" in captions[1]
    assert "including those that test on these domains" in captions[1]
    (note,) = [n for n in build("t", second.description, second.runs).notes if "was tuned" in n]
    assert "FedProx" in note
    assert "lr=0.004" in note


@pytest.mark.parametrize(("protocol", "word"), [(None, "true"), ("lodo", "lodo")])
def test_missing_cells_are_filled_with_the_same_tuning(
    tmp_path: Path, protocol: str | None, word: str
) -> None:
    """The ledger can be of another protocol if the table's own protocol has none."""
    made = tuned_record("fedprox", 0, 8, **{"train.lr": 0.004})
    mine = made.tuned.model_copy(update={"protocol": protocol})
    save(tmp_path, made.model_copy(update={"tuned": mine}))
    save(tmp_path, tuned_record("fedavg", 0, 8, **{"train.lr": 0.004}))
    elsewhere = record("fedavg", scenario="ic-p-o", settings={"train": {"lr": 0.004}})
    save(tmp_path, elsewhere.model_copy(update={"tuned": mine}))
    (table,) = frames(read_frame(tmp_path))
    grid = build("t", table.description, table.runs)
    assert f" tuned={word}" in dict(grid.fills)["FedProx"]
    assert ("8 trials of one seed on ip-o-c under lodo" in " ".join(grid.notes)) == (
        protocol == "lodo"
    )


def test_missing_cells_of_a_method_whose_recipe_won_are_filled_as_tuned(tmp_path: Path) -> None:
    """Without the note, a run would be missing from the table of tuned runs."""
    save(tmp_path, tuned_record("fedavg", 0, 8))
    mine = TunedRecord(trials=8, settings={"train.lr": 0.004})
    other = record("fedprox", scenario="ic-p-o", settings={"train": {"lr": 0.004}})
    save(tmp_path, other.model_copy(update={"tuned": mine}))
    (table,) = frames(read_frame(tmp_path))
    assert " tuned=true" in dict(build("t", table.description, table.runs).fills)["FedAvg"]


def test_cells_of_another_protocol_take_the_tuning_of_the_runs_at_hand(tmp_path: Path) -> None:
    save(tmp_path, tuned_record("fedavg", 0, 8, **{"train.lr": 0.004}))
    columns = [{"head": name, "where": {"protocol": name}} for name in ("ltdo", "lodo")]
    groups = [{"split": "test", "columns": columns}]
    both = Description.model_validate({"title": "Both", "others": True, "groups": groups})
    (command,) = dict(build("t", both, read_runs(tmp_path)).fills).values()
    assert "--protocol lodo" in command
    assert " tuned=ltdo" in command


def test_a_setting_that_the_command_replaced_is_not_called_tuned(tmp_path: Path) -> None:
    save(tmp_path, tuned_record("fedprox", 0, 8, **{"train.lr": 0.004}))
    made = record("fedavg", settings={"train": {"lr": 0.1}})
    mine = TunedRecord(trials=8, settings={"train.lr": 0.004})
    save(tmp_path, made.model_copy(update={"tuned": mine}))
    (table,) = frames(read_frame(tmp_path))
    notes = " ".join(build("t", table.description, table.runs).notes)
    assert "8 trials of one seed on ip-o-c: FedProx; not tuned: FedAvg" in notes
    assert "FedAvg was tuned to" not in notes


def test_rows_of_unequal_trials_say_so(tmp_path: Path) -> None:
    save(tmp_path, tuned_record("fedprox", 0, 8, **{"train.lr": 0.004}))
    save(tmp_path, tuned_record("fedavg", 0, 4), tuned_record("moon", 0, 4))
    (table,) = frames(read_frame(tmp_path))
    caption = " ".join(build("t", table.description, table.runs).notes)
    assert (
        "4 trials of one seed on ip-o-c: MOON, FedAvg; 8 trials of one seed on ip-o-c: FedProx"
        in caption
    )


@pytest.mark.parametrize("untuned", [False, True])
def test_a_table_says_that_tuning_kept_the_recipe(tmp_path: Path, untuned: bool) -> None:
    """Readers can then tell it from a table without tuning."""
    save(tmp_path, tuned_record("fedprox", 0, 8), tuned_record("fedavg", 0, 8))
    if untuned:
        save(tmp_path, record("moon", settings={"train": {"lr": 0.002}}))
    (table,) = frames(read_frame(tmp_path))
    said = " ".join(build("t", table.description, table.runs).notes)
    kept = "each; the recipe's settings were selected for every row and are used in all scenarios"
    assert ("8 trials of one seed on ip-o-c" in said) != untuned
    assert (kept in said) != untuned


def test_rows_whose_rate_one_run_chose_are_marked(tmp_path: Path) -> None:
    """Unless it is the recipe's rate or was chosen by a lead over several seeds."""
    save(tmp_path, tuned_record("fedprox", 0, 8, **{"train.lr": 0.004, "hyper.mu": 0.5}))
    several = tuned_record("moon", 0, 8, **{"train.lr": 0.004})
    seeds = {"tuned": several.tuned.model_copy(update={"seeds": 3})}  # type: ignore[union-attr]
    save(tmp_path, tuned_record("fedavg", 0, 8), several.model_copy(update=seeds))
    (table,) = [t for t in frames(read_frame(tmp_path)) if t.name.endswith("tuned")]
    grid = build("t", table.description, table.runs)
    said = {line.label: [*line.footnotes] for line in grid.lines}
    rates = "at lr=0.004, FedAvg at lr=0.002"
    assert said == {
        "FedAvg": [],
        "FedProx": [rates, "lr, mu chosen by one run"],
        "MOON": [rates],
    }
    assert "chosen by" not in grid.caption


def test_if_one_run_chose_the_rates_of_most_rows_the_caption_says_so_once(tmp_path: Path) -> None:
    for method in ("fedprox", "moon"):
        save(tmp_path, tuned_record(method, 0, 8, **{"train.lr": 0.004}))
    save(tmp_path, tuned_record("fedavg", 0, 8))
    (table,) = [t for t in frames(read_frame(tmp_path)) if t.name.endswith("tuned")]
    grid = build("t", table.description, table.runs)
    assert grid.footnotes == ("at lr=0.004, FedAvg at lr=0.002",)
    assert "last round; lr chosen by one run; no test" in grid.caption
