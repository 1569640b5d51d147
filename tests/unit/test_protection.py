"""Protection: clipping, noise, secure sums and guarantees, with numbers worked out by hand."""

from __future__ import annotations

import json
import math
import os
import subprocess

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.keys import canonical_settings
from feddg_bench.config.schema import PrivacySettings
from feddg_bench.core.messages import LocalUpdate, Reply, content, decode, encode
from feddg_bench.core.method import Method
from feddg_bench.core.server import sample_clients
from feddg_bench.engine.executors import ProcessExecutor
from feddg_bench.plugins import load_method, names
from feddg_bench.protection.accounting import epsilon, rdp_of_fixed
from feddg_bench.protection.guarantee import guarantee
from feddg_bench.protection.possible import obstacles
from feddg_bench.protection.sums import HiddenReplies
from feddg_bench.protection.vectors import (
    adapted_norm,
    clipped,
    from_vector,
    gaussian,
    to_vector,
    update_noise,
)
from feddg_bench.testing import Subject, TaskRecorder, start_toy_run, toy_settings
from feddg_bench.testing.contract import declared_sums_suffice
from tests.helpers import ALL, bitwise, hyper, refused

SECURE = {"privacy": {"aggregation": "secure"}, "federation": {"per_round": None}}
DP = {
    "privacy": {"mechanism": "dp_client", "clip_norm": 0.5, "noise_multiplier": 0.1},
    "federation": {"weighting": "uniform"},
}
STYLE = {"privacy": {"mechanism": "dp_style"}, **hyper(style="pixel")}
FIXED = {"privacy": {"sampling": "fixed"}}


# ------------------------------------------------------------------------ clipping and noise


def test_a_long_vector_is_shortened_and_a_short_one_stays():
    vector, below = clipped(np.array([3.0, 4.0]), 1.0)
    assert_close(vector, np.array([0.6, 0.8]))
    assert not below
    same, below = clipped(np.array([3.0, 4.0]), 5.0)
    assert same.tolist() == [3.0, 4.0]
    assert below


def test_noise_has_its_variance_and_its_stream():
    draws = gaussian(200_000, 2.5, 0, "updates", 1)
    assert draws.var() == pytest.approx(6.25, rel=0.02)  # standard error 0.3 %
    assert draws.mean() == pytest.approx(0, abs=0.03)
    assert draws[:5].tolist() == gaussian(5, 2.5, 0, "updates", 1).tolist()
    assert draws[0] != gaussian(1, 2.5, 0, "updates", 2)[0]


def test_update_and_count_together_have_the_noise_that_was_asked_for():
    z = update_noise(1.0, 2.0)
    assert z == pytest.approx(1 / math.sqrt(1 - 1 / 16))
    assert z**-2 + (2 * 2.0) ** -2 == pytest.approx(1.0)
    with refused(SettingsError, "privacy.count_noise above 0.5"):
        update_noise(1.0, 0.5)


def test_the_adaptive_norm_moves_towards_the_quantile():
    assert adapted_norm(2.0, 0.75, quantile=0.5, rate=0.2) == pytest.approx(2 * math.exp(-0.05))
    assert adapted_norm(2.0, 0.5, quantile=0.5, rate=0.2) == 2.0


def test_vectors_give_payloads_back():
    payload = {"w": torch.tensor([[1.5, 2.0]]), "n": torch.tensor(3), "more": [0.25, {"k": 2}]}
    vector = to_vector(payload)
    assert vector.tolist() == [1.5, 2.0, 3.0, 0.25, 2.0]
    found = from_vector(vector + np.array([0, 0, 0.4, 0, 0]), payload)
    bitwise(found["w"], payload["w"])
    bitwise(found["n"], payload["n"])
    assert found["more"] == [0.25, {"k": 2.0}]


# ------------------------------------------------------------------------------- accounting


def test_epsilon_of_one_gaussian_release():
    """By hand: RDP of order a is a / (2 z^2); epsilon is the minimum over its conversions."""
    z, delta = 2.0, 1e-5
    orders = np.arange(1.1, 400, 0.001)
    rdp = orders / (2 * z**2)
    best = rdp + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    pytest.importorskip("opacus", reason="epsilon needs the extra feddg-bench[privacy]")
    assert epsilon(z, 1.0, 1, delta) == pytest.approx(best.min(), rel=1e-3)


CASES = [(1.0, 0.1, 100, 1e-5), (2.0, 0.5, 50, 1e-3), (0.8, 0.05, 50, 1e-5), (1.5, 1.0, 10, 1e-5)]
KNOWN = {  # from dp-accounting 0.6.0: RDP for fixed cohorts of 1000 clients, PLD for Poisson
    "fixed": [83.93691709771716, 48.43633758646754, 74.03513430363745, 27.81184688377875],
    "poisson": [7.04660287720805, 6.981135717920991, 4.452335493726396, 10.669522834696647],
}


@pytest.mark.parametrize(("sampling", "accountant"), [("fixed", "rdp"), ("poisson", "prv")])
def test_epsilon_is_that_of_dp_accounting(sampling, accountant):
    pytest.importorskip("opacus", reason="epsilon needs the extra feddg-bench[privacy]")
    for case, known in zip(CASES, KNOWN[sampling], strict=True):
        found = epsilon(*case, sampling=sampling, accountant=accountant)
        assert found == pytest.approx(known, rel=0.01), case


SCRIPT = """
import json, sys
import dp_accounting as d
from dp_accounting import pld, rdp
found = {"poisson": [], "fixed": []}
for z, q, steps, delta in json.loads(sys.argv[1]):
    account = pld.PLDAccountant()
    event = d.PoissonSampledDpEvent(q, d.GaussianDpEvent(z))
    found["poisson"].append(account.compose(event, steps).get_epsilon(delta))
    account = rdp.RdpAccountant(neighboring_relation=d.NeighboringRelation.REPLACE_ONE)
    event = d.SampledWithoutReplacementDpEvent(1000, int(1000 * q), d.GaussianDpEvent(z / 2))
    found["fixed"].append(account.compose(event, steps).get_epsilon(delta))
print(json.dumps(found))
"""


def test_the_known_epsilons_are_what_dp_accounting_says_today():
    """In a separate environment: ``python -m venv ENV && ENV/bin/pip install dp-accounting``."""
    python = os.environ.get("FEDDG_DP_ACCOUNTING")
    if python is None:
        pytest.skip("FEDDG_DP_ACCOUNTING names no Python that has dp-accounting")
    ran = subprocess.run([python, "-c", SCRIPT, json.dumps(CASES)], capture_output=True, check=True)
    found = json.loads(ran.stdout)
    for sampling, known in KNOWN.items():
        assert found[sampling] == pytest.approx(known, rel=1e-6)


def test_fixed_cohorts_cost_no_more_than_everybody_and_less_with_fewer():
    pytest.importorskip("opacus", reason="epsilon needs the extra feddg-bench[privacy]")
    spent = [epsilon(4.0, q, 20, 1e-5, sampling="fixed") for q in (0.01, 0.1, 0.5, 1.0)]
    assert spent == sorted(spent)
    assert rdp_of_fixed(2.0, 1.0, 4) == 2.0  # 2 alpha / z^2: a replaced term moves a sum by 2


# ------------------------------------------------------------------------- Poisson sampling


def test_poisson_cohorts_have_k_clients_in_the_mean_and_the_variance_of_coins():
    clients = tuple(f"client_{k:02}" for k in range(20))
    cohorts = [sample_clients(clients, 5, seed=0, round=r, poisson=True) for r in range(2000)]
    sizes = np.array([len(cohort) for cohort in cohorts])
    assert sizes.mean() == pytest.approx(5, abs=0.15)
    assert sizes.var() == pytest.approx(20 * 0.25 * 0.75, rel=0.1)
    assert all(list(cohort) == sorted(cohort) for cohort in cohorts)
    assert sizes.min() == 0


# ---------------------------------------------------------------------------- settings, keys


def test_settings_that_say_nothing_are_not_in_the_key():
    assert "privacy" not in canonical_settings(toy_settings())
    private = canonical_settings(toy_settings(DP))["privacy"]
    assert private == {"mechanism": "dp_client", "clip_norm": 0.5, "noise_multiplier": 0.1}


@pytest.mark.parametrize(
    ("layer", "word"),
    [
        ({"privacy": {"clip_norm": 2.0}}, "privacy.clip_norm has no effect"),
        ({"privacy": {"aggregation": "secure", "delta": 0.1}}, "privacy.delta has no effect"),
        ({"privacy": {"mechanism": "dp_client"}}, "federation.weighting=uniform"),
        ({**DP, "privacy": {**DP["privacy"], "aggregation": "secure"}}, "privacy.sampling=fixed"),
        ({**DP, "privacy": {**DP["privacy"], "clip_rate": 1.0}}, "privacy.clip_rate"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(layer, word):
    with pytest.raises(ValueError, match=r"privacy|federation") as caught:
        toy_settings(layer)
    assert word in str(caught.value)


# ------------------------------------------------------------------------- supported methods


def test_what_each_method_can_have():
    found = {name: obstacles(load_method(name)) for name in names("method")}
    can = {
        key: {n for n, why in found.items() if not why[key]} for key in next(iter(found.values()))
    }
    alone = {"erm", "fedadg", "fedavg", "fedprox", "fedsam", "fedsr", "moon"}
    alone |= {
        "coral",
        "dann",
        "ditto",
        "feddyn",
        "fedopt",
        "fish",
        "irm",
        "mixstyle",
        "mixup",
        "mmd",
        "rsc",
        "sagnet",
        "vrex",
        "fedclip",
        "zeroshot",
    }
    assert can["dp_client"] == alone
    assert can["secure"] == alone | {
        "agrrand",
        "agrsum",
        "fedbn",
        "fedgma",
        "fediir",
        "gperxan",
        "scaffold",
        "ncm",
        "ridge",
    }
    assert can["dp_style"] == {"ccst", "feddg", "pardon"}
    assert "style" in found["pardon"]["dp_client"]
    assert "control" in found["scaffold"]["dp_client"]
    assert "every two clients" in found["pcgrad"]["secure"]
    assert "each round" in found["fedccrl"]["dp_style"]


def test_a_server_half_that_says_nothing_counts_as_needing_single_replies():
    class Silent(Method):
        def aggregate(self, server, updates):
            return server.weights

    class Said(Silent):
        singles = ""

    class Again(Said):
        def run_round(self, server):
            pass

    assert "aggregate" in obstacles(Silent)["secure"]
    assert obstacles(Said)["secure"] == ""
    assert "run_round" in obstacles(Again)["secure"]


class Median(Method):
    """Declares wrongly that means are enough for it."""

    singles = ""

    def aggregate(self, server, updates):
        states = [reply.value.weights for reply in updates]
        return {
            name: torch.stack([s[name] for s in states]).median(dim=0).values for name in states[0]
        }


def test_the_contract_finds_a_server_half_that_needs_more_than_it_says():
    with pytest.raises(AssertionError, match="singles"):
        declared_sums_suffice(Subject(Median))
    declared_sums_suffice(Subject("pcgrad"))  # it declares that it needs them


def test_batch_normalisation_that_fedbn_sends_is_averaged_too():
    network = {
        "backbone": {"name": "mobilenet_v2", "pretrained": False},
        "train": {"batch_size": 16},
    }
    runs = [start_toy_run("fedbn", load_method("fedbn").needs, network, ALL) for _ in range(2)]
    runs[1].server.protection = HiddenReplies(PrivacySettings(), runs[1].method, 4)
    for run in runs:
        run.rounds(1)
    single, hidden = (run.method.global_model(run.server) for run in runs)
    assert any("running_mean" in name for name in single)
    close(hidden, single, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "layer", "word"),
    [("pardon", DP, "style"), ("pcgrad", SECURE, "every two"), ("fedavg", STYLE, "nothing")],
)
def test_what_does_not_go_together_is_refused(method, layer, word):
    layer = {key: value for key, value in layer.items() if key != "hyper"}
    with refused(SettingsError, word):
        start_toy_run(method, layer)


def test_dp_client_refuses_averaged_batch_normalisation():
    network = {"backbone": {"name": "resnet18"}, "data": {"image_size": 32}}
    with refused(SettingsError, "federation.bn=frozen"):
        start_toy_run("fedavg", DP, network)


def test_a_secure_sum_of_two_is_refused():
    with refused(SettingsError, "over 2 clients"):
        start_toy_run("fedavg", SECURE, {"federation": {"per_round": 2}})


# ------------------------------------------------------------------------------- secure sums


def close(found, expected, atol=1e-6):
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            assert_close(found[name], tensor, atol=atol, rtol=1e-5)


def test_the_secure_mean_is_that_of_the_weights():
    plain, hidden = (
        start_toy_run("fedavg", {"federation": {"per_round": None}}),
        start_toy_run("fedavg", SECURE),
    )
    for run in (plain, hidden):
        run.rounds(1)
    close(hidden.server.weights, plain.server.weights)


def test_bits_of_a_secure_sum_are_few_and_enough_or_too_few():
    errors = []
    plain = start_toy_run("fedavg", {"federation": {"per_round": None}})
    plain.rounds(1)
    for bits, fraction in ((64, 32), (32, 18), (16, 4)):
        run = start_toy_run(
            "fedavg", SECURE, {"privacy": {"bits": bits, "fraction_bits": fraction}}
        )
        (result,) = run.rounds(1)[1:]
        gap = [(run.server.weights[n] - w).abs().max() for n, w in plain.server.weights.items()]
        errors.append(float(max(gap)))
        assert errors[-1] <= 4 * 2.0 ** -(fraction + 1) / 44 + 1e-6  # 44 images, rounded 4 times
        size = sum(w.numel() for w in run.server.weights.values())
        assert 4 * size * bits // 8 < result.ledger.protection["up"] < 4 * (size * bits // 8 + 999)
        assert result.ledger.bytes["up"] == result.ledger.protection["up"]
    assert errors[2] > 1e-4


def test_the_server_half_sees_one_reply():
    run = start_toy_run("fedavg", SECURE)
    run.server.round = 1
    (reply,) = run.server.ask(run.method.fit)
    assert (reply.client, reply.clients, reply.num_examples) == ("all", 4, 44)
    assert run.server.share(reply) == 44


def test_dropouts_leave_the_sum_of_the_others():
    run = start_toy_run(
        "fedavg", SECURE, {"privacy": {"dropout": 0.2, "threshold": 0.4}}, {"seed": 1}
    )
    recorder = TaskRecorder()
    again = start_toy_run(
        "fedavg", {"federation": {"per_round": None}, "seed": 1}, executor=recorder
    )
    (result,) = run.rounds(1)[1:]
    start = {name: tensor.clone() for name, tensor in again.server.weights.items()}
    again.rounds(1)
    gone = {entry["client"] for entry in result.ledger.dropped}
    assert 0 < len(gone) < 4, "choose another seed"
    left = [r for r in recorder.replies if r.client not in gone]
    images = sum(r.num_examples for r in left)
    for name, tensor in run.server.weights.items():
        if tensor.is_floating_point():
            mean = sum(r.value.weights[name].double() * r.num_examples for r in left) / images
            assert_close(tensor, mean.float(), atol=1e-6, rtol=1e-5)
            assert not torch.equal(tensor, start[name])


def test_a_round_with_too_few_clients_is_skipped():
    run = start_toy_run("fedavg", SECURE, {"privacy": {"dropout": 0.9, "threshold": 1.0}})
    before = {name: tensor.clone() for name, tensor in run.server.weights.items()}
    assert [result.skipped for result in run.rounds(2)[1:]] == [True, True]
    bitwise(run.server.weights, before)


# ------------------------------------------------------------------------------ dp_client


def test_the_model_moves_by_the_noisy_mean_of_clipped_updates():
    recorder = TaskRecorder()
    run = start_toy_run("fedavg", DP, FIXED, {"federation": {"per_round": 2}}, executor=recorder)
    old = {name: tensor.clone() for name, tensor in run.server.weights.items()}
    run.rounds(1)
    names = [name for name, tensor in old.items() if tensor.is_floating_point()]
    total = 0
    for reply in recorder.replies:
        delta = torch.cat([(reply.value.weights[n] - old[n]).double().flatten() for n in names])
        assert delta.norm() > 0.5, "nothing is clipped"
        total = total + delta * (0.5 / delta.norm())
    noise = torch.from_numpy(gaussian(len(total), 0.1 * 0.5, 0, "updates", 1))
    expected = torch.cat([old[n].double().flatten() for n in names]) + (total + noise) / 2
    found = torch.cat([run.server.weights[n].double().flatten() for n in names])
    assert_close(found, expected, atol=1e-6, rtol=0)


def test_one_client_moves_the_model_by_no_more_than_the_clip_norm():
    """With equal noise, changing one update moves the model by at most two clip norms over K."""
    moved = []
    for spoiled in (False, True):
        run = start_toy_run("fedavg", DP, FIXED, {"federation": {"per_round": None}})

        def double(task, reply, spoiled=spoiled):
            if spoiled and task.client == "client_1":
                for tensor in reply.value.weights.values():
                    tensor.mul_(100 if tensor.is_floating_point() else 1)

        run.executor.on_reply = double
        run.rounds(1)
        moved.append(to_vector(run.server.weights))
    assert 0 < np.linalg.norm(moved[1] - moved[0]) <= 2 * 0.5 / 4 + 1e-6


def test_noise_is_added_where_nobody_takes_part():
    run = start_toy_run("fedavg", DP, {"federation": {"per_round": 1}, "seed": 3})
    results = run.rounds(3)[1:]
    empty = [result for result in results if not result.cohort]
    assert empty, "choose another seed"
    assert not any(result.skipped for result in results)


def test_the_adaptive_norm_follows_the_updates_and_is_kept():
    adaptive = {"privacy": {"adaptive_clipping": True, "count_noise": 0.1, "clip_rate": 1.0}}
    run = start_toy_run("fedavg", DP, adaptive, FIXED, {"federation": {"per_round": None}})
    run.rounds(1)
    # All four updates are longer than 0.5; the noise on their count has its own stream.
    share = gaussian(1, 0.1, 0, "count", 1)[0] / 4
    assert run.server.memory["clip norm"] == pytest.approx(0.5 * math.exp(0.5 - share))


def test_a_client_changes_the_count_below_the_norm_by_a_half():
    """Hence a round without clients tells nothing about the norm: its share is 1/2 plus noise."""
    adaptive = {"privacy": {"adaptive_clipping": True, "count_noise": 0.1, "clip_quantile": 0.2}}
    run = start_toy_run("fedavg", DP, adaptive, {"federation": {"per_round": 1}, "seed": 3})
    before, sizes = 0.5, set()
    for upto in (1, 2, 3):
        (result,) = [r for r in run.rounds(upto) if r.round]
        # All updates are longer than the norm: each client lowers the share by 1/2.
        noise = gaussian(1, 0.1, 3, "count", upto)[0]
        share = 0.5 + noise - 0.5 * len(result.cohort)  # over an expected cohort of 1
        sizes.add(len(result.cohort))
        now = run.server.memory["clip norm"]
        assert now == pytest.approx(before * math.exp(-0.2 * (share - 0.2)))
        before = now
    assert 0 in sizes, "choose another seed"


def test_dp_client_over_secure_sums_has_the_same_model():
    fixed = [DP, FIXED, {"federation": {"per_round": None}}]
    plain, hidden = start_toy_run("fedavg", *fixed), start_toy_run("fedavg", SECURE, *fixed)
    for run in (plain, hidden):
        run.rounds(1)
    close(hidden.server.weights, plain.server.weights)


def test_numbers_that_do_not_fit_a_secure_sum_end_the_run():
    """Truncated image counts would give a silently wrong model."""
    few = {"privacy": {"bits": 32}}
    with refused(SettingsError, "does not fit", "privacy.bits=32", "give more bits"):
        start_toy_run("fedavg", SECURE, few).rounds(1)


def test_guarantees_say_what_they_protect():
    pytest.importorskip("opacus", reason="epsilon needs the extra feddg-bench[privacy]")
    fedavg, pardon, ccst = map(load_method, ("fedavg", "pardon", "ccst"))
    found = guarantee(toy_settings(DP), fedavg, 4)
    assert found.epsilon == epsilon(0.1, 0.5, 3, 1e-5)
    assert "there or not" in found.protects
    found = guarantee(toy_settings(DP, FIXED), fedavg, 4)
    assert found.epsilon == epsilon(0.1, 0.5, 3, 1e-5, sampling="fixed")
    assert "replaced" in found.protects
    found = guarantee(toy_settings(STYLE), pardon, 4)
    assert found.epsilon == epsilon(0.5, 1, 1, 1e-5)
    assert found.protects.startswith("a client")
    found = guarantee(toy_settings(STYLE), ccst, 4)  # it sends one of two kinds of styles
    assert found.epsilon == epsilon(0.5, 1, 1, 1e-5)
    assert found.protects.startswith("a client")
    assert found.protects.endswith("(overall)")
    found = guarantee(toy_settings(STYLE, {"hyper": {"bank": "both"}}), ccst, 4)
    assert found.epsilon == epsilon(0.5, 1, 2, 1e-5)
    assert found.protects.startswith("an image")
    assert guarantee(toy_settings(), fedavg, 4) is None
    assert guarantee(toy_settings(SECURE), fedavg, 4).epsilon is None


# ------------------------------------------------------------------------------- dp_style


def test_styles_are_clipped_and_noised_at_the_client():
    clean, noisy = TaskRecorder(), TaskRecorder()
    start_toy_run("pardon", hyper(style="pixel"), executor=clean).rounds(1)
    short = {"privacy": {"clip_norm": 0.25}}
    start_toy_run("pardon", STYLE, short, executor=noisy).rounds(1)
    for before, after in zip(clean.replies, noisy.replies, strict=True):
        if "style" not in content(after.value):
            continue
        style = before.value["style"].double().flatten()
        assert style.norm() > 0.25
        draws = torch.from_numpy(gaussian(6, 0.25, 0, "local_style", "style", 0, before.client))
        expected = (style * (0.25 / style.norm()) + draws).view(2, 3).float()
        expected[1].clamp_(min=0)  # standard deviations
        assert_close(after.value["style"], expected, atol=1e-6, rtol=0)


def test_styles_of_images_are_clipped_one_by_one():
    noisy = TaskRecorder()
    tiny = {"privacy": {"clip_norm": 0.1, "noise_multiplier": 1e-9}}
    start_toy_run("ccst", STYLE, tiny, hyper(bank="single"), executor=noisy).rounds(0)
    single = noisy.replies[0].value["single"]
    assert len(single) > 1
    assert_close(single.flatten(1).norm(dim=1), torch.full((len(single),), 0.1))


def test_styles_that_are_sent_each_round_are_refused():
    run = start_toy_run("ccst", STYLE, hyper(refresh="round"))
    with refused(SettingsError, "each round", "local_styles"):
        run.rounds(1)


# ----------------------------------------------------------------------------- reproducibility


@pytest.fixture(scope="module")
def pool():
    executor = ProcessExecutor(2)
    yield executor
    executor.close()


ADAPTIVE = {"privacy": {"adaptive_clipping": True, "count_noise": 0.5}}
PROTECTED = [
    ("fedavg", [{**SECURE, "privacy": {"aggregation": "secure", "dropout": 0.1}}]),
    ("scaffold", [SECURE, {"train": {"optimizer": "sgd"}}]),
    ("fedavg", [DP, ADAPTIVE]),
    ("pardon", [STYLE]),
]
protected = pytest.mark.parametrize(("method", "layers"), PROTECTED, ids=str)


def state(run):
    return encode(run.server.state())


@pytest.mark.nightly
@protected
def test_processes_have_the_bits_of_one(method, layers, pool):
    here, there = start_toy_run(method, *layers), start_toy_run(method, *layers, executor=pool)
    first, second = here.rounds(2), there.rounds(2)
    assert [r.ledger.bytes for r in first] == [r.ledger.bytes for r in second]
    assert [r.cohort for r in first] == [r.cohort for r in second]
    assert state(here) == state(there)


@protected
def test_a_resumed_run_is_one_that_never_stopped(method, layers):
    whole, stopped, resumed = (start_toy_run(method, *layers) for _ in range(3))
    whole.rounds(3)
    stopped.rounds(1)
    resumed.server.restore(decode(encode(stopped.server.state())))
    resumed.rounds(3)
    assert state(resumed) == state(whole)


def test_a_reply_of_one_client_counts_as_before():
    reply = Reply("client_0", 7, LocalUpdate({}), {}, {})
    run = start_toy_run("fedavg", {"federation": {"weighting": "uniform"}})
    assert run.server.share(reply) == 1.0
