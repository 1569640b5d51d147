"""Runs of a row that differ in settings become rows of their own, named by what differs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feddg_bench.records.runs import RecordedRun

SHORT = {"partition.heterogeneity": "lambda", "partition.clients": "N", "federation.per_round": "K"}
"""Names of settings in labels; others go by the last part of their key."""

IN_LABEL = 3
"""Most differences that a label shows; a note gives the others."""

SPLIT = "data.split_csv"


@dataclass(frozen=True)
class Variant:
    """Runs that agree in all settings but seed, scenario and what columns vary."""

    label: str  # what sets it apart from the other variants of the row; may be empty
    # The differences by key: settings, recipe, version or images. A setting that did not exist yet
    # when a run was made, or has no effect in it, is absent.
    differences: Mapping[str, Any]
    runs: tuple[RecordedRun, ...]


def setting_text(value: Any) -> str:
    """Return a setting's value as a person writes it.

    >>> [setting_text(value) for value in (True, None, 0.5, 1.0, "sgd")]
    ['true', 'none', '0.5', '1', 'sgd']
    """
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def split(runs: Sequence[RecordedRun], free: Collection[str] = ()) -> list[Variant]:
    """Return the variants among the runs of a row.

    Runs under several recipes are first told apart by recipe, unless the settings agree. Settings
    are compared within a data set, since recipes give each its own. ``free`` are keys that the
    table's columns vary.
    """
    entries = signed(runs, free)
    recipes = sorted({entry.recipe for entry in entries})
    found: list[Variant] = []
    for recipe in recipes:
        mine = [entry for entry in entries if entry.recipe == recipe]
        keys = _differing(mine)
        together: dict[tuple[str, ...], tuple[dict[str, Any], list[RecordedRun]]] = {}
        for entry in mine:
            differences: dict[str, Any] = {"recipe": recipe} if len(recipes) > 1 else {}
            differences |= {key: entry.signature[key] for key in keys if key in entry.signature}
            mark = tuple(repr(item) for item in differences.items())
            together.setdefault(mark, (differences, []))[1].extend(entry.runs)
        said = _telling([differences for differences, _ in together.values()], mine)
        usual = _usual(list(together.values()))
        for differences, members in together.values():
            own = {key: value for key, value in differences.items() if key in said}
            text = label({k: v for k, v in own.items() if k not in usual or v != usual[k]})
            found.append(Variant(text, differences, tuple(members)))
    order = list(dict.fromkeys(key for variant in found for key in variant.differences))
    found.sort(
        key=lambda variant: [
            natural(setting_text(variant.differences[key])) if key in variant.differences else []
            for key in order
        ]
    )
    return _distinct(found)


def _usual(
    together: Sequence[tuple[Mapping[str, Any], Sequence[RecordedRun]]],
) -> Mapping[str, Any]:
    """Return the differences of the variant with more runs than any other, if there is one.

    It keeps the bare name, and the others are named by what they change, as when some runs of an
    ablation stand beside a whole leaderboard.
    """
    most = max(len(members) for _, members in together)
    found = [differences for differences, members in together if len(members) == most]
    return {k: v for k, v in found[0].items() if k != "recipe"} if len(found) == 1 else {}


def _telling(named: Sequence[Mapping[str, Any]], entries: Sequence[SignedRuns]) -> set[str]:
    """Return the keys of the differences that labels show.

    Of a method's own settings, these are the ones that it declares for labels, if they tell all
    variants apart: a preset's name stands for what it sets.
    """
    keys = {key for differences in named for key in differences}
    declared = {f"hyper.{name}" for entry in entries for run in entry.runs for name in run.labels}
    few = {key for key in keys if not key.startswith("hyper.") or key in declared}
    marks = {
        tuple(repr(found[key]) if key in found else "" for key in sorted(few)) for found in named
    }
    return few if len(marks) == len(named) else keys


def label(differences: Mapping[str, Any]) -> str:
    """Return differences as a label: ``lambda=0.5, lr=0.01``, the first `IN_LABEL` of them.

    >>> label({"partition.heterogeneity": 0.5, "hyper.mu": 0.1})
    'lambda=0.5, mu=0.1'
    """
    said = assignments(differences)
    rest = len(said) - IN_LABEL
    return ", ".join(said[:IN_LABEL]) + (f", +{rest} more" if rest > 0 else "")


def assignments(differences: Mapping[str, Any]) -> list[str]:
    """Return ``name=value`` of each difference, with the shortest name that is not ambiguous."""
    lasts = Counter(key.rsplit(".", 1)[-1] for key in differences)
    said = []
    for key, value in differences.items():
        last = key.rsplit(".", 1)[-1]
        name = SHORT.get(key) or (last if lasts[last] == 1 else key)
        said.append(f"{name}={setting_text(value)}")
    return said


def natural(value: str) -> list[tuple[int, float, str]]:
    """Return a sort key that orders numbers in a text by their size."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", value)
    return [(0, float(p), "") if n % 2 else (1, 0.0, p) for n, p in enumerate(parts)]


def _signature(run: RecordedRun, free: Collection[str] = ()) -> dict[str, Any]:
    """Return all that may differ between runs of one row and must not be averaged over."""
    found = {key: value for key, value in run.settings.items() if key not in free}
    more = {"method": run.method, "protocol": run.protocol}
    found |= {key: value for key, value in more.items() if key not in free}
    return {**found, "version": run.version, "images": run.fingerprint[:8]}


@dataclass(frozen=True)
class SignedRuns:
    """Runs of a data set that agree in all that must not be averaged over."""

    dataset: str
    signature: dict[str, Any]
    runs: list[RecordedRun]

    @property
    def recipe(self) -> str:
        """The first of its runs' recipes."""
        return min(run.recipe for run in self.runs)


def signed(runs: Iterable[RecordedRun], free: Collection[str]) -> list[SignedRuns]:
    """Return runs by data set and signature; equal settings are one entry whatever the recipe."""
    runs = list(runs)
    groups: dict[tuple[Any, ...], list[RecordedRun]] = {}
    for run in runs:  # runs share their settings object, so this is quick
        mark = (run.dataset, id(run.settings), run.version, run.fingerprint)
        groups.setdefault((*mark, run.method, run.protocol), []).append(run)
    alike = _one_file_a_scenario(runs)
    entries: dict[tuple[str, str], SignedRuns] = {}
    for members in groups.values():
        found = _signature(members[0], free)
        if alike and found.get(SPLIT) is not None:
            found[SPLIT] = "file"
        dataset = members[0].dataset
        whole = (dataset, repr(sorted(found.items())))
        entries.setdefault(whole, SignedRuns(dataset, found, [])).runs.extend(members)
    return list(entries.values())


def _one_file_a_scenario(runs: Iterable[RecordedRun]) -> bool:
    """Return whether no scenario was run with two split files.

    Each scenario has a file of its own, so their hashes differ without a difference in meaning.
    """
    found: dict[tuple[str, str], set[Any]] = {}
    for run in runs:
        found.setdefault((run.dataset, run.scenario), set()).add(run.settings.get(SPLIT))
    return all(len(files - {None}) <= 1 for files in found.values())


def _differing(entries: Sequence[SignedRuns]) -> list[str]:
    """Return the keys whose values differ within a data set, in the order of settings."""
    signatures: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        signatures.setdefault(entry.dataset, []).append(entry.signature)
    return [
        key
        for key in dict.fromkeys(key for entry in entries for key in entry.signature)
        if any(  # one that lacks the key differs, too
            len({repr(s[key]) if key in s else "" for s in mine}) > 1
            for mine in signatures.values()
        )
    ]


def _distinct(variants: list[Variant]) -> list[Variant]:
    """Return the variants with distinct labels: a number is added where shortened ones agree."""
    seen: Counter[str] = Counter()
    total = Counter(variant.label for variant in variants)
    out = []
    for variant in variants:
        seen[variant.label] += 1
        twice = total[variant.label] > 1
        name = f"{variant.label} ({seen[variant.label]})" if twice else variant.label
        out.append(Variant(name, variant.differences, variant.runs))
    return out
