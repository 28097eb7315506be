#!/usr/bin/env python3
"""Stand-in for NVIDIA's flasher; see ../../../README.md."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

# What the real logs say, by outcome, and the exit code of one board.
OUTCOMES = {
    "written": (0, "l4t_flash_from_kernel: Starting to flash to qspi\nl4t_flash_from_kernel: Successfully flash the qspi\n"
                   "l4t_flash_from_kernel: Flashing success\nFlash is successful\nReboot device\nCleaning up...\n"),
    "qspi_not_written": (0, "l4t_flash_from_kernel: Flashing success\nFlash is successful\nReboot device\n"),
    "still_in_recovery": (0, "l4t_flash_from_kernel: Successfully flash the qspi\nFlashing success\n"),
    "bad_layout": (2, "-c and --external-device must be specified together\n"),
    "network_mode": (3, "Error: This configuration is no longer supported\n"),
    "no_boot": (4, "Waiting for target to boot-up...\nError: Timeout\nError: Device ping failed after RCM boot.\n"
                   "Error: This can be due to XUSB not being enabled or device failed to boot.\n"),
    "no_ssh": (5, "Waiting for device to expose ssh .........Error: Timeout\nError: Device should have booted into "
                  "initrd kernel now. However, the host cannot connect to its ssh server\n"),
    "no_board_info": (11, "Error: unable to find ecid.bin\n"),
    "usb_write": (1, "ERROR: might be timeout in USB write.\nError: Return value 3\n"),
    "no_nfs": (103, "Error: Flash failure.\nError: Either the device cannot mount the NFS server on the host or ...\n"),
    "disk_full": (1, "tar: rootfs.tar: Cannot write: No space left on device\n"),
    "unplugged": (1, "l4t_flash_from_kernel: Starting to flash to nvme0n1\nclient_loop: send disconnect: Broken pipe\n"),
    "unknown": (77, "a message that nobody has seen before\n"),
    "hang": (0, ""),
}
MARK = "# Entry added by NVIDIA initrd flash tool"

told = json.loads(Path("stand-in.json").read_text())
sysroot = Path(told["sysroot"])
arguments = sys.argv[1:]
with open("calls.jsonl", "a") as calls:
    names = ("BOARDID", "BOARDSKU", "FAB", "BOARDREV", "ROOTFS_AB", "ADDITIONAL_DTB_OVERLAY_OPT")
    json.dump({"argv": arguments, "env": {name: os.environ[name] for name in names if name in os.environ}}, calls)
    calls.write("\n")

if "--flash-only" not in arguments:
    print("*  Step 1: Generate flash packages *")
    code, said = OUTCOMES[told.get("images", "written")]
    if code:
        print(said)
        sys.exit(code)
    Path("tools/kernel_flash/images").mkdir(exist_ok=True)
    if "--no-flash" in arguments:
        print("Put device in recovery mode, run with option --flash-only to flash device.")
        sys.exit(0)

most = int(arguments[arguments.index("--massflash") + 1]) if "--massflash" in arguments else 1
boards = sorted(node for node in (sysroot / "sys/bus/usb/devices").iterdir()
                if (node / "idProduct").read_text().strip() in ("7023", "7223", "7323", "7423", "7523", "7623"))
if not boards:
    print("No devices to flash")
    sys.exit(1)
if len(boards) > most:
    print("Too many devices in RCM mode")
    sys.exit(1)

exports, rule = sysroot / "etc/exports", sysroot / "etc/udev/rules.d/99-l4t-host.rules"
before = exports.read_text()
exports.write_text(f"{before}{MARK}\n{Path.cwd()}/tools/kernel_flash/tmp 127.0.0.1(rw,nohide,insecure,no_root_squash)\n")
rule.write_text("stand-in\n")
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # the real one is killed in the middle of a step, too

Path("initrdlog").mkdir(exist_ok=True)
codes = []
for instance, board in enumerate(boards):
    outcome = told["outcomes"].get(board.name, "written")
    code, said = OUTCOMES[outcome]
    said = "*  Step 3: Boot the device with flash initrd image *\n" + said
    log = Path(f"initrdlog/flash_{board.name}_{instance}_{time.time_ns()}.log")
    if told.get("no_log") != board.name:
        log.write_text(said)
    if most == 1:
        print(said)
    if outcome == "hang":
        Path("hanging").write_text(str(os.getpid()))
        time.sleep(600)
    if code == 0 and outcome != "still_in_recovery":
        (board / "idProduct").write_text("7020\n")
        (board / "serial").write_text(told["serials"].get(board.name, f"serial{instance}") + "\n")
    if outcome == "unplugged":
        shutil.rmtree(board)
    codes.append(code)

exports.write_text(before)
rule.unlink()
if most == 1:
    sys.exit(codes[0])
if any(codes):
    print("Flash complete (WITH FAILURES)")
    sys.exit(1)
