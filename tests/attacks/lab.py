"""A place for attacks: the command in this process, monitored for forbidden actions."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, NamedTuple

from feddg_bench.common.errors import FeddgError, RunInterruptedError

PATIENCE = 60.0
"""Seconds without an answer after which a command counts as hanging."""
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile")
KNOWN = re.compile(r"(python[0-9.]*|git|uname|ldconfig|fc-list|gcc|cc|ld|objdump)$")
"""Programs that the suite or its libraries start themselves, with any input."""


class HangError(Exception):
    """No answer in time."""


class Outcome(NamedTuple):
    """How a command ended.

    Attributes:
        code: Exit status; -1 if an exception came through.
        out: Standard output.
        err: Standard error, or the traceback.
    """

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The last line of the message to the user, shortened."""
        text = " ".join((self.err.strip() or self.out.strip()).splitlines()[-1:])
        return text.removeprefix("feddg-bench: error: ")[:160]

    @property
    def refused(self) -> bool:
        """Whether it was refused correctly: status 2, one sentence, no traceback."""
        lines = [line for line in self.err.splitlines() if line.startswith("feddg-bench: error: ")]
        usage = self.err.startswith("Usage:")  # from the option parser, also one sentence
        return self.code == 2 and "Traceback" not in self.err and (len(lines) == 1 or usage)


class Row(NamedTuple):
    """One attack and its verdict."""

    attack: str
    happened: str
    held: bool


@dataclass
class Lab:
    """A folder of its own, the command in it, and a log of attacks.

    Attributes:
        root: Nothing may be written elsewhere.
        programs: Programs that were started.
        outside: Files written outside of `root`.
        rows: Attacks so far.
        full: Whether to try all of a large grid, not a sample.
    """

    root: Path
    programs: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    full: bool = False
    _count: int = 0

    def folder(self) -> Path:
        """Return a new empty folder."""
        self._count += 1
        path = self.root / f"{self._count:03}"
        path.mkdir()
        return path

    def add(self, attack: str, happened: object, held: bool) -> None:
        """Add an attack to the log."""
        self.rows.append(Row(attack, " ".join(str(happened).split()), bool(held)))

    def refused(self, attack: str, outcome: Outcome) -> None:
        """Add an attack that must be refused in one sentence."""
        what = outcome.sentence if outcome.code != -1 else f"traceback: {outcome.sentence}"
        self.add(attack, f"exit {outcome.code}: {what}", outcome.refused)

    def feddg(
        self, *arguments: object, cwd: Path | None = None, limit: float | None = None
    ) -> Outcome:
        """Run the command; it ends as for a user."""
        from feddg_bench import cli

        out, err = io.StringIO(), io.StringIO()
        argv, before = sys.argv, Path.cwd()
        sys.argv = ["feddg-bench", *map(str, arguments)]
        handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        code = 0
        notices = logging.StreamHandler(err)  # like Python's default without logging configuration
        notices.setLevel(logging.WARNING)
        logging.getLogger().addHandler(notices)
        try:
            os.chdir(cwd or self.root)
            with redirect_stdout(out), redirect_stderr(err), in_time(limit or PATIENCE):
                cli.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
        except HangError:
            code = -1
            err.write(f"\nno answer in {limit or PATIENCE:.0f} s")
        except BaseException as error:
            code = -1
            err.write(f"\nTraceback {type(error).__name__}: {error}"[:500])
        finally:
            logging.getLogger().removeHandler(notices)
            os.chdir(before)
            sys.argv = argv
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Outcome(code, out.getvalue(), err.getvalue())

    def apart(self, *arguments: object, limit: float = 20.0) -> Outcome:
        """Run the command in a fork of this process, which can be killed whatever it waits for."""
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()
            outcome = self.feddg(*arguments)
            said = [*outcome, self.programs, self.outside]
            with os.fdopen(theirs, "w") as pipe:
                json.dump(said, pipe)
            os._exit(0)
        os.close(theirs)
        told = b""
        end = time.monotonic() + limit
        while select.select([ours], [], [], max(0.0, end - time.monotonic()))[0]:
            piece = os.read(ours, 65_536)
            if not piece:
                break
            told += piece
        os.close(ours)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if not told.endswith(b"]"):
            return Outcome(-1, "", f"no answer in {limit:.0f} s")
        code, out, err, self.programs, self.outside = json.loads(told)
        return Outcome(code, out, err)


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, str]:
    """Call a function; return its result, and its failure or ``""``."""
    try:
        with in_time(PATIENCE):
            return function(*arguments, **named), ""
    except FeddgError as error:
        return None, f"refused: {error}"
    except HangError:
        return None, "hang"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return None, f"traceback: {type(error).__name__}: {error} ({Path(where.filename).name})"


@contextmanager
def in_time(limit: float) -> Iterator[None]:
    """If the block takes too long, end it as a signal would, and raise `HangError`."""
    rung = []

    def ring(number: int, _: object) -> None:
        rung.append(number)
        raise RunInterruptedError(number)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if rung:
            raise HangError


_watched: list[Lab] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched:
        return
    lab = _watched[-1]
    if event in STARTS:
        program = os.fsdecode(arguments[0] or "") if arguments else ""
        if not KNOWN.search(program):
            lab.programs.append(program)
    elif event == "open" and isinstance(arguments[0], (str, bytes)):
        flags = arguments[2] if isinstance(arguments[2], int) else 0
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes:
            _note(lab, arguments[0])
    elif event in ("os.mkdir", "os.remove", "os.rmdir"):
        if arguments[-1] == -1:  # otherwise relative to an open folder, as in `shutil.rmtree`
            _note(lab, arguments[0])
    elif event in ("os.rename", "os.link", "os.symlink"):
        _note(lab, arguments[1])


def _note(lab: Lab, name: str | bytes | os.PathLike[str]) -> None:
    with suppress(TypeError, ValueError):
        path = os.path.realpath(os.fsdecode(name))
        allowed = (os.path.realpath(lab.root), "/dev", "/proc")
        if not path.startswith(allowed):
            lab.outside.append(path)


sys.addaudithook(_watch)


@contextmanager
def open_lab() -> Iterator[Lab]:
    """Open a lab; its PATH has traps in place of ``gs`` and other programs that decoders know."""
    with tempfile.TemporaryDirectory(prefix="attacks-") as name:
        root = Path(name)
        lab = Lab(root)
        (root / "home").mkdir()
        (root / "tmp").mkdir()
        traps = root / "bin"
        traps.mkdir()
        for program in ("gs", "gswin32c", "gswin64c", "ghostscript", "convert", "inkscape"):
            trap = traps / program
            trap.write_text(f"#!/bin/sh\necho {program} >> {root}/started\n")
            trap.chmod(0o755)
        environment = {
            "HOME": str(root / "home"),
            "TMPDIR": str(root / "tmp"),
            "FEDDG_CACHE": str(root / "cache"),
            "PATH": f"{traps}{os.pathsep}{os.environ.get('PATH', '')}",
            "COLUMNS": "200",
        }
        gone = [n for n in os.environ if n.startswith("WANDB_")] + ["FEDDG_DATA", "FEDDG_CONFIG"]
        saved = dict(os.environ)
        os.environ.update(environment)
        for variable in gone:
            os.environ.pop(variable, None)
        get_temp_dir()  # for worker processes; it outlives this block
        temporary, tempfile.tempdir = tempfile.tempdir, str(root / "tmp")
        written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        _watched.append(lab)
        try:
            yield lab
        finally:
            _watched.pop()
            os.environ.clear()
            os.environ.update(saved)
            tempfile.tempdir = temporary
            sys.dont_write_bytecode = written
            if (root / "started").exists():
                lab.programs += (root / "started").read_text().split()


def tree(folder: Path) -> set[str]:
    """Return the relative paths of all files below a folder."""
    return {
        os.path.relpath(os.path.join(where, name), folder)  # noqa: PTH118 - a thousand times quicker
        for where, _, names in os.walk(folder)
        for name in names
    }


def seconds() -> float:
    """Return the CPU seconds of this process and its children."""
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system


TINY = (
    "--scenario",
    "ip-o-c",
    "--workers",
    1,
    "--clients",
    4,
    "--per-round",
    2,
    "data.image_size=8",
    "data.id_test_fraction=0.5",
    "data.id_val_fraction=0.3",
    "train.batch_size=128",
)
"""Arguments of a run of digits4 that takes a second."""
