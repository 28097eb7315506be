"""Checks of `appliance doctor`, on recorded trees and outputs: no machine is looked at."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trustme
from support.boards import plant

from appliance import doctor, doctor_cli, settings
from appliance.adapters import host
from appliance.core.clock import DAY_S, RELEASED_AT
from appliance.doctor import Here
from appliance.doctor_tls import Check, Trust, check_tls, read_certificates
from appliance.doctor_tls import checks as tls_checks
from models.bundle import Blob
from models.engine import NEVER, Passport, Target

pytestmark = pytest.mark.unit

NOW = RELEASED_AT + DAY_S
NANO = "NVIDIA Jetson Orin Nano Developer Kit Super\0"
RELEASE = (
    "# R36 (release), REVISION: {}, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan  8 01:49:37 UTC 2025"
)
SWAPS = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
WATCHDOG = ["systemctl", "show", "-p", "RuntimeWatchdogUSec"]


def tree(root: Path, **files: str) -> Here:
    """A recorded machine: files by their path, `__` for `/`."""
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return Here(root, lambda _command: "")


def verdicts(*checks: Check) -> list[str]:
    for check in checks:
        assert check.reason
        assert check.remedy or check.verdict in {"ok", "skip"}
    return [check.verdict for check in checks]


# Python and what is installed


def test_a_python_older_than_that_of_jetpack_6_fails() -> None:
    assert verdicts(doctor.python((3, 8, 10)), doctor.python((3, 10, 12)), doctor.python((3, 12, 3))) == [
        "fail",
        "ok",
        "ok",
    ]


def test_the_library_that_does_not_load_is_named_with_what_it_said() -> None:
    check = doctor.libraries("numpy\ncv2\n", "ImportError: libGL.so.1: cannot open shared object file")
    assert verdicts(check) == ["fail"]
    assert check.reason.startswith("cv2 does not load: ImportError: libGL")
    assert verdicts(doctor.libraries("numpy\ncv2\n", ""), doctor.libraries("", "killed")) == ["ok", "fail"]


def test_the_real_libraries_load_in_a_process_of_their_own() -> None:
    assert verdicts(doctor.libraries(*doctor.imported())) == ["ok"]


# Jetson


@pytest.mark.parametrize(
    ("revision", "verdict", "said"),
    [
        ("4.7", "warn", "NvMap"),
        ("4.3", "ok", "36.4.3"),
        ("5.0", "ok", "36.5.0"),
        ("3.0", "fail", "JetPack 6.2"),
    ],
)
def test_releases_of_jetpack_are_told_apart(tmp_path: Path, revision: str, verdict: str, said: str) -> None:
    check = doctor.jetpack(tree(tmp_path, etc__nv_tegra_release=RELEASE.format(revision)).l4t)
    assert verdicts(check) == [verdict]
    assert said in check.reason + check.remedy


def test_a_machine_that_is_no_jetson_is_not_judged_as_one(tmp_path: Path) -> None:
    here = tree(tmp_path)
    found = [doctor.jetpack(here.l4t), doctor.power_mode({}), doctor.devices(here), doctor.engines(here, [])]
    assert verdicts(*found) == ["skip"] * 4


def test_tensorrt_is_needed_where_it_is_asked_for_and_missed_on_a_jetson() -> None:
    assert verdicts(
        doctor.tensorrt("", False, wanted="tensorrt"),
        doctor.tensorrt("36.4.3", False, wanted="onnxruntime-cpu"),
        doctor.tensorrt("", False, wanted="onnxruntime-cpu"),
        doctor.tensorrt("36.4.3", True, wanted="tensorrt"),
    ) == ["fail", "warn", "skip", "ok"]


@pytest.mark.parametrize(
    ("mode", "verdict"), [({"id": 2, "name": "MAXN_SUPER"}, "ok"), ({"id": 0, "name": "15W"}, "warn"), ({}, "warn")]
)
def test_a_power_mode_that_holds_the_module_back_is_named(mode: dict[str, Any], verdict: str) -> None:
    assert verdicts(doctor.power_mode({"l4t": "36.4.3", "power_mode": mode})) == [verdict]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("orin-nano", ["ok", "ok", "ok", "warn", "ok"]),  # one slot is spent
        ("orin-nx", ["warn", "warn", "fail", "skip", "ok"]),  # held back, hot, and its disk is read-only
        ("agx-orin", ["ok", "ok", "ok", "ok", "ok"]),
    ],
)
def test_boards_are_judged_by_what_they_say(tmp_path: Path, name: str, found: list[str]) -> None:
    told = host.board(plant(tmp_path, name, "36.4.3"))
    checks = [doctor.power_mode, doctor.heat, doctor.storage, doctor.system_slots, doctor.battery]
    assert verdicts(*(check(told) for check in checks)) == found


def test_heat_worn_storage_and_a_slot_that_cannot_be_booted_are_named() -> None:
    hot = {"slowed_by": ["cpu-throttle-alert"], "temperatures_celsius": {"tj-thermal": 99.5}}
    worn = {"storage": [{"disk": "mmcblk0", "life_used_percent": 90}]}
    dead = {"storage": [{"disk": "nvme0n1", "read_only": True}]}
    checks = [
        doctor.heat(hot),
        doctor.storage(worn),
        doctor.storage(dead),
        doctor.system_slots({"slots": {"bootable": {"A": True, "B": False}}}),
    ]
    assert verdicts(*checks) == ["warn", "warn", "fail", "warn"]
    said = ["cpu-throttle-alert", "mmcblk0", "nvme0n1", "slot B"]
    assert [word in check.reason for word, check in zip(said, checks, strict=True)] == [True] * 4


def passport_of(plan: bytes, l4t: str) -> Passport:
    target = Target("tensorrt", "8.7", "10.3.0", "12.6", l4t, "NVIDIA Jetson Orin Nano Developer Kit Super")
    digest = hashlib.sha256(b"graph").hexdigest()
    return Passport("rec", "fp32", "orin-nano", target, digest, Blob.of(plan), (), 0, (), {}, "", "tests", NEVER)


def test_an_engine_of_another_release_or_with_a_turned_byte_is_found(tmp_path: Path) -> None:
    here = tree(tmp_path / "root", etc__nv_tegra_release=RELEASE.format("4.3"), **{"proc__device-tree__model": NANO})
    folder = tmp_path / "bundle" / "engines" / "orin-nano"
    folder.mkdir(parents=True)
    (folder / "rec.plan").write_bytes(b"plan")
    passport = passport_of(b"plan", "36.4.3")
    (folder / "rec.passport.json").write_bytes(passport.to_bytes())
    bundle = [tmp_path / "bundle"]
    assert verdicts(doctor.engines(here, bundle)) == ["ok"]
    other = dataclasses.replace(passport, valid_for=dataclasses.replace(passport.valid_for, l4t="36.5.0"))
    (folder / "rec.passport.json").write_bytes(other.to_bytes())
    check = doctor.engines(here, bundle)
    assert verdicts(check) == ["fail"]
    assert "36.5.0" in check.reason
    beside = tmp_path / "bundle" / "engines" / "zz-this-one"
    shutil.copytree(folder, beside)
    (beside / "rec.passport.json").write_bytes(passport.to_bytes())
    assert verdicts(doctor.engines(here, bundle)) == ["ok"]  # the runtime takes the one that fits
    shutil.rmtree(beside)
    assert verdicts(doctor.engines(tree(tmp_path / "pc"), bundle)) == ["ok"]
    (folder / "rec.plan").write_bytes(b"plam")
    assert verdicts(doctor.engines(tree(tmp_path / "pc"), bundle)) == ["fail"]


# Rights, disk, memory


def test_a_state_folder_that_cannot_be_written_and_open_tokens_fail(tmp_path: Path) -> None:
    assert verdicts(doctor.rights(tmp_path / "not" / "there" / "yet")) == ["ok"]
    assert verdicts(doctor.rights(Path("/proc/state"))) == ["fail"]
    tokens = tmp_path / "tokens.json"
    tokens.touch(0o600)
    assert verdicts(doctor.rights(tmp_path)) == ["ok"]
    tokens.chmod(0o644)
    check = doctor.rights(tmp_path)
    assert (verdicts(check), check.remedy) == (["fail"], f"chmod 600 {tokens}")


@pytest.mark.parametrize(("free_bytes", "verdict"), [(2**20, "fail"), (2**30, "warn"), (2**40, "ok")])
def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_bytes: int, verdict: str) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": free_bytes}))
    assert verdicts(doctor.disk(tmp_path)) == [verdict]


def test_memory_for_a_second_version_is_judged_by_the_largest_model_where_a_daemon_runs() -> None:
    def status(leased_bytes: int) -> dict[str, Any]:
        models = [{"need_bytes": 100 * 2**20}, {"need_bytes": 2**20}]
        return {"memory": {"models": models, "budget_bytes": 250 * 2**20, "leased_bytes": leased_bytes}}

    assert verdicts(doctor.memory(2**40, status(101 * 2**20)), doctor.memory(2**40, status(200 * 2**20))) == [
        "ok",
        "warn",
    ]
    assert verdicts(doctor.memory(8 * 2**30, None), doctor.memory(2**30, None)) == ["ok", "warn"]


def test_swap_on_a_card_is_named_and_compressed_memory_is_not() -> None:
    zram = "/dev/zram0                              partition\t1048572\t\t0\t\t5\n"
    card = "/dev/mmcblk0p3                          partition\t1048572\t\t0\t\t-2\n"
    assert verdicts(doctor.swap(SWAPS), doctor.swap(SWAPS + zram), doctor.swap(SWAPS + zram + card)) == [
        "ok",
        "ok",
        "warn",
    ]
    assert "/dev/mmcblk0p3" in doctor.swap(SWAPS + card).reason


# Time and network


def test_a_clock_of_1970_fails_and_one_that_nobody_vouches_for_is_a_warning() -> None:
    assert verdicts(
        doctor.clock(3600.0, synced=True, assumed=False),
        doctor.clock(NOW, synced=None, assumed=False),
        doctor.clock(NOW, synced=False, assumed=True),
        doctor.clock(NOW, synced=True, assumed=False),
    ) == ["fail", "warn", "warn", "ok"]


def test_a_missing_hardware_clock_is_a_warning(tmp_path: Path) -> None:
    with_one = host.board(tree(tmp_path / "with", sys__class__rtc__rtc0__name="rtc-pcf8563").root)
    assert verdicts(doctor.battery(with_one), doctor.battery({})) == ["ok", "warn"]


def test_ipv6_that_is_off_is_a_warning(tmp_path: Path) -> None:
    on = tree(tmp_path / "on", proc__net__if_inet6="", proc__sys__net__ipv6__conf__all__disable_ipv6="0\n")
    off = tree(tmp_path / "off", proc__net__if_inet6="", proc__sys__net__ipv6__conf__all__disable_ipv6="1\n")
    assert verdicts(doctor.ipv6(on), doctor.ipv6(off), doctor.ipv6(tree(tmp_path / "none"))) == ["ok", "warn", "warn"]


@pytest.mark.parametrize(("told", "verdict"), [("30s", "ok"), ("0", "warn"), ("", "warn")])
def test_a_watchdog_that_nobody_feeds_is_a_warning(tmp_path: Path, told: str, verdict: str) -> None:
    def run(command: Sequence[str]) -> str:
        assert command == WATCHDOG
        return f"RuntimeWatchdogUSec={told}\n"

    here = tree(tmp_path, dev__watchdog0="")
    assert verdicts(doctor.watchdog(Here(here.root, run))) == [verdict]
    assert verdicts(doctor.watchdog(tree(tmp_path / "without"))) == ["skip"]


def test_a_certificate_is_judged_by_how_long_it_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "server.pem"
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(path)
    until = min(one.valid_until for one in read_certificates(path))
    assert verdicts(
        doctor.certificate(None, NOW),
        doctor.certificate(path, until - 100 * DAY_S),
        doctor.certificate(path, until - 3 * DAY_S),
        doctor.certificate(path, until + 3 * DAY_S),
        doctor.certificate(tmp_path / "none.pem", NOW),
    ) == ["skip", "ok", "warn", "fail", "fail"]


def test_a_broker_is_called_and_an_upstream_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert verdicts(doctor.broker("127.0.0.1", port)) == ["ok"]
    assert verdicts(doctor.broker("127.0.0.1", port), doctor.broker("", 1883)) == ["fail", "skip"]
    assert verdicts(doctor.upstream(f"http://127.0.0.1:{port}/", NOW), doctor.upstream("", NOW)) == ["fail", "skip"]
    assert "secret" not in str(doctor.upstream(f"http://me:secret@127.0.0.1:{port}/", NOW))
    assert verdicts(doctor.upstream(f"https://127.0.0.1:{port}/", NOW)) == ["fail"]


def test_what_is_no_address_at_all_is_a_finding(tmp_path: Path) -> None:
    for url in ("https://example.com:port/", "https://.x/", "http://.x/", "http://[::1/"):
        assert verdicts(doctor.upstream(url, NOW)) == ["fail"]
    told = settings.load(profile="cpu", config=None, flags={"state_dir": tmp_path})
    told.identity_files.service.parent.mkdir()
    told.identity_files.service.write_text("https://fleet.example.com:port/")
    assert [check.verdict for check in tls_checks(told, NOW) if check.name == "enrolment"] == ["fail"]
    assert verdicts(doctor.broker(".x", 1883), check_tls("broker tls", ".x", 8883, Trust(), NOW)) == ["fail", "fail"]


def test_libraries_that_never_end_loading_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_IMPORT", "import time; print('numpy', flush=True); time.sleep(60)")
    monkeypatch.setattr(doctor, "_IMPORT_S", 0.5)
    check = doctor.libraries(*doctor.imported())
    assert (check.verdict, "did not end within" in check.reason) == ("fail", True)


# All of it


def test_a_daemon_is_well_on_a_fallback_or_not_ready() -> None:
    def status(ready: bool, degraded: str | None) -> dict[str, Any]:
        model = {"name": "reader", "ready": ready, "reason": "waiting: it died", "degraded": degraded}
        return {"ready": ready, "models": [model]}

    checks = [doctor.daemon(one) for one in (None, status(True, None), status(True, "no GPU"), status(False, None))]
    assert verdicts(*checks) == ["skip", "ok", "warn", "fail"]
    assert checks[1].reason == "ready with 1 model"
    assert "it died" in checks[-1].reason
    assert doctor.daemon(None, "why").reason == "why"


def test_every_check_has_a_name_of_its_own_and_is_plain_data(tmp_path: Path) -> None:
    config = settings.Settings(state_dir=tmp_path)
    checks = list(doctor.examine(tree(tmp_path), config, now=NOW, status=None))
    verdicts(*checks)
    assert len({check.name for check in checks}) == len(checks) >= 18
    assert json.loads(json.dumps([dataclasses.asdict(check) for check in checks]))[0]["name"] == "python"


def test_the_table_in_the_documents_names_every_check(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "commands.md").read_text().partition("## The doctor")[2]
    told = {name for row in re.findall(r"^\| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE) for name in row.split(", ")}
    made = {check.name for check in doctor.examine(tree(tmp_path), settings.Settings(), now=NOW, status=None)}
    where_wanted = {"broker tls", "enrolment", "revoked certificates"}  # not yielded for a device that needs none
    assert told - {"check"} == made | where_wanted | {"settings"}


@pytest.mark.parametrize(
    ("http", "address"),
    [
        ({}, "http://127.0.0.1:8080"),
        ({"port": 21080, "tls_certificate": "a.pem"}, "https://localhost:21080"),
        ({"host": "0.0.0.0", "tls_certificate": "a.pem"}, "https://localhost:8080"),  # noqa: S104 - nobody listens
        ({"host": "10.0.0.7", "tls_certificate": "a.pem"}, "https://10.0.0.7:8080"),
        ({"host": "fd00::7", "tls_certificate": "a.pem"}, "https://[fd00::7]:8080"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_doctor_asks_where_the_settings_say(http: dict[str, Any], address: str) -> None:
    assert doctor_cli.address_of(settings.Settings(http=settings.Http(**http))) == address


def test_devices_that_this_user_may_not_open_are_named(tmp_path: Path) -> None:
    here = tree(tmp_path, dev__nvmap="")
    assert verdicts(doctor.devices(here)) == ["ok"]
    if os.geteuid() != 0:  # root may open anything
        (tmp_path / "dev/nvmap").chmod(0)
        assert verdicts(doctor.devices(here)) == ["fail"]
