"""What client commands say when the daemon cannot be asked, and when tokens are made where no daemon is."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest
import trustme
from rich.table import Table
from support.enrolment import listening
from typer.testing import CliRunner

from appliance import client_cli, console

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No authority and no token of whoever runs this."""
    monkeypatch.delenv(console.CA_VARIABLE, raising=False)
    monkeypatch.delenv(console.TOKEN_VARIABLE, raising=False)


def why(url: str) -> str:
    """What is said of a daemon that cannot be asked at `url`."""
    with console.client(url, timeout_s=20.0) as http, pytest.raises(httpx.HTTPError) as caught:
        http.get("/v1/status")
    return console.reason_of(url, caught.value)


def test_a_certificate_that_is_not_trusted_leads_to_the_authority_and_not_to_starting_the_daemon() -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    with listening(context) as port:
        said = why(f"https://localhost:{port}")
    assert "name the PEM file of its authority in APPLIANCE_CA" in said
    assert "appliance run" not in said


def test_a_daemon_that_hangs_up_on_plain_http_may_have_tls() -> None:
    error = httpx.RemoteProtocolError("Server disconnected without sending a response.")
    said = console.reason_of("http://localhost:8080", error)
    assert "if the daemon has TLS, give its https:// address" in said


def test_nobody_at_the_address_is_told_to_start_the_daemon() -> None:
    assert "start it with `appliance run`" in why("http://127.0.0.1:1")


def test_tokens_made_where_no_daemon_has_been_say_so_with_the_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(client_cli.app, ["token", "create", "a", "--role", "infer", "--state-dir", "stat"])
    assert (made.exit_code, made.stdout.startswith("a.")) == (0, True), made.output
    assert f"no daemon has ever used {tmp_path / 'stat'}: " in made.stderr
    (tmp_path / "stat" / "lock").touch()  # as a daemon leaves it
    listed = CliRunner().invoke(client_cli.app, ["token", "list", "--state-dir", "stat"])
    assert (listed.exit_code, "no daemon" in listed.stderr) == (0, False)


def test_what_a_device_says_commands_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("label", box=None)
    table.add_row("\x1b]0;mine\x07", style="dim")
    console.plain().print(table)
    console.plain().print("line 1\nline 2 \x9b2J\x1b[2J")
    shown = capsys.readouterr().out
    assert not set(shown) & {"\x1b", "\x07", "\x9b"}
    assert "]0;mine" in shown
    assert "line 1\nline 2" in shown
