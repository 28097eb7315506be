"""How a device comes by its certificate, keeps it fresh and loses it: the rules, on a real service on loopback.

Past 400 lines because every test is one step or one attack against the same authority and device.
"""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import os
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.enrolment import DAY_S, Fleet, listening
from support.processes import eventually

from appliance import identity as upkeep
from appliance import settings
from appliance.adapters.identity import Identity, authority_of
from appliance.adapters.tls import Calling, Listening
from appliance.authority import Authority
from appliance.core.identity import Tries, renewal, spread_of
from models.enrolment import ENROL, LARGEST_BYTES, RENEW, Ask, IdentityFiles, Issued
from models.errors import BadInput, ConfigError, Forbidden, IdentityError, NotFound

pytestmark = pytest.mark.unit

_PEM = serialization.Encoding.PEM


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet")) as served:
        yield served


@pytest.fixture
def ageing(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet of one test, whose clock that test may set."""
    with Fleet(tmp_path / "ageing") as served:
        yield served


@pytest.fixture
def here(tmp_path: Path) -> Identity:
    """A device that has no certificate yet."""
    return Identity(files(tmp_path))


def files(folder: Path) -> IdentityFiles:
    return IdentityFiles(folder / "identity")


def enrol(fleet: Fleet, device: Identity, name: str, token: str = "") -> None:
    device.enrol(fleet.url, token or fleet.token(name), name, fleet.ca.read_bytes())


def certificate(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(files(folder).certificate.read_bytes())


# When to renew


def test_a_certificate_is_renewed_after_two_thirds_of_its_life_and_a_fleet_not_all_at_once() -> None:
    due = [renewal(0, 1200, 100, spread, Tries()).at for spread in (0, 0.5, 1)]
    assert due == pytest.approx([800, 850, 900])
    places = [spread_of(f"press-{number}") for number in range(1000)]
    assert min(places) < 0.01
    assert max(places) > 0.99
    assert 0.45 < sum(places) / 1000 < 0.55
    assert spread_of("press-7") == spread_of("press-7")


def test_renewals_that_fail_are_tried_again_ever_more_rarely_but_at_least_four_times_a_day() -> None:
    waits_s = [renewal(0, 1e9, 9e8, 0.0, Tries(failed, 9e8)).at - 9e8 for failed in (1, 2, 3, 20, 10_000)]
    assert waits_s == [30, 60, 120, 10800, 10800]
    assert renewal(0, 1e9, 8e8, 0.0, Tries(1, 9e8)).at == 8e8 + 30  # the clock was set back meanwhile


def test_before_its_beginning_and_after_its_end_a_certificate_cannot_be_renewed() -> None:
    assert [renewal(1000, 2000, now, 0.5, Tries()).hindered for now in (0, 999, 1000, 1999, 2000)] == [
        "clock",
        "clock",
        "",
        "",
        "expired",
    ]


# Enrolment


def test_an_enrolled_device_has_a_key_of_its_own_and_a_certificate_of_its_fleet(
    fleet: Fleet, here: Identity, tmp_path: Path
) -> None:
    token = fleet.authority.new_token("press-7", ["10.0.0.7", "press-7.example.com"], time.time() + 60)
    facts = here.enrol(fleet.url, token, "press-7", fleet.ca.read_bytes())
    assert (facts.name, facts.service) == ("press-7", fleet.url)
    assert 89 * DAY_S < facts.valid_until - time.time() < 90 * DAY_S
    found = certificate(tmp_path)
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["press-7", "10.0.0.7", "press-7.example.com"]
    assert here.facts() == facts
    Listening(
        files(tmp_path).certificate, None, files(tmp_path).authority, files(tmp_path).revoked
    )  # all of it is used


def test_the_private_key_lies_in_one_file_that_only_its_owner_may_read_and_never_leaves(
    fleet: Fleet, here: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    send = http.client.HTTPSConnection.send
    monkeypatch.setattr(http.client.HTTPSConnection, "send", lambda own, data: (sent.append(data), send(own, data))[1])
    enrol(fleet, here, "press-8")
    here.renew()
    assert any(b"BEGIN CERTIFICATE REQUEST" in data for data in sent)
    assert not any(b"PRIVATE" in data for data in sent)
    secret = [path for path in tmp_path.rglob("*") if path.is_file() and b"PRIVATE" in path.read_bytes()]
    assert secret == [files(tmp_path).certificate]
    assert stat.S_IMODE(secret[0].stat().st_mode) == 0o600
    line = secret[0].read_bytes().splitlines()[1]
    assert not any(line in path.read_bytes() for path in fleet.folder.rglob("*") if path.is_file())


def test_a_token_is_kept_as_a_hash_and_its_file_is_for_the_authority_alone(fleet: Fleet) -> None:
    token = fleet.token("press-9")
    register = fleet.folder / "authority" / "register.json"
    assert token not in register.read_text()
    assert stat.S_IMODE(register.stat().st_mode) == 0o600
    key = fleet.folder / "authority" / "authority.key.pem"
    assert "ENCRYPTED" in key.read_text()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_token_opens_once_but_the_same_device_may_ask_again_when_the_answer_was_lost(
    fleet: Fleet, tmp_path: Path
) -> None:
    token, request = fleet.token(), Identity(files(tmp_path / "a")).request("press-10")
    fleet.authority.enrol(Ask(request, token), time.time())  # and the answer is lost
    enrol(fleet, Identity(files(tmp_path / "a")), "press-10", token)
    with pytest.raises(IdentityError, match="this token was used already"):
        enrol(fleet, Identity(files(tmp_path / "b")), "press-10", token)
    assert any("used already" in line for line in fleet.told)


def test_a_lost_answer_gives_no_second_name(fleet: Fleet, here: Identity) -> None:
    token = fleet.token()
    fleet.authority.enrol(Ask(here.request("press-11"), token), time.time())
    with pytest.raises(IdentityError, match="for another device than press-12"):
        enrol(fleet, here, "press-12", token)


def test_a_stolen_token_opens_no_other_name_and_an_open_one_no_name_that_is_taken(fleet: Fleet, here: Identity) -> None:
    with pytest.raises(IdentityError, match="this token is for another device than thief"):
        enrol(fleet, here, "thief", fleet.token("press-13"))
    fleet.device("press-14")
    fleet.authority.serve_as(["broker.example.com"], time.time())
    for name in ("press-14", "broker.example.com"):
        with pytest.raises(IdentityError, match=f"the name {name} is taken"):
            enrol(fleet, here, name, fleet.token())
    with pytest.raises(IdentityError, match="is taken"):  # nor does one that was made for it pass for a server
        enrol(fleet, here, "broker.example.com", fleet.token("broker.example.com"))
    with pytest.raises(BadInput, match="another kind of machine"):
        fleet.authority.serve_as(["press-14"], time.time())


@pytest.mark.parametrize("token", ["", "unknown", "ä" * 2000])
def test_a_token_that_nobody_made_opens_nothing(fleet: Fleet, here: Identity, token: str) -> None:
    with pytest.raises(IdentityError, match="this token is not known here"):
        here.enrol(fleet.url, token, "press-15", fleet.ca.read_bytes())


def test_a_token_expires(fleet: Fleet, here: Identity) -> None:
    token, request = fleet.token(), here.request("press-16")
    with pytest.raises(Forbidden, match="this token has expired"):
        fleet.authority.enrol(Ask(request, token), time.time() + DAY_S)


def test_a_device_that_is_replaced_leaves_a_certificate_that_counts_no_more(fleet: Fleet, tmp_path: Path) -> None:
    old, new = Identity(files(tmp_path / "old")), Identity(files(tmp_path / "new"))
    enrol(fleet, old, "press-17")
    serial = certificate(tmp_path / "old").serial_number
    enrol(fleet, new, "press-17")
    listed = x509.load_pem_x509_crl(files(tmp_path / "new").revoked.read_bytes())
    assert listed.get_revoked_certificate_by_serial_number(serial)
    assert not listed.get_revoked_certificate_by_serial_number(certificate(tmp_path / "new").serial_number)
    with pytest.raises(IdentityError, match="counts no more: enrol anew"):
        old.renew()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda _csr: "nonsense", "this is no certificate request"),
        (lambda csr: csr[:120] + ("A" if csr[120] != "A" else "B") + csr[121:], "request"),
    ],
    ids=["nonsense", "damaged"],
)
def test_what_is_no_request_is_refused(fleet: Fleet, here: Identity, spoil: Callable[[str], str], reason: str) -> None:
    ask = Ask(spoil(here.request("press-18")), fleet.token())
    with pytest.raises(BadInput, match=reason):
        fleet.authority.enrol(ask, time.time())


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "../up", "tür"])
def test_a_name_that_no_device_may_have_is_refused(fleet: Fleet, here: Identity, name: str) -> None:
    with pytest.raises((BadInput, ValueError)):
        fleet.authority.enrol(Ask(here.request(name), fleet.token()), time.time())


def test_a_request_with_another_kind_of_key_is_refused(fleet: Fleet) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "press-19")])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    ask = Ask(request.public_bytes(_PEM).decode(), fleet.token())
    with pytest.raises(BadInput, match="an ECDSA P-256 key of its own"):
        fleet.authority.enrol(ask, time.time())


# What the device believes


def test_the_service_is_believed_by_file_or_fingerprint_only(fleet: Fleet, here: Identity, tmp_path: Path) -> None:
    spelled = ":".join(fleet.authority.fingerprint.upper()[i : i + 2] for i in range(0, 64, 2))
    for fingerprint in (fleet.authority.fingerprint, spelled):
        assert authority_of(fleet.url, fingerprint) == fleet.ca.read_bytes()
    with pytest.raises(IdentityError, match="not the one given"):
        authority_of(fleet.url, "00" * 32)
    strange = Fleet(tmp_path / "strange", name="another fleet")
    with pytest.raises(IdentityError, match="signed by fleet, and this device trusts another fleet"):
        here.enrol(fleet.url, "secret", "press-20", strange.ca.read_bytes())
    with pytest.raises(IdentityError, match="is no address of an enrolment service"):
        here.enrol("http://127.0.0.1:1", "secret", "press-20", fleet.ca.read_bytes())


def test_answers_that_do_not_fit_are_not_kept_and_the_old_identity_stays(
    fleet: Fleet, here: Identity, tmp_path: Path
) -> None:
    enrol(fleet, here, "press-21")
    before = {path.name: path.read_bytes() for path in files(tmp_path).folder.iterdir()}
    strange = Fleet(tmp_path / "strange", name="another fleet")
    right = fleet.authority.certify(here.request("press-21"), "press-21", [], time.time())
    foreign = strange.authority.certify(here.request("press-21"), "press-21", [], time.time())
    other = fleet.authority.certify(Identity(files(tmp_path / "other")).request("b"), "b", [], time.time())
    for wrong, reason in (
        (foreign, "not one of the authority that was given"),
        (other, "for another key"),
        (dataclasses.replace(right, certificate="nonsense"), "not one of the authority"),
        (dataclasses.replace(right, revoked=foreign.revoked), "not signed by the authority"),
        (dataclasses.replace(right, revoked=""), "cannot be read"),
    ):
        with pytest.raises(IdentityError, match=reason):
            here.accept(wrong, fleet.ca.read_bytes())
    (tmp_path / "identity" / "pending.pem").unlink()
    assert {path.name: path.read_bytes() for path in files(tmp_path).folder.iterdir()} == before
    with pytest.raises(IdentityError, match="no request of this device"):
        here.accept(right, fleet.ca.read_bytes())


def test_without_a_network_a_request_and_its_answer_travel_as_files(fleet: Fleet, here: Identity) -> None:
    request = here.request("press-22")
    with pytest.raises(BadInput, match="for press-22, not for press-23"):
        fleet.authority.certify(request, "press-23", [], time.time())
    carried = json.dumps(dataclasses.asdict(fleet.authority.certify(request, "press-22", [], time.time())))
    assert here.accept(Issued(**json.loads(carried)), fleet.ca.read_bytes()).name == "press-22"
    with pytest.raises(IdentityError, match="brought by hand"):
        here.renew()


# The service


def test_the_service_takes_nothing_that_is_too_large_or_no_request(fleet: Fleet) -> None:
    context = Calling(fleet.ca).context()

    def ask(method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
        asked = http.client.HTTPSConnection("127.0.0.1", int(fleet.url.rpartition(":")[2]), context=context, timeout=20)
        asked.request(method, path, body or None, headers)
        response = asked.getresponse()
        said = response.status, response.read().decode()
        asked.close()
        return said

    huge = {"content-length": str(LARGEST_BYTES + 1)}
    assert ask("POST", ENROL, **huge)[0] == 400
    assert ask("POST", ENROL, b"[" * 100_000)[0] == 400
    assert ask("POST", ENROL, b'{"csr": 1}')[0] == 400
    assert ask("POST", "/elsewhere", b'{"csr": ""}')[0] == 400
    assert ask("GET", "/elsewhere")[0] == 404
    status, said = ask("POST", RENEW, json.dumps({"csr": ""}).encode())
    assert (status, "show it in the handshake" in said) == (403, True)


# Renewal


def test_a_renewal_brings_a_new_key_and_the_next_one_shows_the_new_certificate(
    fleet: Fleet, here: Identity, tmp_path: Path
) -> None:
    enrol(fleet, here, "press-24")
    first = certificate(tmp_path)
    here.renew()
    second = certificate(tmp_path)
    assert second.public_key() != first.public_key()
    assert second.serial_number != first.serial_number
    here.renew()


def test_nobody_renews_for_another_name(fleet: Fleet, tmp_path: Path) -> None:
    own, other = Identity(files(tmp_path / "own")), Identity(files(tmp_path / "other"))
    enrol(fleet, own, "press-25")
    shown = ssl.PEM_cert_to_DER_cert(certificate(tmp_path / "own").public_bytes(_PEM).decode())
    with pytest.raises(Forbidden, match="ask for your own name"):
        fleet.authority.renew(Ask(other.request("press-26")), shown, time.time())
    with pytest.raises(Forbidden, match="counts no more"):
        fleet.authority.renew(Ask(other.request("press-25")), shown, time.time() + 91 * DAY_S)


def keep(fleet: Fleet, folder: Path, days_ahead: float) -> upkeep.Upkeep:
    """What looks after the identity in `folder`, with a clock that is ahead; the service's goes with it."""
    told = settings.Settings(state_dir=folder)
    fleet.days_ahead = days_ahead
    return upkeep.Upkeep(told, lambda: time.time() + days_ahead * DAY_S, None)


def test_the_daemon_renews_when_two_thirds_have_passed_and_not_before(
    ageing: Fleet, here: Identity, tmp_path: Path
) -> None:
    enrol(ageing, here, "press-27")
    first = certificate(tmp_path).serial_number
    assert keep(ageing, tmp_path, 59).look() == ""
    assert certificate(tmp_path).serial_number == first
    later = keep(ageing, tmp_path, 68)
    assert later.look() == ""
    assert certificate(tmp_path).serial_number != first
    status = later.status()
    assert status
    assert status["name"] == "press-27"
    renewed = certificate(tmp_path).serial_number
    assert later.look() == ""
    assert certificate(tmp_path).serial_number == renewed


@pytest.mark.parametrize(
    ("days_ahead", "reason"), [(91, "enrol anew with a token"), (-20_000, "before the certificate begins")]
)
def test_a_daemon_that_cannot_renew_says_why_and_does_not_ask(
    ageing: Fleet, here: Identity, tmp_path: Path, days_ahead: float, reason: str
) -> None:
    enrol(ageing, here, "press-28" if days_ahead > 0 else "press-29")
    files(tmp_path).service.write_text("https://127.0.0.1:1")  # nobody is there
    assert reason in keep(ageing, tmp_path, days_ahead).look()


def test_a_renewal_that_fails_leaves_the_old_certificate_and_is_tried_again_later(
    ageing: Fleet, here: Identity, tmp_path: Path
) -> None:
    enrol(ageing, here, "press-30")
    files(tmp_path).service.write_text("https://127.0.0.1:1")
    before = files(tmp_path).certificate.read_bytes()
    kept = keep(ageing, tmp_path, 80)
    with pytest.raises(IdentityError, match="the enrolment service cannot be asked, because"):
        kept.look()
    assert files(tmp_path).certificate.read_bytes() == before
    files(tmp_path).service.write_text(ageing.url)
    assert kept.look() == ""  # not yet: it waits a while
    assert files(tmp_path).certificate.read_bytes() == before


def test_a_running_upkeep_takes_up_files_that_changed_and_tells_what_is_wrong(
    fleet: Fleet, here: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_LOOK_S", 0.05)
    taken_up: list[int] = []
    told = settings.Settings(state_dir=tmp_path, identity=settings.Identity(mqtt=True))

    async def run() -> None:
        async with upkeep.upkept(told, time.time, lambda: taken_up.append(1)) as kept:
            await until(lambda: "is not enrolled" in str(kept.status()))
            await asyncio.to_thread(enrol, fleet, here, "press-31")
            await until(lambda: bool(taken_up) and "press-31" in str(kept.status()))

    async def until(seen: Callable[[], bool]) -> None:
        await asyncio.to_thread(eventually, seen, "the upkeep has noticed", 20.0)

    asyncio.run(run())


# Revocation


def test_a_revoked_device_is_refused_by_the_door_that_takes_up_the_list_and_by_the_service(
    fleet: Fleet, here: Identity, tmp_path: Path
) -> None:
    enrol(fleet, here, "press-32")
    guard = fleet.device("guard")
    guard.service.write_text(fleet.url)
    door = Listening(fleet.server_file(), None, guard.authority, guard.revoked)
    show = Calling(fleet.ca, files(tmp_path).certificate).context()

    def shake(port: int) -> None:
        with (
            socket.create_connection(("127.0.0.1", port), 20) as plain,
            show.wrap_socket(plain, server_hostname="localhost") as tls,
        ):
            tls.sendall(b"?")
            tls.recv(1)

    with listening(door.context) as port:
        shake(port)
        assert not Identity(guard).fetch_revoked()
        fleet.authority.revoke("press-32", time.time())
        assert Identity(guard).fetch_revoked()
        door.load()
        with pytest.raises((ssl.SSLError, ConnectionError), match=r"REVOKED|EOF|reset|roken"):
            shake(port)
    with pytest.raises(IdentityError, match="counts no more"):
        here.renew()
    with pytest.raises(NotFound, match="no certificate of 'press-32' counts"):
        fleet.authority.revoke("press-32", time.time())


def test_an_older_list_of_revoked_certificates_is_not_taken_again(fleet: Fleet, here: Identity, tmp_path: Path) -> None:
    enrol(fleet, here, "press-33")
    older = fleet.revoked.read_bytes()
    newer = fleet.authority.list_revoked(time.time())
    assert here.fetch_revoked()
    fleet.revoked.write_bytes(older)  # as somebody in between would replay it
    assert not here.fetch_revoked()
    assert files(tmp_path).revoked.read_bytes() == newer
    fleet.authority.list_revoked(time.time())


# The authority


def test_an_authority_says_what_is_wrong_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no authority"):
        Authority(tmp_path, lambda: b"x").new_token("", [], 0)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="PROVISION_PASSPHRASE"):
        Authority(tmp_path / "new", lambda: b"").init("fleet", 90, time.time())
    Fleet(tmp_path)
    with pytest.raises(ConfigError, match="holds an authority already"):
        Fleet(tmp_path)
    with pytest.raises(ConfigError, match="give its own passphrase"):
        Authority(tmp_path / "authority", lambda: b"wrong").serve_as(["localhost"], time.time())
    (tmp_path / "authority" / "register.json").write_text("{")
    with pytest.raises(ConfigError, match="restore it from a copy"):
        Authority(tmp_path / "authority", lambda: b"passphrase").new_token("", [], 0)


def test_the_register_forgets_what_has_expired(tmp_path: Path) -> None:
    fleet, now = Fleet(tmp_path), time.time()
    fleet.token("press-1")
    fleet.device("press-1")
    fleet.authority.revoke("press-1", now)
    assert len(fleet.authority.register().certificates) == 1
    fleet.device("press-2", at=now + 91 * DAY_S)
    register = fleet.authority.register()
    assert [one.name for one in register.certificates.values()] == ["press-2"]
    assert not register.tokens
    assert len(x509.load_pem_x509_crl(fleet.authority.list_revoked(now + 91 * DAY_S))) == 0


# Settings


def load(tmp_path: Path, text: str) -> settings.Settings:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return settings.load(profile="cpu", config=path, flags={"state_dir": tmp_path})


def test_the_settings_name_the_files_of_the_identity_where_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(settings.ENV_PREFIX)]:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="get one with `appliance enroll`"):
        load(tmp_path, "[identity]\nhttp = true")
    own = files(tmp_path)
    waiting = load(tmp_path, "[identity]\nmqtt = true").mqtt  # it serves meanwhile, and connects when it is enrolled
    assert (waiting.tls, waiting.ca, waiting.certificate) == (True, own.authority, own.certificate)
    own.folder.mkdir()
    own.certificate.touch()
    door = load(tmp_path, '[identity]\nhttp = true\n[http]\nhost = "0.0.0.0"').http
    assert (door.tls_certificate, door.client_ca, door.client_crl) == (own.certificate, own.authority, own.revoked)
    mixed = load(tmp_path, '[identity]\nhttp = true\n[http]\ntls_certificate = "/a"\nclient_ca = "/b"').http
    assert (mixed.tls_certificate, mixed.client_ca, mixed.client_crl) == (Path("/a"), Path("/b"), None)
    with pytest.raises(ConfigError, match=r"set http\.client_ca too"):
        load(tmp_path, '[http]\nclient_crl = "/a"')


def test_files_of_another_authority_do_for_the_door_too(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "own.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    Listening(tmp_path / "own.pem", None, tmp_path / "ca.pem")
    with pytest.raises(ConfigError, match="cannot be used"):
        Listening(tmp_path / "own.pem", None, tmp_path / "none.pem")
