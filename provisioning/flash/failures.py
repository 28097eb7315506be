"""What a flashing tool left behind -> what it means, and what helps. Pure.

Exit codes are those of NVIDIA's l4t_initrd_flash_internal.sh. With several boards the front script hides them, so each
board's own log is judged by what it says: the texts below stand beside the codes there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """One way to fail."""

    name: str
    what: str
    remedy: str
    codes: tuple[int, ...] = ()
    pattern: str = ""
    """Of what the log says, in any case of letters."""


_COLD = (
    "enter recovery mode cold (power off, hold the button or bridge FC REC, power on), "
    "with the cable in a USB port of the PC itself"
)
_NETWORK = "turn IPv6 on, and the firewall and VPN off, for the board's network (usb0)"

FAILURES: Mapping[str, Failure] = {
    failure.name: failure
    for failure in (
        # What says most comes first: one log may hold the texts of several.
        Failure(
            "disk_full",
            "the host's disk is full",
            "make room where the BSP is; where there is room, a partition of the board is too small for its image: "
            "raise --slot-gib",
            (),
            r"no space left on device",
        ),
        Failure(
            "host_tool",
            "a program is missing on the host",
            "install what the log names, or run tools/l4t_flash_prerequisites.sh",
            (110,),
            r"not found! to install",
        ),
        Failure("no_ipv6", "IPv6 is off on the host", _NETWORK, (113,), r"ipv6 is disabled"),
        Failure(
            "firewall",
            "the host's firewall keeps boards from its NFS server",
            "sudo ufw allow nfs",
            (),
            r"nfs port is blocked",
        ),
        Failure(
            "no_nfs",
            "the host's NFS server does not serve the images",
            "sudo systemctl restart nfs-kernel-server, and look what showmount -e localhost says",
            (103, 111, 112, 114),
            r"nfs server is not running|not exported by|cannot mount the nfs server",
        ),
        Failure(
            "usb_write",
            "the first bytes over USB did not arrive",
            f"{_COLD}; no hub, no virtual machine, another cable",
            (),
            r"might be timeout in usb write",
        ),
        Failure(
            "no_board_info",
            "the board did not tell what it is (ecid.bin is missing)",
            f"{_COLD}: after a soft reboot into recovery it often does not tell",
            (11,),
            r"unable to find ecid\.bin",
        ),
        Failure(
            "no_boot",
            "the board took the flashing system and never came up with it (no ping after RCM boot, 120 s)",
            f"{_COLD}; then look at its serial console (the micro-B port, /dev/ttyACM0) while it boots",
            (4,),
            r"device ping failed after rcm boot",
        ),
        Failure(
            "no_ssh",
            "the board booted the flashing system and the host cannot reach it",
            _NETWORK,
            (5, 102, 105),
            r"host cannot connect to its ssh",
        ),
        Failure(
            "bad_layout",
            "the layout and the device that it is for do not belong together",
            "give -c and --external-device together: look at the plan",
            (2,),
            r"must be specified together|requires -c option",
        ),
        Failure(
            "network_mode",
            "this BSP writes boards over a network only",
            "leave --network usb0 in the plan",
            (3,),
            r"configuration is no longer supported",
        ),
        Failure(
            "too_many",
            "more boards are in recovery mode than the images were made for",
            "unplug some, or make images for more with --boards",
            (),
            r"too many devices",
        ),
        Failure("no_board", "no board is in recovery mode any more", _COLD, (), r"no devices to flash"),
        Failure(
            "qspi_not_written",
            "the tool ended well and did not write the boot firmware (QSPI)",
            "flash again with --option --erase-all; until then an old firmware boots",
        ),
        Failure("not_started", "the tool never came to this board", "run again: it goes on with this board"),
        Failure(
            "unplugged",
            "the board has left USB while it was written",
            f"{_COLD}; then run again",
        ),
        Failure("interrupted", "the run was interrupted", "run again: it goes on where it was"),
        Failure("unknown", "the tool failed in a way that is not known here", "read the end of the log"),
        # After the tool has ended well.
        Failure(
            "still_in_recovery",
            "the tool ended well and the board is still in recovery mode",
            "take the bridge off FC REC, and power-cycle it",
        ),
        Failure(
            "not_called_home",
            "the tool ended well and the board never called home",
            "look at its console and its network; if it is off USB for good, power-cycle it",
        ),
        Failure(
            "old_system",
            "a system runs on the board that is not of this run",
            "QSPI was not erased, or old NVMe partitions boot: flash again with --option --erase-all",
        ),
        Failure(
            "wrong_release",
            "the board called home with another release of Jetson's system",
            "QSPI was not erased, or old NVMe partitions boot: flash again with --option --erase-all",
        ),
        Failure(
            "not_armed",
            "the board's two root file systems are not both armed and bootable",
            "only flashing arms them: flash again with the layout of rootfs A/B",
        ),
        Failure(
            "no_answer",
            "the board's appliance did not answer the golden question",
            "read journalctl -u appliance on the board",
        ),
        Failure(
            "wrong_answer",
            "the board's appliance answered the golden question wrongly",
            "read journalctl -u appliance on the board; a module that computes wrongly goes back",
        ),
    )
}
_WRITTEN = re.compile(r"flashing success|flash is successful", re.IGNORECASE)
_ALL_WRITTEN = re.compile(r"has been flashed successfully", re.IGNORECASE)
"""What flash.sh says, which writes the firmware first or fails."""
_QSPI = re.compile(r"successfully flash the qspi", re.IGNORECASE)


def of_log(log: str, code: int | None = None, *, firmware: bool = True) -> Failure | None:
    """What became of one board, by its log, and by its exit code where that is known; None when it was written.

    A code of 0 is not believed by itself: a board whose log does not say that it was written was not. `firmware` says
    whether that was to be written, too.
    """
    if code == 0 and _ALL_WRITTEN.search(log):
        return None
    if code in {0, None} and _WRITTEN.search(log):
        return FAILURES["qspi_not_written"] if firmware and not _QSPI.search(log) else None
    return of_tool(log, code)


def of_tool(log: str, code: int | None = None) -> Failure:
    """Why a tool failed: by what it says, else by its exit code."""
    by_text = (one for one in FAILURES.values() if one.pattern and re.search(one.pattern, log, re.IGNORECASE))
    by_code = (one for one in FAILURES.values() if code in one.codes)
    return next(by_text, None) or next(by_code, FAILURES["unknown"])
