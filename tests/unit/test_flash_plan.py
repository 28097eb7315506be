"""From a wish and facts to exact commands: NVIDIA's documented cases, word by word."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.flashing import BSP

from models import schema
from models.errors import ConfigError
from provisioning.flash import plan as plans
from provisioning.flash.boards import BOARDS, MODULES
from provisioning.flash.facts import Bsp, read_bsp
from provisioning.flash.plan import Plan, Wish

pytestmark = pytest.mark.unit

NANO = Wish("jetson-orin-nano-devkit", "orin-nano-devkit", ab=False, data_gib=0)
AGX = Wish("jetson-agx-orin-devkit", "agx-orin-devkit", ab=False, data_gib=0)
FLASHER = "sudo {} ./tools/kernel_flash/l4t_initrd_flash.sh"
NVME = "--external-device nvme0n1p1 -c tools/kernel_flash/flash_l4t_t234_nvme.xml"
QSPI = '-p "-c bootloader/generic/cfg/flash_t234_qspi.xml"'
OFFLINE = "BOARDID=3767 BOARDSKU=0005 FAB=000 BOARDREV="


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
            replace(NANO, one_step=True, options=("-u", "pkc.pem", "--uefi-keys", "uefi.conf", "--hsm")),
            [
                FLASHER.format("")
                + f" {NVME} {QSPI} -u pkc.pem --uefi-keys uefi.conf --hsm --network usb0 "
                "jetson-orin-nano-devkit internal"
            ],
        ),
        (
            replace(AGX, boards=5, package=True),
            [FLASHER.format("") + " --flash-only --massflash 5 --network usb0 jetson-agx-orin-devkit"],
        ),
        (
            replace(NANO, three_step=True),
            [
                FLASHER.format(OFFLINE)
                + f" --no-flash --reuse {QSPI} --network usb0 jetson-orin-nano-devkit internal",
                FLASHER.format(OFFLINE)
                + f" --no-flash {NVME} --external-only --append --network usb0 jetson-orin-nano-devkit external",
                FLASHER.format("") + " --flash-only --network usb0 jetson-orin-nano-devkit external",
            ],
        ),
        (
            replace(NANO, pkc="/k/pkc.pem", sbk="/k/sbk.key", encryption_key="/k/disk.key"),
            [
                FLASHER.format(OFFLINE) + f" --no-flash --reuse {QSPI} -u /k/pkc.pem -v /k/sbk.key --network usb0 "
                "jetson-orin-nano-devkit internal",
                FLASHER.format(f"{OFFLINE} ROOTFS_ENC=1") + " --no-flash --external-device nvme0n1p1 "
                "-c tools/kernel_flash/flash_l4t_t234_nvme_rootfs_enc.xml -i /k/disk.key --external-only --append "
                "-u /k/pkc.pem -v /k/sbk.key --network usb0 jetson-orin-nano-devkit external",
                FLASHER.format("") + " --flash-only -u /k/pkc.pem -v /k/sbk.key --network usb0 "
                "jetson-orin-nano-devkit external",
            ],
        ),
        (replace(NANO, storage="sd"), ["sudo ./flash.sh jetson-orin-nano-devkit internal"]),
        (
            replace(NANO, one_step=True, options=("--erase-all",)),
            [FLASHER.format("") + f" {NVME} {QSPI} --erase-all --network usb0 jetson-orin-nano-devkit internal"],
        ),
        (
            replace(NANO, one_step=True, options=("--initrd",)),
            [FLASHER.format("") + f" {NVME} {QSPI} --initrd --network usb0 jetson-orin-nano-devkit internal"],
        ),
        (
            replace(NANO, one_step=True, options=("--direct", "sdb")),
            [FLASHER.format("") + f" {NVME} {QSPI} --direct sdb --network usb0 jetson-orin-nano-devkit internal"],
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
        "secure boot", "secure boot with keys in a vault", "a package in a factory",
        "three steps", "encrypted disk", "sd", "erase", "stop in the flashing system",
        "a disk of the host", "one partition", "qspi only", "lan",
    ],
)  # fmt: skip
def test_each_documented_case_is_planned_word_by_word(wish: Wish, documented: list[str], bsp: Bsp) -> None:
    made = plans.make(wish, bsp)
    commands = [list(step.argv) for step in made.steps if step.name in {"firmware", "images", "flash"}]
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
    assert [step.name for step in plans.make(NANO, ready).steps] == ["lock", "ticket", "images", "flash"]


def test_nobody_can_log_in_with_the_password_that_the_tool_demands(bsp: Bsp) -> None:
    user, lock = (step for step in plans.make(NANO, bsp).steps if step.name in {"user", "lock"})
    assert user.argv[user.argv.index("-p") + 1] == plans.PASSWORD
    assert lock.argv == ("sudo", "usermod", "--prefix", f"{bsp.path}/rootfs", "--lock", "maintainer")


def test_the_account_is_made_by_the_documented_command(bsp: Bsp) -> None:
    bare = plans.make(NANO, replace(bsp, applied="")).steps
    binaries, user = (step.argv for step in bare if step.name in {"binaries", "user"})
    assert binaries == ("sudo", "./apply_binaries.sh")
    documented = f"sudo ./tools/l4t_create_default_user.sh -u maintainer -p {shlex.quote(plans.PASSWORD)} -n appliance"
    assert list(user) == shlex.split(f"{documented} --accept-license")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"user": "../../root"}, "'../../root' is no user"),
        ({"user": "-a"}, "is no user"),
        ({"user": "maintainer; reboot"}, "is no user"),
        ({"host_name": "board\n1"}, "is no host name"),
        ({"host_name": "-n"}, "is no host name"),
    ],
)
def test_a_name_that_no_system_can_have_is_not_handed_to_a_tool(changes: dict[str, str], said: str, bsp: Bsp) -> None:
    with pytest.raises(ConfigError, match=said):
        plans.make(replace(NANO, **changes), bsp)  # type: ignore[arg-type] # two of its texts


def test_a_plan_is_still_good_in_the_folder_that_a_run_has_prepared(bsp: Bsp) -> None:
    bare = replace(bsp, applied="", users=())
    wish = Wish(NANO.board, NANO.module)
    for before in (bare, bsp, replace(bsp, users=("maintainer",))):
        plans.check(plans.make(wish, before), before)
        plans.check(plans.make(wish, before), replace(bsp, users=("maintainer",)))


@pytest.mark.parametrize(
    "changes",
    [
        {"release": "36.4.4"},
        {"applied": ""},
        {"users": ()},
        {"path": "/another/Linux_for_Tegra"},
        {"layouts": {"tools/kernel_flash/flash_l4t_t234_nvme_rootfs_ab.xml": "<partition_layout/>"}},
    ],
)
def test_a_plan_for_another_folder_than_that_which_is_there_now_is_refused(changes: dict[str, Any], bsp: Bsp) -> None:
    ready = replace(bsp, users=("maintainer",))
    with pytest.raises(ConfigError, match=r"plan again|has no partition UDA"):
        plans.check(plans.make(Wish(NANO.board, NANO.module), ready), replace(ready, **changes))


def test_a_plan_with_a_command_that_nobody_planned_is_refused(bsp: Bsp) -> None:
    made = plans.make(NANO, bsp)
    for steps in (
        (*made.steps, plans.Step("more", "", ("sudo", "reboot"))),
        made.steps[1:],
        tuple(reversed(made.steps)),
        (replace(made.steps[0], argv=("sudo", "true")), *made.steps[1:]),
    ):
        with pytest.raises(ConfigError, match="plan again"):
            plans.check(replace(made, steps=steps), bsp)


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
    card = plans.make(replace(NANO, storage="sd", data_gib=8), bsp)
    (card_layout,) = (step.file for step in card.steps if step.file)
    assert card_layout == "bootloader/generic/cfg/appliance_flash_t234_qspi_sd.xml"
    (flash,) = (step.argv for step in card.steps if step.flashes)
    assert flash[1:] == ("./flash.sh", "-c", card_layout, "-S", "20GiB", NANO.board, "internal")


def test_two_plans_that_do_the_same_are_the_same_text_and_come_back_from_it(bsp: Bsp) -> None:
    made = plans.make(Wish(NANO.board, NANO.module), bsp)
    assert schema.dump(made) == schema.dump(plans.make(Wish(NANO.board, NANO.module), bsp))
    assert schema.load(Plan, schema.dump(made)) == made


def test_a_module_that_a_board_does_not_take_and_a_board_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes no module"):
        replace(NANO, module="agx-orin-64gb").identity()
    with pytest.raises(ConfigError, match="no board 'jetson-nano'"):
        replace(NANO, board="jetson-nano").configuration()


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (
            Wish(NANO.board, NANO.module, storage="emmc"),
            "jetson-orin-nano-devkit has no eMMC: choose --storage nvme or sd",
        ),
        (replace(NANO, network="eth9"), "'eth9' is no network of the flasher: give usb0, or eth0:"),
        (replace(NANO, network="eth0:192.168.0.17:192.168.0.21"), "is no network of the flasher"),
    ],
)
def test_what_the_flasher_or_the_board_does_not_have_is_not_planned(wish: Wish, said: str, bsp: Bsp) -> None:
    with pytest.raises(ConfigError, match=said):
        plans.make(wish, bsp)


def test_a_folder_that_is_no_bsp_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no BSP folder \(flash.sh is missing\)"):
        read_bsp(tmp_path)
