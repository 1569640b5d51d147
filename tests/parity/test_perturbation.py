"""Perturbed styles of CCST and FedCCRL; for PARDON's, see its own tests."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

LOUD = {"hyper": {"perturb_noise": 0.05, "perturb_shrink": 0.1}}
METHODS = {
    "ccst": ({"hyper": {"style": "pixel", "bank": "both"}}, ("overall", "single")),
    "fedccrl": ({"hyper": {"upload_ratio": 1.0, "upload_subset": "fixed"}}, ("statistics",)),
}


def sent(start_run, recorder, method, *layers, rounds):
    """Return what each client sent before it trained, in the order of calls."""
    start_run(method, *layers, executor=recorder).rounds(rounds)
    return [reply.value for reply in recorder.replies if isinstance(reply.value, dict)]


@pytest.mark.parametrize("method", METHODS)
def test_sent_styles_are_shrunken_and_noisy(start_run, recorder, method):
    layer, items = METHODS[method]
    rounds = 0 if method == "ccst" else 2
    sent(start_run, recorder, method, layer, rounds=rounds)
    plain, recorder.replies = list(recorder.replies), []
    sent(start_run, recorder, method, layer, LOUD, rounds=rounds)
    pairs = [
        (a.value[item], b.value[item])
        for a, b in zip(plain, recorder.replies, strict=True)
        for item in items
        if isinstance(a.value, dict)
    ]
    assert pairs
    noise = torch.cat([(b - 0.9 * a)[..., 0, :].flatten() for a, b in pairs])
    assert 0.02 < float(noise.std()) < 0.1
    assert all((b[..., 1, :] >= 0.00316).all() for _, b in pairs)
    assert not torch.equal(pairs[0][1], pairs[1][1])


def test_fedccrl_draws_noise_once(start_run, recorder):
    layer, _ = METHODS["fedccrl"]
    first, second = {}, {}
    start_run("fedccrl", layer, LOUD, executor=recorder).rounds(2)
    for reply in recorder.replies:
        if isinstance(reply.value, dict):
            (second if reply.client in first else first)[reply.client] = reply.value["statistics"]
    assert first.keys() == second.keys()
    for client, statistics in first.items():
        assert_close(second[client], statistics, rtol=0, atol=0)
