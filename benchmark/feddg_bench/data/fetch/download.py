"""Fetching one file over HTTP: mirrors in turn, resumed where it broke off, never half there."""

from __future__ import annotations

import errno
import re
import shutil
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib import request
from urllib.error import HTTPError, URLError

from feddg_bench.common.errors import DataError
from feddg_bench.data.fetch.partial import Note, Part, Wanted, open_part, sha256
from feddg_bench.data.fetch.web import RefusedError, check_url, opener, shown

WAITS = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each new attempt at a mirror; one that brought bytes starts them anew."""
TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as broken."""
LONGEST_WAIT = 60.0
"""Seconds that a server may ask to wait (``Retry-After``) and be obeyed."""
CHUNK = 2**18
TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which a later attempt may succeed."""

Progress = Callable[[int, int], None]
"""Called with the bytes that are here and their total."""


@dataclass(frozen=True)
class Fetched:
    """A file that is here and as it should be.

    Attributes:
        url: The address that gave its last byte; nothing if it was here before.
        size: Bytes.
        sha256: 64 hexadecimal digits.
    """

    url: str | None
    size: int
    sha256: str


class _BrokenError(Exception):
    """An attempt failed; the next one may succeed, after the seconds that the server asks for."""

    wait = 0.0


def fetch(
    urls: Sequence[str], path: Path, wanted: Wanted, progress: Progress | None = None
) -> Fetched:
    """Fetch a file from the first mirror that gives the right one.

    Bytes go to ``<path>.part``, which becomes ``path`` only when its size and checksum are right.
    A part that an earlier attempt left, even of another process, is gone on with (HTTP ranges) if
    the server's ETag, date or, where a checksum will tell, length says that the file is the same.

    Args:
        urls: Addresses, ``http`` or ``https``, in the order to try. Proxies of the environment are
            used, and a redirect never leads from ``https`` to ``http``.
        path: Where the file goes; if it is there and right, nothing is fetched.
        wanted: What it must be.
        progress: Told of bytes as they come.

    Raises:
        SettingsError: If an address is of another kind.
        DataError: If no mirror has it, there is no room, or another process fetches it now.
    """
    for url in urls:
        check_url(url)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if wanted.fault(path) is None:
                return Fetched(None, path.stat().st_size, sha256(path))
            path.unlink()
        with open_part(path) as part:
            return _fetch(urls, path, part, wanted, progress)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "make room and run the same command again, it goes on; or " if full else ""
        raise DataError(
            f"cannot write {path}: {error.strerror or error}; {hint}choose another folder"
        ) from error


def _fetch(
    urls: Sequence[str], path: Path, part: Part, wanted: Wanted, progress: Progress | None
) -> Fetched:
    reasons = []
    for url in urls:
        try:
            _from_mirror(url, part, wanted, progress)
        except RefusedError as error:
            reasons.append(f"{shown(url)}: {error}")
            continue
        part.finish(path)
        return Fetched(url, path.stat().st_size, sha256(path))
    raise DataError(f"no mirror gave {path.name} ({'; '.join(reasons)})")


def _from_mirror(url: str, part: Part, wanted: Wanted, progress: Progress | None) -> None:
    """Make the part the whole and right file.

    Raises:
        RefusedError: If this mirror does not do it.
    """
    failures, best, again = 0, part.length, False
    while True:
        start = part.resumable(url, wanted)
        try:
            _receive(url, part, start, wanted, progress)
        except _BrokenError as error:
            if part.length > best:
                failures, best = 0, part.length
            if failures == len(WAITS):
                times = "" if failures == 0 else f" ({failures + 1} times)"
                raise RefusedError(f"{error}{times}") from error
            time.sleep(max(WAITS[failures], error.wait))
            failures += 1
            continue
        fault = wanted.fault(part.path)
        if fault is None:
            return
        part.discard()  # wrong bytes are of no use to anybody
        if start == 0 or again:
            raise RefusedError(f"gives a wrong file: {fault}")
        again = True  # what an earlier attempt left may be what is wrong


def _receive(url: str, part: Part, start: int, wanted: Wanted, progress: Progress | None) -> None:
    """Make one request and write what comes, from byte ``start`` on or from the beginning.

    Raises:
        _BrokenError: If a later attempt may do better; the part keeps what has come.
        RefusedError: If it will not.
        DataError: If there is no room.
    """
    if start and start == part.note.size:
        return  # it was stopped between the last byte and the check
    headers = {"User-Agent": "feddg-bench", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if part.note.url == url and (validator := part.note.validator):
            headers["If-Range"] = validator
    with _open(url, headers, part) as response:
        total = _begin(url, response, part, start, wanted)
        done = part.length
        if progress is not None:
            progress(done, total)
        while done < total:
            try:
                data = response.read1(min(CHUNK, total - done))
            except (OSError, HTTPException) as error:
                text = f"broke off after {done:,} of {total:,} bytes ({error})"
                raise _BrokenError(text) from error
            if not data:
                raise _BrokenError(f"broke off after {done:,} of {total:,} bytes")
            part.write(data)
            done += len(data)
            if progress is not None:
                progress(done, total)


def _open(url: str, headers: Mapping[str, str], part: Part) -> HTTPResponse:
    try:
        response = opener().open(request.Request(url, headers=dict(headers)), timeout=TIMEOUT)  # noqa: S310
    except HTTPError as error:
        error.close()
        answer = f"answers {error.code} {error.reason}".rstrip()
        if error.code == 416 and "Range" in headers:
            part.discard()
            raise _BrokenError(answer) from error
        if error.code not in TEMPORARY:
            raise RefusedError(answer) from error
        broken = _BrokenError(answer)
        asked = error.headers.get("Retry-After", "")
        broken.wait = min(float(asked), LONGEST_WAIT) if asked.isdecimal() else 0.0
        raise broken from error
    except URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise RefusedError(f"cannot prove who it is ({error.reason.verify_message})") from error
        raise _BrokenError(f"cannot be reached ({error.reason})") from error
    except (OSError, HTTPException, ValueError) as error:
        raise _BrokenError(f"gives no answer ({error or type(error).__name__})") from error
    assert isinstance(response, HTTPResponse)  # noqa: S101  (only HTTP handlers are installed)
    return response


def _begin(url: str, response: HTTPResponse, part: Part, start: int, wanted: Wanted) -> int:
    """Place the part at the answer's first byte, note what file it is, and return its length."""
    note = Note(url, response.headers["ETag"], response.headers["Last-Modified"], None)
    if response.status == 206:
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers["Content-Range"] or "")
        if not start or span is None:
            raise RefusedError("answers with a part that was not asked for")
        total = int(span[2])
        if int(span[1]) != start or not part.note.same_file(note, total):
            part.discard()
            raise _BrokenError("has another file now than the one begun")
    elif response.status == 200:
        length = response.headers["Content-Length"] or ""
        if not length.isdecimal():
            raise RefusedError("does not say how long the file is")
        total, start = int(length), 0
    else:
        raise RefusedError(f"answers {response.status} {response.reason}".rstrip())
    if wanted.size is not None and total != wanted.size:
        raise RefusedError(f"offers {total:,} bytes instead of {wanted.size:,}")
    free = shutil.disk_usage(part.path.parent).free
    if total - start > free:
        raise DataError(
            f"no room for {part.path.name.removesuffix('.part')}: {total - start:,} bytes are to "
            f"come and {free:,} are free in {part.path.parent}; make room or choose another folder"
        )
    part.begin(start, Note(url, note.etag, note.modified, total))
    return total
