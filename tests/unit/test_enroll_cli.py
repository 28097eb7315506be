"""`provision enroll` and `appliance enroll`, as they are typed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.enrolment import Fleet
from typer.testing import CliRunner

from appliance import client_cli, settings
from models.errors import BadInput, ConfigError, NotFound
from provisioning import cli
from provisioning.publish_cli import passphrase

pytestmark = pytest.mark.unit

Typed = Callable[..., str]


@pytest.fixture(autouse=True)
def _bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and no settings of this machine."""
    for name in [name for name in os.environ if name.startswith(settings.ENV_PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(settings, "SYSTEM_CONFIG", tmp_path / "none.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROVISION_PASSPHRASE", "correct horse")
    monkeypatch.setenv("COLUMNS", "200")
    passphrase.cache_clear()


def provision(*arguments: str) -> str:
    """What `provision enroll` prints; errors are raised."""
    return CliRunner().invoke(cli.app, ["enroll", *arguments], catch_exceptions=False).stdout


def enroll(*arguments: str) -> tuple[int, str]:
    """How `appliance enroll` ends, and what it prints."""
    ended = CliRunner().invoke(client_cli.app, ["enroll", "--state-dir", "state", *arguments], catch_exceptions=False)
    return ended.exit_code, ended.output


def test_an_authority_is_made_and_shows_what_it_gave(tmp_path: Path) -> None:
    said = provision("init", "authority", "--name", "press fleet")
    token = provision("token", "authority", "--device", "press-7", "--also", "10.0.0.7", "--hours", "2").strip()
    assert len(token) > 40
    assert enroll("--request", "press-8.csr", "--name", "press-8")[0] == 0
    provision("sign", "authority", "press-8.csr", "--device", "press-8", "--out", "press-8.answer")
    assert (
        "press-8 has a certificate until" in enroll("--answer", "press-8.answer", "--ca", "authority/authority.pem")[1]
    )
    provision("server", "authority", "broker.example.com", "--out", "broker.pem")
    assert (tmp_path / "broker.pem").stat().st_mode & 0o777 == 0o600
    shown = json.loads(provision("status", "authority", "--json"))
    assert f"fingerprint: {shown['fingerprint']}" in said
    assert sorted(one["name"] for one in shown["certificates"].values()) == ["broker.example.com", "press-8"]
    assert [one["device"] for one in shown["tokens"]] == ["press-7"]
    assert token not in json.dumps(shown)
    assert "1 certificates of press-8 are revoked" in provision("revoke", "authority", "press-8")
    table = provision("status", "authority")
    assert "REVOKED" in table
    assert "a token for press-7 opens for 2 h" in table
    assert "bring authority/revoked.pem to brokers" in provision("revoked", "authority")


@pytest.mark.parametrize(
    ("arguments", "kind", "reason"),
    [
        (("token", "nowhere"), ConfigError, "make one with `provision enroll init`"),
        (("token", "authority", "--device", "a b"), BadInput, "is no name of a device"),
        (("token", "authority", "--also", "a b"), BadInput, "is no host name or address"),
        (("revoke", "authority", "press-9"), NotFound, "`provision enroll status` shows"),
        (("serve", "authority", "--host", "0.0.0.0"), ConfigError, "give it with --name"),  # noqa: S104 - refused
        (("init", "authority"), ConfigError, "holds an authority already"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_workshop_says_what_is_wrong_in_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], kind: type[Exception], reason: str
) -> None:
    Fleet(tmp_path)
    with pytest.raises(kind, match=reason):
        provision(*arguments)


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        ((), 1, "this device is not enrolled: give --url and --token"),
        (("--renew",), 1, "this device has no certificate"),
        (("--renew", "--url", "https://localhost"), 2, "choose one of"),
        (("--url", "https://localhost"), 2, "give --token, and the authority"),
        (("--answer", "a"), 2, "whom to trust is not said"),
        (("--answer", "none", "--ca", "none"), 1, "none cannot be read (No such file"),
        (
            ("--url", "https://localhost:1", "--token", "t", "--ca", "none"),
            1,
            "(No such file or directory): bring authority/",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_device_says_what_is_wrong_in_one_sentence(arguments: tuple[str, ...], code: int, reason: str) -> None:
    ended, said = enroll(*arguments)
    assert (ended, reason in said, "Traceback" in said) == (code, True, False), said


def test_a_device_that_is_to_serve_others_by_its_certificate_can_ask_for_it(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('http.host = "0.0.0.0"\nidentity.http = true\n')
    assert enroll("--request", "a.csr", "--name", "press-7", "--config", str(tmp_path / "config.toml"))[0] == 0


def test_a_device_that_has_a_name_takes_no_other() -> None:
    assert enroll("--request", "a.csr", "--name", "press-7")[0] == 0
    assert (Path("state") / "device_id").read_text() == "press-7"
    code, said = enroll("--request", "a.csr", "--name", "press-8")
    assert (code, "this device is called 'press-7' already" in said) == (1, True)


@pytest.mark.parametrize("wanted", [("--name", "press-x"), ()], ids=["named", "unnamed"])
def test_a_name_under_which_enrolment_was_refused_is_not_kept(tmp_path: Path, wanted: tuple[str, ...]) -> None:
    with Fleet(tmp_path) as fleet:
        ask = ("--url", fleet.url, "--token", fleet.token("press-7"), "--ca", str(fleet.ca))
        code, said = enroll(*ask, *wanted)
        assert (code, "this token is for another device" in said) == (1, True), said
        assert not Path("state/device_id").exists()
        assert enroll(*ask, "--name", "press-7")[0] == 0
    assert Path("state/device_id").read_text() == "press-7"
