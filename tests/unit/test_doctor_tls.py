"""Why TLS does not come about: real handshakes on loopback that fail in every way, each said in one sentence."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from support.enrolment import DAY_S, Fleet, listening
from support.processes import free_port

from appliance import doctor_tls, settings
from appliance.adapters.tls import Listening
from appliance.doctor_tls import Certificate, Handshake, Trust, check_identity, check_tls, explain, shake_hands

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is waited for until it comes."""
    monkeypatch.setattr(doctor_tls, "_ALERT_S", 20.0)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """An authority that has been there for two years."""
    return Fleet(tmp_path_factory.mktemp("fleet"), made_at=time.time() - 730 * DAY_S)


def sentence(context: ssl.SSLContext | None, trust: Trust, answer: bytes = b"", host: str = "127.0.0.1") -> str:
    """What is said of a handshake with a server of `context`: a failure, its reason and its remedy."""
    with listening(context, answer) as port:
        found = check_tls("broker", host, port, trust)
    assert (found.name, found.verdict) == ("broker", "fail"), found
    assert found.remedy
    assert "\n" not in found.reason
    return found.reason.replace(f":{port}", "")


def test_a_handshake_that_works_says_until_when(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_tls, "_ALERT_S", 1.0)
    own = fleet.device("press-1").certificate
    with listening(Listening(fleet.server_file(), None, fleet.ca, fleet.revoked).context) as port:
        found = check_tls("broker", "127.0.0.1", port, Trust(fleet.ca, own))
    assert found.verdict == "ok"
    assert "whose certificate is valid until" in found.reason


def test_a_server_that_expired(fleet: Fleet) -> None:
    expired = Listening(fleet.server_file(at=time.time() - 366 * DAY_S))
    said = sentence(expired.context, Trust(fleet.ca))
    assert said.startswith("the certificate of localhost expired on 20")
    assert ", and the clock says 20" in said


def test_a_server_whose_certificate_begins_only_later(fleet: Fleet) -> None:
    early = Listening(fleet.server_file(at=time.time() + 9 * DAY_S))
    assert "the certificate of localhost becomes valid only on 20" in sentence(early.context, Trust(fleet.ca))


def test_a_name_that_is_not_in_the_certificate(fleet: Fleet) -> None:
    other = Listening(fleet.server_file("broker.example.com"))
    said = sentence(other.context, Trust(fleet.ca))
    assert said == "the certificate of 127.0.0.1 is for broker.example.com, not for 127.0.0.1"
    assert sentence(other.context, Trust(fleet.ca), host="localhost").endswith("not for localhost")


def test_another_authority_than_the_one_that_is_trusted(fleet: Fleet, tmp_path: Path) -> None:
    strange = Fleet(tmp_path / "strange", name="another fleet")
    said = sentence(Listening(strange.server_file()).context, Trust(fleet.ca))
    assert said == "the certificate of 127.0.0.1 was signed by another fleet, and this device trusts fleet"
    assert "the system's authorities" in sentence(Listening(strange.server_file()).context, Trust())


def test_another_authority_of_the_same_name(fleet: Fleet, tmp_path: Path) -> None:
    namesake = Fleet(tmp_path / "namesake")
    said = sentence(Listening(namesake.server_file()).context, Trust(fleet.ca))
    assert said.endswith("was signed by another key of an authority that is also called fleet")


def test_a_server_that_vouches_for_itself(fleet: Fleet, tmp_path: Path) -> None:
    itself = trustme.CA(organization_name="me")
    path = tmp_path / "itself.pem"
    path.write_bytes(itself.private_key_pem.bytes() + itself.cert_pem.bytes())
    assert "127.0.0.1 vouches for itself" in sentence(Listening(path).context, Trust(fleet.ca))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak TLS on this port"),
        (b"\x20", "hung up at once, as what knows no TLS does"),
    ],
    ids=["HTTP", "MQTT"],
)
def test_a_port_where_nobody_speaks_tls(fleet: Fleet, answer: bytes, said: str) -> None:
    assert sentence(None, Trust(fleet.ca), answer) == f"127.0.0.1 {said}"


def test_a_port_where_somebody_hangs_up_or_says_nothing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_tls, "_ANSWER_S", 0.5)
    assert sentence(None, Trust(fleet.ca)) == "127.0.0.1 takes the connection and says nothing"
    found = check_tls("broker", "127.0.0.1", free_port(), Trust(fleet.ca))
    assert (found.verdict, "cannot be reached (Connection refused)" in found.reason) == ("fail", True)


def test_our_certificate_was_revoked(fleet: Fleet) -> None:
    own = fleet.device("press-2").certificate
    fleet.authority.revoke("press-2", time.time())
    door = Listening(fleet.server_file(), None, fleet.ca, fleet.revoked)
    said = sentence(door.context, Trust(fleet.ca, own))
    assert said == "our certificate was revoked, says 127.0.0.1"


def test_our_certificate_expired(fleet: Fleet) -> None:
    own = fleet.device("press-3", at=time.time() - 100 * DAY_S).certificate
    door = Listening(fleet.server_file(), None, fleet.ca)
    said = sentence(door.context, Trust(fleet.ca, own))
    assert said.startswith("127.0.0.1 refused our certificate, which is valid from 20")


def test_our_certificate_is_of_another_fleet(fleet: Fleet, tmp_path: Path) -> None:
    own = Fleet(tmp_path / "other", name="another fleet").device("press-4").certificate
    said = sentence(Listening(fleet.server_file(), None, fleet.ca).context, Trust(fleet.ca, own))
    assert said == "127.0.0.1 does not trust who signed our certificate"


def test_a_certificate_is_wanted_and_there_is_none(fleet: Fleet) -> None:
    strict = Listening(fleet.server_file(), None, fleet.ca).context
    strict.verify_mode = ssl.CERT_REQUIRED
    assert sentence(strict, Trust(fleet.ca)) == "127.0.0.1 wants a certificate of us and got none"


def test_files_that_cannot_be_used(fleet: Fleet, tmp_path: Path) -> None:
    for trust in (Trust(tmp_path / "none.pem"), Trust(fleet.ca, fleet.ca), Trust(fleet.ca, tmp_path / "none.pem")):
        assert sentence(None, trust).startswith("our own TLS files cannot be used (")


def test_a_board_that_woke_up_in_1970_is_told_to_set_its_clock() -> None:
    peer = Certificate("broker", "fleet", ("broker",), 1.8e9, 1.83e9)
    for code in (9, 11):
        found = explain("broker", Handshake("broker", 8883, 60.0, "untrusted", code, "", peer))
        assert found.reason == (
            "the clock of this machine says 1970-01-01 00:01 UTC, when no certificate of broker:8883 was valid yet"
        )
        assert "set the clock" in found.remedy


def test_a_real_handshake_judged_by_a_board_of_1970_blames_the_clock(fleet: Fleet) -> None:
    early = Listening(fleet.server_file(at=time.time() + 9 * DAY_S))  # as every certificate looks to such a board
    with listening(early.context) as port:
        found = explain("broker", shake_hands("127.0.0.1", port, Trust(fleet.ca), now=5.0))
    assert found.reason.startswith("the clock of this machine says 1970-01-01 00:00 UTC")


def test_the_own_certificate_is_told_of_before_it_is_too_late(fleet: Fleet, tmp_path: Path) -> None:
    path, now = fleet.device("press-5").certificate, time.time()
    seen = {days: check_identity(path, now + days * DAY_S) for days in (0, 80, 91, -100)}
    assert [found.verdict for found in seen.values()] == ["ok", "warn", "fail", "fail"]
    assert "expired on" in seen[91].reason
    assert "and the clock says" in seen[-100].reason
    assert check_identity(tmp_path / "none", now).verdict == "skip"


def test_a_device_whose_own_list_names_its_certificate_is_told_that_it_was_revoked(fleet: Fleet) -> None:
    files = fleet.device("press-8")
    assert check_identity(files.certificate, time.time(), files.revoked).verdict == "ok"
    fleet.authority.revoke("press-8", time.time())
    found = check_identity(files.certificate, time.time(), fleet.revoked)
    assert (found.verdict, "our certificate, of press-8, was revoked" in found.reason) == ("fail", True)


def test_the_checks_of_a_device_follow_its_settings(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()

    def told(**flags: object) -> settings.Settings:
        return settings.load(profile="cpu", config=tmp_path / "config.toml", flags=flags)

    bare = doctor_tls.checks(told(state_dir=tmp_path), time.time())
    assert [found.verdict for found in bare] == ["skip"]
    state = fleet.device("press-6").folder.parent
    full = told(state_dir=state, identity={"http": True, "mqtt": True}, mqtt={"host": "127.0.0.1", "port": free_port()})
    found = {one.name: one for one in doctor_tls.checks(full, time.time())}
    assert {name: one.verdict for name, one in found.items()} == {
        "identity": "ok",
        "broker tls": "fail",
        "revoked certificates": "ok",
    }
    late = {one.name: one for one in doctor_tls.checks(full, time.time() + 91 * DAY_S)}
    assert "no certificate is taken" in late["revoked certificates"].reason
