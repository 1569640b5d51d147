"""Updates that no attack reads are dropped, without effect on any figure."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from feddg_attacks import perform
from feddg_attacks.attack import Attack, Scene
from feddg_attacks.kinds import membership
from feddg_attacks.kinds.gradient_inversion import GradientInversion
from feddg_attacks.kinds.membership import Membership
from feddg_attacks.kinds.property import Properties
from feddg_attacks.records import ATTACKERS, Attacker
from tests.privacy.scenes import CLIENTS, attacked_federation, captured, scene_of


@pytest.fixture(autouse=True, scope="module")
def _few() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "MOST_CLIENTS", 3)
        patch.setattr(GradientInversion, "steps", 2)
        yield


@pytest.fixture(scope="module")
def scenes(_few: None) -> list[Scene]:
    """Return a run with all messages kept, and the same run with only the required ones kept."""
    few = attacked_federation(each=2, public=6)
    return [
        scene_of("fedavg", federation=few, rounds=2, limited=limited) for limited in (False, True)
    ]


@pytest.mark.parametrize("attacker", ATTACKERS)
@pytest.mark.parametrize("attack", [Membership, Properties, GradientInversion])
def test_what_no_attack_looks_at_moves_no_figure(
    attack: type[Attack], attacker: Attacker, scenes: list[Scene]
) -> None:
    def found(scene: Scene) -> object:
        try:
            return list(attack().measure(replace(scene, attacker=attacker)))
        except perform.SettingsError as refused:
            return str(refused)

    whole, limited = map(found, scenes)
    assert limited == whole


def test_updates_of_most_clients_and_of_late_rounds_are_not_kept() -> None:
    _, capture = captured("fedavg", rounds=4, limited=True)
    kept = {
        (e.task.client, e.task.round) for e in capture.exchanges if e.sent["weights"] is not None
    }
    assert len(capture.exchanges) == 4 * CLIENTS
    assert {number for _, number in kept} == {1, 2, 3}
    assert {f"client_{i}" for i in range(4)} <= {client for client, _ in kept}
    assert len(kept) <= 3 * (4 + 3)


def test_all_are_kept_where_only_some_clients_are_asked() -> None:
    few = {"federation": {"per_round": 3}}
    _, capture = captured("fedavg", few, rounds=4, limited=True)
    assert len(capture.exchanges) == 12
    assert all(e.sent["weights"] is not None for e in capture.exchanges)
