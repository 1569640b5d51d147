"""The protection of a run's replies, and its guarantee."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import PrivacySettings, RunSettings
from feddg_bench.config.settle import own_settings
from feddg_bench.core.messages import Payload, Reply, Task, content
from feddg_bench.core.server import Protection, Server
from feddg_bench.protection.accounting import epsilon
from feddg_bench.protection.possible import covered
from feddg_bench.protection.sums import HiddenReplies
from feddg_bench.protection.vectors import clipped, from_vector, gaussian, to_vector
from feddg_bench.records.record import PrivacyRecord, RunRecord

if TYPE_CHECKING:
    from feddg_bench.core.method import Method

logger = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Largest difference between two computations of an epsilon, as by two versions of Opacus."""


def open_protection(settings: RunSettings, method: Method, clients: int) -> Protection | None:
    """Return the protection between replies and the server half; ``None`` if there is none."""
    privacy = settings.privacy
    if privacy.mechanism == "dp_style":
        return SentOnce(settings.method)
    if privacy.mechanism == "dp_client" or privacy.aggregation == "secure":
        return HiddenReplies(privacy, method, settings.federation.per_round or clients)
    return None


def guarantee(settings: RunSettings, method: type[Method], clients: int) -> PrivacyRecord | None:
    """Return the record of a run's protection; ``None`` if there is none.

    ``clients`` is N, the number of clients that hold images.

    Raises:
        SettingsError: If epsilon is infinite or not positive, or Opacus is not installed.
    """
    try:
        return _guarantee(settings, method, clients)
    except ArithmeticError as error:  # too little noise: its square is 0, a divergence overflows
        raise _nothing(settings.privacy, math.inf) from error


def _nothing(p: PrivacySettings, spent: float) -> SettingsError:
    return SettingsError(
        f"privacy.noise_multiplier={p.noise_multiplier:g} with privacy.delta={p.delta:g} gives an "
        f"epsilon of {spent:g}, which guarantees nothing: change the noise, or lower delta"
    )


def _guarantee(settings: RunSettings, method: type[Method], clients: int) -> PrivacyRecord | None:
    p = settings.privacy
    record = PrivacyRecord(mechanism=p.mechanism, aggregation=p.aggregation)
    if p.mechanism == "none":
        return record if p.aggregation == "secure" else None
    if p.mechanism == "dp_style":
        sent = covered(method.sends(own_settings(method.Settings, settings)))
        whose = "an image" if any(s.of_images for s in sent) else "a client"
        names = " and ".join(s.name for s in sent)
        # Noised at the client, an item can change from any value to any other: by two clip norms.
        spent = epsilon(p.noise_multiplier / 2, 1, len(sent), p.delta, accountant=p.accountant)
        record.protects = f"{whose}, replaced by another, in what is sent once ({names})"
        record.accountant = p.accountant
    else:
        rate = min(settings.federation.per_round or clients, clients) / clients
        fixed = p.sampling == "fixed"
        spent = epsilon(
            p.noise_multiplier,
            rate,
            settings.federation.rounds,
            p.delta,
            sampling=p.sampling,
            accountant=p.accountant,
        )
        record.protects = "a client, replaced by another" if fixed else "a client, there or not"
        record.accountant = "rdp" if fixed else p.accountant
        record.sampling = p.sampling
    if p.delta >= 1 / clients:
        logger.warning(
            "privacy.delta=%g is not below 1 over %d clients: it allows to tell everything of one",
            p.delta,
            clients,
        )
    if not 0 < spent < math.inf:
        raise _nothing(p, spent)
    record.epsilon, record.delta = spent, p.delta
    return record


def doubt(record: RunRecord, method: type[Method]) -> str:
    """Return what is wrong with a record's guarantee, computed again; "" if nothing is.

    An epsilon of Rényi divergences must be equal within 0.001, one of ``prv`` at most as large.

    Raises:
        SettingsError: If the settings cannot be read by this version, or Opacus is not installed.
    """
    privacy = record.privacy
    if privacy is None or privacy.epsilon is None:
        return ""
    settings = validate(RunSettings, _named(record.settings))
    rdp = settings.privacy.model_copy(update={"accountant": "rdp"})
    settings = settings.model_copy(update={"privacy": rdp})
    again = guarantee(settings, method, record.partition.clients)
    if again is None or again.epsilon is None or again.protects != privacy.protects:
        return f"it protects {again and again.protects}, and not {privacy.protects}"
    more, tight = privacy.epsilon - again.epsilon, privacy.accountant == "prv"
    if more > TOLERANCE or (not tight and more < -TOLERANCE):
        least = "at most " if tight else ""
        return f"epsilon is {privacy.epsilon:g}, and {least}{again.epsilon:g} by its settings"
    return ""


def _named(value: Any) -> Any:
    """Return a record's settings with the digest of each file in place of its path."""
    if isinstance(value, dict):
        return value["sha256"] if "sha256" in value else {k: _named(v) for k, v in value.items()}
    return [_named(inner) for inner in value] if isinstance(value, list) else value


# ---------------------------------------------------------------------------- what is sent once


class SentOnce:
    """Passes on replies that ``dp_style`` covers; clients have added the noise.

    Args:
        name: The method's name.
    """

    poisson = False

    def __init__(self, name: str) -> None:
        self.name = name

    def applied(
        self, server: Server, call: str, clients: Sequence[str], replies: Iterator[Reply[Any]]
    ) -> Iterator[Reply[Any]]:
        """Yield the replies.

        Raises:
            SettingsError: If content that was sent before round 1 is sent again.
        """
        for reply in replies:
            if server.round and "weights" not in content(reply.value):
                raise SettingsError(
                    f"privacy.mechanism=dp_style covers what is sent once, before round 1, and "
                    f"{self.name} is set to ask for {call} in each round"
                )
            yield reply
            del reply


def noised(value: Any, task: Task, method: Method, settings: PrivacySettings, seed: int) -> Any:
    """Return what a client sends: with ``dp_style`` clipped and noised, unless it holds weights.

    A tensor is one vector; if its rows belong to individual images, each row is one. Standard
    deviations that noise made negative are set to 0, which reveals nothing more.
    """
    if settings.mechanism != "dp_style" or "weights" in content(value):
        return value
    sent = {s.name: s for s in covered(method.sends(method.settings)) if s.call == task.call}
    result: Payload = {}
    for name, tensor in value.items():
        parts = list(tensor) if sent[name].of_images else [tensor]
        scale = settings.noise_multiplier * settings.clip_norm
        names = (task.call, name, task.round, task.client)
        draws = gaussian(tensor.numel(), scale, seed, *names)
        short = [clipped(to_vector(part), settings.clip_norm)[0] for part in parts]
        noisy = from_vector(np.concatenate([np.zeros(0), *short]) + draws, tensor)
        if sent[name].of_deviations:
            noisy[..., 1, :].clamp_(min=0)
        result[name] = noisy
    return result
