"""Download of one file over HTTP: mirrors in turn, resumable, complete or not at all."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.data.fetch.mirrors import Download

WAITS = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each retry of a mirror; they start again after an attempt that received bytes."""
TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as broken."""
LONGEST_WAIT = 60.0
"""Maximum wait in seconds when a server asks for one (``Retry-After``)."""
CHUNK = 2**18
TEMPORARY = frozenset({408, 416, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which a later attempt may succeed."""

OnBytes = Callable[[int, int], None]
"""Called with the number of bytes received so far and their total."""


class _RefusedError(Exception):
    """A mirror does not have the right file, or redirects to a forbidden address."""


class _BrokenError(Exception):
    """An attempt failed; the next one may succeed, after ``wait`` seconds or more."""

    wait = 0.0


def fetch(
    urls: Sequence[str], path: Path, wanted: Download, progress: OnBytes | None = None
) -> str | None:
    """Fetch a file from the first mirror that serves the right one.

    Bytes go to ``<path>.part``, which becomes ``path`` only when its size and checksum are right.
    A part left by an earlier attempt, even in another process, is resumed (HTTP ranges); if it
    turns out to belong to another file, the download starts again.

    Args:
        urls: Addresses, ``http`` or ``https``, in the order to try. Proxies of the environment are
            used, and a redirect never leads from ``https`` to ``http``.
        path: Destination; if it already is the right file, nothing is fetched.
        wanted: Size and checksum of the right file.
        progress: Called as bytes arrive.

    Returns:
        The address that served the last byte; ``None`` if the file was already there.

    Raises:
        SettingsError: If an address is neither.
        DataError: If no mirror has it, the disk is full, or another process is fetching it.
    """
    for url in urls:
        check_url(url)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f"{path.name}.lock"), blocking=False):
            if path.exists() and wanted.fault(path) is None:
                return None
            path.unlink(missing_ok=True)
            reasons = []
            for url in urls:
                try:
                    _from_mirror(url, path.with_name(f"{path.name}.part"), wanted, progress)
                except _RefusedError as error:
                    reasons.append(f"{_shown(url)}: {error}")
                else:
                    path.with_name(f"{path.name}.part").replace(path)
                    return url
    except Timeout as error:
        raise DataError(f"another process is fetching {path} now: wait for it to end") from error
    except (OSError, NotImplementedError) as error:  # the latter where files cannot be locked
        raise DataError(
            f"cannot write {path}: {getattr(error, 'strerror', None) or error}; make room and run "
            f"the same command again, which goes on, or choose another folder"
        ) from error
    raise DataError(f"no mirror gave {path.name} ({'; '.join(reasons)})")


def check_url(url: str) -> None:
    """Refuse an address that is not a web address.

    Raises:
        SettingsError: If it is not.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable:
        raise SettingsError(f"cannot fetch from {url!r}: expected http://... or https://...")


def _shown(url: str) -> str:
    """Return an address for a message, without passwords and parameters."""
    parts = urlsplit(url)
    return f"{parts.netloc.rpartition('@')[2]}{parts.path}"


class _Redirects(request.HTTPRedirectHandler):
    """Follows redirects, but not to other schemes and not from ``https`` down to ``http``."""

    def redirect_request(
        self,
        req: request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> request.Request | None:
        """Return the request that follows a redirect."""
        scheme = urlsplit(newurl).scheme
        if scheme not in ("http", "https") or (req.type, scheme) == ("https", "http"):
            raise _RefusedError(f"sends on to {scheme or 'nowhere'}:, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _from_mirror(url: str, part: Path, wanted: Download, progress: OnBytes | None) -> None:
    """Extend ``part`` until it is the right file.

    Raises:
        _RefusedError: If this mirror cannot provide it.
    """
    failures, best, again = 0, _length(part), False
    while True:
        start = _length(part)
        try:
            if start == 0 or wanted.fault(part) is not None:  # else it lacks only its final name
                _receive(url, part, start, wanted, progress)
        except _BrokenError as error:
            if _length(part) > best:
                failures, best = 0, _length(part)
            if failures == len(WAITS):
                times = "" if failures == 0 else f" ({failures + 1} times)"
                raise _RefusedError(f"{error}{times}") from error
            time.sleep(max(WAITS[failures], error.wait))
            failures += 1
            continue
        fault = wanted.fault(part)
        if fault is None:
            return
        part.unlink()  # wrong bytes are useless
        if start == 0 or again:
            raise _RefusedError(f"gives a wrong file: {fault}")
        again = True  # the fault may be in the bytes of an earlier attempt


def _length(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _receive(url: str, part: Path, start: int, wanted: Download, progress: OnBytes | None) -> None:
    """Make one request and write the received bytes, from ``start`` on or from the beginning.

    Raises:
        _BrokenError: If a later attempt may succeed; the part keeps the received bytes.
        _RefusedError: If no later attempt can.
        DataError: If the disk is full.
    """
    headers = {"User-Agent": "feddg-bench", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with _open(url, headers, part) as response:
        done, total = _begin(response, part, start, wanted)
        with part.open("r+b" if done else "wb", buffering=0) as file:  # a kill loses nothing
            file.seek(done)
            while True:
                if progress is not None:
                    progress(done, total)
                if done >= total:
                    os.fsync(file.fileno())
                    return
                reason = ""
                try:
                    data = response.read1(min(CHUNK, total - done))
                except (OSError, HTTPException) as error:
                    data, reason = b"", f" ({error})"
                if not data:
                    raise _BrokenError(f"broke off after {done:,} of {total:,} bytes{reason}")
                file.write(data)
                done += len(data)


def _open(url: str, headers: Mapping[str, str], part: Path) -> HTTPResponse:
    try:
        asked = request.Request(url, headers=dict(headers))  # noqa: S310 - checked by check_url
        response = request.build_opener(_Redirects).open(asked, timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        answer = f"answers {error.code} {error.reason}".rstrip()
        if error.code not in TEMPORARY:
            raise _RefusedError(answer) from error
        if error.code == 416:
            part.unlink(missing_ok=True)
        broken = _BrokenError(answer)
        seconds = error.headers.get("Retry-After", "")
        broken.wait = min(float(seconds), LONGEST_WAIT) if seconds.isdecimal() else 0.0
        raise broken from error
    except URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise _RefusedError(
                f"cannot prove who it is ({error.reason.verify_message})"
            ) from error
        raise _BrokenError(f"cannot be reached ({error.reason})") from error
    except (OSError, HTTPException, ValueError) as error:
        raise _BrokenError(f"gives no answer ({error or type(error).__name__})") from error
    assert isinstance(response, HTTPResponse)  # noqa: S101 - of http and https it always is
    return response


def _begin(response: HTTPResponse, part: Path, start: int, wanted: Download) -> tuple[int, int]:
    """Return the byte at which the response begins, and the length of the whole file."""
    if response.status == 206:
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers["Content-Range"] or "")
        if not start or span is None or int(span[1]) != start:
            raise _RefusedError("answers with a part that was not asked for")
        total = int(span[2])
    elif response.status == 200:
        length = response.headers["Content-Length"] or ""
        if not length.isdecimal():
            raise _RefusedError("does not say how long the file is")
        start, total = 0, int(length)
    else:
        raise _RefusedError(f"answers {response.status} {response.reason}".rstrip())
    if wanted.size is not None and total != wanted.size:
        raise _RefusedError(f"offers {total:,} bytes instead of {wanted.size:,}")
    free = shutil.disk_usage(part.parent).free
    if total - start > free:
        raise DataError(
            f"no room for {part.stem}: {total - start:,} bytes are to come and {free:,} are free "
            f"in {part.parent}; make room or choose another folder"
        )
    return start, total
