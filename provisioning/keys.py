"""Signing keys in files: Ed25519, each private key encrypted with a passphrase (PKCS#8), its public key beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.signer import CryptoSigner, SSlibKey

from models.errors import ConfigError
from models.folder import write_file

_PRIVATE, _PUBLIC = ".pem", ".pub.json"


def read_public(path: Path) -> SSlibKey:
    """The public key in a file that `Keys.create` wrote; raises ConfigError when it cannot be read."""
    try:
        known = json.loads(path.read_bytes())
        return SSlibKey.from_dict(known.pop("keyid"), known)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{path} is no public key ({error}): restore it from a copy"
        raise ConfigError(msg) from error


class Keys:
    """One or several folders of key files; offline keys are simply in a folder that is not always there."""

    def __init__(self, folders: Sequence[Path], passphrase: Callable[[], bytes]) -> None:
        """Look for keys in `folders`; new ones come into the first. `passphrase` is asked when one is needed."""
        self._folders, self._passphrase = folders, passphrase

    def create(self, name: str) -> CryptoSigner:
        """Make a key; raises ConfigError where there is one of that name."""
        folder = self._folders[0]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        private, public = folder / f"{name}{_PRIVATE}", folder / f"{name}{_PUBLIC}"
        if private.exists():
            msg = f"{private} is there already: give an empty folder for new keys"
            raise ConfigError(msg)
        secret = Ed25519PrivateKey.generate()
        signer = CryptoSigner(secret)
        encryption = serialization.BestAvailableEncryption(self._secret())
        pem = secret.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        write_file(private, pem, mode=0o600)
        known = {"keyid": signer.public_key.keyid, **signer.public_key.to_dict()}
        write_file(public, json.dumps(known, indent=1).encode())
        return signer

    def names(self) -> Mapping[str, str]:
        """Key id -> name of each key whose private file is here."""
        return {
            self.public(path.name.removesuffix(_PRIVATE)).keyid: path.name.removesuffix(_PRIVATE)
            for folder in self._folders
            for path in sorted(folder.glob(f"*{_PRIVATE}"))
        }

    def next_name(self, role: str) -> str:
        """A name for one more key of `role`."""
        numbers = [int(found[1]) for name in self.names().values() if (found := re.fullmatch(rf"{role}-(\d+)", name))]
        return f"{role}-{max(numbers, default=0) + 1}"

    def public(self, name: str) -> SSlibKey:
        """The public key of `name`; raises ConfigError when it cannot be read."""
        return read_public(self._find(f"{name}{_PUBLIC}"))

    def signer(self, name: str) -> CryptoSigner:
        """What signs with the key `name`; raises ConfigError when it cannot be read, or the passphrase is another."""
        path = self._find(f"{name}{_PRIVATE}")
        try:
            secret = serialization.load_pem_private_key(path.read_bytes(), self._secret())
        except (OSError, ValueError, TypeError) as error:
            msg = f"{path} cannot be opened: give its own passphrase, or restore it from a copy"
            raise ConfigError(msg) from error
        if not isinstance(secret, Ed25519PrivateKey):
            msg = f"{path} is no Ed25519 key: use those that `provision publish init` made"
            raise ConfigError(msg)
        return CryptoSigner(secret, self.public(name))

    def _secret(self) -> bytes:
        secret = self._passphrase()
        if not secret:
            raise ConfigError("keys are encrypted: set PROVISION_PASSPHRASE to their passphrase, or run on a terminal")
        return secret

    def _find(self, file: str) -> Path:
        for folder in self._folders:
            if (folder / file).exists():
                return folder / file
        msg = f"there is no key file {file} in {', '.join(map(str, self._folders))}: give its folder with --keys"
        raise ConfigError(msg)
