"""The fleet's certificate authority: who may be which device, until when, and whose certificate counts no more.

`provision enroll` works with it in a workshop; whoever serves devices hands what they ask to `enrol` and `renew`.
All of it is one folder:

    authority.pem      its certificate, which devices and brokers trust
    authority.key.pem  its private key (ECDSA P-256), encrypted with a passphrase (PKCS#8)
    register.json      enrolment tokens by the SHA-256 of their secret, and every certificate that still matters
    revoked.pem        the list of revoked certificates (CRL), also for mosquitto's `crlfile`

Past 400 lines with all that X.509 wants to be told.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from models import schema
from models.enrolment import Ask, Issued
from models.errors import BadInput, ConfigError, Forbidden, NotFound
from models.folder import write_file

_DAY_S = 86400
_AUTHORITY_DAYS = 3650
_SERVER_DAYS = 365
_REVOKED_DAYS = 90
"""A list that is older lets nobody in any more: who can hold it back may do so only for so long."""
_BACK_S = 3600
"""Certificates begin so much earlier, for those whose clocks are a little behind."""
_NAME = r"[A-Za-z0-9._-]{1,64}"
_LONGEST_NAME = 64
"""What X.509 has room for."""
_HOST = r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*"
_DEVICE, _SERVER = "device", "server"


@dataclass(frozen=True, slots=True)
class Token:
    """What is kept of an enrolment token; times are Unix seconds."""

    device: str
    """The only name that it opens; empty for any that nobody has."""
    expires_at: int
    also: tuple[str, ...] = ()
    """Host names and addresses that the certificate is to hold besides."""
    key_sha256: str = ""
    """Of the public key that used it: the same device may ask again when the answer was lost, another may not."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A certificate that was issued; times are Unix seconds."""

    name: str
    kind: str
    """device or server."""
    valid_until: int = 0
    revoked_at: int = 0
    """0 where it was not."""
    also: tuple[str, ...] = ()

    def counts(self, now: float) -> bool:
        """Whether it is neither revoked nor expired."""
        return not self.revoked_at and now < self.valid_until


@dataclass(frozen=True, slots=True)
class Register:
    """Everything that the authority remembers."""

    device_days: int
    """For how long certificates of devices are valid."""
    tokens: dict[str, Token] = field(default_factory=dict)
    """By the SHA-256 of the secret."""
    certificates: dict[str, Entry] = field(default_factory=dict)
    """By serial number, in hexadecimal digits."""

    def counting(self, name: str, now: float) -> dict[str, Entry]:
        """Those of `name` that count."""
        return {serial: one for serial, one in self.certificates.items() if one.name == name and one.counts(now)}

    def revoke(self, serials: Iterable[str], now: float) -> None:
        """Let certificates count no more."""
        for serial in serials:
            self.certificates[serial] = replace(self.certificates[serial], revoked_at=int(now))

    def forget(self, now: float) -> None:
        """Drop what has expired, which nobody believes anyway."""
        for serial in [serial for serial, one in self.certificates.items() if one.valid_until <= now]:
            del self.certificates[serial]
        for digest in [digest for digest, token in self.tokens.items() if token.expires_at <= now]:
            del self.tokens[digest]


class Authority:
    """One folder with an authority; several processes may work with it. `now` is in Unix seconds everywhere."""

    def __init__(self, folder: Path, passphrase: Callable[[], bytes]) -> None:
        """Use `folder`; `passphrase` is asked when the key is needed."""
        self._folder, self._passphrase = folder, passphrase

    def init(self, name: str, device_days: int, now: float) -> None:
        """Make the authority `name`; raises ConfigError where there is one."""
        if self._path("key").exists():
            msg = f"{self._folder} holds an authority already: give an empty folder"
            raise ConfigError(msg)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(name, _subject(name), key.public_key(), now, _AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        encrypted = serialization.BestAvailableEncryption(self._secret())
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encrypted)
        write_file(self._path("key"), pem, mode=0o600)
        write_file(self._path("certificate"), certificate.public_bytes(serialization.Encoding.PEM))
        self._write(Register(device_days))
        self.list_revoked(now)

    @cached_property
    def certificate(self) -> x509.Certificate:
        """Its certificate; raises ConfigError where there is none."""
        try:
            return x509.load_pem_x509_certificate(self._path("certificate").read_bytes())
        except (OSError, ValueError) as error:
            msg = f"{self._folder} holds no authority ({error}): make one with `provision enroll init`"
            raise ConfigError(msg) from error

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its certificate, by which a device recognises it."""
        return self.certificate.fingerprint(hashes.SHA256()).hex()

    def register(self) -> Register:
        """What is remembered; raises ConfigError when it cannot be read."""
        try:
            return schema.load(Register, json.loads(self._path("register").read_bytes()))
        except (OSError, ValueError) as error:
            msg = f"{self._path('register')} cannot be read ({error}): restore it from a copy"
            raise ConfigError(msg) from error

    # Tokens

    def new_token(self, device: str, also: Sequence[str], expires_at: float) -> str:
        """A token that opens one enrolment, of `device` or, empty, of any free name; it is kept nowhere."""
        if device:
            _check_name(device)
        for name in also:
            _check_host(name)
        secret = secrets.token_urlsafe(32)
        with self._changing() as register:
            register.tokens[_digest(secret)] = Token(device, int(expires_at), tuple(also))
        return secret

    # Devices

    def enrol(self, ask: Ask, now: float) -> Issued:
        """Certify the key of a device that holds a token.

        A token counts once: for one key and name. Earlier certificates of the name are revoked, because the device
        that had them was replaced. Raises BadInput, and Forbidden when the token opens nothing or not this name.
        """
        key, name = _request(ask.csr)
        with self._changing() as register:
            token = register.tokens.get(_digest(ask.token))
            if token is None:
                raise Forbidden("this token is not known here: ask for one made with `provision enroll token`")
            if token.key_sha256 not in {"", _key_digest(key)}:
                raise Forbidden("this token was used already: ask for a new one, and find out by whom if not by you")
            if now >= token.expires_at:
                raise Forbidden("this token has expired: ask for a new one")
            if token.device not in {"", name}:
                msg = f"this token is for another device than {name}: ask for one that is for it"
                raise Forbidden(msg)
            earlier = register.counting(name, now)
            if earlier and (not token.device or _SERVER in {one.kind for one in earlier.values()}):
                msg = f"the name {name} is taken: choose another, or ask for a token that is for it"
                raise Forbidden(msg)
            register.revoke(earlier, now)
            # Written down before it is answered: whatever is cut off, no other key gets a certificate for this token.
            register.tokens[_digest(ask.token)] = replace(token, device=name, key_sha256=_key_digest(key))
            certificate = self._sign(register, key, Entry(name, _DEVICE, also=token.also), now)
        return self._issued(certificate, now, anew=bool(earlier))

    def renew(self, ask: Ask, shown: bytes, now: float) -> Issued:
        """Certify the new key of a device that has shown the certificate `shown` (DER) in a handshake.

        Raises Forbidden for one that was not issued here to a device, was revoked, or has expired.
        """
        key, name = _request(ask.csr)
        with self._changing() as register:
            old = register.certificates.get(_hex(x509.load_der_x509_certificate(shown).serial_number))
            if old is None or old.kind != _DEVICE or not old.counts(now):
                raise Forbidden("this certificate counts no more: enrol anew with a token")
            if old.name != name:
                msg = f"the certificate is that of {old.name}, and the request is for {name}: ask for your own name"
                raise Forbidden(msg)
            certificate = self._sign(register, key, Entry(name, _DEVICE, also=old.also), now)
        return self._issued(certificate, now)

    def certify(self, csr: str, device: str, also: Sequence[str], now: float) -> Issued:
        """Certify a request that an operator vouches for to come from `device`; raises BadInput where it says else."""
        for host in also:
            _check_host(host)
        key, name = _request(csr)
        if name != device:
            msg = f"the request is for {name}, not for {device}: see where it comes from"
            raise BadInput(msg)
        with self._changing() as register:
            _check_kind(register, name, _DEVICE, now)
            certificate = self._sign(register, key, Entry(name, _DEVICE, also=tuple(also)), now)
        return self._issued(certificate, now)

    # Servers

    def serve_as(self, names: Sequence[str], now: float) -> bytes:
        """A new key and a certificate for a server of ours, as one PEM file; raises BadInput for what is no name."""
        for name in names:
            _check_host(name)
        key = ec.generate_private_key(ec.SECP256R1())
        with self._changing() as register:
            _check_kind(register, names[0], _SERVER, now)
            certificate = self._sign(register, key.public_key(), Entry(names[0], _SERVER, also=tuple(names)), now)
        plain = serialization.NoEncryption()
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        return pem + certificate.public_bytes(serialization.Encoding.PEM)

    # Revocation

    def revoke(self, name: str, now: float) -> int:
        """Let no certificate of `name` count any more; how many that were. Raises NotFound when there is none."""
        with self._changing() as register:
            found = register.counting(name, now)
            if not found:
                msg = f"no certificate of {name[:100]!r} counts: `provision enroll status` shows those that do"
                raise NotFound(msg)
            register.revoke(found, now)
        self.list_revoked(now)
        return len(found)

    def list_revoked(self, now: float, *, anew: bool = True) -> bytes:
        """The list of revoked certificates (PEM), signed anew and written down; else one of at most a day ago."""
        path, begins = self._path("revoked"), int(now) - _BACK_S
        with self._alone():
            with contextlib.suppress(OSError, ValueError):
                content = path.read_bytes()
                latest = int(x509.load_pem_x509_crl(content).last_update_utc.timestamp())
                if not anew and latest > begins - _DAY_S:
                    return content
                begins = max(begins, latest + 1)  # of two of the same second OpenSSL would go by either
            builder = (
                x509.CertificateRevocationListBuilder()
                .issuer_name(self.certificate.subject)
                .last_update(_moment(begins))
                .next_update(_moment(now + _REVOKED_DAYS * _DAY_S))
                .add_extension(_signed_by(self._key), critical=False)
                .add_extension(x509.CRLNumber(begins), critical=False)
            )
            for serial, one in self.register().certificates.items():
                if one.revoked_at:
                    revoked = x509.RevokedCertificateBuilder().serial_number(int(serial, 16))
                    builder = builder.add_revoked_certificate(revoked.revocation_date(_moment(one.revoked_at)).build())
            content = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
            write_file(path, content)
        return content

    # Within

    def _issued(self, certificate: x509.Certificate, now: float, *, anew: bool = False) -> Issued:
        pem = serialization.Encoding.PEM
        return Issued(
            certificate.public_bytes(pem).decode(),
            self.certificate.public_bytes(pem).decode(),
            self.list_revoked(now, anew=anew).decode(),
        )

    def _sign(self, register: Register, key: ec.EllipticCurvePublicKey, entry: Entry, now: float) -> x509.Certificate:
        """A certificate of `entry`, noted in the register, which also forgets what has expired."""
        names = [entry.name, *entry.also] if re.fullmatch(_HOST, entry.name) else entry.also
        uses = [ExtendedKeyUsageOID.SERVER_AUTH] + [ExtendedKeyUsageOID.CLIENT_AUTH] * (entry.kind == _DEVICE)
        days = register.device_days if entry.kind == _DEVICE else _SERVER_DAYS
        builder = (
            _builder(entry.name, self.certificate.subject, key, now, days)
            .add_extension(_signed_by(self._key), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        )
        if names:
            shown = [_general(name) for name in dict.fromkeys(names)]
            builder = builder.add_extension(x509.SubjectAlternativeName(shown), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        register.forget(now)
        entry = replace(entry, valid_until=int(certificate.not_valid_after_utc.timestamp()))
        register.certificates[_hex(certificate.serial_number)] = entry
        return certificate

    @cached_property
    def _key(self) -> ec.EllipticCurvePrivateKey:
        path = self._path("key")
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), self._secret())
        except (OSError, ValueError, TypeError) as error:
            msg = f"{path} cannot be opened: give its own passphrase, or restore it from a copy"
            raise ConfigError(msg) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            msg = f"{path} is no ECDSA key: restore it from a copy"
            raise ConfigError(msg)
        return key

    def _secret(self) -> bytes:
        secret = self._passphrase()
        if not secret:
            raise ConfigError("the key is encrypted: set PROVISION_PASSPHRASE to its passphrase, or run on a terminal")
        return secret

    def _path(self, what: str) -> Path:
        names = {"certificate": "authority.pem", "key": "authority.key.pem"}
        names |= {"register": "register.json", "revoked": "revoked.pem"}
        return self._folder / names[what]

    def _write(self, register: Register) -> None:
        write_file(self._path("register"), json.dumps(schema.dump(register), indent=1).encode(), mode=0o600)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Register]:
        """The register, written back after the body has changed it."""
        with self._alone():
            register = self.register()
            yield register
            self._write(register)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other thread or process changes the folder; raises ConfigError where there is no authority."""
        self.certificate  # noqa: B018 - or else the lock would make any folder look like one
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _request(csr: str) -> tuple[ec.EllipticCurvePublicKey, str]:
    """Key and name in a request; raises BadInput for one that is not signed with its own ECDSA P-256 key."""
    try:
        request = x509.load_pem_x509_csr(csr.encode())
        key, valid = request.public_key(), request.is_signature_valid
        names = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        msg = f"this is no certificate request ({error}): send one that `appliance enroll` made"
        raise BadInput(msg) from error
    if not valid or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BadInput("the request is not signed with an ECDSA P-256 key of its own: make it with `appliance enroll`")
    name = str(names[0].value) if len(names) == 1 else ""
    _check_name(name)
    return key, name


def _check_name(name: str) -> None:
    if not re.fullmatch(_NAME, name):
        msg = f"{name[:100]!r} is no name of a device: use up to 64 of A-Z a-z 0-9 . _ -"
        raise BadInput(msg)


def _check_host(name: str) -> None:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if not re.fullmatch(_HOST, name) or len(name) > _LONGEST_NAME:
            msg = f"{name[:100]!r} is no host name or address: give one like press-7.local or 10.0.0.7"
            raise BadInput(msg) from None


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _check_kind(register: Register, name: str, kind: str, now: float) -> None:
    """No device may pass for a server, nor the other way round."""
    if any(one.kind != kind for one in register.counting(name, now).values()):
        msg = f"{name} is the name of another kind of machine: choose another"
        raise BadInput(msg)


def _digest(secret: str) -> str:
    # Plain SHA-256: 256 random bits need no slow hash.
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def _key_digest(key: ec.EllipticCurvePublicKey) -> str:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def _hex(serial: int) -> str:
    return f"{serial:x}"


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(int(at), timezone.utc)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _signed_by(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: float, days: int
) -> x509.CertificateBuilder:
    """What every certificate says."""
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_moment(now - _BACK_S))
        .not_valid_after(_moment(now + days * _DAY_S))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )
