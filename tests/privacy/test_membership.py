"""The likelihood ratio compared with hand-made numbers, and controls that fail when they should."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from feddg_attacks.attack import Pictures, interval, no_leak, planted_leak
from feddg_attacks.kinds.membership import (
    ABSENT,
    RIDGE,
    Likelihood,
    Membership,
    percentiles,
    planted,
)
from feddg_attacks.records import AttackResult, Interval
from feddg_attacks.shadow import Rows, Shadow
from feddg_bench.common.errors import SettingsError
from tests.privacy.scenes import CLIENTS, EACH, attacked_federation, scene_of

pytestmark = pytest.mark.nightly

PIXEL = {"hyper": {"style": "pixel", "style_augment": False}}
scores = st.lists(st.integers(0, 9), min_size=2, max_size=30)


def pictures(domains: list[int], labels: list[int]) -> Pictures:
    return Pictures(np.zeros((len(domains), 1, 1, 3)), np.array(labels), np.array(domains))


@given(scores, scores)
def test_the_mean_percentile_is_the_area_under_the_curve(
    members: list[int], others: list[int]
) -> None:
    shares = percentiles(
        torch.tensor(members), np.zeros(len(members)), torch.tensor(others), np.zeros(len(others))
    )
    truth = [1] * len(members) + [0] * len(others)
    assert np.isclose(shares.mean(), roc_auc_score(truth, members + others))


def test_members_are_told_from_others_of_their_own_domain_alone() -> None:
    members, others = torch.tensor([5.0, 1.0]), torch.tensor([4.0, 6.0, 0.0, 2.0])
    shares = percentiles(members, np.array([0, 1]), others, np.array([0, 0, 1, 1]))
    assert shares.tolist() == [0.5, 0.5]


def test_the_ratio_is_that_of_two_normal_distributions() -> None:
    # Public values of one domain: mean 2, squares of the differences 1, 1, 4, 4: C = 2.5.
    public = torch.tensor([[1.0], [3.0], [0.0], [4.0]], dtype=torch.float64)
    known = Likelihood(public, np.zeros(4, dtype=int), np.zeros(4, dtype=int))
    precision = 1 / (2.5 * (1 + RIDGE))
    sent, x = torch.tensor([2.6], dtype=torch.float64), torch.tensor([[5.0]], dtype=torch.float64)
    found = known._ratio(sent, 10, x, np.zeros(1, dtype=int), affine=True)
    assert np.isclose(float(found), precision * (3 * 0.6 - 3 * 3 / 20))


def test_the_mixture_of_domains_is_found_in_whole_images() -> None:
    public = torch.tensor([[0.0, 1.0], [0.0, -1.0], [9.0, 1.0], [9.0, -1.0]], dtype=torch.float64)
    known = Likelihood(public, np.array([0, 0, 1, 1]), np.zeros(4, dtype=int))
    a, shares = known.mixture(torch.tensor([3.1, 0.0], dtype=torch.float64), 3, affine=True)
    assert a == 1
    assert torch.allclose(shares, torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))
    lonely = Likelihood(public[2:], np.array([1, 1]), np.zeros(2, dtype=int))
    a, _ = lonely.mixture(torch.tensor([36.0, 0.0], dtype=torch.float64), 3, affine=False)
    assert np.isclose(a, 4)  # as after four steps


def test_a_target_of_a_class_that_the_message_does_not_know_is_no_member() -> None:
    public = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    known = Likelihood(public, np.zeros(12, dtype=int), np.arange(12) % 2)
    rows = Rows(torch.zeros(1, 3, dtype=torch.float64), True, True, torch.tensor([0]))
    found = known.ratios(rows, 4, public[:2], pictures([0, 0], [0, 1]))
    assert found[1] == ABSENT
    assert found[0] > ABSENT


def test_the_nearest_row_counts_where_rows_are_of_images() -> None:
    public = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    known = Likelihood(public, np.zeros(40, dtype=int), np.zeros(40, dtype=int))
    rows = Rows(public[[3, 7]], each=True, mean=True)
    found = known.ratios(rows, 2, public, pictures([0] * 40, [0] * 40))
    assert set(found.topk(2).indices.tolist()) == {3, 7}


def measure(scene: object) -> dict[str, AttackResult]:
    return {result.item: result for result in Membership().measure(scene)}  # type: ignore[arg-type]


def test_stored_pixel_styles_and_updates_tell_members() -> None:
    found = measure(scene_of("pardon", PIXEL))
    assert set(found) == {"style", "weights"}
    for result in found.values():
        assert not result.failed
        assert result.no_leak.holds
        assert result.planted_leak.holds
        assert result.messages == CLIENTS
        assert result.targets == CLIENTS * EACH
        assert result.figures["auc"].low > 0.55
        assert "tpr_at_1_fpr" not in result.figures  # 60 non-members resolve no hundredth


def test_statistics_of_single_images_and_prototypes_are_read_too() -> None:
    every = {"hyper": {"upload_ratio": 1.0}}
    statistics = measure(scene_of("fedccrl", every, items={"statistics"}))["statistics"]
    assert statistics.figures["auc"].value > 0.95
    assert measure(scene_of("fpl", items={"prototypes"}))["prototypes"].planted_leak.holds


def test_a_scorer_that_lets_other_clients_hold_the_targets_is_found_out() -> None:
    scene = scene_of("fedavg")
    held = dict.fromkeys(scene.federation.clients, scene.federation.clients["client_4"])
    update = scene.exchanges[4].sent  # each client now holds and sends what client_4 does
    sabotaged = [replace(e, sent=update) for e in scene.exchanges]
    federation = replace(scene.federation, clients=held)
    result = measure(replace(scene, exchanges=sabotaged, federation=federation))["weights"]
    assert not result.no_leak.holds
    assert result.planted_leak.holds
    assert result.figures == {}
    assert "'no leak'" in result.failed


def test_an_attack_that_sees_nothing_in_its_vectors_is_found_out() -> None:
    blind = torch.zeros(20, 3, dtype=torch.float64)
    known = Likelihood(blind, np.zeros(20, dtype=int), np.zeros(20, dtype=int))
    rows = Rows(blind[:1], each=False, mean=True)
    hits = planted(known, rows, blind, pictures([0] * 20, [0] * 20), np.random.default_rng(0))
    control = planted_leak(interval(hits, np.random.default_rng(0)), 0.9)
    assert control.measured.value == 0.5
    assert not control.holds


def test_no_leak_must_be_near_chance() -> None:
    assert no_leak(Interval(value=0.52, low=0.48, high=0.56), 0.5).holds
    assert not no_leak(Interval(value=0.6, low=0.56, high=0.64), 0.5).holds
    assert not no_leak(Interval(value=0.4, low=0.36, high=0.44), 0.5).holds


def test_an_interval_is_over_groups() -> None:
    groups = [np.zeros(3), np.ones(1)]
    found = interval(groups, np.random.default_rng(0))
    assert found.value == 0.25
    assert (found.low, found.high) == (0.0, 1.0)


def test_a_client_finds_single_images_in_the_pool_that_it_is_sent() -> None:
    every = {"hyper": {"upload_ratio": 1.0}}
    few = attacked_federation(public=24)
    found = measure(scene_of("fedccrl", every, attacker="client", rounds=2, federation=few))
    assert set(found) == {"pool", "weights"}
    assert found["pool"].figures["auc"].value > 0.95
    assert not found["pool"].up
    assert found["pool"].targets == (CLIENTS - 1) * EACH


@pytest.mark.parametrize(
    ("method", "item", "layer"),
    [("pardon", "style", PIXEL), ("fedccrl", "pool", {"hyper": {"upload_ratio": 1.0}})],
)
def test_what_tells_members_by_their_looks_alone_is_found_out(
    method: str, item: str, layer: dict[str, Any]
) -> None:
    """Non-members are darker than public images, members are not: this needs no message."""
    federation = attacked_federation(public=40)
    images = np.asarray(federation.images).copy()
    for split, _, index in federation.evaluation:
        if split == "id_test":
            images[index] //= 4
    dark = replace(federation, images=images)
    scene = scene_of(method, layer, attacker="client", rounds=2, federation=dark)
    result = measure(scene)[item]
    assert not result.no_leak.holds
    assert result.figures == {}


def test_a_client_reads_the_style_of_all_as_one_style() -> None:
    found = measure(scene_of("pardon", PIXEL, attacker="client"))
    assert set(found) == {"style"}
    assert found["style"].planted_leak.holds


def test_one_client_leaves_nothing_to_compare_with() -> None:
    scene = scene_of("fedavg")
    alone = replace(scene, exchanges=scene.exchanges[:1])
    with pytest.raises(SettingsError, match="two clients or more"):
        measure(alone)


def test_under_secure_sums_there_is_no_single_message() -> None:
    scene = scene_of("fedavg")
    secure = scene.settings.privacy.model_copy(update={"aggregation": "secure"})
    hidden = replace(scene, settings=scene.settings.model_copy(update={"privacy": secure}))
    assert scene.messages()
    assert not hidden.messages()
    with pytest.raises(SettingsError, match="membership"):
        measure(hidden)


def test_the_attacker_adds_no_noise_for_privacy_to_its_own() -> None:
    noise = {"mechanism": "dp_style", "noise_multiplier": 5.0}
    scene = scene_of("pardon", PIXEL, {"privacy": noise})
    public = scene.part("id_val", 100)
    shadow = Shadow(scene.settings, scene.federation, public)
    task = next(e.task for e in scene.exchanges if e.task.call == "local_style")
    mean = shadow.sent(task, 0, 0)["style"][0]
    pixels = torch.from_numpy(public.images[0]).float().mean((0, 1)) / 255
    torch.testing.assert_close(mean, pixels, atol=1e-4, rtol=0)
