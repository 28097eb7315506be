"""Who may do what, and the file of tokens that says so.

A token is `name.secret` with 256 random bits; the file keeps the SHA-256 of the secret, from which it
cannot be found, so that a copy of the file opens nothing.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from models import schema
from models.errors import BadInput, ConfigError, Conflict, NotFound
from models.folder import write_file

NAME = r"[A-Za-z0-9_-]{1,64}"
MOST_TOKENS = 1000
_MODE = 0o600


class Role(enum.IntEnum):
    """Each may do what those below it may."""

    INFER = 1
    """Run models, read status and metrics."""
    OPERATE = 2
    """Load and unload models."""
    ADMIN = 3
    """Everything that changes the device, and faults on purpose."""

    @classmethod
    def of(cls, name: str) -> Role:
        """The role of a name in small letters; raises BadInput."""
        try:
            return cls[name.upper()]
        except KeyError as error:
            msg = f"there is no role {name[:40]!r}; known: {', '.join(role.label for role in cls)}"
            raise BadInput(msg) from error

    @property
    def label(self) -> str:
        """The name in small letters."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Token:
    """What the file keeps of a token; `made_at` is in Unix seconds."""

    role: str
    sha256: str
    made_at: int


@dataclass(frozen=True, slots=True)
class _Document:
    tokens: Mapping[str, Token]


class TokenFile:
    """`tokens.json` in the state folder. Commands write it, the daemon only reads it."""

    def __init__(self, state_dir: Path) -> None:
        """Use the file in `state_dir`, which need not exist."""
        self.path = state_dir / "tokens.json"
        self._tokens: Mapping[str, Token] = {}
        self._stamp: tuple[int, int] | None = None

    def read(self) -> Mapping[str, Token]:
        """Tokens by name, read anew when the file has changed; raises ConfigError when it cannot be understood."""
        try:
            state = self.path.stat()
            stamp = (state.st_mtime_ns, state.st_ino)
            if stamp != self._stamp:
                tokens = schema.load(_Document, orjson.loads(self.path.read_bytes())).tokens
                for token in tokens.values():
                    Role.of(token.role)
                self._tokens = tokens
                self._stamp = stamp
        except FileNotFoundError:
            self._tokens, self._stamp = {}, None
        except (OSError, ValueError, BadInput) as error:
            msg = f"{self.path} cannot be read ({error}): mend its rights, or delete it and make new tokens"
            raise ConfigError(msg) from error
        return self._tokens

    def create(self, name: str, role: Role) -> str:
        """A new token, which is kept nowhere; raises BadInput for what is no name, and Conflict."""
        if not re.fullmatch(NAME, name):
            msg = f"{name[:100]!r} is no name of a token: use up to 64 of A-Z a-z 0-9 _ -"
            raise BadInput(msg)
        secret = secrets.token_urlsafe(32)
        with self._changing() as tokens:
            if name in tokens:
                msg = f"there is a token {name!r} already: revoke it first, or choose another name"
                raise Conflict(msg)
            if len(tokens) >= MOST_TOKENS:
                msg = f"there are {MOST_TOKENS} tokens already: revoke some first"
                raise Conflict(msg)
            tokens[name] = Token(role.label, digest(secret), int(time.time()))
        return f"{name}.{secret}"

    def revoke(self, name: str) -> None:
        """Let a token open nothing any more; raises NotFound."""
        with self._changing() as tokens:
            if tokens.pop(name, None) is None:
                msg = f"there is no token {name[:100]!r}: `appliance token list` names them"
                raise NotFound(msg)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, Token]]:
        """The tokens, written back whole and under a lock; the file belongs to the owner of its folder."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / "tokens.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        except OSError as error:
            msg = f"the state folder {folder} cannot be used ({error.strerror}): give another with --state-dir"
            raise ConfigError(msg) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tokens = dict(self.read())
            yield tokens
            write_file(self.path, orjson.dumps(schema.dump(_Document(tokens)), option=orjson.OPT_INDENT_2), _MODE)
            if os.geteuid() == 0:  # the daemon that reads it need not be root
                owner = folder.stat()
                os.chown(self.path, owner.st_uid, owner.st_gid)
        except OSError as error:
            msg = f"{self.path} cannot be written: {error.strerror}"
            raise ConfigError(msg) from error
        finally:
            os.close(lock)


def role_of(token: str, tokens: Mapping[str, Token]) -> tuple[str, Role] | None:
    """Name and role of a token as it was sent; None when it opens nothing. Takes as long for any wrong secret."""
    name, _dot, secret = token.partition(".")
    known = tokens.get(name)
    if known is None or not hmac.compare_digest(digest(secret), known.sha256):
        return None
    return name, Role.of(known.role)


def digest(secret: str) -> str:
    """What is kept of a secret."""
    # Plain SHA-256: 256 random bits need no slow hash, and each request pays for this one.
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()
