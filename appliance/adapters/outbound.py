"""Connections to servers outside: kept open, through the proxy that the environment names, if any. Blocks."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3

_OBJECT = re.compile(r"^(<[^>]*>|HTTPS?Connection(Pool)?\([^)]*\)): ")
"""Of the HTTP client, in which something went wrong."""


def why(error: Exception) -> str:
    """What went wrong, in words for people: what the HTTP client wraps around it tells them nothing."""
    inner = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason else error
    wrapped = inner.args[-1] if inner.args and isinstance(inner, urllib3.exceptions.HTTPError) else None
    said = _OBJECT.sub("", str(wrapped if isinstance(wrapped, str | Exception) else inner))
    return said or type(inner).__name__


def bearer(token_file: Path) -> str:
    """The header `authorization` with the token of a file; raises OSError, which never tells what the file holds."""
    token = token_file.read_text(encoding="ascii", errors="replace").strip()
    if not (token and token.isascii() and token.isprintable()):  # the complaint of the HTTP client would quote it
        msg = f"{token_file} holds no token of one line: write it anew"
        raise OSError(msg)
    return f"Bearer {token}"


class Pools:
    """Connections by the way that they take."""

    def __init__(self, at_once: int, tls: ssl.SSLContext | None = None) -> None:
        """Keep up to `at_once` open; `tls` says whom to trust, and shows who we are, where the usual does not do."""
        self._at_once, self._tls = at_once, tls
        self._pools: dict[str, urllib3.PoolManager] = {}

    def to(self, url: str) -> urllib3.PoolManager:
        """Connections to a server."""
        parts = urlsplit(url)
        proxy = "" if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme, "")
        if proxy not in self._pools:
            self._pools[proxy] = (
                self._through(proxy) if proxy else urllib3.PoolManager(maxsize=self._at_once, ssl_context=self._tls)
            )
        return self._pools[proxy]

    def close(self) -> None:
        """Let go of all."""
        for pool in self._pools.values():
            pool.clear()

    def _through(self, proxy: str) -> urllib3.PoolManager:
        """A proxy's address may carry a user and a password."""
        user = urllib3.util.parse_url(proxy).auth
        headers = urllib3.make_headers(proxy_basic_auth=unquote(user)) if user else None
        return urllib3.ProxyManager(proxy, maxsize=self._at_once, proxy_headers=headers, ssl_context=self._tls)
