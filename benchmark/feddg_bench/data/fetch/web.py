"""Addresses of the web, and what opens them."""

from __future__ import annotations

from http.client import HTTPMessage
from typing import IO, Any
from urllib import request
from urllib.parse import urlsplit

from feddg_bench.common.errors import SettingsError


class RefusedError(Exception):
    """A mirror does not have what is wanted, or leads where nobody should go."""


def check_url(url: str) -> None:
    """Refuse an address that is not of a web server.

    Raises:
        SettingsError: If it is refused.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable:
        raise SettingsError(f"cannot fetch from {url!r}: expected http://... or https://...")


def shown(url: str) -> str:
    """Return an address for a message, without passwords and parameters."""
    parts = urlsplit(url)
    return f"{parts.netloc.rpartition('@')[2]}{parts.path}"


class Redirects(request.HTTPRedirectHandler):
    """Follows redirects, but not out of HTTP and not from ``https`` down to ``http``."""

    def redirect_request(
        self,
        req: request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> request.Request | None:
        """Return the request that follows a redirect.

        Raises:
            RefusedError: If it is not followed.
        """
        schemes = req.type, urlsplit(newurl).scheme
        if schemes[1] not in ("http", "https") or schemes == ("https", "http"):
            raise RefusedError(f"sends on to {schemes[1] or 'nowhere'}:, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def opener() -> request.OpenerDirector:
    """Return what opens addresses; unlike `urllib`'s own it knows no files and no FTP."""
    director = request.OpenerDirector()
    handlers: tuple[Any, ...] = (
        request.ProxyHandler,
        request.HTTPHandler,
        request.HTTPSHandler,
        request.HTTPDefaultErrorHandler,
        request.HTTPErrorProcessor,
        Redirects,
    )
    for handler in handlers:
        director.add_handler(handler())
    return director
