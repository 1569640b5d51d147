"""Errors that a user can cause; the command line prints them as one sentence and exits with 2."""

import difflib
import signal
import sysconfig
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_LETTERS = 1000
"""Maximum number of characters in an error's list of known names."""

MANY_SETTINGS = 20
"""Maximum number of settings that an error lists."""

_OWNERS = {"hyper": "method", "world": "data set"}
"""Section of settings -> what has them."""


STDLIB = sysconfig.get_path("stdlib")

REMEDIES = {
    "Expected more than 1 value per channel": "batch normalisation cannot train on a batch of one "
    "image: set train.batch_size=2 or more and train.drop_last_if_single=true, or federation.bn="
    "frozen",
    "CUDA out of memory": "set a smaller train.batch_size, or fewer --workers for this GPU",
}
"""Beginning of a library's message -> its remedy, a setting."""


class FeddgError(Exception):
    """An error the user can fix; the message says what was found and expected, and the remedy."""


class SettingsError(FeddgError):
    """A name, flag or value that cannot be used."""


class PluginError(FeddgError):
    """A method or data set that breaks its contract."""


class ClientError(FeddgError):
    """A bad reply of a client, if ``on_fault`` is ``fail``."""


class WorkerDeathError(FeddgError):
    """Workers died over a run, such as when memory ran out; other runs can begin."""


class DataError(FeddgError):
    """A file or folder that is missing, unreadable or not what it claims to be."""


HANGUP = getattr(signal, "SIGHUP", signal.SIGTERM)
"""Signal of a closed terminal or connection; Windows has none."""


class RunInterruptedError(BaseException):
    """A signal asked the run to stop; its last checkpoint is on disk.

    Attributes:
        signal_number: SIGINT, SIGTERM or SIGHUP.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


@contextmanager
def noted(where: str) -> Iterator[None]:
    """Add a place to exceptions of a block, unless they have one already.

    Raises:
        SettingsError: In place of an exception of a library that another setting prevents.
    """
    try:
        yield
    except Exception as error:
        if getattr(error, "__notes__", ()):
            raise
        error.add_note(where)
        for beginning, remedy in REMEDIES.items():
            if str(error).startswith(beginning):
                mendable = SettingsError(f"{in_a_line(error)}; {remedy}")
                mendable.add_note(where)
                raise mendable from error
        raise


def unknown(kind: str, name: str, known: Iterable[str], meant: str | None = None) -> str:
    """Return the error message for an unknown name, with a suggestion of the nearest known one.

    If there are many known settings, it names the command that lists them instead. ``meant`` is
    suggested in place of the nearest name.

    >>> unknown("method", "fedgam", ["fedavg", "fedgma"])
    "unknown method 'fedgam'; did you mean 'fedgma'? Known: fedavg, fedgma"
    >>> unknown("setting", "hyper.mu", [])
    "unknown setting 'hyper.mu': the method has no settings of its own, so leave it out"
    >>> unknown("sweep", "every", ["lodo", "tune/afl", "tune/erm"])
    "unknown sweep 'every'. Known: lodo, tune/NAME (2 names)"
    """
    names = sorted(set(known))
    if not names and (owner := _OWNERS.get(name.partition(".")[0])):
        return (
            f"unknown {kind} {short(name)}: the {owner} has no {kind}s of its own, so leave it out"
        )
    if not name:
        return f"the name of a {kind} is empty; is there a comma too many? Known: {_shown(names)}"
    begun = [known for known in names if len(name) > 2 and known.startswith(name)]
    near = difflib.get_close_matches(name, begun or names, n=1, cutoff=0.0 if begun else 0.6)
    near = [meant] if meant else near
    if not near:  # a dotted key typed without its section, or with the wrong one
        lasts = {n.rsplit(".", 1)[-1]: n for n in names}
        near = [lasts[m] for m in difflib.get_close_matches(name.rsplit(".", 1)[-1], lasts, n=1)]
    hint = f"; did you mean {near[0]!r}?" if near else "."
    if kind == "setting" and len(names) > MANY_SETTINGS:
        return (
            f"unknown setting {short(name)}{hint} See `feddg-bench settings` for all {len(names)}"
        )
    return f"unknown {kind} {short(name)}{hint} Known: {_shown(names)}"


def _shown(names: Sequence[str]) -> str:
    folders = Counter(name.rpartition("/")[0] for name in names if "/" in name)
    names = [name for name in names if "/" not in name]
    names += [f"{folder}/NAME ({n} names)" for folder, n in folders.items()]
    shown = ", ".join(names) or "none"
    if len(shown) > MOST_LETTERS:
        first = shown[:MOST_LETTERS].count(", ") or 1
        shown = f"{', '.join(names[:first])} and {len(names) - first} more"
    return shown


def left_out(what: str, why: object) -> str:
    """Return the message that something is left out; its name is there once.

    >>> left_out("fedavg", "fedavg needs images"), left_out("fedavg", "no images")
    ('left out: fedavg needs images', 'fedavg is left out: no images')
    """
    named = str(why).startswith(what)
    return f"left out: {why}" if named else f"{what} is left out: {why}"


def in_a_line(error: BaseException) -> str:
    """Return an exception in one line, with its type and place unless it is a `FeddgError`.

    >>> try:
    ...     int("many")
    ... except ValueError as error:
    ...     in_a_line(error).partition(" (")[0]
    "ValueError: invalid literal for int() with base 10: 'many'"
    """
    text = printable((str(error).strip() or type(error).__name__).splitlines()[0])
    if isinstance(error, FeddgError):
        return text
    text = f"{type(error).__name__}: {text}"
    places = traceback.extract_tb(error.__traceback__)
    if not places or isinstance(error, SyntaxError):  # its text names the place
        return text
    if "importlib" in places[-1].filename:  # a missing module has no place
        return text
    # Python's own modules, such as pathlib, raise what their caller asked for.
    callers = [p for p in places if "site-packages" in p.filename or STDLIB not in p.filename]
    place = (callers or places)[-1]
    return f"{text} ({printable(Path(place.filename).name)}, line {place.lineno})"


def told(error: FeddgError) -> str:
    """Return the sentence of an error and its place in a run, if it has one."""
    places = getattr(error, "__notes__", ())
    return printable(f"{error} ({'; '.join(places)})" if places else str(error))


def short(value: Any) -> str:
    """Return the ``repr`` of a value, cut to 100 characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deep, or an integer of too many digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


def top(module: str) -> str:
    """Return the top-level package of a module."""
    return module.partition(".")[0]


def printable(text: str) -> str:
    r"""Return text without control characters: unprintable ones are written as escapes.

    >>> printable("a\x1b[31mb\n")
    'a\\x1b[31mb\\n'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
