"""The gate before every HTTP request: who asks, may they, and not too often.

On loopback anybody on this machine may run models and read status, unless that is turned off; everything
else, and everybody elsewhere, needs a token or a client certificate. Two checks guard against web
pages that a browser on this machine has open: the header `host` must be one of our names (a page whose
name was rebound to 127.0.0.1 has another), and a page of another site may change nothing.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from appliance.adapters.answers import refusal
from appliance.adapters.tokens import Role, Token, TokenFile, role_of
from appliance.core.rates import Rate, Rates
from appliance.settings import LOOPBACK, Http
from models.errors import ApplianceError, BadInput, ConfigError, Forbidden, NotFound, Unauthenticated

log = structlog.get_logger()

READING = frozenset({"GET", "HEAD", "OPTIONS"})

_CHANGES = (
    (re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/infer"), Role.INFER),
    (re.compile(r"/v1/models/[^/]+/predict"), Role.INFER),
    (re.compile(r"/v2/repository/index"), Role.INFER),
    (re.compile(r"/v2/repository/models/[^/]+/(load|unload)"), Role.OPERATE),
    (re.compile(r"/v1/(faults|commands)(/.*)?"), Role.ADMIN),
)
"""Path -> the role that verbs other than `READING` need there."""

_READS = {"/v1/recorder": Role.OPERATE}
"""Path -> the role that reading needs, where that tells what others have asked."""

_LOOKED_AT = frozenset(
    {
        b"host",
        b"origin",
        b"authorization",
        b"x-request-id",
        b"traceparent",
        b"content-encoding",
        b"content-length",
        b"inference-header-content-length",
    }
)
"""Headers that are looked for in one go; `scope["known"]` has those that came."""

_FRESH_S = 1.0
"""How long a revoked token may still be taken."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever made a request: a token or certificate by its name, or an address."""

    name: str
    role: Role
    anonymous: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """What the operator decided."""

    anonymous: bool
    """Whether callers without a token may run models and read; off loopback never."""
    hosts: frozenset[str] = frozenset()
    """Names that the header `host` may have; empty takes any, as TLS vouches for the name there."""
    sites: frozenset[str] = frozenset()
    """Names of sites whose pages are our own, besides the one that `host` names: those of a proxy before us."""
    certificates: Mapping[str, Role] = field(default_factory=dict)
    """Common name of a client certificate, signed by the operator's authority -> what it may do."""


class Gate:
    """An ASGI application before another; `scope["caller"]` tells the one behind who asks."""

    def __init__(self, app: ASGIApp, rules: Rules, tokens: TokenFile, rates: Rates) -> None:
        """Let through to `app` what `rules`, `tokens` and `rates` allow."""
        self._app, self.rules, self.file, self.rates = app, rules, tokens, rates
        self._tokens: Mapping[str, Token] = {}
        self._read_at = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refusal, or hand on; anything but HTTP has no business here."""
        if scope["type"] != "http":
            return
        headers = looked_at(scope["headers"])
        try:
            if "\n" in scope["path"]:  # where a route ends its `$` lets one pass, and no role is decided for it
                raise NotFound("there is nothing at a path with a line break in it")
            self._refuse_other_sites(scope["method"], headers)
            caller = await self.caller(scope, headers)
            _check(caller, self.needed(scope["method"], scope["path"]))
            self.rates.enter(caller.name, time.monotonic())
        except ApplianceError as error:
            await refusal(error)(scope, receive, send)
            return
        scope["caller"], scope["known"] = caller, headers
        try:
            await self._app(scope, receive, send)
        finally:
            self.rates.leave(caller.name)

    def at_once(self, path: str, headers: Mapping[bytes, bytes], address: str) -> Caller | None:
        """Whoever posts to `path` from an `address`, as far as no file must be read for it; None where one must.

        Raises Unauthenticated, Forbidden. A request that is let in is still to be counted in `rates`.
        """
        self._refuse_other_sites("POST", headers)
        authorization = headers.get(b"authorization")
        if authorization is not None:
            found = role_of(token_in(authorization.decode("latin-1")), self._tokens)
            if found is None or time.monotonic() - self._read_at > _FRESH_S:
                return None
            caller = Caller(*found)
        else:
            caller = self._nameless(address)
        _check(caller, self.needed("POST", path))
        return caller

    def _refuse_other_sites(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise Forbidden for what another site's page, or a page under a name that is not ours, has a browser ask."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self.rules.hosts and host and _name_of(host) not in self.rules.hosts:
            msg = (
                f"{host[:100]!r} is no name of this appliance: use {', '.join(sorted(self.rules.hosts))}, "
                "or add the name to http.hosts"
            )
            raise Forbidden(msg)
        origin = headers.get(b"origin")
        if origin is not None and method not in READING:
            site = origin.decode("latin-1").partition("://")[2]
            if site != host and _name_of(site) not in self.rules.sites:
                raise Forbidden("a web page of another site asked for this: only this appliance's own page may")

    async def caller(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
        """Whoever asks; raises Unauthenticated, Forbidden."""
        authorization = headers.get(b"authorization")
        if authorization is not None:
            token = token_in(authorization.decode("latin-1"))
            found = role_of(token, self._tokens)
            now = time.monotonic()
            # A new token opens at once; one that is known is believed for a while without asking the disk.
            if found is None or now - self._read_at > _FRESH_S:
                self._tokens = await asyncio.to_thread(self._read)
                self._read_at = now
                found = role_of(token, self._tokens)
            if found is None:
                raise _needs_token("this token is not known here", Role.INFER)
            return Caller(*found)
        name = scope.get("client_certificate")
        if name is not None:
            role = self.rules.certificates.get(name)
            if role is None:
                msg = f"the certificate of {name[:100]!r} may do nothing here: add the name to http.client_roles"
                raise Forbidden(msg)
            return Caller(name, role)
        return self._nameless(str((scope.get("client") or ("local",))[0]))

    def _nameless(self, address: str) -> Caller:
        """Whoever shows neither token nor certificate; raises Unauthenticated."""
        if not self.rules.anonymous:
            raise _needs_token("this needs a token", Role.INFER)
        return _anonymous(address)

    def needed(self, method: str, path: str) -> Role:
        """What a caller must be for `method` on `path`."""
        return role_needed(method, path)

    def _read(self) -> Mapping[str, Token]:
        try:
            return self.file.read()
        except ConfigError as error:  # nobody is let in by a file that cannot be understood
            log.warning("tokens_unreadable", reason=str(error))
            return {}


def gate_before(app: ASGIApp, told: Http, tokens: TokenFile) -> Gate:
    """The gate that the settings describe; raises ConfigError when nobody could pass it."""
    if not told.on_loopback and not tokens.read() and not told.client_roles:
        msg = (
            f"http.host is {told.host!r}, which others can reach, and nobody could be let in: make a token with "
            f"`appliance token create NAME --role infer --state-dir {tokens.path.parent}`, "
            "or set http.client_ca and http.client_roles"
        )
        raise ConfigError(msg)
    names = frozenset(name.lower() for name in told.hosts)
    rules = Rules(
        anonymous=told.on_loopback and told.anonymous,
        hosts=LOOPBACK | names if told.on_loopback else frozenset(),
        sites=names,
        certificates={name: Role.of(role) for name, role in told.client_roles.items()},
    )
    rates = Rates(
        client=Rate(told.client_requests_per_s, told.client_concurrency),
        everyone=Rate(told.requests_per_s, told.concurrency),
    )
    return Gate(app, rules, tokens, rates)


def looked_at(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[bytes, bytes]:
    """Those of all headers that anybody here asks for; of several alike the last."""
    return {name: value for name, value in headers if name in _LOOKED_AT}


def role_needed(method: str, path: str) -> Role:
    """What a caller must be for `method` on `path`."""
    if method in READING:
        return _READS.get(path, Role.INFER)
    return decided(path) or Role.INFER


@lru_cache(maxsize=1024)
def decided(path: str) -> Role | None:
    """The role that changing something at `path` needs; None when nobody has decided it, as where nothing is."""
    return next((role for pattern, role in _CHANGES if pattern.fullmatch(path)), None)


@lru_cache(maxsize=1024)
def _anonymous(address: str) -> Caller:
    return Caller(address, Role.INFER, anonymous=True)


def _check(caller: Caller, needed: Role) -> None:
    if caller.role >= needed:
        return
    if caller.anonymous:
        why = f"this needs a token of role {needed.label}"
        raise _needs_token(why, needed)
    msg = f"{caller.name!r} has role {caller.role.label}, and this needs {needed.label}"
    raise Forbidden(msg)


def _needs_token(why: str, role: Role) -> Unauthenticated:
    msg = (
        f"{why}: make one with `appliance token create NAME --role {role.label}`, with this daemon's --state-dir if it "
        "has one, and send it as `authorization: Bearer ...`"
    )
    return Unauthenticated(msg)


def token_in(authorization: str) -> str:
    """The token of a header; browsers and stock clients send it as the password of any user."""
    scheme, _space, value = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode("latin-1").partition(":")[2]
        except (binascii.Error, ValueError) as error:
            raise BadInput("the header `authorization` is no Basic one: check what the client sends") from error
    raise Unauthenticated("the header `authorization` holds no token: send `Bearer ...`, or Basic with it as password")


@lru_cache(maxsize=1024)
def _name_of(host: str) -> str:
    """The name in HOST or HOST:PORT, in small letters and without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")
