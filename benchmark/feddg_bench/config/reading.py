"""User input: YAML, read safely and within limits, and lists of names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import yaml

from feddg_bench.common.errors import SettingsError, short, unknown

MAX_LENGTH = 1_000_000
"""Maximum number of characters in a file."""
MAX_DEPTH = 16
"""Maximum nesting depth."""
MAX_VALUES = 100_000
"""Maximum number of values, including repetitions by aliases."""
MAX_WHOLE = 2**63
"""Bound of integers: they must fit into 64 bits."""

_SAFE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader in C, ten times as fast, if PyYAML was built with it."""
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_MERGE = "tag:yaml.org,2002:merge"


class _RefusedError(Exception):
    """A refused text; the message says what is wrong with it."""


class _Loader(_SAFE):  # type: ignore[misc]
    """YAML 1.1 as PyYAML reads it, but 1e-3 is a number, and ambiguous numbers are refused.

    In YAML 1.1, 010 is 8 and 1:30 is 90, but flags and most people read them differently.
    """


def _number(loader: Any, node: Any) -> int | float:
    text = loader.construct_scalar(node)
    subject = f"the number {text[:40]} in line {node.start_mark.line + 1} is"
    if ":" in text:
        raise _RefusedError(f"{subject} base 60 in YAML; write a decimal number, or '{text[:40]}'")
    if re.fullmatch(r"[-+]?0[0-7_]*[0-7]", text):
        digits = text.replace("_", "")[:40]
        values = " or ".join(dict.fromkeys((f"{int(digits, 8)}", f"{int(digits)}")))
        raise _RefusedError(f"{subject} octal in YAML; write {values}, or '{text[:40]}' for text")
    read = _SAFE.construct_yaml_int if node.tag == _INT else _SAFE.construct_yaml_float
    number: int | float = read(loader, node)
    return number


_Loader.add_constructor(_INT, _number)
_Loader.add_constructor(_FLOAT, _number)


class _Dumper(yaml.SafeDumper):
    """Quotes any text that `_Loader` would read as something else."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        _FLOAT,
        re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def composed(name: str) -> str:
    """Return a name in Unicode's normal form C, which is used to compare names.

    The same name can be stored as other characters: macOS separates letters from their accents.
    """
    return unicodedata.normalize("NFC", name)


def plain_name(name: str) -> str:
    """Return a name for comparisons.

    These ignore Unicode form, case, spaces, hyphens and underscores.
    """
    return composed(composed(name).casefold()).translate(str.maketrans("", "", " _-"))


def listed(text: str | Iterable[str]) -> list[str]:
    """Return the parts of a comma-separated list, or of a sequence, without duplicates."""
    parts = text.split(",") if isinstance(text, str) else text
    return list(dict.fromkeys(part.strip() for part in parts))


def known_name(name: str, known: Iterable[str]) -> str:
    """Return the known name that matches, or ``name`` itself unless exactly one does.

    Names are compared as `plain_name`s: papers write FedDG-GA, for example.

    >>> known_name("FedDG-GA", ["fedavg", "feddg_ga"])
    'feddg_ga'
    """
    if name in known:
        return name
    alike = [each for each in known if plain_name(each) == plain_name(name)]
    return alike[0] if len(alike) == 1 else name


def read_names(
    kind: str, text: str | Iterable[str], known: Collection[str], *, every: bool = False
) -> list[str]:
    """Return the names in a list, read by `listed`; with ``every``, ``all`` stands for all.

    Each is one of ``known``, in any spelling that `known_name` accepts.

    Raises:
        SettingsError: If one is unknown; the message suggests the nearest known one.
    """
    given = list(text) if isinstance(text, Iterable) else [text]
    if not all(isinstance(name, str) for name in given):
        raise SettingsError(f"{kind}: {short(text)} cannot be read; expected a name, or several")
    names = list(dict.fromkeys(known_name(name, known) for name in listed(text)))
    if every and "all" in names:
        if len(names) > 1:
            raise SettingsError(f"all stands for every {kind}: give it alone, or leave it out")
        return list(known)
    for name in names:
        if name not in known:
            raise SettingsError(unknown(kind, name, known))
    return names


def read_yaml(text: str, what: str) -> Any:
    """Return the only document in a text: mappings, lists, text, numbers, booleans, null.

    ``what`` is the name of the text in errors.

    Raises:
        SettingsError: If it is not YAML, has a key twice, or holds values that no setting can have.
    """
    try:
        _check_depth(text)  # before anything recurses over it
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_keys(node, set())
        value = loader.construct_document(node)
        _check_values(value)
    except _RefusedError as error:
        raise SettingsError(f"cannot read {what}: {error}") from error
    except yaml.MarkedYAMLError as error:
        at = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError(f"{what} is not YAML: {error.problem}{at}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{what} is not YAML: {str(error).splitlines()[0]}") from error
    except (ValueError, LookupError, AttributeError) as error:  # PyYAML's, for a tag
        raise SettingsError(
            f"cannot read {what}: a number or date in it is none; write text in quotation marks"
        ) from error
    return value


def write_yaml(value: Any) -> str:
    """Return a value as one line of YAML, which `read_yaml` reads as the same value."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**6
    )
    return text.strip().removesuffix("...").strip()


def _check_depth(text: str) -> None:
    if len(text) > MAX_LENGTH:
        raise _RefusedError(f"it is longer than {MAX_LENGTH:,} characters")
    depth = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _RefusedError(f"it is nested more than {MAX_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _check_keys(node: yaml.Node, seen: set[yaml.Node]) -> None:
    """Refuse duplicate keys in a mapping; YAML forbids them, and PyYAML takes the last."""
    if node in seen or isinstance(node, yaml.ScalarNode):
        return
    seen.add(node)
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, seen)
        return
    keys: set[tuple[str, str]] = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.tag == _MERGE:  # nested merges can expand without bound
                line = key.start_mark.line + 1
                raise _RefusedError(f"it merges by << in line {line}: write out the lines meant")
            if (key.tag, key.value) in keys:
                line = key.start_mark.line + 1
                raise _RefusedError(f"it has the key {key.value!r} twice, again in line {line}")
            keys.add((key.tag, key.value))
        _check_keys(value, seen)


def _check_values(value: Any) -> None:
    for count, _ in enumerate(_values(value, 0)):
        if count >= MAX_VALUES:
            raise _RefusedError(f"it holds more than {MAX_VALUES:,} values")


def _values(value: Any, depth: int) -> Iterator[None]:
    """Yield once per value, and refuse values no setting can have; aliases may be circular."""
    yield
    if depth > MAX_DEPTH:
        raise _RefusedError(f"it is nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise _RefusedError(f"the key {key!r} is not text; write it in quotation marks")
            yield from _values(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, depth + 1)
    elif isinstance(value, int):
        if not -MAX_WHOLE <= value < MAX_WHOLE:
            raise _RefusedError("a whole number in it has more than 64 bits")
    elif not isinstance(value, (str, float, type(None))):
        kind = type(value).__name__
        raise _RefusedError(f"a {kind} in it is no value of a setting; write it in quotation marks")
