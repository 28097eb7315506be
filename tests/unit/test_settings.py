"""What an operator may set, which source wins, and how a typing error is answered."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from appliance import hardware, settings
from appliance.settings import Settings
from models.errors import ConfigError

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith(settings.ENV_PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An empty configuration file, so that the machine's own one is never read."""
    path = tmp_path / "config.toml"
    path.touch()
    return path


def load(file: Path, text: str = "", flags: Mapping[str, Any] | None = None, profile: str = "cpu") -> Settings:
    """The settings of a configuration file with `text` and of `flags`."""
    file.write_text(text)
    return settings.load(profile=profile, config=file, flags=flags or {})


def refusal(file: Path, text: str = "", flags: Mapping[str, Any] | None = None, profile: str = "cpu") -> str:
    """The sentence with which settings are refused."""
    with pytest.raises(ConfigError) as caught:
        load(file, text, flags, profile)
    return str(caught.value)


def test_with_nothing_set_the_daemon_is_on_loopback_and_has_no_broker(file: Path) -> None:
    config = load(file)
    assert (config.http.host, config.http.port) == ("127.0.0.1", 8080)
    assert (config.mqtt.host, config.runtime, config.clock.assume_synced) == ("", "onnxruntime-cpu", False)


def test_each_source_overrides_the_one_below_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(file).limits.concurrency == 2  # the profile
    text = "[limits]\nconcurrency = 3\nqueue = 30\nhang_s = 30"
    assert load(file, text).limits.concurrency == 3
    monkeypatch.setenv("APPLIANCE_LIMITS__CONCURRENCY", "4")
    monkeypatch.setenv("APPLIANCE_LIMITS__QUEUE", "40")
    assert load(file, text).limits.concurrency == 4
    limits = load(file, text, {"limits": {"concurrency": 5}}).limits
    assert (limits.concurrency, limits.queue, limits.hang_s) == (5, 40, 30.0)


def test_every_source_may_name_bundles_and_files(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(file, 'bundles = ["/a", "b"]\n[onnx]\nlinear = "x.onnx"').bundles == (Path("/a"), Path("b"))
    monkeypatch.setenv("APPLIANCE_BUNDLES", '["/c"]')
    monkeypatch.setenv("APPLIANCE_ONNX", '{"square": "y.onnx"}')
    config = load(file, 'bundles = ["/a"]\n[onnx]\nlinear = "x.onnx"')
    assert config.bundles == (Path("/c"),)
    assert config.onnx == {"linear": Path("x.onnx"), "square": Path("y.onnx")}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[http]\nprot = 1", "http.prot is no setting; did you mean http.port?"),
        ("[htttp]\nport = 1", "htttp is no setting; did you mean http?"),
        ("[limit]\nqueue = 1", "limit is no setting; did you mean limits?"),
        ("runtim = 'null'", "runtim is no setting; did you mean runtime?"),
        ("zzz = 1", "zzz is no setting"),
    ],
)
def test_an_unknown_key_in_the_file_is_refused_with_the_nearest_one(file: Path, text: str, sentence: str) -> None:
    assert refusal(file, text) == sentence


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("APPLIANCE_HTTP__PROT", "APPLIANCE_HTTP__PORT"),
        ("APPLIANCE_HTTP_PORT", "APPLIANCE_HTTP__PORT"),
        ("APPLIANCE_STATEDIR", "APPLIANCE_STATE_DIR"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_one(
    file: Path, monkeypatch: pytest.MonkeyPatch, variable: str, nearest: str
) -> None:
    monkeypatch.setenv(variable, "1")
    assert refusal(file) == f"the environment sets {variable}, which is no setting; did you mean {nearest}?"


def test_the_variable_that_client_commands_read_does_not_stop_the_daemon(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPLIANCE_URL", "http://127.0.0.1:9")
    load(file)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[http]\nport = 'eight'", "http.port: "),
        ("[http]\nport = 70000", "http.port: "),
        ("[http]\nport = [1]", "http.port: "),
        ("http = 5", "http: "),
        ("[limits]\nqueue = 0", "limits.queue: "),
        ("[limits]\nhang_s = nan", "limits.hang_s: "),
        ("[http]\nbody_limit_bytes = 10_000_000_000_000_000_000", "http.body_limit_bytes: "),
        ("shutdown_grace_s = inf", "shutdown_grace_s: "),
        ("[mqtt]\nkeepalive_s = 1", "mqtt.keepalive_s: "),
        ("bundles = 'one'", "bundles: "),
        ("onnx = ['a']", "onnx: "),
        ("device_id = 'press/7'", "device_id: "),
        ("device_id = '#'", "device_id: "),
        ("precision = 'int4'", "precision: Input should be 'auto', 'fp32' or 'int8'"),
        (
            "runtime = 'tvm'",
            "runtime: Input should be 'onnxruntime-cpu', 'onnxruntime-cuda', 'openvino', 'tensorrt', ",
        ),
        ("clock = {assume_synced = 'perhaps'}", "clock.assume_synced: "),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_key(file: Path, text: str, key: str) -> None:
    assert refusal(file, text).startswith(key)


def test_a_variable_of_the_wrong_kind_is_refused_by_its_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPLIANCE_HTTP__PORT", "eight")
    assert refusal(file).startswith("http.port: ")


def test_a_variable_that_is_no_json_is_blamed_on_the_environment_not_on_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPLIANCE_BUNDLES", "/a:/b")
    assert refusal(file).startswith("the environment cannot be read: ")
    assert "bundles" in refusal(file)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "", "example.com", "127.0.0.1.example.com"])  # noqa: S104 - what must be refused
def test_an_address_off_loopback_is_refused_without_tls_in_one_sentence(file: Path, host: str) -> None:
    sentence = refusal(file, flags={"http": {"host": host}})
    assert sentence.startswith(f"http.host is {host!r}, which others can reach, and there is no TLS: set ")
    assert sentence.endswith("or listen on loopback, 127.0.0.1")
    assert load(file, f"[http]\nhost = {host!r}\ntls_certificate = '/a.pem'").http.tls_certificate == Path("/a.pem")


def test_client_certificates_without_tls_are_refused(file: Path) -> None:
    assert "client certificates come over TLS only" in refusal(file, "[http]\nclient_ca = '/ca.pem'")


def test_a_role_of_a_certificate_that_does_not_exist_is_refused(file: Path) -> None:
    assert refusal(file, "[http]\nclient_roles = {camera = 'root'}").startswith("http.client_roles.camera: ")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_every_spelling_of_loopback_is_served(file: Path, host: str) -> None:
    assert load(file, flags={"http": {"host": host}}).http.host == host


@pytest.mark.parametrize("profile", ["orin-mega", " ", "../profiles/cpu", "CPU"])
def test_an_unknown_profile_is_refused_with_those_that_exist(file: Path, profile: str) -> None:
    assert refusal(file, profile=profile).startswith(f"there is no profile {profile!r}; known: ")
    assert "cpu" in refusal(file, profile=profile)


@pytest.mark.parametrize("profile", sorted(path.stem for path in settings.PROFILES.glob("*.toml")))
def test_every_profile_can_be_used(file: Path, profile: str) -> None:
    load(file, profile=profile)


def test_a_profile_is_what_was_said_last_or_else_what_suits_the_machine(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "suited", lambda: ("orin-nano", "this machine is a Nano"))
    assert load(file, profile="").engines.target == "orin-nano"
    text = "profile = 'orin-nx'\n[limits]\nbatch = 3"
    assert load(file, text, profile="").engines.target == "orin-nx"
    monkeypatch.setenv("APPLIANCE_PROFILE", "agx-orin")
    assert load(file, text, profile="").engines.target == "agx-orin"
    config = load(file, text, profile="a100")
    assert (config.profile, config.engines.target, config.limits.batch) == ("a100", "a100", 3)
    monkeypatch.delenv("APPLIANCE_PROFILE")
    assert refusal(file, "profile = 5", profile="").startswith("there is no profile 5; known: a100, ")


def test_a_configuration_file_that_does_not_exist_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the configuration file .*typo\.toml does not exist"):
        settings.load(profile="cpu", config=tmp_path / "typo.toml", flags={})


@pytest.mark.parametrize("content", [b"[http", b"port = \xff", b"a = 1\na = 2"])
def test_a_file_that_is_no_toml_is_refused_by_its_path(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read: "):
        settings.load(profile="cpu", config=file, flags={})


def test_a_password_is_not_printed_with_the_settings(file: Path) -> None:
    config = load(file, "[mqtt]\npassword = 'hunter2'")
    assert config.mqtt.password.get_secret_value() == "hunter2"
    assert "hunter2" not in repr(config)


def test_an_address_of_updates_with_a_password_in_it_is_refused_without_repeating_it(file: Path) -> None:
    said = refusal(file, "[update]\nurl = 'https://me:hunter2@updates.example/press'\nroot = 'root.json'")
    assert said.startswith("update.url has a user or a password in it")
    assert "hunter2" not in said
    assert load(file, "[update]\nurl = 'https://updates.example/a@b'\nroot = 'root.json'").update.url.endswith("a@b")


def test_settings_cannot_be_changed_after_the_start(file: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(file).http.port = 1


def test_state_of_a_plain_user_lies_where_the_desktop_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert settings.default_state_dir() == tmp_path / "appliance"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings.default_state_dir() == tmp_path / ".local" / "state" / "appliance"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert settings.default_state_dir() == Path("/var/lib/appliance")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[upstream]\nurl = 'http://upstream.example'", "upstream.url is plain HTTP beyond this machine"),
        ("[upstream]\nurl = 'http://localhost.example:80'", "upstream.url is plain HTTP beyond this machine"),
        ("[upstream]\nurl = 'https://user:word@upstream.example'", "upstream.url: "),
        ("[second_opinion]\nmodels = ['m']", "second_opinion.models is set, and there is nobody to ask"),
    ],
)
def test_an_upstream_that_would_give_away_what_is_said_is_refused(file: Path, text: str, sentence: str) -> None:
    assert refusal(file, text).startswith(sentence)


@pytest.mark.parametrize("url", ["https://upstream.example/fleet", "http://127.0.0.1:8443", "http://[::1]:80"])
def test_an_upstream_over_tls_or_on_this_machine_is_taken(file: Path, url: str) -> None:
    assert load(file, f"[upstream]\nurl = '{url}'").upstream.url == url


def test_an_enrolled_device_shows_its_certificate_to_upstream_where_that_is_wished_for(file: Path) -> None:
    config = load(file, "[identity]\nupstream = true\n[upstream]\nurl = 'https://upstream.example'")
    files = config.identity_files
    assert (config.upstream.certificate, config.upstream.ca) == (files.certificate, files.authority)


def test_a_data_centre_server_is_the_fleets_home_unless_it_is_told_otherwise() -> None:
    assert settings.load(profile="a100", config=None, flags={}).role == "upstream"
    assert settings.load(profile="a100", config=None, flags={"role": "device"}).role == "device"
    assert settings.load(profile="cpu", config=None, flags={}).role == "device"
