"""Properties: what share of a client's images is of each domain and class?

The attacker knows what a client with one image of any domain and class would send (`Shadow`), and
looks for the shares p of these groups whose mean is nearest to the message S. With M the groups'
means, P the inverse covariance within groups, n the number of the client's images and p0 the shares
among public images,

    p = argmin n (S / a - M' p)' P (S / a - M' p) + |p - p0|^2 / t^2

clipped at 0, where a is S's scale (`feddg_attacks.kinds.membership`) and t the width of the prior
around p0. If the rows of a message are of single images, their mean is used; if they are of
classes, the client holds only these. Source: Ateniese et al., IJSN 2015 (the question).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from feddg_attacks.attack import Attack, Pictures, Scene, interval, no_leak, planted_leak
from feddg_attacks.capture import Message, by_item
from feddg_attacks.kinds.membership import (
    MOST_OTHERS,
    MOST_PUBLIC,
    Likelihood,
    few_clients,
)
from feddg_attacks.records import AttackResult
from feddg_attacks.shadow import Rows, Shadow
from feddg_bench.core.messages import nbytes

SPREAD = 0.3
"""t, width of the prior around a group's share among public images."""
FOUND = 0.6
"""Rank that a planted leak must reach; it is low because clients can be similar."""
ABSENT = 20
"""Number of fictitious clients; *no leak* looks for every client in a message of each of them."""


class Mixture:
    """The attacker's half.

    Args:
        public: Vectors of public images, [m, P].
        pictures: Their domains and classes.
    """

    def __init__(self, public: Tensor, pictures: Pictures) -> None:
        pairs = np.stack([pictures.domains, pictures.labels], 1)
        self.groups, group = np.unique(pairs, axis=0, return_inverse=True)  # [G, 2]
        group = group.reshape(-1)
        self.means = torch.stack([public[group == g].mean(0) for g in range(len(self.groups))])
        self.prior = torch.from_numpy(np.bincount(group) / len(group))
        self.known = Likelihood(public, group, group)
        self.scale = Likelihood(public, pictures.domains, pictures.labels)

    def shares(self, message: Rows, images: int) -> Tensor:
        """Return the share of each group, [G], of sum 1, by a message of a client with n images."""
        if message.keys is not None:
            held = np.isin(self.groups[:, 1], message.keys.numpy())
            p = self.prior * torch.from_numpy(held)
            return p / p.sum() if p.sum() > 0 else self.prior
        sent = message.vectors.mean(0)
        a, _ = self.scale.mixture(sent, images, affine=message.mean)
        metric = images * self.known.precise(self.means)  # [G, P]
        normal = metric @ self.means.T + torch.eye(len(self.prior)) / SPREAD**2
        towards = metric @ (sent / a - self.prior @ self.means)
        p = (self.prior + torch.linalg.solve(normal, towards)).clamp(min=0)
        return p / p.sum() if p.sum() > 0 else self.prior


def along(shares: np.ndarray, groups: np.ndarray, axis: int) -> np.ndarray:
    """Return shares [..., G] of groups as shares of domains (``axis`` 0) or classes (1)."""
    names = np.unique(groups[:, axis])
    sums = [shares[..., groups[:, axis] == name].sum(-1) for name in names]
    return np.stack(sums, -1)


def guess_ranks(guesses: np.ndarray, truth: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return for each guess the share of other clients that it fits worse than its own client.

    Distances are half the sum of absolute differences. Ties count half.

    Args:
        guesses: Guessed shares, [N, G].
        truth: True shares of all clients, [K, G].
        own: Index of each guess's client in ``truth``, [N].
    """
    distance = np.abs(guesses[:, None] - truth[None]).sum(2).round(9) / 2  # [N, K]
    own_distance = distance[np.arange(len(guesses)), own][:, None]
    better = (distance > own_distance).sum(1) + ((distance == own_distance).sum(1) - 1) / 2
    shares: np.ndarray = better / (len(truth) - 1)
    return shares


class Properties(Attack):
    """The scorer's half: can a client's mixture be distinguished from those of others?"""

    kind = "property"
    version = 3

    def measure(self, scene: Scene) -> Iterator[AttackResult]:
        """Attack each item that clients send, for domains and for classes."""
        public, others = scene.part("id_val", MOST_PUBLIC), scene.part("id_test", MOST_OTHERS)
        sent = [message for message in scene.messages() if message.up]
        names = few_clients({message.client for message in sent}, scene.draw("clients"))
        shadow = Shadow(scene.settings, scene.federation, public + others)
        count = 0
        for chosen in by_item(sent, names):
            first = [m for m in chosen if m.when == chosen[0].when]
            rows = [shadow.rows(message) for message in first]
            unread = any(row is None for row in rows) or not shadow.answers(first[0])
            if len(first) < 3 or unread:
                continue
            count += 1
            item, task = first[0].item, first[0].exchange.task
            scene.step(f"{self.kind} of {item}", 0, 1)
            vectors = shadow.vectors(task, item, range(len(public) + len(others)))
            mixture = Mixture(vectors[: len(public)], public)
            truth = np.stack([self._truth(scene, m.client, mixture.groups) for m in first])
            sizes = [message.exchange.images for message in first]
            guesses = self._guess(mixture, [row for row in rows if row is not None], sizes)
            hold = partial(plant, rows[0], vectors[len(public) :], others, mixture.groups)
            planted = self._guess(mixture, hold(truth), sizes)
            absent = [
                self._guess(mixture, hold(np.tile(p, (len(first), 1))), sizes)
                for p in absent_clients(mixture.prior.numpy(), scene.draw("no leak", item))
            ]
            for axis, about in enumerate(("domains", "classes")):
                true = along(truth, mixture.groups, axis)
                if np.ptp(true, axis=0).max() > 0:  # else all clients have the same shares
                    correlations = [
                        along(p, mixture.groups, axis) for p in (guesses, planted, *absent)
                    ]
                    prior = along(mixture.prior.numpy(), mixture.groups, axis)
                    yield self._result(scene, first[0], about, true, correlations, prior)
        if not count:
            raise self.nothing(scene, "what three clients or more measure on images, or weights")

    @staticmethod
    def _guess(mixture: Mixture, rows: Sequence[Rows], sizes: Sequence[int]) -> np.ndarray:
        pairs = zip(rows, sizes, strict=True)
        return np.stack([mixture.shares(row, images).numpy() for row, images in pairs])

    @staticmethod
    def _truth(scene: Scene, client: str, groups: np.ndarray) -> np.ndarray:
        """Return the true share of each group, [G]."""
        held = scene.federation.clients[client]
        pairs = np.stack([scene.federation.domain_ids[held], scene.federation.labels[held]], 1)
        counts: np.ndarray = (pairs[:, None] == groups[None]).all(2).sum(0)
        shares: np.ndarray = counts / max(1, counts.sum())
        return shares

    def _result(
        self,
        scene: Scene,
        message: Message,
        about: str,
        truth: np.ndarray,
        correlations: Sequence[np.ndarray],
        prior: np.ndarray,
    ) -> AttackResult:
        guesses, planted, *absent = correlations
        here = np.arange(len(truth))
        wrong = [guess_ranks(guess, truth, here) for guess in absent]
        draw = scene.draw("bootstrap", message.item, about)
        right = guess_ranks(guesses, truth, here)
        planted_ranks = guess_ranks(planted, truth, here)
        return AttackResult(
            item=message.item,
            about=about,
            up=True,
            call=message.when[1],
            times=1,
            messages=len(truth),
            targets=len(truth),
            bytes=nbytes(message.value),
            no_leak=no_leak(interval(wrong, draw), 0.5),
            planted_leak=planted_leak(interval(list(planted_ranks[:, None]), draw), FOUND),
            figures={
                "rank": interval(list(right[:, None]), draw),
                "error": interval(list(np.abs(guesses - truth).sum(1)[:, None] / 2), draw),
                "guess": interval(list(np.abs(prior - truth).sum(1)[:, None] / 2), draw),
            },
        ).withheld()


def absent_clients(prior: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return mixtures [`ABSENT`, G] of fictitious clients, around the shares ``prior`` [G].

    Weights of groups are exponentially distributed. One guess has a mean rank of 0.5 over clients,
    whatever they hold: any other mean shows that the scorer knows more than the message.
    """
    weights = draw.exponential(size=(ABSENT, len(prior))) * prior
    mixtures: np.ndarray = weights / weights.sum(1, keepdims=True)
    return mixtures


def plant(
    form: Rows | None,
    x: Tensor,
    who: Pictures,
    groups: np.ndarray,
    truth: np.ndarray,
) -> list[Rows]:
    """Return messages of mixtures alone: weighted means of the groups' vectors.

    Args:
        form: A real message of the same form.
        x: Vectors of images that no client holds, [n, P].
        who: These images.
        groups: Domain and class of each group, [G, 2].
        truth: The mixtures [K, G].
    """
    assert form is not None  # noqa: S101 - the caller has read it
    pairs = np.stack([who.domains, who.labels], 1)
    means = []
    for domain, label in groups:
        for same in ((pairs == (domain, label)).all(1), pairs[:, 0] == domain):
            if same.any():
                means.append(x[torch.from_numpy(same)].mean(0))
                break
    plain = torch.stack(means)
    rows = []
    for shares in truth:
        keys = None
        if form.keys is not None:
            keys = torch.from_numpy(np.unique(groups[shares > 0, 1]))
        rows.append(Rows((torch.from_numpy(shares) @ plain)[None], form.each, form.mean, keys))
    return rows
