"""Why TLS does not come about, in one sentence: the part of `appliance doctor` that shakes hands as the daemon would.

`shake_hands` collects facts from the network and from files; `explain` judges them and is pure.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.x509.oid import ExtensionOID, NameOID

from appliance.core.clock import RELEASED_AT

if TYPE_CHECKING:
    from appliance.settings import Settings

Fault = Literal["", "files", "unreachable", "silent", "plain", "closed", "untrusted", "refused", "other"]

_ANSWER_S = 5.0
_LATE_SHARE = 1 / 6
"""Of its life that is left when a certificate should have been renewed long ago."""
_ALERT_S = 1.0
"""With TLS 1.3 a server judges our certificate after the handshake has ended for us."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that `appliance doctor` has looked at."""

    name: str
    verdict: Literal["ok", "warn", "fail", "skip"]
    reason: str
    """What was found, in one sentence."""
    remedy: str = ""
    """What to do about it; empty when nothing is to be done."""


@dataclass(frozen=True, slots=True)
class Trust:
    """What one side of a handshake brings along: PEM files."""

    authority: Path | bytes | None = None
    """Who must have signed the other side's certificate, also as the content; None for those whom the system trusts."""
    certificate: Path | None = None
    """Our own, with its key unless `key` is given."""
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is written in a certificate; times are Unix seconds."""

    subject: str
    issuer: str
    names: tuple[str, ...]
    """Host names and addresses that it is valid for."""
    valid_from: float
    valid_until: float


@dataclass(frozen=True, slots=True)
class Handshake:
    """What happened when somebody shook hands at `now` with `host`, and who took part."""

    host: str
    port: int
    now: float
    fault: Fault = ""
    """Empty when both sides were content."""
    code: int = 0
    """OpenSSL's X509_V_ERR_* number, where `fault` is untrusted."""
    detail: str = ""
    """In the words of the library, or the alert that the other side sent."""
    peer: Certificate | None = None
    own: Certificate | None = None
    authorities: tuple[Certificate, ...] = ()


def checks(told: Settings, now: float) -> Iterator[Check]:
    """What this device needs of TLS by its settings: its identity, the broker, who renews it, who is revoked."""
    files, mqtt = told.identity_files, told.mqtt
    yield check_identity(files.certificate, now, files.revoked)
    if mqtt.host and mqtt.tls:
        yield check_tls("broker tls", mqtt.host, mqtt.port, Trust(mqtt.ca, mqtt.certificate, mqtt.key), now)
    try:
        service = urlsplit(files.service.read_text(encoding="utf-8") if files.service.exists() else "")
        host, port = service.hostname, service.port or 443
    except ValueError as error:
        yield Check("enrolment", "fail", f"{files.service} holds no address ({error})", "enrol anew")
    else:
        if host:
            yield check_tls("enrolment", host, port, Trust(files.authority, files.certificate), now)
    if told.http.client_crl:
        yield _check_list(told.http.client_crl, now)


def check_identity(path: Path, now: float, revoked: Path | None = None) -> Check:
    """Whether the certificate that `appliance enroll` brought counts at `now`, long enough, and is not in `revoked`."""
    if not path.exists():
        return Check("identity", "skip", "this device is not enrolled")
    try:
        own = read_certificates(path)[0]
        serial = x509.load_pem_x509_certificate(path.read_bytes()).serial_number
    except (OSError, ValueError) as error:
        return Check("identity", "fail", f"{path} cannot be read ({_words(error)})", "mend its rights, or enrol anew")
    with contextlib.suppress(OSError, ValueError):  # a list that cannot be read is a finding of its own
        if revoked and x509.load_pem_x509_crl(revoked.read_bytes()).get_revoked_certificate_by_serial_number(serial):
            reason = f"our certificate, of {own.subject}, was revoked, says {revoked}"
            return Check("identity", "fail", reason, "enrol anew with a token, or ask who revoked it")
    until = f"the certificate of {own.subject} is valid until {day(own.valid_until)}"
    if now < own.valid_from:
        reason = f"the certificate of {own.subject} begins on {day(own.valid_from)}, and the clock says {day(now)}"
        return Check("identity", "fail", reason, "set the clock, or wait until it is synchronised")
    if now >= own.valid_until:
        reason = f"the certificate of {own.subject} expired on {day(own.valid_until)}, and the clock says {day(now)}"
        return Check("identity", "fail", reason, "enrol anew with a token, or set the clock if that is wrong")
    if own.valid_until - now < (own.valid_until - own.valid_from) * _LATE_SHARE:
        return Check("identity", "warn", f"{until}, and renewing it is overdue", "`appliance enroll --renew` says why")
    return Check("identity", "ok", until)


def _check_list(path: Path, now: float) -> Check:
    name = "revoked certificates"
    try:
        listed = x509.load_pem_x509_crl(path.read_bytes())
    except (OSError, ValueError) as error:
        return Check(name, "fail", f"{path} cannot be read ({_words(error)})", "bring it anew")
    until = listed.next_update_utc
    if until is not None and now >= until.timestamp():
        reason = f"the list of revoked certificates was good until {day(until.timestamp())}: no certificate is taken"
        return Check(name, "fail", reason, "bring a fresh one: `provision enroll revoked` signs it")
    return Check(name, "ok", f"{len(listed)} certificates are revoked")


def check_tls(name: str, host: str, port: int, trust: Trust, now: float | None = None) -> Check:
    """Shake hands with `host` as the daemon would, and say how that went; `now` is the wall time to judge by."""
    return explain(name, shake_hands(host, port, trust, time.time() if now is None else now))


def shake_hands(host: str, port: int, trust: Trust, now: float) -> Handshake:
    """Connect, shake hands, hang up. Blocks for some seconds at most; raises nothing of the network or of TLS."""
    try:
        known = trust.authority.read_bytes() if isinstance(trust.authority, Path) else trust.authority
        context = ssl.create_default_context(cadata=known.decode() if known else None)
        authorities = _written(known) if known else ()
        own = read_certificates(trust.certificate)[0] if trust.certificate else None
        if trust.certificate:
            context.load_cert_chain(trust.certificate, trust.key, password="")
    except (OSError, ValueError, IndexError) as error:
        return Handshake(host, port, now, "files", detail=_words(error))
    fault, code, detail, peer = _shake(host, port, context)
    if fault in {"untrusted", "refused"} and peer is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only to see what it shows
        peer = _shake(host, port, context, alert_s=0.0)[3]
    return Handshake(host, port, now, fault, code, detail, peer, own, authorities)


def _shake(
    host: str, port: int, context: ssl.SSLContext, alert_s: float | None = None
) -> tuple[Fault, int, str, Certificate | None]:
    peer: Certificate | None = None
    try:
        plain = socket.create_connection((host, port), _ANSWER_S)
    except (OSError, ValueError) as error:  # ValueError: what is no host name at all
        return "unreachable", 0, _words(error), None
    try:
        with context.wrap_socket(plain, server_hostname=host) as tls:
            shown = tls.getpeercert(binary_form=True)
            peer = _read(x509.load_der_x509_certificate(shown)) if shown else None
            tls.settimeout(_ALERT_S if alert_s is None else alert_s)
            with contextlib.suppress(TimeoutError, ssl.SSLWantReadError):  # it waits for us to speak: content
                if not tls.recv(1):
                    return "closed", 0, "", peer
    except ssl.SSLCertVerificationError as error:
        return "untrusted", error.verify_code, error.verify_message, peer
    except TimeoutError:
        return "silent", 0, "", peer
    except (ssl.SSLEOFError, ConnectionError):
        return "closed", 0, "", peer
    except ssl.SSLError as error:
        reason = error.reason or ""
        if "ALERT" in reason:
            return "refused", 0, reason, peer
        return ("plain" if reason in _PLAIN else "other"), 0, reason or _words(error), peer
    except (OSError, ValueError) as error:
        return "other", 0, _words(error), peer
    finally:
        plain.close()
    return "", 0, "", peer


_PLAIN = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL"}


def explain(name: str, found: Handshake) -> Check:
    """The one sentence about a handshake, and what to do."""
    where = f"{found.host}:{found.port}"
    if not found.fault:
        peer = found.peer
        until = f", whose certificate is valid until {day(peer.valid_until)}" if peer else ""
        return Check(name, "ok", f"TLS with {where}{until}")
    if found.fault == "untrusted":
        return Check(name, "fail", *_untrusted(found, where))
    if found.fault == "refused":
        return Check(name, "fail", *_refused(found, where))
    reason, remedy = {
        "files": (
            f"our own TLS files cannot be used ({found.detail})",
            "give PEM files that are there, may be read and belong together, or enrol with `appliance enroll`",
        ),
        "unreachable": (f"{where} cannot be reached ({found.detail})", "check name, port, network and firewall"),
        "silent": (f"{where} takes the connection and says nothing", "check that its program is alive"),
        "plain": (
            f"{where} does not speak TLS on this port",
            "give its TLS port (MQTT: usually 8883), or turn TLS off",
        ),
        "closed": (f"{where} hung up {_when(found)}", "see its log; give its TLS port (MQTT: usually 8883)"),
        "other": (f"TLS with {where} failed ({found.detail})", "see the other side's log"),
    }[found.fault]
    return Check(name, "fail", reason, remedy)


def _when(found: Handshake) -> str:
    if found.peer is None:
        return "at once, as what knows no TLS does"
    # Servers on an event loop, ours too, often end a handshake without telling why.
    return f"on seeing our certificate of {found.own.subject}" if found.own else "after the handshake"


_NOT_YET, _EXPIRED, _REVOKED = 9, 10, 23
_LIST_MISSING, _LIST_NOT_YET, _LIST_EXPIRED = 3, 11, 12
_SIGNATURE = 7
_NO_CHAIN = {2, 18, 19, 20, 21}
_PURPOSE = {24, 26, 79}
_OTHER_NAME = {62, 64}
# X509_V_ERR_* of OpenSSL's x509_vfy.h


def _untrusted(found: Handshake, where: str) -> tuple[str, str]:
    """Why we do not believe the other side, and what to do."""
    peer, today = found.peer, day(found.now)
    if found.now < RELEASED_AT and found.code in {_NOT_YET, _LIST_NOT_YET, _EXPIRED}:
        return (
            f"the clock of this machine says {today}, when no certificate of {where} was valid yet",
            "set the clock, or wait until it is synchronised",
        )
    if found.code in {_NOT_YET, _EXPIRED}:
        wrong = [one for one in (peer, *found.authorities) if one and not one.valid_from <= found.now < one.valid_until]
        who = wrong[0] if wrong else peer
        what = f"the certificate of {who.subject}" if who else f"a certificate that {where} shows"
        if found.code == _NOT_YET:
            since = f" on {day(who.valid_from)}" if who else ""
            return f"{what} becomes valid only{since}, and the clock says {today}", "set the clock that is wrong"
        since = f" on {day(who.valid_until)}" if who else ""
        return f"{what} expired{since}, and the clock says {today}", "renew it, or set the clock if that is wrong"
    if found.code == _REVOKED:
        return f"the certificate of {where} was revoked", "give it a new one, or ask who revoked it"
    if found.code in {_LIST_MISSING, _LIST_NOT_YET, _LIST_EXPIRED}:
        return f"the list of revoked certificates is missing or out of date ({found.detail})", "bring a fresh one"
    if found.code in _OTHER_NAME:
        names = ", ".join(peer.names) if peer and peer.names else "no name"
        return (
            f"the certificate of {where} is for {names}, not for {found.host}",
            "call it by a name in its certificate, or give it a certificate with this name",
        )
    if found.code in _PURPOSE:
        return f"the certificate of {where} is not meant for a server ({found.detail})", "give it one that is"
    if found.code in _NO_CHAIN or found.code == _SIGNATURE:
        return _no_chain(found, where)
    return f"the certificate of {where} is not to be trusted ({found.detail})", "see what it shows and who signed it"


def _no_chain(found: Handshake, where: str) -> tuple[str, str]:
    trusted = ", ".join(one.subject for one in found.authorities) or "the system's authorities"
    peer = found.peer
    if peer is None:
        return f"who signed the certificate of {where} is not trusted here ({found.detail})", "give its authority"
    if peer.issuer in {one.subject for one in found.authorities}:
        return (
            f"the certificate of {where} was signed by another key of an authority that is also called {peer.issuer}",
            "bring the file of the authority that the other side really has",
        )
    if peer.issuer == peer.subject:
        return (
            f"{where} vouches for itself ({peer.subject}), and this device trusts {trusted}",
            "give it a certificate of that authority, or trust its own",
        )
    return (
        f"the certificate of {where} was signed by {peer.issuer}, and this device trusts {trusted}",
        "give the authority that signed it; if another one stands between, let the server send its whole chain",
    )


_ALERTS = {
    "CERTIFICATE_EXPIRED": ("our certificate has expired, says {where}", "renew it: `appliance enroll --renew`"),
    "CERTIFICATE_REVOKED": ("our certificate was revoked, says {where}", "enrol anew, or ask who revoked it"),
    "UNKNOWN_CA": ("{where} does not trust who signed our certificate", "enrol with the authority that it trusts"),
    "CERTIFICATE_REQUIRED": ("{where} wants a certificate of us and got none", "enrol with `appliance enroll`"),
    "PROTOCOL_VERSION": ("{where} speaks no version of TLS that we take (1.2 or later)", "bring it up to date"),
    "UNRECOGNIZED_NAME": ("{where} does not serve the name {host}", "call it by a name that it has"),
}


def _refused(found: Handshake, where: str) -> tuple[str, str]:
    """Why the other side does not believe us; its alert may be as dumb as "bad certificate"."""
    own = found.own
    if own and not own.valid_from <= found.now < own.valid_until:
        valid = f"from {day(own.valid_from)} to {day(own.valid_until)}"
        reason = f"{where} refused our certificate, which is valid {valid}, and the clock says {day(found.now)}"
        return reason, "renew it, or set the clock if that is wrong"
    for alert, (reason, remedy) in _ALERTS.items():
        if alert in found.detail:
            return reason.format(where=where, host=found.host), remedy
    if own is None:
        return f"{where} refused the handshake ({found.detail})", "it may want a certificate: `appliance enroll`"
    return (
        f"{where} refused the certificate of {own.subject}, signed by {own.issuer} ({found.detail})",
        "see its log; it must trust that authority",
    )


def read_certificates(path: Path) -> tuple[Certificate, ...]:
    """What is written in the certificates of a PEM file; raises OSError, and ValueError where there are none."""
    return _written(path.read_bytes())


def _written(pem: bytes) -> tuple[Certificate, ...]:
    return tuple(_read(one) for one in x509.load_pem_x509_certificates(pem))


def _read(one: x509.Certificate) -> Certificate:
    try:
        found = one.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME).value
    except x509.ExtensionNotFound:
        found = x509.SubjectAlternativeName([])
    names = [str(entry.value) for entry in found] if isinstance(found, x509.SubjectAlternativeName) else []
    return Certificate(
        _called(one.subject),
        _called(one.issuer),
        tuple(names),
        one.not_valid_before_utc.timestamp(),
        one.not_valid_after_utc.timestamp(),
    )


def _called(name: x509.Name) -> str:
    common = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(common[0].value) if common else name.rfc4514_string()


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def day(at: float) -> str:
    """A time in Unix seconds, for people."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
