"""TLS as this device listens and as it calls: contexts made of PEM files, and files that changed taken up again."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from models.errors import ConfigError


class Listening:
    """TLS of a door."""

    def __init__(
        self,
        certificate: Path,
        key: Path | None = None,
        client_ca: Path | None = None,
        client_crl: Path | None = None,
    ) -> None:
        """Show `certificate`, a chain with its key unless that is in `key`; take clients' that `client_ca` signed.

        `client_crl` says which of these it has revoked. Raises ConfigError for files that cannot be used.
        """
        self._certificate, self._key = certificate, key
        self._of_clients = [path for path in (client_ca, client_crl) if path]
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.load()
        if client_ca:
            self.context.verify_mode = ssl.CERT_OPTIONAL  # who has none may still have a token
        if client_crl:
            self.context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF

    def load(self) -> None:
        """Have new connections go by what the files hold now; raises ConfigError.

        Of several revocation lists of one authority OpenSSL goes by the newest.
        """
        try:
            self.context.load_cert_chain(self._certificate, self._key, password="")  # refused, not asked for
            for path in self._of_clients:
                self.context.load_verify_locations(path)
        except OSError as error:
            files = ", ".join(str(path) for path in (self._certificate, self._key, *self._of_clients) if path)
            msg = f"the TLS files {files} cannot be used ({error}): give PEM files that belong together"
            raise ConfigError(msg) from error


@dataclass(frozen=True, slots=True)
class Calling:
    """Files of whoever calls a server."""

    ca: Path | None = None
    """Who must have signed the server's certificate; None for those whom the system trusts."""
    certificate: Path | None = None
    """Our own, with its key unless `key` is given; None shows none."""
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """What the files hold now; raises OSError, with a sentence, when they cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key, password="")
        except OSError as error:
            files = ", ".join(str(path) for path in (self.ca, self.certificate, self.key) if path)
            msg = f"the TLS files {files} cannot be used ({error.strerror}): give others, or enrol this device"
            raise OSError(error.errno, msg) from error
        return context
