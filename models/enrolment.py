"""How a device comes by its certificate: what it sends to the enrolment service, what it gets, where it keeps that.

    GET  /v1/enrolment/authority  the authority's certificate (PEM), for a device that knows its fingerprint
    GET  /v1/enrolment/revoked    its list of revoked certificates (PEM)
    POST /v1/enrolment            an `Ask` with a token, answered with an `Issued`
    POST /v1/enrolment/renewal    an `Ask` of whoever shows a certificate that still counts, answered with an `Issued`

A refusal is `{"error": ...}`. Everything that crosses is public but the token; a private key never does. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ENROL, RENEW = "/v1/enrolment", "/v1/enrolment/renewal"
AUTHORITY, REVOKED = "/v1/enrolment/authority", "/v1/enrolment/revoked"
LARGEST_BYTES = 2**20
"""Of anything that crosses."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a device sends."""

    csr: str
    """Certificate request (PKCS#10, PEM), signed with the key that it is to certify."""
    token: str = ""
    """Opens one enrolment; empty in a renewal."""


@dataclass(frozen=True, slots=True)
class Issued:
    """What a device gets; PEM."""

    certificate: str
    authority: str
    """Who signed it."""
    revoked: str
    """Which certificates of this authority count no more."""


@dataclass(frozen=True, slots=True)
class IdentityFiles:
    """The folder with what makes this device known to others."""

    folder: Path

    @property
    def certificate(self) -> Path:
        """The private key and the certificate, in one file: a power cut leaves no key beside another's certificate."""
        return self.folder / "identity.pem"

    @property
    def authority(self) -> Path:
        """Who signed it."""
        return self.folder / "authority.pem"

    @property
    def revoked(self) -> Path:
        """Which certificates of this authority count no more."""
        return self.folder / "revoked.pem"

    @property
    def pending(self) -> Path:
        """The private key of a request that has not been answered yet."""
        return self.folder / "pending.pem"

    @property
    def service(self) -> Path:
        """Address of the enrolment service, which renews; empty after an enrolment by files."""
        return self.folder / "service"
