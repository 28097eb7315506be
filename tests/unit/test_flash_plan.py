"""From a wish and facts to exact commands, and what stands against them: NVIDIA's documented cases, word by word."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.flashing import BSP, Bench

from models import schema
from models.errors import ConfigError
from provisioning.flash import plan as plans
from provisioning.flash.boards import BOARDS, MODULES, Attached, State, attached
from provisioning.flash.facts import TOOLS, Bsp, Host, read_bsp, read_host
from provisioning.flash.plan import Plan, Wish

pytestmark = pytest.mark.unit

NANO = Wish("jetson-orin-nano-devkit", "orin-nano-devkit", ab=False, data_gib=0)
AGX = Wish("jetson-agx-orin-devkit", "agx-orin-devkit", ab=False, data_gib=0)
FLASHER = "sudo {} ./tools/kernel_flash/l4t_initrd_flash.sh"
NVME = "--external-device nvme0n1p1 -c tools/kernel_flash/flash_l4t_t234_nvme.xml"
QSPI = '-p "-c bootloader/generic/cfg/flash_t234_qspi.xml"'
OFFLINE = "BOARDID=3767 BOARDSKU=0005 FAB=000 BOARDREV="
GOOD = Host(
    machine="x86_64",
    root=True,
    tools=frozenset(TOOLS),
    ipv6=True,
    udisks=False,
    tlp=False,
    vpn=False,
    wsl=False,
    virtual=False,
    free_bytes=2**40,
)


@pytest.fixture(scope="module")
def bsp() -> Bsp:
    """The stand-in."""
    return read_bsp(BSP)


@pytest.mark.parametrize(
    ("wish", "documented"),
    [
        (replace(AGX, storage="emmc"), ["sudo ./flash.sh jetson-agx-orin-devkit internal"]),
        (
            replace(AGX, one_step=True, network="", options=("--showlogs",)),
            [
                FLASHER.format('ADDITIONAL_DTB_OVERLAY_OPT="BootOrderNvme.dtbo"')
                + " --external-device nvme0n1p1 -c ./tools/kernel_flash/flash_l4t_external.xml --showlogs "
                "jetson-agx-orin-devkit external"
            ],
        ),
        (
            replace(NANO, one_step=True, options=("--showlogs",)),
            [FLASHER.format("") + f" {NVME} {QSPI} --showlogs --network usb0 jetson-orin-nano-devkit internal"],
        ),
        (
            replace(NANO, board="jetson-orin-nano-devkit-super", one_step=True, options=("--showlogs",)),
            [FLASHER.format("") + f" {NVME} {QSPI} --showlogs --network usb0 jetson-orin-nano-devkit-super internal"],
        ),
        (
            NANO,
            [
                FLASHER.format(OFFLINE) + f" --no-flash {NVME} {QSPI} --network usb0 jetson-orin-nano-devkit internal",
                FLASHER.format("") + " --flash-only --network usb0 jetson-orin-nano-devkit internal",
            ],
        ),
        (
            replace(NANO, images_only=True),
            [FLASHER.format(OFFLINE) + f" --no-flash {NVME} {QSPI} --network usb0 jetson-orin-nano-devkit internal"],
        ),
        (
            replace(NANO, ab=True, one_step=True),
            [
                FLASHER.format("ROOTFS_AB=1") + " --external-device nvme0n1p1 "
                f"-c tools/kernel_flash/flash_l4t_t234_nvme_rootfs_ab.xml {QSPI} --network usb0 "
                "jetson-orin-nano-devkit internal"
            ],
        ),
        (
            # NVIDIA's example calls the device mmcblk0p1, the older word for internal.
            replace(AGX, storage="emmc", boards=5),
            [
                FLASHER.format("BOARDID=3701 BOARDSKU=0000 FAB=TS4 BOARDREV=A.0")
                + " --no-flash --massflash 5 --network usb0 jetson-agx-orin-devkit internal",
                FLASHER.format("") + " --flash-only --massflash 5 --network usb0 jetson-agx-orin-devkit",
            ],
        ),
        (
            replace(NANO, one_step=True, options=("-u", "pkc.pem", "-v", "sbk.key")),
            [
                FLASHER.format("")
                + f" {NVME} {QSPI} -u pkc.pem -v sbk.key --network usb0 jetson-orin-nano-devkit internal"
            ],
        ),
        (
            replace(NANO, one_step=True, options=("-k", "kernel-dtb")),
            [FLASHER.format("") + f" {NVME} {QSPI} -k kernel-dtb --network usb0 jetson-orin-nano-devkit internal"],
        ),
        (
            replace(NANO, one_step=True, options=("--qspi-only",)),
            [FLASHER.format("") + f" {NVME} {QSPI} --qspi-only --network usb0 jetson-orin-nano-devkit internal"],
        ),
        (
            replace(NANO, one_step=True, network="eth0:192.168.0.17/24:192.168.0.21"),
            [
                FLASHER.format("")
                + f" {NVME} {QSPI} --network eth0:192.168.0.17/24:192.168.0.21 jetson-orin-nano-devkit internal"
            ],
        ),
    ],
    ids=[
        "emmc", "agx nvme", "nano nvme", "nano super", "offline images", "images only", "rootfs ab", "massflash",
        "secure boot", "one partition", "qspi only", "lan",
    ],
)  # fmt: skip
def test_each_documented_case_is_planned_word_by_word(wish: Wish, documented: list[str], bsp: Bsp) -> None:
    made = plans.make(wish, bsp)
    commands = [list(step.argv) for step in made.steps if step.name in {"images", "flash"}]
    assert commands == [shlex.split(line) for line in documented]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_images_of_every_module_are_made_with_its_own_numbers(module: str, bsp: Bsp) -> None:
    board = next(name for name, board in BOARDS.items() if module in board.modules)
    steps = plans.make(replace(NANO, board=board, module=module), bsp).steps
    (images,) = (step for step in steps if step.name == "images")
    known = MODULES[module]
    assert images.argv[1:3] == (f"BOARDID={known.board_id}", f"BOARDSKU={known.sku}")


def test_a_plan_prepares_the_root_file_system_only_as_far_as_it_is_not_ready(bsp: Bsp) -> None:
    bare = replace(bsp, applied="", users=())
    assert [step.name for step in plans.make(Wish(NANO.board, NANO.module, overlay="/image.tar"), bare).steps] == [
        "binaries", "user", "lock", "overlay", "ticket", "layout", "images", "flash",
    ]  # fmt: skip
    ready = replace(bsp, users=("maintainer",))
    assert [step.name for step in plans.make(NANO, ready).steps] == ["ticket", "images", "flash"]


def test_nobody_can_log_in_with_the_password_that_the_tool_demands(bsp: Bsp) -> None:
    user, lock = (step for step in plans.make(NANO, bsp).steps if step.name in {"user", "lock"})
    assert user.argv[user.argv.index("-p") + 1] == plans.PASSWORD
    assert lock.argv == ("sudo", "usermod", "--prefix", f"{bsp.path}/rootfs", "--lock", "maintainer")


def test_models_get_the_end_of_the_disk_and_everything_else_stays_as_nvidia_laid_it(bsp: Bsp) -> None:
    source = bsp.layouts["tools/kernel_flash/flash_l4t_t234_nvme_rootfs_ab.xml"]
    made = plans.data_layout(source, 12 * 2**30)
    names = [line.split('"')[1] for line in made.splitlines() if "<partition " in line]
    assert names[-4:] == ["APP", "APP_b", "UDA", "secondary_gpt"]
    assert "<size> 12884901888 </size>" in made
    assert sorted(made.replace("12884901888", "419430400")) == sorted(source)
    with pytest.raises(ConfigError, match="UDA"):
        plans.data_layout("<partition_layout/>", 1)


def test_a_changed_layout_is_written_and_used_with_the_sizes_that_fit_it(bsp: Bsp) -> None:
    made = plans.make(Wish(NANO.board, NANO.module), bsp)
    layout, images = (step for step in made.steps if step.name in {"layout", "images"})
    assert layout.file == "tools/kernel_flash/appliance_flash_l4t_t234_nvme_rootfs_ab.xml"
    assert images.argv[images.argv.index("-c") + 1 :][:3] == (layout.file, "-S", "20GiB")
    emmc = plans.make(replace(AGX, storage="emmc", data_gib=8), bsp)
    (emmc_layout,) = (step.file for step in emmc.steps if step.file)
    assert emmc_layout == "bootloader/generic/cfg/appliance_flash_t234_qspi_sdmmc.xml"


def test_two_plans_that_do_the_same_are_the_same_text_and_come_back_from_it(bsp: Bsp) -> None:
    made = plans.make(Wish(NANO.board, NANO.module), bsp)
    assert schema.dump(made) == schema.dump(plans.make(Wish(NANO.board, NANO.module), bsp))
    assert schema.load(Plan, schema.dump(made)) == made


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"machine": "aarch64"}, "x86-64"),
        ({"root": False}, "sudo"),
        ({"tools": frozenset(TOOLS) - {"exportfs", "dtc"}}, "apt-get install device-tree-compiler nfs-kernel-server"),
        ({"ipv6": False}, "IPv6 is off"),
        ({"free_bytes": 2**20}, "make room"),
        ({"udisks": True}, "warning: udisks"),
        ({"tlp": True}, "warning: TLP"),
        ({"vpn": True}, "warning: a VPN"),
        ({"wsl": True}, "warning: this is WSL"),
        ({"virtual": True}, "warning: this is a virtual machine"),
    ],
)
def test_what_is_wrong_with_the_host_is_said_with_what_helps(changes: dict[str, Any], said: str, bsp: Bsp) -> None:
    assert plans.problems(NANO, bsp, GOOD) == []
    (problem,) = plans.problems(NANO, bsp, replace(GOOD, **changes))
    assert said in ("" if problem.blocks else "warning: ") + problem.what


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"release": "", "applied": ""}, "does not tell its release"),
        ({"release": "38.2.0", "applied": ""}, "this BSP is R38.2.0"),
        ({"release": "39.0.0", "applied": ""}, "R39.2 on"),
        ({"release": "35.4.1", "applied": ""}, "this BSP is R35.4.1"),
        ({"applied": "36.4.0"}, "drivers of R36.4.0"),
        ({"ubuntu": ""}, "rootfs is empty"),
        ({"ubuntu": "20.04"}, "Ubuntu 20.04"),
        ({"files": frozenset()}, "no jetson-orin-nano-devkit.conf"),
    ],
)
def test_what_is_wrong_with_the_bsp_is_said_with_what_helps(changes: dict[str, Any], said: str, bsp: Bsp) -> None:
    found = plans.problems(NANO, replace(bsp, **changes), GOOD)
    assert said in found[0].what
    assert found[0].blocks


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (replace(NANO, storage="emmc"), "has no eMMC"),
        (replace(AGX, storage="emmc", ab=True), "--no-ab"),
        (replace(NANO, ab=True, data_gib=30), "do not fit"),
        (replace(NANO, one_step=True, boards=2), "without --one-step"),
        (replace(NANO, board="jetson-agx-orin-devkit-super", module="agx-orin-64gb"), "came with R39"),
    ],
)
def test_what_a_board_or_a_disk_cannot_hold_is_said_before_anything_starts(wish: Wish, said: str, bsp: Bsp) -> None:
    assert any(said in problem.what for problem in plans.problems(wish, bsp, GOOD))


def test_a_module_that_a_board_does_not_take_and_a_board_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes no module"):
        replace(NANO, module="agx-orin-64gb").identity()
    with pytest.raises(ConfigError, match="no board 'jetson-nano'"):
        replace(NANO, board="jetson-nano").configuration()


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (Wish(NANO.board, NANO.module, storage="emmc"), "jetson-orin-nano-devkit has no eMMC: choose --storage nvme"),
        (replace(NANO, network="eth9"), "'eth9' is no network of the flasher: give usb0, or eth0:"),
        (replace(NANO, network="eth0:192.168.0.17:192.168.0.21"), "is no network of the flasher"),
    ],
)
def test_what_the_flasher_or_the_board_does_not_have_is_not_planned(wish: Wish, said: str, bsp: Bsp) -> None:
    with pytest.raises(ConfigError, match=said):
        plans.make(wish, bsp)


def test_boards_are_seen_on_usb_with_what_they_are_doing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for port, product in (("1-1", "7523"), ("1-8.4", "7323"), ("2-1", "7020"), ("2-2", "7035"), ("3-1", "7045")):
        bench.plug(port, product, serial="1421123456789" if product == "7020" else "")
    bench.plug("3-2", "7019")
    bench.plug("3-3", "beef")
    found = attached(bench.sysroot)
    assert [(one.port, one.state.value) for one in found] == [
        ("1-1", "recovery"), ("1-8.4", "recovery"), ("2-1", "booted"), ("2-2", "flashing"), ("3-1", "debug"),
        ("3-2", "foreign"),
    ]  # fmt: skip
    assert found[0].modules == ("orin-nano-8gb", "orin-nano-devkit")
    assert found[1].behind_hub
    assert found[2].serial == "1421123456789"


def test_a_board_that_this_container_was_not_given_is_not_seen(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.plug("1-1")
    next((bench.sysroot / "dev/bus/usb").glob("*/*")).unlink()
    assert attached(bench.sysroot) == []


RECOVERY = Attached("1-1", "7523", State.RECOVERY)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "none is on USB"),
        ([Attached("1-1", "7020", State.BOOTED)], "1-1 is booted"),
        ([RECOVERY, replace(RECOVERY, port="1-2")], "2 boards are in recovery mode"),
        ([replace(RECOVERY, product="7323")], "1-1 is orin-nx-16gb, not orin-nano-devkit"),
        ([RECOVERY, Attached("1-3", "7026", State.FOREIGN)], "Xavier or Thor"),
        ([replace(RECOVERY, port="1-8.4")], "behind a hub"),
    ],
)
def test_what_hangs_on_usb_and_cannot_be_flashed_is_said(found: list[Attached], said: str) -> None:
    assert plans.of_boards(NANO, [RECOVERY]) == []
    assert said in plans.of_boards(NANO, found)[0].what


def test_a_host_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    monkeypatch.setenv("PATH", str(bench.folder / "bin"))
    calm = read_host(bench.bsp, bench.sysroot)
    assert (calm.ipv6, calm.udisks, calm.tlp, calm.vpn, calm.wsl, calm.virtual) == (True, *[False] * 5)
    assert calm.tools == frozenset(TOOLS)
    for name, content in {
        "proc/7/comm": "udisksd\n",
        "run/tlp/last_pwr": "0",
        "proc/net/route": "Iface\tDestination\ntun0\t0000\n",
        "proc/version": "Linux version 5.15 (Microsoft@Microsoft.com)\n",
        "proc/cpuinfo": "flags\t: fpu hypervisor\n",
        "proc/sys/net/ipv6/conf/all/disable_ipv6": "1\n",
    }.items():
        bench.host(name, content)
    rough = read_host(bench.bsp, bench.sysroot)
    assert (rough.ipv6, rough.udisks, rough.tlp, rough.vpn, rough.wsl, rough.virtual) == (False, *[True] * 5)


def test_a_folder_that_is_no_bsp_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no BSP folder \(flash.sh is missing\)"):
        read_bsp(tmp_path)


def test_what_is_known_to_fail_on_a_module_is_said_there_and_nowhere_else(bsp: Bsp) -> None:
    nx = plans.make(replace(NANO, module="orin-nx-8gb"), bsp)
    assert "full UEFI" in plans.known_issue(nx, "no_boot")
    assert not plans.known_issue(nx, "no_ssh")
    assert not plans.known_issue(replace(nx, release="36.4.0"), "no_boot")
    assert not plans.known_issue(plans.make(NANO, bsp), "no_boot")
