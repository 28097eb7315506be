"""The device's side of enrolment: its private key, which never leaves it, its certificate, and whom it asks for one.

Everything here blocks, and is imported only where a device has, or is to have, an identity.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from appliance.doctor_tls import Trust, check_tls
from models import schema
from models.enrolment import AUTHORITY, ENROL, LARGEST_BYTES, RENEW, REVOKED, Ask, IdentityFiles, Issued
from models.errors import IdentityError
from models.folder import write_file

_SECRET = 0o600
_TIMEOUT_S = 20.0
_OK = 200


@dataclass(frozen=True, slots=True)
class Facts:
    """What the certificate of this device says; times are Unix seconds."""

    name: str
    valid_from: float
    valid_until: float
    service: str
    """Who renews it; empty when it was brought by hand."""


class Identity:
    """The folder with a device's identity; several processes may work with it."""

    def __init__(self, files: IdentityFiles) -> None:
        """Use `files`, which need not exist."""
        self._files = files

    def facts(self) -> Facts | None:
        """What is there; None for nothing. Raises IdentityError when it cannot be read."""
        try:
            certificate = x509.load_pem_x509_certificate(self._files.certificate.read_bytes())
            service = self._files.service.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            msg = f"{self._files.certificate} cannot be read ({error}): mend its rights, or enrol anew"
            raise IdentityError(msg) from error
        return Facts(
            _name(certificate),
            certificate.not_valid_before_utc.timestamp(),
            certificate.not_valid_after_utc.timestamp(),
            service,
        )

    def request(self, name: str) -> str:
        """A certificate request for `name` (PEM), with a key that is made here and stays.

        A request that was never answered is made again with the same key, for which its token still opens.
        """
        with self._alone():
            return self._request(name)

    def accept(self, issued: Issued, authority: bytes, service: str = "") -> Facts:
        """Keep what the request was answered with; raises IdentityError for what `authority` (PEM) did not sign."""
        with self._alone():
            return self._accept(issued, authority, service)

    def enrol(self, service: str, token: str, name: str, authority: bytes) -> Facts:
        """Get a certificate for `name` of the service at this address; raises IdentityError."""
        with self._alone():
            asked = _Service(service, Trust(authority))
            return self._accept(asked.issue(ENROL, Ask(self._request(name), token)), authority, service)

    def renew(self) -> Facts:
        """Get a new certificate, for a new key, by showing the old one; raises IdentityError, keeping the old one."""
        with self._alone():
            facts = self._known()
            service = _Service(facts.service, Trust(self._files.authority, self._files.certificate))
            issued = service.issue(RENEW, Ask(self._request(facts.name)))
            return self._accept(issued, self._files.authority.read_bytes(), facts.service)

    def fetch_revoked(self) -> bool:
        """Bring the list of revoked certificates up to date; whether it changed. Raises IdentityError."""
        with self._alone():
            content = _Service(self._known().service, Trust(self._files.authority)).get(REVOKED)
            found = _checked_list(content, self._files.authority.read_bytes())
            with contextlib.suppress(OSError, ValueError):
                kept = x509.load_pem_x509_crl(self._files.revoked.read_bytes())
                if found.last_update_utc <= kept.last_update_utc:  # an old one, which somebody may hold up to us
                    return False
            self._write(self._files.revoked, content)
            return True

    def _known(self) -> Facts:
        facts = self.facts()
        if facts is None:
            raise IdentityError("this device has no certificate: get one with `appliance enroll`")
        if not facts.service:
            raise IdentityError(
                "the certificate was brought by hand, so nobody is known who renews it: make a request with "
                "`appliance enroll --request FILE`"
            )
        return facts

    def _request(self, name: str) -> str:
        key = self._pending()
        if key is None:
            key = ec.generate_private_key(ec.SECP256R1())
            self._write(self._files.pending, _private(key), _SECRET)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
        return request.public_bytes(serialization.Encoding.PEM).decode()

    def _pending(self) -> ec.EllipticCurvePrivateKey | None:
        try:
            key = serialization.load_pem_private_key(self._files.pending.read_bytes(), None)
        except (OSError, ValueError, TypeError):
            return None
        return key if isinstance(key, ec.EllipticCurvePrivateKey) else None

    def _accept(self, issued: Issued, authority: bytes, service: str) -> Facts:
        key = self._pending()
        if key is None:
            raise IdentityError("this answers no request of this device: make one first, with --request FILE")
        try:
            certificate = x509.load_pem_x509_certificate(issued.certificate.encode())
            certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
        except (ValueError, TypeError, InvalidSignature) as error:
            msg = f"the certificate is not one of the authority that was given ({error}): give the one that signed it"
            raise IdentityError(msg) from error
        if certificate.public_key() != key.public_key():
            raise IdentityError("the certificate is for another key: bring the answer to the latest request")
        _checked_list(issued.revoked.encode(), authority)
        self._write(self._files.authority, authority)
        self._write(self._files.revoked, issued.revoked.encode())
        self._write(self._files.service, service.encode())
        # Last and at once: until here the old identity counts, and from here on the new one.
        self._write(self._files.certificate, _private(key) + issued.certificate.encode(), _SECRET)
        self._files.pending.unlink(missing_ok=True)
        facts = self.facts()
        assert facts  # noqa: S101 - written just now
        return facts

    def _write(self, path: Path, content: bytes, mode: int = 0o644) -> None:
        write_file(path, content, mode)
        self._hand_over(path)

    def _hand_over(self, path: Path) -> None:
        """The daemon that reads it need not be root: what lies here belongs to whoever owns the state folder."""
        if os.geteuid() == 0:
            owner = self._files.folder.parent.stat()
            os.chown(path, owner.st_uid, owner.st_gid)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other process changes the folder; raises IdentityError when it cannot be written."""
        folder = self._files.folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._hand_over(folder)
            with (folder / "lock").open("ab") as lock:
                self._hand_over(folder / "lock")
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            msg = f"{folder} cannot be used ({error.strerror or error}): make room, or mend its rights"
            raise IdentityError(msg) from error


class _Service:
    """The enrolment service, as one device asks it."""

    def __init__(self, url: str, trust: Trust) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" or not parts.hostname:
            msg = f"{url!r} is no address of an enrolment service: give one like https://enrol.example.com:8453"
            raise IdentityError(msg)
        self._url, self._trust = url, trust
        self._host, self._port, self._path = parts.hostname, parts.port or 443, parts.path.rstrip("/")

    def issue(self, path: str, ask: Ask) -> Issued:
        """What an `Ask` is answered with; raises IdentityError."""
        content = self._request("POST", path, self._context(), json.dumps(schema.dump(ask)).encode())
        try:
            return schema.load(Issued, json.loads(content))
        except ValueError as error:
            msg = f"what answers at {self._url} is no enrolment service ({error}): give its address"
            raise IdentityError(msg) from error

    def get(self, path: str) -> bytes:
        """A public file; raises IdentityError."""
        return self._request("GET", path, self._context())

    def authority(self, fingerprint: str) -> bytes:
        """The authority's certificate (PEM), recognised by the SHA-256 of it; raises IdentityError.

        Nobody is trusted yet, and nothing but a public file crosses.
        """
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        content = self._request("GET", AUTHORITY, context)
        try:
            found = x509.load_pem_x509_certificate(content).fingerprint(hashes.SHA256()).hex()
        except ValueError as error:
            msg = f"what answers at {self._url} is no enrolment service ({error}): give its address"
            raise IdentityError(msg) from error
        if found != fingerprint.replace(":", "").lower():
            msg = (
                f"the authority at {self._url} has the fingerprint {found}, not the one given: somebody else answers "
                "there, or the fingerprint is wrong"
            )
            raise IdentityError(msg)
        return content

    def _context(self) -> ssl.SSLContext:
        authority, own = self._trust.authority, self._trust.certificate
        known = authority.read_bytes() if isinstance(authority, Path) else authority
        try:
            context = ssl.create_default_context(cadata=known.decode() if known else None)
            if own:
                context.load_cert_chain(own, password="")
        except (OSError, ValueError) as error:
            msg = f"the authority or the certificate cannot be used ({error}): give PEM files"
            raise IdentityError(msg) from error
        return context

    def _request(self, method: str, path: str, context: ssl.SSLContext, body: bytes | None = None) -> bytes:
        asked = http.client.HTTPSConnection(self._host, self._port, timeout=_TIMEOUT_S, context=context)
        try:
            asked.request(method, self._path + path, body=body)
            response = asked.getresponse()
            content = response.read(LARGEST_BYTES)
        except (OSError, http.client.HTTPException) as error:
            found = check_tls("enrolment", self._host, self._port, self._trust)
            why = f"{found.reason}: {found.remedy}" if found.verdict == "fail" else f"the connection broke ({error})"
            msg = f"the enrolment service cannot be asked, because {why}"
            raise IdentityError(msg) from error
        finally:
            asked.close()
        if response.status != _OK:
            raise IdentityError(_refusal(content) or f"{self._url}{path} is answered with status {response.status}")
        return content


def authority_of(service: str, fingerprint: str) -> bytes:
    """The certificate (PEM) of a service's authority, recognised by its fingerprint; raises IdentityError."""
    return _Service(service, Trust()).authority(fingerprint)


def _refusal(content: bytes) -> str:
    """Why it was refused, in the words of the other side; empty where there are none."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return f"the enrolment service refused: {json.loads(content)['error']}"
    return ""


def _checked_list(content: bytes, authority: bytes) -> x509.CertificateRevocationList:
    try:
        found = x509.load_pem_x509_crl(content)
        signed = found.is_signature_valid(x509.load_pem_x509_certificate(authority).public_key())  # type: ignore[arg-type] # any kind of key, or TypeError
    except (ValueError, TypeError) as error:
        msg = f"the list of revoked certificates cannot be read ({error}): ask for the whole answer again"
        raise IdentityError(msg) from error
    if not signed:
        raise IdentityError("the list of revoked certificates is not signed by the authority: nothing of it is taken")
    return found


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()  # a device must start with nobody there; the file is for its daemon alone
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def _name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""
