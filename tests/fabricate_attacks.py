"""Attack records with made-up figures."""

from __future__ import annotations

from typing import Any

from feddg_attacks.records import AttackRecord, AttackResult, Control, Interval


def interval(value: float, reach: float = 0.1) -> Interval:
    return Interval(value=value, low=value - reach, high=value + reach)


def control(value: float = 0.5, *, holds: bool = True) -> Control:
    return Control(measured=interval(value), expected=f"about {value:g}", holds=holds)


def result(figures: dict[str, Interval], **changes: Any) -> AttackResult:
    """Return the result of an attack on PARDON's styles; ``changes`` replace other fields."""
    values: dict[str, Any] = {
        "item": "style",
        "up": True,
        "call": "local_style",
        "times": 1,
        "messages": 3,
        "targets": 30,
        "bytes": 24,
        "no_leak": control(),
        "planted_leak": control(1),
        "figures": figures,
    }
    return AttackResult(**(values | changes))


def attack(*results: AttackResult, **changes: Any) -> AttackRecord:
    """Return a record of membership inference by the server from PARDON's messages on Digits4."""
    values: dict[str, Any] = {
        "key": "0" * 16,
        "kind": "membership",
        "version": 1,
        "attacker": "server",
        "run_key": "1" * 16,
        "method": "pardon",
        "dataset": "digits4",
        "protocol": "ltdo",
        "scenario": "ip-o-c",
        "seed": 0,
        "recipe": "quick",
        "labels": {},
        "settings": {},
        "clients": 3,
        "images": 10,
        "public": 40,
        "rounds": 1,
        "measured": {},
        "seconds": 1.0,
        "results": list(results),
    }
    return AttackRecord(**(values | changes))
