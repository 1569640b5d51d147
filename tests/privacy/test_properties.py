"""The estimated mixture of a client compared with hand-made mixtures."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from feddg_attacks.attack import Pictures
from feddg_attacks.kinds.membership import MOST_CLIENTS
from feddg_attacks.kinds.property import Mixture, Properties, along, guess_ranks, plant
from feddg_attacks.shadow import Rows
from tests.privacy.scenes import CLIENTS, attacked_federation, scene_of, sorted_federation

CELLS = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])


def public() -> tuple[torch.Tensor, Pictures]:
    """Return 40 vectors of four distant groups, and their domains and classes."""
    group = np.arange(40) % 4
    centres = 10 * torch.eye(4, 6, dtype=torch.float64)
    noise = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).double()
    domains, labels = CELLS[group].T
    return centres[group] + noise, Pictures(np.zeros((40, 1, 1, 3)), labels, domains)


def test_a_mixture_of_distinct_groups_is_found() -> None:
    vectors, who = public()
    mixture = Mixture(vectors, who)
    true = torch.tensor([0.5, 0.1, 0.4, 0.0], dtype=torch.float64)
    sent = Rows((true @ mixture.means)[None], each=False, mean=True)
    assert np.allclose(mixture.shares(sent, 1000), true, atol=0.01)
    assert mixture.groups.tolist() == CELLS.tolist()


def test_a_client_of_no_images_tells_nothing_but_what_is_public() -> None:
    vectors, who = public()
    mixture = Mixture(vectors, who)
    sent = Rows(mixture.means[:1], each=False, mean=True)
    assert np.allclose(mixture.shares(sent, 0), [0.25] * 4)


def test_rows_of_classes_say_which_are_held() -> None:
    vectors, who = public()
    mixture = Mixture(vectors, who)
    rows = Rows(vectors[:1], each=True, mean=True, keys=torch.tensor([1]))
    assert mixture.shares(rows, 5).tolist() == [0, 0.5, 0, 0.5]


def test_shares_are_added_along_domains_and_classes() -> None:
    shares = np.array([0.4, 0.3, 0.2, 0.1])
    assert np.allclose(along(shares, CELLS, 0), [0.7, 0.3])
    assert np.allclose(along(shares, CELLS, 1), [0.6, 0.4])


def test_a_rank_is_the_share_of_clients_that_fit_worse() -> None:
    truth = np.array([[1.0, 0.0], [0.8, 0.2], [0.0, 1.0]])
    guesses = np.array([[0.95, 0.05], [1.0, 0.0], [1.0, 0.0]])
    assert guess_ranks(guesses, truth, np.arange(3)).tolist() == [1.0, 0.5, 0.0]
    alike = np.ones((3, 1))
    assert guess_ranks(alike, alike, np.arange(3)).tolist() == [0.5, 0.5, 0.5]


def test_a_planted_message_is_the_mean_of_its_groups() -> None:
    vectors, who = public()
    truth = np.array([[0.25, 0.25, 0.25, 0.25]])
    (row,) = plant(Rows(vectors[:1], False, True), vectors, who, CELLS, truth)
    assert torch.allclose(row.vectors[0], vectors.mean(0))


@pytest.mark.parametrize("method", ["fedavg", "fpl"])
def test_updates_tell_the_classes_of_a_client(method: str) -> None:
    scene = scene_of(method, federation=sorted_federation(), items={"weights"})
    found = {(r.item, r.about): r for r in Properties().measure(scene)}
    result = found["weights", "classes"]
    assert result.messages == CLIENTS
    assert not result.failed
    assert result.figures["rank"].value > 0.8
    assert result.figures["error"].high < result.figures["guess"].low


class Informed(Properties):
    """A scorer that reveals to its attacker what clients hold, whatever they send."""

    def _truth(self, *asked: Any) -> np.ndarray:  # type: ignore[override]
        self.known = [*getattr(self, "known", []), Properties._truth(*asked)]
        return self.known[-1]

    def _guess(self, mixture: Mixture, rows: Any, sizes: Any) -> np.ndarray:  # type: ignore[override]
        return np.stack(self.known)


@pytest.mark.parametrize("clients", [4, 12])
def test_a_scorer_that_knows_what_clients_hold_is_found_out(clients: int) -> None:
    scene = scene_of("fedavg", federation=sorted_federation(many=clients))
    for result in Informed().measure(scene):
        assert not result.no_leak.holds
        assert result.figures == {}
        assert "'no leak'" in result.failed


def test_of_few_clients_a_sure_guess_is_not_withheld() -> None:
    scene = scene_of("fpl", federation=sorted_federation(many=4), items={"prototypes"})
    result = next(r for r in Properties().measure(scene) if r.about == "classes")
    assert np.allclose(list(vars(result.no_leak.measured).values()), 0.5)
    assert result.figures["rank"].value == 1.0


def test_of_many_clients_not_the_first_are_attacked() -> None:
    """The first clients can all hold one class, if a partition deals out images in this order."""
    whole = attacked_federation(3 * (MOST_CLIENTS + 1), each=2)
    held = np.concatenate(list(whole.clients.values()))
    parts = np.split(held[np.argsort(whole.labels[held], kind="stable")], len(whole.clients))
    federation = replace(whole, clients=dict(zip(sorted(whole.clients), parts, strict=True)))
    scene = scene_of("fedavg", federation=federation)
    found = {(r.item, r.about): r for r in Properties().measure(scene)}
    assert found["weights", "classes"].messages == MOST_CLIENTS
    assert found["weights", "classes"].figures["rank"].value > 0.8


def test_where_clients_are_alike_there_is_nothing_to_tell() -> None:
    few = attacked_federation(public=12)
    assert not list(Properties().measure(scene_of("fedavg", federation=few)))
