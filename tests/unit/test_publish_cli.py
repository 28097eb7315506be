"""`provision publish` and `provision command`, as an operator types them."""

from __future__ import annotations

import base64
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import tiny
from typer.testing import CliRunner

from models.errors import ConfigError
from provisioning.cli import app
from provisioning.publish_cli import passphrase
from provisioning.serve import server

pytestmark = pytest.mark.unit

Provision = Callable[..., str]


@pytest.fixture
def provision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provision]:
    """Runs a command in an empty folder and returns what it prints; errors are raised."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROVISION_PASSPHRASE", "correct horse")
    monkeypatch.setenv("COLUMNS", "200")
    passphrase.cache_clear()

    def run(*arguments: str) -> str:
        return CliRunner().invoke(app, arguments, catch_exceptions=False).stdout

    yield run
    passphrase.cache_clear()


@pytest.fixture
def published(provision: Provision, tmp_path: Path) -> Provision:
    """A repository `repository` with `scale` 1.0.0 in the channel dev."""
    tiny.scale_bundle(tmp_path / "v1", 1, null=True)
    assert "repository/metadata/1.root.json" in provision("publish", "init", "repository", "--keys", "keys")
    assert "scale 1.0.0 is in channel dev" in provision("publish", "add", "repository", "v1", "--keys", "keys")
    return provision


def test_the_status_shows_keys_versions_and_channels(published: Provision) -> None:
    said = published("publish", "status", "repository", "--keys", "keys")
    assert "root-1, root-2, root-3" in said
    assert "dev" in said
    status = json.loads(published("publish", "status", "repository", "--json"))
    assert status["channels"] == {"dev/scale": "1.0.0"}
    assert all(f" {one['expires']} " in said for one in status["roles"].values()), said
    assert {role: (len(one["keys"]), one["threshold"]) for role, one in status["roles"].items()} == {
        "root": (3, 2),
        "targets": (2, 1),
        "snapshot": (1, 1),
        "timestamp": (1, 1),
    }
    assert not any(one["expired"] for one in status["roles"].values())


def test_a_version_is_promoted_and_revoked_with_a_reason(published: Provision) -> None:
    promote = ("publish", "promote", "repository", "scale", "1.0.0", "stable", "--keys", "keys")
    assert "channel stable runs scale 1.0.0" in published(*promote)
    revoke = ("publish", "revoke", "repository", "scale", "1.0.0", "--reason", "reads 0 as O", "--keys", "keys")
    assert "dev, stable: that points to nothing now" in published(*revoke)
    assert "REVOKED: reads 0 as O" in published("publish", "status", "repository")
    with pytest.raises(ConfigError, match=r"was revoked \(reads 0 as O\)"):
        published(*promote)


def test_the_online_keys_refresh_and_cannot_publish(published: Provision, tmp_path: Path) -> None:
    (tmp_path / "online").mkdir()
    for path in [*(tmp_path / "keys").glob("snapshot-*"), *(tmp_path / "keys").glob("timestamp-*")]:
        path.rename(tmp_path / "online" / path.name)
    assert "the next refresh must come before" in published("publish", "refresh", "repository", "--keys", "online")
    with pytest.raises(ConfigError, match="not enough keys are here to sign as targets"):
        published("publish", "promote", "repository", "scale", "1.0.0", "stable", "--keys", "online")
    promote = ("publish", "promote", "repository", "scale", "1.0.0", "stable")
    assert "stable" in published(*promote, "--keys", "keys", "--keys", "online")


def test_a_key_is_replaced_by_its_name(published: Provision) -> None:
    rotate = ("publish", "rotate-key", "repository", "targets")
    assert "targets-3 signs as targets now" in published(*rotate, "targets-1", "--keys", "keys")
    with pytest.raises(ConfigError, match="targets-1 is no key of role targets"):
        published(*rotate, "targets-1", "--keys", "keys")


def test_keys_are_encrypted_and_open_with_their_passphrase_only(
    published: Provision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path / "keys").glob("*.pem"):
        assert path.read_bytes().startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
        assert path.stat().st_mode & 0o777 == 0o600
    for wrong, reason in (("battery staple", "cannot be opened: give its own passphrase"), ("", "keys are encrypted")):
        monkeypatch.setenv("PROVISION_PASSPHRASE", wrong)
        passphrase.cache_clear()
        with pytest.raises(ConfigError, match=reason):
            published("publish", "refresh", "repository", "--keys", "keys")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("init", "repository", "--keys", "other"), "holds a repository already"),
        (("init", "fresh", "--keys", "keys"), "is there already: give an empty folder for new keys"),
        (("add", "fresh", "v1", "--keys", "keys"), "is no repository: make one with"),
        (("serve", "fresh"), "fresh is no repository: make one with"),
        (("add", "repository", "v1", "--channel", "beta", "--keys", "keys"), "there is no channel 'beta'; known: dev"),
        (("promote", "repository", "scale", "9.0.0", "dev", "--keys", "keys"), "scale 9.0.0 is not published"),
        (("rotate-key", "repository", "root", "no-such", "--keys", "keys"), "there is no key file no-such.pub.json"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    published: Provision, arguments: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        published("publish", *arguments)


def test_a_port_that_is_taken_is_named_with_what_helps(published: Provision) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*: stop its user, .* --port"):
            published("publish", "serve", "repository", "--port", str(port))


def test_an_order_is_printed_in_an_envelope_for_one_device(provision: Provision) -> None:
    provision("command", "new-key", "ann", "--keys", "commanders")
    sign = ("command", "sign", "update", "--device", "press-7", "--key", "ann", "--keys", "commanders")
    first, second = (
        json.loads(base64.b64decode(json.loads(provision(*sign, "--args", '{"force": true}'))["payload"]))
        for _ in range(2)
    )
    assert (first["device_id"], first["command"], first["args"]) == ("press-7", "update", {"force": True})
    assert first["expires_at"] == first["issued_at"] + 3600
    assert first["id"] != second["id"]
    assert first["sequence"] <= second["sequence"]
    with pytest.raises(ConfigError, match="--args is no JSON"):
        provision(*sign, "--args", "force")
    with pytest.raises(ConfigError, match=r"there is no order 'flibble'; known: status, load, .*, reboot$"):
        provision("command", "sign", "flibble", *sign[3:])


def test_the_trial_server_sends_the_rest_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    with server(tmp_path, "127.0.0.1", 0) as trial:
        thread = threading.Thread(target=trial.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{trial.server_address[1]}/file"

        def get(start: str = "") -> tuple[int, bytes]:
            request = urllib.request.Request(url, headers={"range": start} if start else {})
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
                return answer.status, answer.read()

        assert get() == (200, b"0123456789")
        assert get("bytes=4-") == (206, b"456789")
        with pytest.raises(urllib.error.HTTPError, match="416"):
            get("bytes=10-")
        trial.shutdown()
        thread.join()
