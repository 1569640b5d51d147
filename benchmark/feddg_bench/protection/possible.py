"""Protections that a method supports, according to what its class declares."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from feddg_bench.core.method import Method
    from feddg_bench.core.server import Uplink

_SERVER_HALF = ("prepare", "run_round", "aggregate")
_TENSOR = re.compile(r"float\d+ \[")


class Sent(NamedTuple):
    """One entry of a method's `uplink`."""

    call: str
    name: str
    form: str  # "" if it has no single form

    @property
    def of_images(self) -> bool:
        """Whether its rows belong to individual images; their number depends on the client."""
        return bool(re.search(r"\[[a-z]\b", self.form))

    @property
    def of_deviations(self) -> bool:
        """Whether the second half of it, or of its rows, holds standard deviations."""
        return bool(re.search(r"\b2, \w+\]$", self.form))


def obstacles(method: type[Method]) -> dict[str, str]:
    """Return why a method cannot use ``secure``, ``dp_client`` or ``dp_style``; "" if it can."""
    return {
        "secure": _no_sums(method),
        "dp_client": _not_weights_alone(method) or _no_sums(method),
        "dp_style": _nothing_sent_once(method),
    }


def sent_by(uplink: Uplink) -> Iterator[Sent]:
    """Yield the entries of a method's `uplink`."""
    for call, declared in uplink.items():
        for name in declared:
            form = declared[name] if isinstance(declared, Mapping) else ""
            yield Sent(call, name, form if isinstance(form, str) else "")


def covered(uplink: Uplink) -> list[Sent]:
    """Return the entries that ``dp_style`` covers: tensors of calls that send no weights."""
    trained = {sent.call for sent in sent_by(uplink) if sent.name == "weights"}
    return [s for s in sent_by(uplink) if s.call not in trained and _TENSOR.match(s.form)]


def _no_sums(method: type[Method]) -> str:
    """Return why a server half needs single replies; "" if sums are enough for it."""
    for kind in own_classes(method):
        if "singles" in vars(kind):
            break
        own = [name for name in _SERVER_HALF if name in vars(kind)]
        if own:
            return (
                f"its own {' and '.join(own)} may look at single updates, since it does not say in "
                f"`singles` that sums are enough"
            )
    return method.singles and f"its server half {method.singles}"


def _not_weights_alone(method: type[Method]) -> str:
    """Return why the mean of the weights is not enough for a server half; "" if it is."""
    others = [sent.name for sent in sent_by(method.uplink) if sent.name != "weights"]
    if others:
        return f"it covers the weights alone, and clients also send {', '.join(others)}"
    if any("tally" in vars(kind) for kind in own_classes(method)):
        return "it covers the weights alone, and the server half also needs a tally of updates"
    return ""


def _nothing_sent_once(method: type[Method]) -> str:
    """Return why ``dp_style`` does not cover all but the weights; "" if it does."""
    noised = covered(method.uplink)
    others = [s.name for s in sent_by(method.uplink) if s.name != "weights" and s not in noised]
    if others:
        return (
            f"it covers tensors that are sent once, before round 1, and clients also send "
            f"{', '.join(others)}"
        )
    if not noised:
        return "clients send nothing besides their weights, which it does not cover"
    if not any("prepare" in vars(kind) for kind in own_classes(method)):
        names = ", ".join(sent.name for sent in noised)
        return f"it covers what is sent once, before round 1, and clients send {names} each round"
    return ""


def own_classes(method: type[Method]) -> list[type]:
    """Return a method's class and its bases, without those that all methods share."""
    base = next(kind for kind in method.__mro__ if kind.__module__ == "feddg_bench.core.method")
    return [kind for kind in method.__mro__ if kind not in base.__mro__]
