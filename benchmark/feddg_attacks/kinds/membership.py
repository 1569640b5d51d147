"""Membership: does the client that sent this message hold this image?

The score is a likelihood ratio. Let x be the target's own vector, as a client with this image alone
would send it, S the message of a client with n images, and both approximately normal with the
covariance C of public images (C / n for S). Then, with P the inverse of C and E the expected S
without the target,

    log p(S | member) / p(S | not) = (x - mu)' P (S - E) / a - (x - mu)' P (x - mu) / (2 n)

where mu is the mean of the public images of x's domain, E the combination of these means that is
nearest to S, and a its scale: 1 if S is a mean; free if it is a change of weights, which grows
with the steps. If each row of a message is of one image, the nearest row counts; if rows are of
classes, the row of the target's class. Standardised ratios are averaged over rounds.
Sources: Shokri et al., S&P 2017 (the question); Carlini et al., S&P 2022 (true positives at few
false positives); Zhu et al., FedMIA, 2024 (updates over rounds).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from feddg_attacks.attack import (
    Attack,
    Pictures,
    Scene,
    interval,
    no_leak,
    planted_leak,
)
from feddg_attacks.capture import Message, by_item
from feddg_attacks.received import read_received
from feddg_attacks.records import Attacker, AttackResult
from feddg_attacks.shadow import Rows, Shadow
from feddg_bench.core.messages import nbytes

RIDGE = 0.05
"""Ridge of the public covariance, times its mean variance, since public images are few."""
MOST_PUBLIC, MOST_OTHERS, MOST_CLIENTS, MOST_ROUNDS, MOST_MEMBERS = 300, 300, 40, 3, 300
"""Maximum numbers of public images, images that no client holds, clients, rounds and members."""
MOST_PLANTED = 40
FOUND = 0.9
"""AUC that a planted leak must reach."""
ABSENT = -10.0
"""Score of a target whose class is not in a message, in standard deviations."""


class Likelihood:
    """The attacker's half.

    Args:
        public: Vectors of public images, [m, P].
        domains: Their domains [m].
        classes: Their classes [m].
    """

    def __init__(self, public: Tensor, domains: np.ndarray, classes: np.ndarray) -> None:
        self.public, self.domains, self.classes = public, domains, classes
        self.names = np.unique(domains)
        self.mu = torch.stack([public[domains == d].mean(0) for d in self.names])  # [D, P]
        z = public - self.mean(domains)
        variance = z.square().mean()
        ridge = RIDGE * (variance if variance > 0 else 1.0) * len(z)
        gram = z @ z.T + ridge * torch.eye(len(z), dtype=z.dtype)
        # (Z'Z + r I)^-1 = (I - Z' (Z Z' + r I)^-1 Z) / r: inverts m x m instead of P x P.
        self._inner, self._z = torch.linalg.inv(gram) @ z, z
        self._scale = len(z) / ridge

    def mean(self, domains: np.ndarray) -> Tensor:
        """Return the public mean of each domain [n], as [n, P]."""
        means: Tensor = self.mu[np.searchsorted(self.names, domains)]
        return means

    def precise(self, rows: Tensor) -> Tensor:
        """Return P v of each row v [n, P]."""
        product: Tensor = (rows - rows @ self._z.T @ self._inner) * self._scale
        return product

    def ratios(self, message: Rows, images: int, x: Tensor, who: Pictures) -> Tensor:
        """Return the score of each target [n], in standard deviations of public images.

        Args:
            message: A client's message.
            images: n, as the client states it.
            x: Vectors of the targets, [n, P].
            who: The targets.
        """
        scores = self._raw(message, images, x, who.domains, who.labels)
        known = self._raw(message, images, self.public, self.domains, self.classes)
        known = known[known.isfinite()]
        spread = known.std() if len(known) > 1 and known.std() > 0 else 1.0
        middle = known.mean() if len(known) else 0.0
        return ((scores - middle) / spread).nan_to_num(neginf=ABSENT)

    def _raw(
        self, message: Rows, images: int, x: Tensor, domains: np.ndarray, classes: np.ndarray
    ) -> Tensor:
        if not message.each:
            return self._ratio(message.vectors[0], images, x, domains, affine=message.mean)
        if message.keys is None:  # one row per image
            near = x[:, None] - message.vectors[None]  # [n, J, P]
            distance = (near * self.precise(near.flatten(0, 1)).view_as(near)).sum(2)
            return -distance.min(1).values / 2
        scores = torch.full((len(x),), -torch.inf, dtype=x.dtype)
        for key, vector in zip(message.keys.tolist(), message.vectors, strict=True):
            of = classes == key
            if of.any():
                share = max(1, images // len(message.vectors))
                ratio = self._ratio(vector, share, x[of], domains[of], affine=message.mean)
                scores[torch.from_numpy(of)] = ratio
        return scores

    def mixture(self, sent: Tensor, images: int, *, affine: bool) -> tuple[float, Tensor]:
        """Return a, and the shares of domains [D] for which a E is nearest to S [P].

        ``affine`` sets a to 1. Shares are rounded to whole images.
        """
        base = self.mu[-1] if affine else torch.zeros_like(sent)
        means = self.mu[:-1] - base if affine else self.mu
        metric = self.precise(means)
        share = torch.linalg.pinv(metric @ means.T) @ (metric @ (sent - base))
        if affine:
            share = torch.cat([share, 1 - share.sum(0, keepdim=True)])
        a = float(share.sum())
        whole = (images * share.clamp(min=0) / share.clamp(min=0).sum()).round()
        if a <= 0 or not whole.isfinite().all() or whole.sum() <= 0:
            return 1.0, torch.full_like(share, 1 / len(share))
        return a, whole / whole.sum()

    def _ratio(
        self, sent: Tensor, images: int, x: Tensor, domains: np.ndarray, *, affine: bool
    ) -> Tensor:
        a, shares = self.mixture(sent, images, affine=affine)
        away = x - self.mean(domains)
        precise = self.precise(away)
        return precise @ (sent / a - shares @ self.mu) - (precise * away).sum(1) / (2 * images)


def percentiles(
    members: Tensor, domains: np.ndarray, others: Tensor, theirs: np.ndarray
) -> np.ndarray:
    """Return for each member [n] the share of non-members of its domain that score lower.

    Ties count half. The mean over members is the AUC, stratified by domain: knowing that a client
    holds photos does not tell which ones.
    """
    shares = []
    for score, domain in zip(members, domains, strict=True):
        rest = others[torch.from_numpy(theirs == domain)]
        shares.append(float((rest < score).double().mean() + (rest == score).double().mean() / 2))
    return np.array(shares)


class Membership(Attack):
    """The scorer's half: members of each client against images that no client holds."""

    kind = "membership"
    versions: ClassVar[Mapping[Attacker, int]] = {"client": 2}

    def measure(self, scene: Scene) -> Iterator[AttackResult]:
        """Attack each item that clients send, or that the attacking client receives."""
        if scene.attacker == "client":
            yield from self._received(scene)
            return
        public, others = scene.part("id_val", MOST_PUBLIC), scene.part("id_test", MOST_OTHERS)
        sent = [message for message in scene.messages() if message.up]
        names = few_clients({message.client for message in sent}, scene.draw("clients"))
        if len(names) < 2:  # no message of another client, for the control
            raise self.nothing(scene, "what two clients or more send")
        holders, index = held_by(scene, names)
        members = scene.pictures(index)
        shadow = Shadow(scene.settings, scene.federation, public + others + members)
        count = 0
        for chosen in by_item(sent, names):
            unread = all(shadow.rows(message) is None for message in chosen)
            if unread or not shadow.answers(chosen[0]):
                continue
            count += 1
            yield self._item(scene, shadow, chosen, (public, others, members), holders)
        if not count:
            raise self.nothing(scene)

    def _item(
        self,
        scene: Scene,
        shadow: Shadow,
        messages: Sequence[Message],
        sets: tuple[Pictures, Pictures, Pictures],
        holders: np.ndarray,
    ) -> AttackResult:
        public, others, members = sets
        item, call = messages[0].item, messages[0].when[1]
        names = sorted({message.client for message in messages})
        ends = np.cumsum([0, *map(len, sets)])
        rounds = sorted({message.when[0] for message in messages})[:MOST_ROUNDS]
        # [messages' clients, targets], averaged over rounds
        scores = torch.zeros(len(names), len(others) + len(members), dtype=torch.float64)
        seen = torch.zeros(len(names), 1, dtype=torch.float64)
        form: Rows | None = None
        found: list[np.ndarray] = []
        for number, when in enumerate(rounds):
            scene.step(f"{self.kind} of {item}", number, len(rounds))
            now = [message for message in messages if message.when[0] == when]
            task = now[0].exchange.task
            vectors = shadow.vectors(task, item, range(ends[3]))
            known = Likelihood(vectors[: ends[1]], public.domains, public.labels)
            x, targets = vectors[ends[1] :], others + members
            for message in now:
                rows = shadow.rows(message)
                if rows is not None:
                    form = form or rows
                    place = names.index(message.client)
                    scores[place] += known.ratios(rows, message.exchange.images, x, targets)
                    seen[place] += 1
            if number == 0:
                assert form is not None  # noqa: S101 - one message at least was read
                found = planted(known, form, x[: len(others)], others, scene.draw("planted", item))
        scores /= seen.clamp(min=1)
        rest, member_scores = scores[:, : len(others)], scores[:, len(others) :]

        def groups(shift: int) -> list[np.ndarray]:
            """Return percentiles of each client's members in the message ``shift`` clients on."""
            each = []
            for place, name in enumerate(names):
                at, of = (place + shift) % len(names), holders == name
                theirs = member_scores[at, torch.from_numpy(of)]
                each.append(percentiles(theirs, members.domains[of], rest[at], others.domains))
            return [group for group in each if len(group)]

        shares = groups(0)
        shift = int(scene.draw("no leak", item).integers(1, max(2, len(names))))
        figures = {"auc": interval(shares, scene.draw("bootstrap", item))}
        if min(np.unique(others.domains, return_counts=True)[1]) >= 100:  # else 1 % is no image
            hits = [(group >= 0.99).astype(float) for group in shares]
            figures["tpr_at_1_fpr"] = interval(hits, scene.draw("bootstrap", item))
        wrong = interval(groups(shift), scene.draw("bootstrap", item))
        found_share = interval(found, scene.draw("bootstrap", item))
        return AttackResult(
            item=item,
            up=True,
            call=call,
            times=len(rounds),
            messages=len(names),
            targets=len(members),
            bytes=nbytes(messages[0].value),
            no_leak=no_leak(wrong, 0.5),
            planted_leak=planted_leak(found_share, FOUND),
            figures=figures,
        ).withheld()

    def _received(self, scene: Scene) -> Iterator[AttackResult]:
        """Attack each item that a client receives: does any other client hold the target?"""
        public, others = scene.part("id_val", MOST_PUBLIC), scene.part("id_test", MOST_OTHERS)
        names = [name for name in scene.federation.clients if name != scene.own]
        holders, index = held_by(scene, names)
        members = scene.pictures(index)
        shadow = Shadow(scene.settings, scene.federation, public + others + members)
        own = [e for e in scene.exchanges if e.task.client == scene.own]
        read = list(read_received(scene.messages(), own, shadow))
        if not read:
            raise self.nothing(scene, "what others send, or a mean of it")
        targets, most = others + members, len(others) + len(members)
        for item in dict.fromkeys(message.item for message in read):
            chosen = [message for message in read if message.item == item][:MOST_ROUNDS]
            scores = torch.zeros(most, dtype=torch.float64)
            for number, message in enumerate(chosen):
                scene.step(f"{self.kind} of {item}", number, len(chosen))
                of = message.sent_as
                vectors = shadow.vectors(message.task, of, range(len(public) + most))
                known = Likelihood(vectors[: len(public)], public.domains, public.labels)
                x = vectors[len(public) :]
                each = [known.ratios(rows, message.images, x, targets) for rows in message.rows]
                scores += torch.stack(each).max(0).values / len(chosen)
            rest, member_scores = scores[: len(others)], scores[len(others) :]
            shares = percentiles(member_scores, members.domains, rest, others.domains)
            form, some = message.rows[0], x[: len(others)]
            wrong = absent(known, message.rows, x, (others, members), scene.draw("no leak", item))
            planted_shares = planted(known, form, some, others, scene.draw("planted", item))
            draw = scene.draw("bootstrap", item)
            yield AttackResult(
                item=item,
                up=False,
                call=message.task.call,
                times=len(chosen),
                messages=1,
                targets=len(members),
                bytes=chosen[0].bytes,
                no_leak=no_leak(interval([wrong[holders == n] for n in names], draw), 0.5),
                planted_leak=planted_leak(interval(planted_shares, draw), FOUND),
                figures={"auc": interval([shares[holders == n] for n in names], draw)},
            ).withheld()


def few_clients(names: Iterable[str], draw: np.random.Generator) -> list[str]:
    """Return at most `MOST_CLIENTS` names, drawn and sorted."""
    known = sorted(names)
    if len(known) <= MOST_CLIENTS:
        return known
    return sorted(draw.choice(known, MOST_CLIENTS, replace=False))


def hold(form: Rows, x: Tensor, who: Pictures) -> Rows:
    """Return what a client with these images would send: rows or means of their vectors.

    ``form`` is a real message of the same form; ``x`` are the images' vectors [n, P].
    """
    if not form.each:
        return replace(form, vectors=x.mean(0, keepdim=True))
    if form.keys is None:
        return replace(form, vectors=x)
    keys = np.unique(who.labels)
    means = torch.stack([x[torch.from_numpy(who.labels == key)].mean(0) for key in keys])
    return replace(form, vectors=means, keys=torch.from_numpy(keys))


def absent(
    known: Likelihood,
    forms: Sequence[Rows],
    x: Tensor,
    sets: tuple[Pictures, Pictures],
    draw: np.random.Generator,
) -> np.ndarray:
    """Return the percentiles of members [n] in messages made from half of the non-members.

    No member can be in such a message. Members are compared with the other half of the non-members.

    Args:
        known: The attacker.
        forms: Real messages, of the same number and form.
        x: Vectors of the non-members and the members, [m + n, P].
        sets: Non-members [m] and members [n].
        draw: Chooses the half.
    """
    others, members = sets
    held, free = np.array_split(draw.permutation(len(others)), 2)
    parts = np.array_split(held, min(len(forms), len(held)))
    each = [
        known.ratios(hold(forms[0], x[of], others[of]), len(of), x, others + members)
        for of in parts
    ]
    scores = torch.stack(each).max(0).values
    return percentiles(
        scores[len(others) :], members.domains, scores[torch.from_numpy(free)], others.domains[free]
    )


def planted(
    known: Likelihood, form: Rows, x: Tensor, targets: Pictures, draw: np.random.Generator
) -> list[np.ndarray]:
    """Return the percentiles of images, each in a message that holds only its own statistic.

    ``form`` is a real message, ``x`` the vectors of the targets [n, P].
    """
    shares = []
    for place in draw.permutation(len(targets))[:MOST_PLANTED].tolist():
        scores = known.ratios(hold(form, x[[place]], targets[[place]]), 1, x, targets)
        rest = np.arange(len(targets)) != place
        own_domain, other_domains = targets.domains[[place]], targets.domains[rest]
        shares.append(percentiles(scores[[place]], own_domain, scores[rest], other_domains))
    return shares


def held_by(scene: Scene, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the holders and data set indices of a random sample of the clients' images."""
    clients = scene.federation.clients
    most = max(1, MOST_MEMBERS // max(1, len(names)))
    draw = scene.draw("members")
    parts = {name: np.sort(draw.permutation(clients[name])[:most]) for name in names}
    holders = np.concatenate([np.full(len(part), name) for name, part in parts.items()])
    return holders, np.concatenate(list(parts.values()))
