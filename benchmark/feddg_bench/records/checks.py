"""Consistency checks of a record with itself and its settings: pure functions of its content.

Each returns the first contradiction as part of a sentence, or an empty string.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Final

from feddg_bench.config.keys import run_key
from feddg_bench.config.schema import EvaluationSettings, FederationSettings, PrivacySettings
from feddg_bench.records.metrics import CLIENT_SPLITS, WHOLE

Evaluation = Mapping[str, Mapping[str, Mapping[str, Any]]]  # see `records.record`
_DEFAULTS: Final = {
    "federation": FederationSettings(),
    "evaluation": EvaluationSettings(),
    "privacy": PrivacySettings(),
}


def is_evaluated(number: int, *, rounds: int, every: int, start: int) -> bool:
    """Return whether a round of a run is evaluated: every n-th from ``start`` on, and the last.

    >>> [n for n in range(1, 9) if is_evaluated(n, rounds=8, every=3, start=4)]
    [6, 8]
    """
    return number == rounds or (number >= start and number % every == 0)


@lru_cache(maxsize=100)
def _evaluated(made: int, **timing: int) -> list[int]:
    """Return the numbers of the evaluated rounds among the first ``made``."""
    first = 1 if timing["rounds"] else 0
    return [n for n in range(first, first + made) if is_evaluated(n, **timing)]


def fault_of_names(settings: Mapping[str, Any], names: Mapping[str, Any]) -> str:
    """Return the first name that contradicts a record's settings, as part of a sentence."""
    for name, value in names.items():
        if (own := settings.get(name)) != value:
            return f"{name} is {value!r}, but {own!r} in its settings"
    return ""


def fault_of_key(settings: Mapping[str, Any], version: int, key: str) -> str:
    """Return the fault of a key, or of the digests of files in settings."""
    for digest in _digests(settings):
        if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            return f"settings: {digest!r} is no SHA-256"
    true = run_key(dict(settings), version)
    return "" if key == true else f"its settings are those of the run {true}, not of {key}"


def _digests(value: Mapping[str, Any] | Sequence[Any]) -> Iterator[Any]:
    """Yield the digests that stand for files in settings."""
    if len(value) == 1 and "sha256" in value and isinstance(value, dict):
        yield value["sha256"]
    else:
        for inner in value.values() if isinstance(value, dict) else value:
            if isinstance(inner, dict | list):
                yield from _digests(inner)


def fault_of_rounds(settings: Mapping[str, Any], numbers: Sequence[int], *, finished: bool) -> str:
    """Return the fault of a record's round numbers, which must be 1 to N, or 0 without training.

    A record that is not ``finished`` can lack the last ones.
    """
    for name, least in (
        ("federation.rounds", 0),
        ("evaluation.every", 1),
        ("evaluation.start", 1),
    ):
        if type(value := setting(settings, name)) is not int or value < least:
            return f"{name} is {value!r} in its settings, not a count"
    asked = setting(settings, "federation.rounds")
    if asked == 0 and numbers == [0]:
        return ""
    if numbers != list(range(1, len(numbers) + 1)):
        return "rounds: they do not follow one another from 1"
    if len(numbers) > asked or (finished and len(numbers) < asked):
        return f"rounds: there are {len(numbers)}, but {asked} in its settings"
    return ""


def fault_of_evaluations(
    settings: Mapping[str, Any],
    roles: Mapping[str, Collection[str]],
    images: Mapping[str, Mapping[str, int]],
    evaluated: Sequence[tuple[int, Evaluation]],
    main: str,
    *,
    made: int,
    alike: bool,
) -> str:
    """Return the fault of a record's evaluations, by round.

    Args:
        settings: Settings of the record, which must pass `fault_of_rounds`.
        roles: The domains of ``train``, ``test`` and, if there is one, ``val``.
        images: Split -> domain -> number of images; the domains must be those of the roles.
        evaluated: Numbers of the evaluated rounds, and their evaluations; these must be all that
            the settings require, on all images.
        main: Main metric of the task, which every part has.
        made: Number of rounds.
        alike: Whether all rounds have the same metrics, on the same numbers of images.
    """
    held = {s: {d: n for d, n in parts.items() if n} for s, parts in images.items()}
    splits, scenario = setting(settings, "evaluation.splits"), settings.get("scenario")
    for role in roles.keys() - {"train"}:
        if not held.get(role):
            return f"data.images: there is none for {role}, which scenario {scenario} has"
    for split, domains in held.items():
        if split in CLIENT_SPLITS:
            continue
        inside = {WHOLE, *roles.get(split, roles["train"])}
        # Under `wilds` a role can have many domains, of which the record has the number.
        if settings.get("protocol") != "wilds" and domains.keys() - inside:
            return f"data.images: {split} holds domains that it has not in {scenario}"
    if not isinstance(splits, list | tuple) or not all(isinstance(s, str) for s in splits):
        return f"evaluation.splits is {splits!r} in its settings, not a list of names"
    asked = [*(splits or [split for split in held if split != "train"]), *CLIENT_SPLITS]
    wanted = {split: parts for split, parts in held.items() if parts and split in asked}
    timing = {
        name: setting(settings, key)
        for name, key in (
            ("rounds", "federation.rounds"),
            ("every", "evaluation.every"),
            ("start", "evaluation.start"),
        )
    }
    held_rounds = [number for number, _ in evaluated]
    asked_rounds = _evaluated(made, **timing)
    if held_rounds != asked_rounds:
        number = min({*held_rounds} ^ {*asked_rounds})
        no = "an" if number in held_rounds else "no"
        return f"round {number}: it holds {no} evaluation, unlike its settings say"
    for number, evaluation in islice(evaluated, 1 if alike else None):
        for split, parts in evaluation.items():
            if lacking := [domain for domain in parts if main not in parts[domain]]:
                return f"round {number}: {main} on {split} of {lacking[0]} is not there"
        # The whole split is measured, too, if a metric is not a mean over domains.
        found = {
            split: {
                domain: measured["images"]
                for domain, measured in parts.items()
                if domain != WHOLE or domain in wanted.get(split, ())
            }
            for split, parts in evaluation.items()
        }
        if found != wanted:
            differ = sorted(s for s in {**found, **wanted} if found.get(s) != wanted.get(s))
            return f"round {number}: {differ[0]} is not measured on the images of its data"
    return ""


def fault_of_privacy(settings: Mapping[str, Any], found: Mapping[str, Any] | None) -> str:
    """Return the fault of a record's privacy entry, by the names of `PrivacyRecord`."""
    mechanism, aggregation, delta, sampling, accountant = (
        setting(settings, f"privacy.{name}")
        for name in ("mechanism", "aggregation", "delta", "sampling", "accountant")
    )
    private, clients = mechanism != "none", mechanism == "dp_client"
    fixed, asked = clients and sampling == "fixed", private or aggregation != "plain"
    if found is None or not asked:
        return "" if asked is (found is not None) else "privacy: it is not that of its settings"
    expected = {
        "mechanism": mechanism,
        "aggregation": aggregation,
        "delta": delta if private else None,
        "accountant": None if not private else "rdp" if fixed else accountant,
        "sampling": sampling if clients else None,
    }
    for name, value in expected.items():
        if found[name] != value:
            return f"privacy: {name} is {found[name]!r}, but {value!r} by its settings"
    if {found["epsilon"] is not None, found["protects"] is not None} != {private}:
        return "privacy: it must say whom an epsilon protects, and by how much, or neither"
    return ""


def fault_of_personal(found: Mapping[str, Mapping[str, Any]], main: str) -> str:
    """Return the fault of the measurements of personal models, which all need the main metric."""
    lacking = [client for client, measured in found.items() if main not in measured]
    return f"personal: {main} of {lacking[0]} is not there" if lacking else ""


def setting(settings: Mapping[str, Any], key: str) -> Any:
    """Return a setting of a record by dotted key; its default if the record lacks it."""
    section, _, name = key.partition(".")
    part = settings.get(section)
    default = getattr(_DEFAULTS[section], name)
    return part.get(name, default) if isinstance(part, dict) else default


def check_amount(value: float) -> float:
    """Return a time or an amount of memory, NaN if it was not measured.

    Raises:
        ValueError: If it is negative or infinite.
    """
    if not (math.isnan(value) or 0 <= value < 1e15):
        raise ValueError(f"{value:g} is negative or infinite")
    return value
