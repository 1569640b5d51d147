"""Clients that send forbidden values: nothing may change silently."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from feddg_bench.core.messages import LocalUpdate
from feddg_bench.core.method import Method
from feddg_bench.plugins import load_method
from feddg_bench.testing import start_toy_run
from tests.attacks.lab import Lab, call
from tests.helpers import ALL, PLAIN, no_file

OTHERS = ("scaffold", "feddg_ga", "fediir", "ccst", "pardon", "fedccrl", "fpl", "copa")
CULPRIT, ROUND = "client_1", 1
QUICK = {**ALL, **PLAIN, "train": {"batch_size": 16}}
"""Each client takes one step; an effect of its first message shows in the second round."""

Change = Callable[[Any], Any]


def weights(change: Change) -> Change:
    """Return a change of a `LocalUpdate`'s weights."""
    return lambda update: LocalUpdate(change(dict(update.weights)), update.extra)


def first(change: Change) -> Change:
    """Return a change of the first weight only."""

    def changed(state: dict[str, Any]) -> dict[str, Any]:
        name = next(iter(state))
        return {**state, name: change(state[name])}

    return weights(changed)


UPDATES: dict[str, Change] = {
    "a weight of shape (1,)": first(lambda t: t.flatten()[:1]),
    "a weight of shape (3, 5)": first(lambda _: torch.zeros(3, 5)),
    "a weight of shape ()": first(lambda _: torch.tensor(0.5)),
    "a transposed weight": first(lambda t: t.transpose(0, 1).contiguous()),
    "a weight of 40 million numbers": first(lambda _: torch.zeros(40_000_000)),
    "an empty weight": first(lambda _: torch.zeros(0)),
    "an extra weight": weights(lambda s: {**s, "evil": torch.zeros(3)}),
    "a missing weight": weights(lambda s: dict(list(s.items())[1:])),
    "weights in another order": weights(lambda s: dict(reversed(s.items()))),
    "no weights": weights(lambda _: {}),
    "a string for the weights": weights(lambda _: "weights"),
    "None for the weights": weights(lambda _: None),
    "a list for the weights": weights(lambda s: list(s.values())),
    "a number for a weight": first(lambda _: 1.0),
    "a key that is no text": weights(lambda s: {**s, 5: torch.zeros(1)}),
    "float16": first(torch.Tensor.half),
    "bfloat16": first(torch.Tensor.bfloat16),
    "float64": first(torch.Tensor.double),
    "int64": first(torch.Tensor.long),
    "bool": first(torch.Tensor.bool),
    "complex64": first(lambda t: t.to(torch.complex64)),
    "NaN in complex64": first(lambda t: t.to(torch.complex64) * complex(0, math.nan)),
    "a sparse weight": first(lambda t: t.to_sparse()),
    "a weight on the meta device": first(lambda t: t.to("meta")),
    "NaN in one number": first(lambda t: t.index_fill(0, torch.tensor([0]), math.nan)),
    "infinity in one number": first(lambda t: t.index_fill(0, torch.tensor([0]), math.inf)),
    "finite 3e38": first(lambda t: torch.full_like(t, 3e38)),
    "finite -3e38": first(lambda t: torch.full_like(t, -3e38)),
    "an update of None": lambda _: None,
    "a string": lambda _: "update",
    "a bare tensor": lambda _: torch.zeros(3),
    "something undeclared": lambda update: LocalUpdate(update.weights, {"evil": 1.0}),
    "extras that are no mapping": lambda update: LocalUpdate(update.weights, [1]),  # type: ignore[arg-type]
}
LEAVES: dict[str, Change] = {
    "of another shape": lambda _: torch.zeros(3, 5, 7),
    "of shape (1,)": lambda t: t.flatten()[:1].clone() if t.shape != (1,) else torch.zeros(2),
    "complex": lambda t: t.to(torch.complex64),
    "half": lambda t: t.half(),
    "NaN": lambda t: (
        torch.full_like(t.double(), math.nan).to(t.dtype)
        if t.is_floating_point()
        else t.double() * math.nan
    ),
    "a string": lambda _: "evil",
    "None": lambda _: None,
    "a list": lambda _: [1, 2, 3],
}
NUMBERS: dict[str, Change] = {
    "NaN": lambda _: math.nan,
    "infinity": lambda _: math.inf,
    "10**400": lambda _: 10**400,
    "a string": lambda _: "evil",
    "a list": lambda _: [],
    "a tensor": lambda _: torch.zeros(3),
}


def faulty(method: type[Method], calls: dict[str, Change], when: int = ROUND) -> type[Method]:
    """Return a method with one client that answers differently in one round."""

    def wrapped(name: str, change: Change) -> Callable[..., Any]:
        def answer(self: Any, client: Any) -> Any:
            value = getattr(super(type(self), self), name)(client)
            culprit = client.name == CULPRIT and client.round == when
            return change(value) if culprit else value

        answer.__name__ = name
        return answer

    made = {name: wrapped(name, change) for name, change in calls.items()}
    return type(method.__name__, (method,), made)


def outcome(plugin: type[Method], *layers: Any) -> tuple[str, Any]:
    """Return the end of a run of two rounds, and its weights."""

    def train() -> Any:
        run = start_toy_run(plugin, QUICK, *layers)
        results = run.rounds(2)
        dropped = [d for r in results for d in r.ledger.dropped]
        skipped = [r.round for r in results if r.skipped]
        return run.server.weights, dropped, skipped

    made, failed = call(train)
    if failed:
        return failed, None
    state, dropped, skipped = made
    said = "".join(f"dropped {fault(d)}; " for d in dropped)
    return said + (f"skipped rounds {skipped}" if skipped else ""), state


def fault(dropped: Any) -> str:
    """Return the name of a dropped client."""
    return str(dropped["client"] if isinstance(dropped, dict) else dropped.client)


def judge(
    lab: Lab, attack: str, plugin: type[Method], clean: Any, *layers: Any, said_only: bool = False
) -> None:
    """Run with a fault and add the outcome: it must be reported, or change nothing."""
    said, state = outcome(plugin, *layers)
    if state is None:
        lab.add(attack, said, said.startswith("refused") and CULPRIT in said)
        return
    finite = all(bool(torch.isfinite(t).all()) for t in state.values() if t.is_floating_point())
    same = set(state) == set(clean) and all(torch.equal(state[n], clean[n]) for n in clean)
    if not finite:
        lab.add(attack, f"the model is not finite; {said}", False)
    elif said:
        lab.add(attack, said, CULPRIT in said or "skipped" in said)
    else:
        lab.add(
            attack,
            "nothing said, no change" if same else "a silent change of the model",
            same and not said_only,
        )


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield tensors and numbers of a payload, with their paths."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, (*at, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value[:1]):
            yield from paths(inner, (*at, number))
    elif isinstance(value, torch.Tensor | int | float) and not isinstance(value, bool):
        yield at, value


def put(value: Any, at: tuple[Any, ...], change: Change) -> Any:
    """Return a copy of a payload with one leaf changed."""
    if not at:
        return change(value)
    key, *rest = at
    copy = list(value) if isinstance(value, list) else dict(value)
    copy[key] = put(copy[key], tuple(rest), change)
    return copy


def extras(name: str) -> list[tuple[str, int, tuple[Any, ...], Any]]:
    """Return what a method's clients send besides weights: call, round, path and value."""
    seen: dict[tuple[str, tuple[Any, ...]], tuple[int, Any]] = {}

    def look(call_: str) -> Change:
        return lambda value: note(call_, value)

    plugin = load_method(name)

    def note(call_: str, value: Any) -> Any:
        sent = value.extra if isinstance(value, LocalUpdate) else value
        for at, leaf in paths(sent):
            seen.setdefault((call_, at), (when, leaf))
        return value

    for when in (0, ROUND):
        spy = faulty(plugin, {c: look(c) for c in plugin.uplink}, when)
        start_toy_run(spy, QUICK, no_file(name)).rounds(ROUND)
    tried = set()
    listed = []
    for (call_, at), (when, leaf) in seen.items():
        if (call_, type(leaf)) not in tried:  # a call's next tensor is checked in the same way
            tried.add((call_, type(leaf)))
            listed.append((call_, when, at, leaf))
    return listed


def attack(lab: Lab, methods: tuple[str, ...] = OTHERS) -> None:
    """Let a client of FedAvg and of other methods send forbidden values."""
    fedavg = load_method("fedavg")
    _, clean = outcome(fedavg)
    for name, change in UPDATES.items():
        title, legal = f"a client sends {name}", name == "weights in another order"
        judge(lab, title, faulty(fedavg, {"fit": change}), clean, said_only=not legal)
    for name in methods:
        plugin = load_method(name)
        _, clean = outcome(plugin, no_file(name))
        for call_, when, at, leaf in extras(name):
            changes = LEAVES if isinstance(leaf, torch.Tensor) else NUMBERS
            for kind, change in changes.items():

                def sent(value: Any, at: Any = at, change: Change = change) -> Any:
                    if isinstance(value, LocalUpdate):
                        return LocalUpdate(value.weights, put(value.extra, at, change))
                    return put(value, at, change)

                way = ".".join(map(str, at))
                title = f"{name}: {call_} sends {kind} as {way}"
                judge(lab, title, faulty(plugin, {call_: sent}, when), clean, no_file(name))
    in_place(lab, fedavg)


def in_place(lab: Lab, fedavg: type[Method]) -> None:
    """A client owns what it receives; its exceptions name it."""
    _, clean = outcome(fedavg)

    class Writes(fedavg):  # type: ignore[valid-type, misc]
        def fit(self, client: Any) -> LocalUpdate:
            update = super().fit(client)
            if client.name == CULPRIT:
                for tensor in client.weights.values():
                    tensor.mul_(2)
            return update

    class Raises(fedavg):  # type: ignore[valid-type, misc]
        def fit(self, client: Any) -> LocalUpdate:
            if client.name == CULPRIT and client.round == ROUND:
                raise ZeroDivisionError("no luck")
            return super().fit(client)

    judge(lab, "a client writes into the weights it got", Writes, clean)
    judge(lab, "a client raises", Raises, clean)
