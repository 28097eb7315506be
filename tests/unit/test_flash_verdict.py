"""What became of a board: by what tools left behind, by what it says when it calls home, and what is kept of that."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from support.flashing import ARMED, RELEASE, RIGHT, Bench

from models import schema
from models.callhome import Report, reply_proof, report_proof
from models.errors import ConfigError, WorkshopError
from models.folder import BundleFolder
from provisioning.flash import failures, home, inventory
from provisioning.flash.home import Exam, Expected, Home
from provisioning.keys import Keys

pytestmark = pytest.mark.unit

WRITTEN = "l4t_flash_from_kernel: Successfully flash the qspi\nFlashing success\nFlash is successful\n"


@pytest.mark.parametrize(
    ("code", "log", "name"),
    [
        (2, "", "bad_layout"),
        (3, "", "network_mode"),
        (4, "", "no_boot"),
        (5, "", "no_ssh"),
        (11, "", "no_board_info"),
        (103, "", "no_nfs"),
        (113, "", "no_ipv6"),
        (1, "Error, too many devices in RCM mode", "too_many"),
        (1, "No devices to flash", "no_board"),
        (1, "ERROR sshpass not found! To install - please run: ...", "host_tool"),
        (1, "Error: NFS port is blocked by UFW.", "firewall"),
        (1, "might be timeout in USB write", "usb_write"),
        (1, "cannot write: No space left on device", "disk_full"),
        (None, "Error: Device ping failed after RCM boot.", "no_boot"),
        (0, "it says nothing of boards", "unknown"),
        (0, "Flash is successful", "qspi_not_written"),
        (9, "what is this", "unknown"),
    ],
)
def test_every_way_to_fail_has_its_name_and_a_remedy(code: int | None, log: str, name: str) -> None:
    failure = failures.of_log(log, code)
    assert failure is not None
    assert (failure.name, bool(failure.remedy)) == (name, True)


def test_a_board_was_written_when_its_log_says_so_and_its_tool_did_not_fail() -> None:
    assert failures.of_log(WRITTEN, 0) is None
    assert failures.of_log(WRITTEN) is None
    assert failures.of_log("Flashing success", firmware=False) is None
    assert failures.of_log("*** The target t186ref has been flashed successfully. ***", 0) is None
    assert failures.of_log(WRITTEN, 1) is not None


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A workshop, for its bundle."""
    return Bench(tmp_path)


def good(bench: Bench) -> Report:
    """What a board says when all is well."""
    exam = Exam(BundleFolder(bench.bundle))
    return Report("run", "1421", l4t=RELEASE, slots=ARMED, bundles=({"digest": exam.digest},), answer=RIGHT)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, None),
        ({"l4t": "36.4.0"}, "wrong_release"),
        ({"l4t": ""}, "wrong_release"),
        ({"slots": {}}, "not_armed"),
        ({"slots": {**ARMED, "armed": False}}, "not_armed"),
        ({"slots": {**ARMED, "bootable": {"A": True, "B": False}}}, "not_armed"),
        ({"answer": None, "reason": "connection refused"}, "no_answer"),
        ({"answer": {"outputs": []}}, "wrong_answer"),
        ({"answer": {"outputs": [{**RIGHT["outputs"][0], "data": [2.1] * 1024}]}}, "wrong_answer"),
        ({"answer": {"outputs": [{**RIGHT["outputs"][0], "shape": [3]}]}}, "wrong_answer"),
        ({"answer": {"outputs": "nonsense"}}, "wrong_answer"),
        ({"bundles": ({"digest": "another"},)}, "wrong_answer"),
        ({"bundles": ({"digest": ["no", "text"]},)}, "wrong_answer"),
        ({"slots": {"armed": True, "bootable": ["A", "B"]}}, "not_armed"),
        ({"slots": {"armed": True, "bootable": {"A": True}}}, "not_armed"),
        ({"slots": {**ARMED, "armed": "no"}}, "not_armed"),
        ({"answer": {"outputs": [{**RIGHT["outputs"][0], "data": [10**400] * 1024}]}}, "wrong_answer"),
        ({"answer": {"outputs": [{**RIGHT["outputs"][0], "data": [float("nan")] * 1024}]}}, "wrong_answer"),
    ],
)
def test_a_board_counts_with_the_right_system_armed_slots_and_a_right_answer(
    changes: dict[str, Any], name: str | None, bench: Bench
) -> None:
    expected = Expected(RELEASE, armed=True, exam=Exam(BundleFolder(bench.bundle)))
    failure = home.verdict(replace(good(bench), **changes), expected)
    assert (failure and failure.name) == name


def test_slots_need_not_be_armed_where_only_one_was_wanted(bench: Bench) -> None:
    expected = Expected(RELEASE, armed=False, exam=Exam(BundleFolder(bench.bundle)))
    assert home.verdict(replace(good(bench), slots={}), expected) is None


class Caller:
    """The workshop's end of the line, and what a board would send."""

    def __init__(self, bench: Bench) -> None:
        """Listen to nothing but `call`."""
        exam = Exam(BundleFolder(bench.bundle))
        self.ticket = home.new_ticket("run", (), "maintainer", exam)
        self.home = Home(self.ticket, Expected(RELEASE, armed=True, exam=exam), bench.folder / "keys")
        self.report = good(bench)

    def call(self, nonce: str = "", **changes: Any) -> dict[str, Any] | None:  # noqa: ANN401 - fields of a report
        """Send a report; the reply."""
        content = json.dumps(schema.dump(replace(self.report, **changes))).encode()
        reply = self.home.take(content, report_proof(nonce or self.ticket.nonce, content, self.home.challenge))
        return None if reply is None else dict(json.loads(reply))


def test_each_board_gets_a_login_of_its_own_that_only_the_workshop_holds(bench: Bench) -> None:
    caller = Caller(bench)
    one, other, again = (caller.call(serial=serial) for serial in ("1421", "1422", "1421"))
    assert one
    assert other
    assert again
    assert one["authorized_key"] == again["authorized_key"] != other["authorized_key"]
    assert one["authorized_key"].startswith("ssh-ed25519 ")
    private = bench.folder / "keys" / "1421.key"
    assert private.stat().st_mode & 0o777 == 0o600
    load_ssh_private_key(private.read_bytes(), None)
    assert caller.home.heard().keys() == {"1421", "1422"}


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "another"}, {"serial": ""}, {"serial": "../escape"}, {"serial": "1" * 300}, {"serial": "1421\n"},
        {"serial": "\N{FULLWIDTH DIGIT ONE}"}, {"serial": "1421\x1b[31m"},
    ],
)  # fmt: skip
def test_a_report_of_another_run_or_without_a_proper_serial_number_is_not_heard(
    changes: dict[str, Any], bench: Bench
) -> None:
    caller = Caller(bench)
    assert caller.call(**changes) is None
    assert caller.home.heard() == {}


def test_an_old_system_that_does_not_know_the_nonce_of_this_run_is_not_heard(bench: Bench) -> None:
    caller = Caller(bench)
    assert caller.call(nonce="00" * 32) is None
    nonsense = b"not even JSON"
    assert caller.home.take(nonsense, report_proof(caller.ticket.nonce, nonsense, caller.home.challenge)) is None
    assert caller.home.heard() == {}


def test_the_reply_to_one_board_proves_nothing_to_another() -> None:
    one, other = (reply_proof("00" * 32, b"welcome", report_proof("00" * 32, serial, "1")) for serial in (b"1", b"2"))
    assert one != other


def test_a_report_that_somebody_recorded_says_nothing_in_a_later_wait(bench: Bench) -> None:
    caller = Caller(bench)
    content = json.dumps(schema.dump(caller.report)).encode()
    recorded = report_proof(caller.ticket.nonce, content, caller.home.challenge)
    assert caller.home.take(content, recorded)
    later = Home(caller.ticket, Expected(RELEASE, armed=True, exam=Exam(BundleFolder(bench.bundle))), bench.folder)
    assert later.take(content, recorded) is None
    assert later.heard() == {}


def test_a_board_whose_key_cannot_be_kept_is_not_told_that_it_is_good(bench: Bench) -> None:
    caller = Caller(bench)
    (bench.folder / "keys").write_text("a file where the folder would be")
    assert caller.call() is None
    assert caller.home.heard() == {}
    assert "cannot keep the key of a board" in caller.home.trouble


def test_a_board_that_hangs_up_in_the_middle_is_no_trouble_for_others(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    caller = Caller(bench)
    with home.listening(caller.home, "127.0.0.1", 0) as port:
        for said in (
            b"POST / HTTP/1.0\r\ncontent-length: 900\r\n\r\n{",
            b"\xff\xfe\r\n\r\n",
            b"GET / HTTP/1.0\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", port), 20) as line:
                torn_s = struct.pack("ii", 1, 0)
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, torn_s)
                line.sendall(said)
        answer = httpx.get(f"http://127.0.0.1:{port}/", trust_env=False, timeout=20)
        assert answer.text == caller.home.challenge
    assert capfd.readouterr().err == ""


def test_who_never_comes_to_an_end_is_hung_up_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "_LONGEST_S", 0.2)
    monkeypatch.setattr(home, "_SILENCE_S", 600.0)
    with (
        home.listening(Caller(bench).home, "127.0.0.1", 0) as port,
        socket.create_connection(("127.0.0.1", port), 20) as line,
    ):
        line.sendall(b"POST / HTTP/1.0\r\ncontent-length: 900\r\n\r\n{")
        assert line.recv(4096) == b""


def test_a_board_that_is_not_good_is_told_why_and_gets_no_key(bench: Bench) -> None:
    reply = Caller(bench).call(l4t="36.4.0")
    assert reply
    assert not reply["accepted"]
    assert "--erase-all" in reply["reason"]
    assert "authorized_key" not in reply


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Keys]:
    """An inventory with three records, and the keys."""
    keys = Keys([tmp_path / "keys"], lambda: b"secret")
    signer = keys.create("workshop")
    file = tmp_path / "inventory.jsonl"
    for serial in ("1421", "1422", "1423"):
        inventory.append(file, {"serial": serial, "verdict": "good"}, signer)
    return file, keys


def test_the_inventory_gives_back_what_was_signed(signed: tuple[Path, Keys]) -> None:
    file, keys = signed
    assert [record["serial"] for record in inventory.read(file, keys.public("workshop"))] == ["1421", "1422", "1423"]


def test_a_record_that_a_power_cut_tore_does_not_spoil_those_after_it(signed: tuple[Path, Keys]) -> None:
    file, keys = signed
    file.write_bytes(file.read_bytes()[:-20])
    inventory.append(file, {"serial": "1424"}, keys.signer("workshop"))
    assert [record["serial"] for record in inventory.read(file, keys.public("workshop"))] == ["1421", "1422", "1424"]


def test_an_inventory_that_was_touched_is_not_believed(signed: tuple[Path, Keys]) -> None:
    file, keys = signed
    lines = file.read_text().splitlines()
    stranger = Keys([file.parent / "strange"], lambda: b"secret")
    stranger.create("workshop")
    with pytest.raises(WorkshopError, match=":1 is not signed"):
        inventory.read(file, stranger.public("workshop"))
    for changed, said in (
        ([lines[0], lines[2]], ":2 is not in its place"),
        ([lines[1], lines[0], lines[2]], ":1 is not in its place"),
        ([lines[0], lines[1].replace("payload", "payl0ad"), lines[2]], ":2 is not signed"),
        ([lines[0], "[]"], ":2 is not signed"),
        ([lines[0], '{"payload": 1, "payloadType": [], "signatures": {}}'], ":2 is not signed"),
        ([lines[0], "[" * 100_000], ":2 is not signed"),
    ):
        file.write_text("\n".join(changed) + "\n")
        with pytest.raises(WorkshopError, match=said):
            inventory.read(file, keys.public("workshop"))
    with pytest.raises(ConfigError, match="cannot be read"):
        inventory.read(file.with_name("none"), keys.public("workshop"))
