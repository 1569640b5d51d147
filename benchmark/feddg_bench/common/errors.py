"""Errors that a user can cause; the command line prints them as one sentence and exits with 2."""

import difflib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

MOST_LETTERS = 1000
"""Maximum number of characters in an error's list of known names."""

MANY_SETTINGS = 20
"""Maximum number of settings that an error lists."""


REMEDIES = {
    "Expected more than 1 value per channel": "batch normalisation cannot train on a batch of one "
    "image: set train.batch_size=2 or more and train.drop_last_if_single=true, or federation.bn="
    "frozen"
}
"""Beginning of a library's message -> its remedy, a setting."""


class FeddgError(Exception):
    """An error the user can fix; the message says what was found and expected, and the remedy."""


class SettingsError(FeddgError):
    """A name, flag or value that cannot be used."""


class PluginError(FeddgError):
    """A method or data set that breaks its contract."""


class ClientError(FeddgError):
    """A failure of one client: an exception, or a bad reply if ``on_fault`` is ``fail``."""


class DataError(FeddgError):
    """A file or folder that is missing, unreadable or not what it claims to be."""


class RunInterruptedError(BaseException):
    """A signal asked the run to stop; its last checkpoint is on disk.

    Attributes:
        signal_number: SIGINT or SIGTERM.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


class _CtrlCError(RunInterruptedError, KeyboardInterrupt):
    """Ctrl-C in a program without a handler of its own; Python expects a `KeyboardInterrupt`."""


_RESENT_AFTER = 0.01
"""Seconds until a signal is sent again if Python ignored its exception."""


def raise_in_handler(error: RunInterruptedError, handler: Callable[..., None]) -> NoReturn:
    """Raise an error in a signal handler, and send the signal again if Python ignores the error.

    Python prints and ignores an exception in code that cannot pass it on, such as ``__del__`` or
    a callback of a library in C or Rust. Without a second signal, the program would not stop.

    Args:
        error: The error with the signal's number.
        handler: The handler to use for the signal that is sent again.
    """
    number, earlier = error.signal_number, sys.unraisablehook

    def send_again(ignored: "sys.UnraisableHookArgs") -> None:
        if getattr(ignored.exc_value, "signal_number", None) != number:
            earlier(ignored)
            return
        sys.unraisablehook = earlier
        signal.signal(number, handler)
        main = threading.main_thread().ident
        timer = threading.Timer(_RESENT_AFTER, signal.pthread_kill, (main, number))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = send_again
    raise error


def _ctrl_c(number: int, _frame: FrameType | None) -> None:
    raise_in_handler(_CtrlCError(number), _ctrl_c)


@contextmanager
def interrupts_told() -> Iterator[None]:
    """Let Ctrl-C raise a `RunInterruptedError` in a block.

    This distinguishes it from a `KeyboardInterrupt` raised by a plugin's code, which is the
    plugin's error. If the program has its own handler, as the command line does, nothing changes.
    """
    python = signal.default_int_handler
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is python
    )
    if ours:
        signal.signal(signal.SIGINT, _ctrl_c)
    try:
        yield
    finally:
        if ours and signal.getsignal(signal.SIGINT) is _ctrl_c:
            with suppress(ValueError):  # a generator may be closed by another thread
                signal.signal(signal.SIGINT, python)


@contextmanager
def plugin_code(packages: Collection[str], what: str) -> Iterator[None]:
    """Turn any exception raised by a plugin's code in a block into one sentence.

    Args:
        packages: Top-level packages of the plugin; errors that passed through none are not its own.
        what: What failed, for the message.

    Raises:
        PluginError: If the plugin's code raised anything but a `FeddgError`.
    """
    try:
        with interrupts_told():
            yield
    except (FeddgError, RunInterruptedError):
        raise
    except BaseException as error:
        if not any(top(name) in packages for name in modules_in(error)):
            raise
        raise PluginError(f"{what}: {in_a_line(error, packages)}") from error


@contextmanager
def noted(where: str) -> Iterator[None]:
    """Add a place to exceptions of a block, unless they have one already."""
    try:
        yield
    except Exception as error:
        if not getattr(error, "__notes__", ()):
            error.add_note(where)
        raise


def unknown(kind: str, name: str, known: Iterable[str], meant: str | None = None) -> str:
    """Return the error message for an unknown name, with a suggestion of the nearest known one.

    If there are many known settings, it names the command that lists them instead. ``meant`` is
    suggested in place of the nearest name.

    >>> unknown("method", "fedgam", ["fedavg", "fedgma"])
    "unknown method 'fedgam'; did you mean 'fedgma'? Known: fedavg, fedgma"
    """
    names = sorted(set(known))
    if not name:
        return f"the name of a {kind} is empty; is there a comma too many? Known: {_shown(names)}"
    near = [meant] if meant else difflib.get_close_matches(name, names, n=1, cutoff=0.5)
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
    shown = ", ".join(names) or "none"
    if len(shown) > MOST_LETTERS:
        first = shown[:MOST_LETTERS].count(", ") or 1
        shown = f"{', '.join(names[:first])} and {len(names) - first} more"
    return shown


def in_a_line(error: BaseException, packages: Collection[str] = ()) -> str:
    """Return an exception in one line, with its type and place unless it is a `FeddgError`.

    The place is the innermost one in the given top-level ``packages``, which helps a plugin's
    author more than a line of PyTorch does; without one, the innermost of all.

    >>> try:
    ...     int("many")
    ... except ValueError as error:
    ...     in_a_line(error).partition(" (")[0]
    "ValueError: invalid literal for int() with base 10: 'many'"
    """
    text = first_line(error)
    text += next(
        (f"; {remedy}" for beginning, remedy in REMEDIES.items() if text.startswith(beginning)), ""
    )
    text = printable(text)
    if isinstance(error, FeddgError):
        return text
    text = f"{printable(type(error).__name__)}: {text}"
    if isinstance(error, SyntaxError):  # its text names the place
        return text
    places = [*traceback.walk_tb(error.__traceback__)]
    if not places:  # it was never raised
        return text
    frame, line = ([p for p in places if top(_module(p[0])) in packages] or places)[-1]
    if top(_module(frame)) == "importlib":  # a missing module has no place
        return text
    return f"{text} ({printable(Path(frame.f_code.co_filename).name)}, line {line})"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, even if its ``__str__`` fails."""
    try:
        text = str(error).strip()
    except RunInterruptedError:
        raise
    except BaseException:
        return "its text cannot be read"
    return (text or type(error).__name__).splitlines()[0]


def short(value: Any) -> str:
    """Return the ``repr`` of a value, cut to 100 characters."""
    try:
        text = repr(value)
    except Exception:  # such as a list that is nested too deep
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


def modules_in(error: BaseException) -> list[str]:
    """Return the modules that an exception passed through, the innermost last."""
    return [_module(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]


def top(module: str) -> str:
    """Return the top-level package of a module."""
    return module.partition(".")[0]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def printable(text: str) -> str:
    r"""Return text without control characters: unprintable ones are written as escapes.

    >>> printable("a\x1b[31mb\n")
    'a\\x1b[31mb\\n'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
