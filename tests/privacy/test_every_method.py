"""The messages of every method can be read, whatever it sends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from feddg_attacks.kinds.membership import Membership
from feddg_attacks.kinds.property import Properties
from feddg_bench.common.errors import SettingsError
from feddg_bench.plugins import load_method, names
from tests.privacy.scenes import scene_of, sorted_federation

pytestmark = pytest.mark.nightly

FEW = {"many": 3, "each": 3, "public": 6}
SETTINGS = {
    "ccst": {"hyper": {"style": "pixel"}},
    "pardon": {"hyper": {"style": "pixel"}},
}


UNREAD = ("erm", "zeroshot", "fdse")
"""Methods that send nothing of one client, and one whose normalisation cannot train on one image
as small as these."""


@pytest.mark.parametrize("method", [name for name in names("method") if name not in UNREAD])
def test_what_a_method_sends_is_attacked(method: str) -> None:
    federation = sorted_federation(**FEW)
    if load_method(method).client_validation:
        public = np.concatenate([index for split, _, index in federation.evaluation[:2]])
        parts = np.array_split(public, FEW["many"])
        federation = replace(
            federation, validation=dict(zip(federation.clients, parts, strict=True))
        )
    scene = scene_of(method, SETTINGS.get(method, {}), federation=federation)
    results = list(Membership().measure(scene))
    declared = {name for sent in load_method(method).uplink.values() for name in sent}
    items = {result.item for result in results}
    assert items <= declared
    assert "weights" in items or "weights" not in declared
    assert all(result.messages == FEW["many"] and result.bytes > 0 for result in results)
    assert list(Properties().measure(scene))


def test_one_pooled_client_can_be_told_from_nobody() -> None:
    whole = sorted_federation(**FEW)
    pooled = replace(whole, clients={"all": np.concatenate(list(whole.clients.values()))})
    scene = scene_of("erm", federation=pooled)
    with pytest.raises(SettingsError, match="property"):
        list(Properties().measure(scene))
