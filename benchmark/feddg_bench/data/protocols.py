"""Protocols: which domains train, validate and test.

Leave one domain out (LODO) tests on one domain and trains on the others. Leave two domains out
(LTDO; Nguyen et al., ICDCS 2025) holds out one more for model selection. A scenario is named by the
codes of its domains, such as ``ac-p-s``: trained on art and cartoon, validated on photo, tested on
sketch. Codes longer than a letter are joined by ``+``, as in ``15+30+45+60+75-0``. The protocol
``wilds`` uses the splits that a data set's authors published (Koh et al., ICML 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from feddg_bench.common.errors import SettingsError, unknown
from feddg_bench.config.reading import composed, known_name, listed, plain_name, read_names

PROTOCOLS: dict[str, tuple[str, ...]] = {"lodo": ("test",), "ltdo": ("val", "test"), "wilds": ()}
"""Name -> roles of the held-out domains, in the order in which a scenario's name gives them."""
TITLES = {
    "lodo": "leave one domain out",
    "ltdo": "leave two domains out",
    "wilds": "published splits",
}
"""Name of a protocol -> its name in titles and captions."""
OFFICIAL = "official"
"""Name of the only scenario of ``wilds``, if the authors published one set of splits."""
MOST_DOMAINS = 64
"""Maximum number of domains for LODO and LTDO; one per writer, for example, is too many."""


Official = Mapping[str, Sequence[str]] | Mapping[str, Mapping[str, Sequence[str]]]
"""Domains by role in the published splits; if there are several sets, such a mapping by name."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Domains by role."""

    name: str  # canonical name
    protocol: str  # a key of `PROTOCOLS`
    train: tuple[str, ...]  # domains that clients hold
    # Domain used only for model selection, if the protocol has one. Under `wilds`, val and test can
    # be several domains: their names joined by `+`, or their number.
    val: str | None
    test: str  # domain that no decision may use


def scenarios(
    protocol: str,
    domains: Sequence[str],
    letters: Mapping[str, str],
    select: str | None = None,
    official: Official | None = None,
    offered: Collection[str] = (),
) -> list[Scenario]:
    """Return the scenarios of a protocol on a data set.

    Args:
        protocol: A key of `PROTOCOLS`.
        domains: The data set's domains in cycle order: by default each domain is held out once;
            LTDO validates on a domain and tests on the next, the first following the last.
        letters: Short code of each domain; its order is the order of codes in a name.
        select: ``None`` for the default set, ``all`` for every choice of held-out domains, or names
            separated by commas. A name gives codes or domains: ``ac-p-s`` with the training codes
            in any order, ``art_painting+cartoon-photo-sketch``, or without the training part,
            ``photo-sketch``. A domain alone, by name in any case or by code, stands for the
            scenarios of the default set that test on it; if there are none, for all that do.
        official: Domains by role, ``train``, ``val`` and ``test``, in the published splits; if
            there are several sets, such a mapping by name; empty if there are none.
        offered: Names of scenarios to prefer to the default set for a domain alone.

    Raises:
        SettingsError: If the protocol or a scenario is unknown, or there are too few or too many
            domains, or no published splits.
    """
    if protocol not in PROTOCOLS:
        raise SettingsError(unknown("protocol", protocol, PROTOCOLS))
    if protocol == "wilds":
        return _official(official or {}, select, domains, letters)
    if len(domains) > MOST_DOMAINS:
        raise SettingsError(
            f"protocol {protocol} leaves out single domains but the data set has {len(domains)}: "
            f"use --protocol wilds"
        )
    held_out = len(PROTOCOLS[protocol])
    if len(domains) <= held_out:
        raise SettingsError(
            f"protocol {protocol} needs at least {held_out + 1} domains but the data set has "
            f"{len(domains)}: {', '.join(domains)}"
        )
    cycle = [*domains, *domains]
    default = [tuple(cycle[i : i + held_out]) for i in range(len(domains))]
    usual = [_scenario(protocol, held, letters) for held in default]
    if select is None:
        return usual
    known = [_scenario(protocol, held, letters) for held in permutations(domains, held_out)]
    if select == "all":
        return known
    sets = [[one for one in known if one.name in offered], usual, known]
    return list(dict.fromkeys(s for name in listed(select) for s in _find(name, sets, letters)))


def _scenario(protocol: str, held: tuple[str, ...], letters: Mapping[str, str]) -> Scenario:
    train = tuple(domain for domain in letters if domain not in held)
    roles = dict(zip(PROTOCOLS[protocol], held, strict=True))
    between = "+" if any(len(code) > 1 for code in letters.values()) else ""
    name = "-".join([between.join(letters[d] for d in train), *(letters[d] for d in held)])
    return Scenario(name, protocol, train, roles.get("val"), roles["test"])


def _official(
    official: Official, select: str | None, domains: Sequence[str], letters: Mapping[str, str]
) -> list[Scenario]:
    tested: dict[str, list[str]] = {}
    known: dict[str, Scenario] = {}
    sets = {name: roles for name, roles in official.items() if isinstance(roles, Mapping)}
    one = {role: held for role, held in official.items() if not isinstance(held, Mapping)}
    for name, roles in (sets or {OFFICIAL: one}).items():
        if roles.get("train") and roles.get("test"):
            val, test = (_summary(roles.get(role, ())) for role in ("val", "test"))
            known[name] = Scenario(name, "wilds", tuple(roles["train"]), val or None, test)
            for held in roles["test"]:
                tested.setdefault(held, []).append(name)
    if not known:
        raise SettingsError(
            "protocol wilds needs a data set with published splits over domains, which this one "
            "has not: use --protocol lodo or ltdo"
        )
    if select in (None, "all"):
        return list(known.values())
    chosen: list[str] = []
    for given in listed(select or ""):
        domain = _domain(given, letters or dict.fromkeys(domains, ""))
        own = known_name(given, known) not in known and tested.get(domain or "")
        chosen += own or read_names("scenario", given, known)
    return [known[name] for name in dict.fromkeys(chosen)]


def _summary(domains: Sequence[str]) -> str:
    return "+".join(domains) if len(domains) <= 3 else f"{len(domains)} domains"


def _find(
    name: str, sets: Sequence[Sequence[Scenario]], letters: Mapping[str, str]
) -> list[Scenario]:
    """Return the scenario of a name, or those of the first set with some that test on a domain."""
    known = sets[-1]
    for scenario in known:
        if _names(composed(name).split("-"), scenario, letters):
            return [scenario]
    domain = _domain(name, letters)
    for scenarios in sets:
        if found := [scenario for scenario in scenarios if scenario.test == domain]:
            return found
    message = unknown("scenario", name, (scenario.name for scenario in known))
    raise SettingsError(f"{message}; or give the domain to test on: {', '.join(letters)}")


def _domain(name: str, letters: Mapping[str, str]) -> str | None:
    """Return the domain of a name or a code, in any case, ``None`` unless exactly one has it."""
    spellings: tuple[Callable[[str], str], ...] = (str, composed, plain_name)
    for spelt in spellings:
        found = {d for d, code in letters.items() if spelt(name) in (spelt(d), spelt(code))}
        if len(found) == 1:
            return found.pop()
    return None


def _names(parts: Sequence[str], scenario: Scenario, letters: Mapping[str, str]) -> bool:
    """Return whether ``parts`` are [training domains,] held-out domains, by code or by name.

    The parts are `composed`.
    """
    codes = {domain: composed(code) for domain, code in letters.items()}
    held = [domain for domain in (scenario.val, scenario.test) if domain is not None]
    if len(parts) not in (len(held), len(held) + 1):
        return False
    train, last = parts[: -len(held)], parts[-len(held) :]
    return all(
        part in (composed(domain), codes[domain]) for part, domain in zip(last, held, strict=True)
    ) and all(
        sorted(part.split("+"))
        in (sorted(map(composed, scenario.train)), sorted(codes[d] for d in scenario.train))
        or _spells(part, [codes[domain] for domain in scenario.train])
        for part in train
    )


def _spells(text: str, codes: Sequence[str]) -> bool:
    """Return whether ``text`` is a concatenation of all ``codes``, in any order."""
    if not codes:
        return not text
    return any(
        text.startswith(code)
        and _spells(text.removeprefix(code), [other for other in codes if other != code])
        for code in codes
    )
