"""Who asks the upstream: devices by a token or certificate of their own, people by tokens with a role.

Tokens of the fleet are in the database, so that every replica knows them. Those of the file that `appliance token`
writes open the fleet's paths as well: with one of them the first token of the fleet is made.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import bindparam, delete, select
from starlette.types import ASGIApp, Scope

from appliance.adapters.access import READING, Caller, Gate, Rules, token_in
from appliance.adapters.tokens import NAME, Role, TokenFile, digest
from appliance.core.rates import Rates
from appliance.upstream import tables as t
from appliance.upstream.database import Database
from appliance.upstream.fleet import Fleet
from models.errors import BadInput, Conflict, Forbidden, NotFound, Unauthenticated

ROLES = {"viewer": Role.INFER, "operator": Role.OPERATE, "admin": Role.ADMIN}
DEVICE = "device"
_DEVICE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAMED = select(t.tokens).where(t.tokens.c.name == bindparam("name"))
_CHANGES = (
    (re.compile(r"/v1/fleet/tokens(/.*)?"), Role.ADMIN),
    (re.compile(r"/v1/fleet/audit"), Role.OPERATE),
)
"""Path -> the role that it needs, to read as well; others are read by everybody and changed by operators."""


class Tokens:
    """The tokens of the fleet; of each only the SHA-256 of its secret is kept."""

    def __init__(self, database: Database, fleet: Fleet, now: Callable[[], float]) -> None:
        """`fleet` keeps the audit log."""
        self._database, self._fleet, self._now = database, fleet, now

    def create(self, by: str, name: str, role: str, device_id: str = "") -> dict[str, Any]:
        """A new token, shown this once; raises BadInput, Conflict."""
        if not re.fullmatch(NAME, name):
            msg = f"{name[:100]!r} is no name of a token: use up to 64 of A-Z a-z 0-9 _ -"
            raise BadInput(msg)
        if role not in {*ROLES, DEVICE}:
            msg = f"there is no role {role[:40]!r}; known: {', '.join((*ROLES, DEVICE))}"
            raise BadInput(msg)
        if bool(device_id) != (role == DEVICE) or (device_id and not _DEVICE_ID.fullmatch(device_id)):
            raise BadInput("a token of role device, and no other, names its device: up to 64 of A-Z a-z 0-9 . _ -")
        secret = secrets.token_urlsafe(32)
        with self._database.writing() as tx:
            row: dict[str, Any] = {"name": name, "role": role, "device_id": device_id, "sha256": digest(secret)}
            row |= {"made_at": self._now(), "made_by": by}
            if not self._database.add(tx, t.tokens, row):
                msg = f"there is a token {name!r} already: revoke it first, or choose another name"
                raise Conflict(msg)
            self._fleet.note(tx, by, "token made", device_id, {"name": name, "role": role})
        return {"name": name, "role": role, "device_id": device_id, "token": f"{name}.{secret}"}

    def revoke(self, by: str, name: str) -> None:
        """Let a token open nothing any more; raises NotFound."""
        with self._database.writing() as tx:
            if not tx.execute(delete(t.tokens).where(t.tokens.c.name == name)).rowcount:
                msg = f"there is no token {name[:100]!r}: GET /v1/fleet/tokens names them"
                raise NotFound(msg)
            self._fleet.note(tx, by, "token revoked", "", {"name": name})

    def all(self) -> list[dict[str, Any]]:
        """What is kept of each, without what it was hashed to."""
        keys = ("name", "role", "device_id", "made_at", "made_by")
        columns = [t.tokens.c[key] for key in keys]
        with self._database.reading() as tx:
            return [dict(zip(keys, row, strict=True)) for row in tx.execute(select(*columns).order_by(t.tokens.c.name))]

    def opened(self, token: str) -> tuple[str, str, str] | None:
        """Name, role and device of a token as it was sent; None when it opens nothing here."""
        name, _dot, secret = token.partition(".")
        with self._database.reading() as tx:
            known = tx.execute(_NAMED, {"name": name[:128]}).one_or_none()
        if known is None or not hmac.compare_digest(digest(secret), known.sha256):
            return None
        return known.name, known.role, known.device_id

    def device(self, scope: Scope, authorization: str | None) -> str:
        """Id of the device that sends a request, by its token or by the certificate that TLS has verified.

        Raises Unauthenticated, and Forbidden for a token of people.
        """
        if authorization is not None:
            found = self.opened(token_in(authorization))
            if found is None:
                raise Unauthenticated("this device's token is not known here: ask for one of role device")
            if found[1] != DEVICE:
                raise Forbidden("this token is one of people: a device needs one of role device, made for it")
            return found[2]
        name: str | None = scope.get("client_certificate")
        if name is None or not _DEVICE_ID.fullmatch(name):
            raise Unauthenticated("who sends a batch shows a token of role device, or the certificate of a device")
        return name


class FleetGate(Gate):
    """Before the paths of people."""

    def __init__(self, app: ASGIApp, rules: Rules, file: TokenFile, rates: Rates, tokens: Tokens) -> None:
        """Let through to `app` what `rules`, the tokens of `file` and of the database, and `rates` allow."""
        super().__init__(app, rules, file, rates)
        self._fleet_tokens = tokens

    async def caller(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
        """Whoever asks; raises Unauthenticated, Forbidden."""
        authorization = headers.get(b"authorization")
        if authorization is not None:
            token = token_in(authorization.decode("latin-1"))
            found = await asyncio.to_thread(self._fleet_tokens.opened, token)
            if found:
                name, role, _device = found
                if role == DEVICE:
                    raise Forbidden("this is a device's token: people need one of role viewer, operator or admin")
                return Caller(name, ROLES[role])
        return await super().caller(scope, headers)

    def needed(self, method: str, path: str) -> Role:
        """What a caller must be for `method` on `path`."""
        decided = next((role for pattern, role in _CHANGES if pattern.fullmatch(path)), None)
        return decided or (Role.INFER if method in READING else Role.OPERATE)
