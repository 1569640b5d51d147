"""A small federation with images that no client has, and runs whose messages are kept."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from feddg_attacks.attack import Scene
from feddg_attacks.capture import Capture
from feddg_attacks.perform import looked_at
from feddg_bench.data.federated import Federation
from feddg_bench.testing.toy import ToyRun, start_toy_run

CLIENTS, EACH = 8, 6


def attacked_federation(many: int = CLIENTS, each: int = EACH, public: int = 60) -> Federation:
    """Return clients with images of two domains, and as many public as withheld images."""
    rng = np.random.default_rng(5)
    count = many * each + 2 * public
    domains = np.arange(count) % 2
    labels = np.arange(count) // 2 % 3
    level = rng.uniform(20, 200, (count, 1, 1, 3)) * (0.6 + 0.4 * domains[:, None, None, None])
    grain = rng.uniform(5, 50, (count, 1, 1, 3))
    images = level + grain * rng.standard_normal((count, 16, 16, 3))
    images[np.arange(count), :, 5 * labels] += 30
    held, rest = np.arange(many * each), np.arange(many * each, count)
    clients = {f"client_{i}": part for i, part in enumerate(np.split(held, many))}
    parts = {"id_val": rest[:public], "id_test": rest[public:]}
    evaluation = tuple(
        (split, name, index[domains[index] == place])
        for split, index in parts.items()
        for place, name in enumerate(("dark", "bright"))
    )
    return Federation(
        images.clip(0, 255).astype(np.uint8),
        16,
        labels.astype(np.int64),
        clients,
        evaluation,
        3,
        sources=("dark", "bright"),
        domain_ids=domains,
    )


def sorted_federation(**sizes: int) -> Federation:
    """Return the same federation with few classes and domains per client."""
    whole = attacked_federation(**sizes)
    held = np.concatenate(list(whole.clients.values()))
    order = held[np.lexsort((whole.domain_ids[held], whole.labels[held]))]
    parts = np.split(order, len(whole.clients))
    return replace(whole, clients=dict(zip(whole.clients, parts, strict=True)))


def captured(
    method: str,
    *layers: Mapping[str, Any],
    rounds: int = 1,
    federation: Federation | None = None,
    limited: bool = False,
) -> tuple[ToyRun, Capture]:
    """Return a run of some rounds with all clients, and its captured messages."""
    whole = {"partition": {"clients": CLIENTS}, "federation": {"per_round": None}}
    toy = start_toy_run(method, whole, *layers, federation=federation or attacked_federation())
    capture = Capture(looked_at(toy.settings, toy.federation)) if limited else Capture()
    toy.executor.on_reply = lambda task, reply: capture.replied(toy, task, reply)  # type: ignore[arg-type]
    toy.rounds(rounds)
    return toy, capture


def scene_of(method: str, *layers: Mapping[str, Any], **how: Any) -> Scene:
    """Return the scene of such a run; ``how`` has the attacker and the arguments of `captured`."""
    own = {name: how.pop(name) for name in ("rounds", "federation", "limited") if name in how}
    toy, capture = captured(method, *layers, **own)
    return Scene(toy.settings, toy.federation, capture.exchanges, **how)
