"""Tokens: shown once, recognised afterwards, opening nothing once revoked."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from appliance.adapters.tokens import Role, TokenFile, role_of
from models.errors import BadInput, ConfigError, Conflict, NotFound

pytestmark = pytest.mark.unit


def test_a_token_opens_what_its_role_says_until_it_is_revoked(tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    token = file.create("gate", Role.OPERATE)
    assert role_of(token, file.read()) == ("gate", Role.OPERATE)
    file.revoke("gate")
    assert role_of(token, file.read()) is None


def test_another_reader_of_the_file_sees_each_change(tmp_path: Path) -> None:
    daemon, command = TokenFile(tmp_path), TokenFile(tmp_path)
    assert daemon.read() == {}
    first = command.create("a", Role.INFER)
    assert role_of(first, daemon.read()) == ("a", Role.INFER)
    command.revoke("a")
    second = command.create("a", Role.ADMIN)
    assert role_of(first, daemon.read()) is None
    assert role_of(second, daemon.read()) == ("a", Role.ADMIN)


def test_what_is_kept_of_a_token_does_not_open_anything(tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    token = file.create("gate", Role.ADMIN)
    kept = (tmp_path / "tokens.json").read_text()
    assert token not in kept
    assert token.partition(".")[2] not in kept
    assert role_of(f"gate.{file.read()['gate'].sha256}", file.read()) is None
    assert stat.S_IMODE((tmp_path / "tokens.json").stat().st_mode) == 0o600


def test_secrets_are_256_random_bits_each(tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    secrets = {file.create(f"t{i}", Role.INFER).partition(".")[2] for i in range(20)}
    assert len(secrets) == 20
    assert {len(secret) for secret in secrets} == {43}  # 256 bits, six a character


@pytest.mark.parametrize(
    "change", ["", ".", "gate", "gate.", ".secret", "gate.secret", "other.{secret}", "gate.{secret}x"]
)
def test_anything_but_the_token_opens_nothing(tmp_path: Path, change: str) -> None:
    file = TokenFile(tmp_path)
    secret = file.create("gate", Role.INFER).partition(".")[2]
    assert role_of(change.format(secret=secret), file.read()) is None
    assert role_of("gate.\ud800\x00", file.read()) is None


@pytest.mark.parametrize("name", ["", "a b", "a.b", "a/b", "x" * 65, "ü", "a\n"])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="is no name of a token"):
        TokenFile(tmp_path).create(name, Role.INFER)


def test_a_name_that_is_taken_keeps_its_token(tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    token = file.create("gate", Role.INFER)
    with pytest.raises(Conflict, match="there is a token 'gate' already: revoke it first"):
        file.create("gate", Role.ADMIN)
    assert role_of(token, file.read()) == ("gate", Role.INFER)


def test_a_token_that_does_not_exist_cannot_be_revoked(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no token 'gate'"):
        TokenFile(tmp_path).revoke("gate")


def test_commands_at_the_same_time_lose_no_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(lambda i: TokenFile(tmp_path).create(f"t{i}", Role.INFER), range(16)))
    known = TokenFile(tmp_path).read()
    assert [role_of(token, known) for token in tokens] == [(f"t{i}", Role.INFER) for i in range(16)]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"tokens": {"a": {"role": "admin"}}}', b"\xff"])
def test_a_damaged_file_is_named_and_lets_nobody_in(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokens.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokens\.json cannot be read"):
        TokenFile(tmp_path).read()


def test_a_role_that_the_file_should_not_hold_opens_nothing(tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    token = file.create("gate", Role.INFER)
    path = tmp_path / "tokens.json"
    path.write_text(path.read_text().replace('"infer"', '"root"'))
    with pytest.raises(ConfigError, match="there is no role 'root'"):
        role_of(token, file.read())
