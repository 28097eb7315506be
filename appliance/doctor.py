"""`appliance doctor`: looks at a machine before or after installation, and says what to do about what is not well.

Each check reads the machine through `Here`, a root folder and a way to run a command, so a recorded tree stands for a
whole device; the rest of a check is a judgement on text and numbers. Nothing is changed, but for one empty file that
is made and removed where the daemon will write. More than 400 lines, because every check is here, and each is short.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from appliance import hardware
from appliance.adapters import host
from appliance.core.clock import DAY_S, RELEASED_AT
from appliance.doctor_tls import Check, Trust, check_tls, read_certificates
from appliance.doctor_tls import checks as tls_checks
from appliance.runtime import machine
from appliance.runtime.tensorrt import installed
from appliance.settings import Gpu, Settings
from models.engine import ENGINES, PASSPORT, Passport
from models.errors import BundleError

_LEAST_PYTHON = (3, 10)
_LIBRARIES = (
    "numpy",
    "cv2",
    "onnxruntime",
    "fastapi",
    "uvicorn",
    "uvloop",
    "httptools",
    "paho.mqtt.client",
    "pydantic_settings",
    "structlog",
    "prometheus_client",
    "tuf",
    "zstandard",
    "orjson",
)
_IMPORT = (
    "import importlib, sys\nfor name in sys.argv[1:]:\n    print(name, flush=True)\n    importlib.import_module(name)"
)
_LEAST_FREE_BYTES, _FREE_BYTES = 256 * 2**20, 2 * 2**30
_CONNECT_S = 3.0
_IMPORT_S = 120
_RENEW_S = 14 * DAY_S
_WORN_PERCENT = 90
_SECOND_SLOT_BYTES = 4 * 2**30
"""Machines with less seldom hold a reading bundle twice."""


@dataclass(frozen=True, slots=True)
class Here:
    """The machine as it is read: files below `root`, and the output of commands, empty where there are none."""

    root: Path = Path("/")
    run: hardware.Run = hardware.output

    def text(self, path: str) -> str:
        """A small file of the machine; empty when it is not there."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return ""

    @property
    def l4t(self) -> str:
        """Version of Jetson's system; empty on other machines."""
        return machine.l4t(self.text("etc/nv_tegra_release"))


def examine(
    here: Here, config: Settings, *, now: float, status: Mapping[str, Any] | None, unanswered: str = ""
) -> Iterator[Check]:
    """All checks, one after the other; `now` is wall time.

    `status` is that of the daemon; None where none is told, for the reason in `unanswered`.
    """
    yield python(sys.version_info[:3])
    yield libraries(*imported())
    board = host.board(here.root)
    yield profile(config.profile, *hardware.suited(here.root, here.run), status)
    yield jetpack(here.l4t)
    yield tensorrt(here.l4t, installed("tensorrt"), wanted=config.runtime)
    yield engines(here, [*config.bundles, config.state_dir])
    yield power_mode(board)
    yield heat(board)
    yield storage(board)
    yield system_slots(board)
    yield rights(config.state_dir)
    yield devices(here)
    yield card(here, config.gpu, hardware.cards(here.run))
    yield disk(config.state_dir)
    yield memory(host.memory_bytes(here.text("proc/meminfo")).get("total", 0), status)
    yield swap(here.text("proc/swaps"))
    yield clock(now, synced=host.clock_synced(), assumed=config.clock.assume_synced)
    yield battery(board)
    yield ipv6(here)
    yield watchdog(here)
    yield certificate(config.http.tls_certificate, now)
    yield broker(config.mqtt.host, config.mqtt.port)
    yield upstream(config.update.url, now)
    yield from tls_checks(config, now)
    yield daemon(status, unanswered)


def python(version: tuple[int, int, int]) -> Check:
    """Whether this Python is new enough."""
    said = ".".join(map(str, version))
    if version[:2] < _LEAST_PYTHON:
        return Check("python", "fail", f"Python is {said}, 3.10 is needed", "use the Python of JetPack 6 or later")
    return Check("python", "ok", f"Python {said}")


def libraries(output: str, failure: str) -> Check:
    """Whether what serving needs can be loaded; `output` names what was begun, `failure` says why the last did not."""
    names = output.split()
    if not failure:
        return Check("libraries", "ok", f"{len(names)} libraries load")
    name = names[-1] if names else "the first library"
    return Check(
        "libraries",
        "fail",
        f"{name} does not load: {failure}",
        "install the appliance again into an environment of its own",
    )


def profile(chosen: str, suits: str, because: str, status: Mapping[str, Any] | None) -> Check:
    """Whether the profile is the one that suits this machine: that of the daemon, or the one it would get."""
    name = (status or {}).get("profile", {}).get("name") or chosen or suits
    if name == suits:
        return Check("profile", "ok", f"{name}: {because}")
    remedy = f"leave `profile` and --profile out, which gives {suits}, unless it is wanted so"
    return Check("profile", "warn", f"{name} was chosen by hand: {because}", remedy)


def jetpack(l4t: str) -> Check:
    """Whether this release of Jetson's system is known to work, and what is odd about it."""
    if not l4t:
        return Check("jetpack", "skip", "this is no Jetson")
    release = tuple(map(int, re.findall(r"\d+", l4t)))
    if release < (36, 4):
        return Check("jetpack", "fail", f"L4T {l4t} is older than JetPack 6.2 (36.4)", "flash JetPack 6.2 or later")
    if release == (36, 4, 7):
        return Check(
            "jetpack",
            "warn",
            "L4T 36.4.7 caps single allocations of the GPU (NvMap error 12 although memory is free)",
            "update to 36.5, or keep memory.budget_bytes well below what is free",
        )
    return Check("jetpack", "ok", f"L4T {l4t}")


def tensorrt(l4t: str, is_there: bool, *, wanted: str) -> Check:
    """Whether TensorRT is there where it is needed."""
    if is_there:
        return Check("tensorrt", "ok", "TensorRT can be imported")
    remedy = "install JetPack's own (apt-get install tensorrt), and make the environment with --system-site-packages"
    if wanted == "tensorrt":
        return Check("tensorrt", "fail", "runtime is tensorrt, and it cannot be imported", remedy)
    if l4t:
        return Check("tensorrt", "warn", f"it cannot be imported, so {wanted} computes everything", remedy)
    return Check("tensorrt", "skip", f"not needed: {wanted} computes everything")


def engines(here: Here, folders: Sequence[Path]) -> Check:
    """Whether each compiled engine has a passport that fits its plan and, on a Jetson, one of each graph fits it."""
    paths = [path for folder in folders for path in sorted((folder / ENGINES).glob(f"**/*{PASSPORT}"))]
    l4t, module = here.l4t, machine.module(here.text("proc/device-tree/model"))
    fitting: set[str] = set()
    others: dict[str, str] = {}  # graph -> why an engine is for another machine, which the runtime passes over
    try:
        for path in paths:
            passport = Passport.from_bytes(path.read_bytes(), str(path))
            passport.check_plan(path.with_name(path.name.removesuffix(PASSPORT) + ".plan").read_bytes())
            graph = passport.graph_sha256
            try:
                if l4t:
                    passport.check(graph, replace(passport.valid_for, l4t=l4t, module=module))
                fitting.add(graph)
            except BundleError as error:
                others[graph] = str(error)
        reason = next((why for graph, why in others.items() if graph not in fitting), "")
    except (BundleError, OSError) as error:
        reason = str(error)
    if reason:
        return Check("engines", "fail", reason, "compile again on this device: provision compile BUNDLE")
    if not paths:
        return Check("engines", "skip", "there are no compiled engines")
    return Check("engines", "ok", f"{len(paths)} engines fit their passports")


def power_mode(board: Mapping[str, Any]) -> Check:
    """Whether the module may run as fast as it can; `board` is what `host.board` says, here and below."""
    if "l4t" not in board:
        return Check("power mode", "skip", "this is no Jetson")
    mode = board.get("power_mode", {})
    name = str(mode.get("name", mode.get("id", "")))
    if name.startswith("MAXN"):
        return Check("power mode", "ok", name)
    return Check(
        "power mode",
        "warn",
        f"{name or 'it is not told'}: the GPU may be held back, and latencies measured in another mode do not hold",
        "choose another with `sudo nvpmodel -m N`, where cooling and supply allow it, and compile again",
    )


def heat(board: Mapping[str, Any]) -> Check:
    """Whether the machine slows itself down."""
    degrees = board.get("temperatures_celsius", {})
    hottest = f"the hottest zone has {max(degrees.values()):.0f} °C" if degrees else "no temperature sensor was found"
    if board.get("slowed_by"):
        why = f"slowed down by {', '.join(board['slowed_by'])}; {hottest}"
        return Check("heat", "warn", why, "see to fan, dust, supply and the place it stands in")
    return Check("heat", "ok" if degrees else "skip", hottest)


def storage(board: Mapping[str, Any]) -> Check:
    """Whether a disk is worn out, or has turned read-only."""
    disks = board.get("storage", ())
    for disk in disks:
        if disk.get("read_only"):
            return Check(
                "storage", "fail", f"{disk['disk']} can only be read", "it may be dying: save it and replace it"
            )
        if disk.get("reserve") in {"warning", "urgent"} or disk.get("life_used_percent", 0) >= _WORN_PERCENT:
            return Check("storage", "warn", f"{disk['disk']} is nearly worn out", "replace it before it fails")
    names = ", ".join(disk["disk"] for disk in disks)
    return Check("storage", "ok", f"{names}: no complaint") if disks else Check("storage", "skip", "no disk was found")


def system_slots(board: Mapping[str, Any]) -> Check:
    """Whether both of the system's own slots can be booted."""
    bootable = board.get("slots", {}).get("bootable", {})
    spent = [slot for slot, can_be in bootable.items() if not can_be]
    if spent:
        why = f"slot {', '.join(spent)} of the system cannot be booted"
        return Check("system slots", "warn", why, "flash it again: an update that fails could not go back")
    return Check("system slots", "ok" if bootable else "skip", "both can be booted" if bootable else "none were found")


def rights(state_dir: Path) -> Check:
    """Whether the daemon may write where it keeps its state, and nobody else reads its tokens."""
    place = _existing(state_dir)
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        why = f"nothing can be written in {place} ({error.strerror})"
        return Check("rights", "fail", why, f"give {state_dir} to the user that runs the daemon, or set state_dir")
    tokens = state_dir / "tokens.json"
    if tokens.exists() and tokens.stat().st_mode & 0o077:
        return Check("rights", "fail", f"others may read {tokens}", f"chmod 600 {tokens}")
    return Check("rights", "ok", f"{state_dir} can be written")


def devices(here: Here) -> Check:
    """Whether this user may use the GPU of a Jetson."""
    nodes = [
        here.root / "dev" / name for name in ("nvmap", "nvhost-gpu", "nvgpu") if (here.root / "dev" / name).exists()
    ]
    if not nodes:
        return Check("GPU", "skip", "there is no GPU of a Jetson")
    closed = [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        return Check("GPU", "fail", f"this user may not open {', '.join(closed)}", "usermod -aG video,render USER")
    return Check("GPU", "ok", "this user may use it")


def card(here: Here, gpu: Gpu, found: Sequence[hardware.Card]) -> Check:
    """Whether cards are divided among workers as settings say, and with which commands they would be."""
    if not found:
        return Check("card", "skip", "nvidia-smi tells of no card")
    names = ", ".join(one.name for one in found)
    if gpu.share == "mps" and not hardware.mps_runs(here.root):
        modes = " && ".join(f"sudo nvidia-smi -i {one.index} -c EXCLUSIVE_PROCESS" for one in found)
        return Check(
            "card",
            "warn",
            f"{names}: MPS does not run, so workers take turns in place of shares of {100 // gpu.parts} %",
            f"{modes} && sudo nvidia-cuda-mps-control -d; CUDA_MPS_PIPE_DIRECTORY, where it is set, moves its pipe",
        )
    for one in found if gpu.share == "mig" else ():
        sizes = [instance.size for instance in one.instances]
        if len(sizes) == gpu.parts and len(set(sizes)) == 1:
            continue
        steps = hardware.cut(one, gpu.parts, hardware.offers(here.run(["nvidia-smi", "mig", "-lgip"]), one.index))
        have = f"it has {', '.join(sizes) or 'none'}" if one.mig == "Enabled" else "MIG is off"
        return Check(
            "card",
            "warn",
            f"card {one.index} ({one.name}) is not cut into {gpu.parts} equal instances: {have}",
            f"stop what uses it, then: {' && '.join(steps)}; then start the daemon anew"
            if steps
            else 'it cannot be: set gpu.parts to fewer, or gpu.share to "mps" or ""',
        )
    shared = {"mig": f"cut into {gpu.parts}", "mps": f"shares of {100 // gpu.parts} %"}.get(gpu.share, "not divided")
    return Check("card", "ok", f"{names}: {shared}")


def disk(state_dir: Path) -> Check:
    """Whether there is room for the journal, and for a next version."""
    free_bytes = shutil.disk_usage(_existing(state_dir)).free
    said = f"{free_bytes / 2**30:.1f} GiB are free for {state_dir}"
    if free_bytes < _LEAST_FREE_BYTES:
        return Check("disk", "fail", said, "remove what is not needed: below 256 MiB nothing is installed")
    if free_bytes < _FREE_BYTES:
        return Check("disk", "warn", said, "a large update may not fit: have 2 GiB free")
    return Check("disk", "ok", said)


def memory(total_bytes: int, status: Mapping[str, Any] | None) -> Check:
    """Whether a next version can be loaded beside the one that serves."""
    known: Mapping[str, Any] = status["memory"] if status else {}
    need_bytes = max((one["need_bytes"] for one in known.get("models", ())), default=0)
    remedy = "updates then switch with a short gap; stop other programs, or serve fewer models"
    if need_bytes:
        free_bytes = known["budget_bytes"] - known["leased_bytes"]
        said = f"the largest model takes {_mebibytes(need_bytes)}, free in the budget are {_mebibytes(free_bytes)}"
        return Check("memory", "ok", said) if free_bytes >= need_bytes else Check("memory", "warn", said, remedy)
    said = f"{_mebibytes(total_bytes)} of memory"
    if 0 < total_bytes < _SECOND_SLOT_BYTES:
        return Check("memory", "warn", f"{said} may be too little for a second version beside the first", remedy)
    return Check("memory", "ok", said)


def swap(swaps: str) -> Check:
    """What memory is swapped to; `swaps` is /proc/swaps."""
    names = [line.split()[0] for line in swaps.splitlines()[1:] if line.strip()]
    worn = [name for name in names if "mmcblk" in name]
    if worn:
        why = f"memory is swapped to {', '.join(worn)}, which stalls every request and wears the card"
        return Check("swap", "warn", why, "swapoff it, or use zram")
    return Check("swap", "ok", f"swap on {', '.join(names)}" if names else "no swap")


def clock(now: float, *, synced: bool | None, assumed: bool) -> Check:
    """Whether the wall clock can be believed, as updates and TLS must."""
    remedy = "let chrony or systemd-timesyncd reach a time server; updates wait until then, serving does not"
    if now < RELEASED_AT:
        return Check("clock", "fail", "the wall clock says a time before this version was released", remedy)
    if assumed:
        return Check(
            "clock", "warn", "clock.assume_synced takes it for right without asking", "for tests only: unset it"
        )
    if not synced:
        return Check("clock", "warn", "the wall clock is not synchronised", remedy)
    return Check("clock", "ok", "the wall clock is synchronised")


def battery(board: Mapping[str, Any]) -> Check:
    """Whether a clock goes on without power."""
    if board.get("rtc_present"):
        return Check("rtc", "ok", "there is a hardware clock (whether its battery is in cannot be seen)")
    return Check(
        "rtc", "warn", "there is no hardware clock: each start begins in the past", "have a time server in its network"
    )


def ipv6(here: Here) -> Check:
    """Whether IPv6 is on."""
    off = here.text("proc/sys/net/ipv6/conf/all/disable_ipv6").strip() == "1"
    if off or not (here.root / "proc/net/if_inet6").exists():
        why = "IPv6 is off: serving needs none, but flashing a Jetson from this machine does"
        return Check("ipv6", "warn", why, "sysctl net.ipv6.conf.all.disable_ipv6=0")
    return Check("ipv6", "ok", "IPv6 is on")


def watchdog(here: Here) -> Check:
    """Whether the hardware starts a machine anew that hangs."""
    if not any((here.root / "dev").glob("watchdog*")):
        return Check("watchdog", "skip", "there is no hardware watchdog")
    found = re.search(r"RuntimeWatchdogUSec=(\S+)", here.run(["systemctl", "show", "-p", "RuntimeWatchdogUSec"]))
    if found and found[1] not in {"0", "infinity"}:
        return Check("watchdog", "ok", f"systemd feeds the hardware watchdog ({found[1]})")
    return Check(
        "watchdog",
        "warn",
        "nobody feeds the hardware watchdog: a machine that hangs stays so",
        "set RuntimeWatchdogSec=30 in /etc/systemd/system.conf",
    )


def certificate(path: Path | None, now: float) -> Check:
    """Whether the certificate that the HTTP door shows is valid, and for how long."""
    if path is None:
        return Check("certificate", "skip", "HTTP is on loopback without TLS")
    try:
        until = min(one.valid_until for one in read_certificates(path))
    except (OSError, ValueError) as error:
        return Check("certificate", "fail", f"{path} cannot be used ({error})", "give a PEM file that may be read")
    left_s = until - now
    if left_s < _RENEW_S:
        why = f"{path} expired" if left_s < 0 else f"{path} expires in {left_s / DAY_S:.0f} days"
        return Check("certificate", "fail" if left_s < 0 else "warn", why, "renew it")
    return Check("certificate", "ok", f"{path} is valid for {left_s / DAY_S:.0f} days")


def broker(address: str, port: int) -> Check:
    """Whether the broker takes connections."""
    if not address:
        return Check("broker", "skip", "none is configured (mqtt.host)")
    try:
        socket.create_connection((address, port), _CONNECT_S).close()
    except (OSError, ValueError) as error:  # ValueError: what is no host name at all
        why = f"{address}:{port} does not answer ({getattr(error, 'strerror', None) or error})"
        return Check("broker", "fail", why, "check mqtt.host, the network and the firewall")
    return Check("broker", "ok", f"{address}:{port} takes connections")


def upstream(url: str, now: float) -> Check:
    """Whether the repository of updates answers, and its certificate is believed."""
    if not url:
        return Check("upstream", "skip", "none is configured (update.url)")
    asked, url = url, re.sub("//[^/@]*@", "//", url)  # what it says may be sent to strangers
    try:
        where = urlsplit(asked)
        if where.scheme == "https":
            shaken = check_tls("upstream", where.hostname or "", where.port or 443, Trust(), now)
            if shaken.verdict != "ok":
                return shaken
        answer = httpx.head(asked, timeout=_CONNECT_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # ValueError: no port, or no host name
        return Check("upstream", "fail", f"{url} does not answer ({error})", "check update.url and the network")
    return Check("upstream", "ok", f"{url} answers (HTTP {answer.status_code})")


def daemon(status: Mapping[str, Any] | None, unanswered: str = "") -> Check:
    """Whether a daemon runs and is well; `unanswered` says why it has no `status`."""
    if status is None:
        return Check("daemon", "skip", unanswered or "none answers; start it with `appliance run`")
    unready = [f"{one['name']}: {one['reason']}" for one in status["models"] if not one["ready"]]
    if not status["ready"]:
        return Check("daemon", "fail", f"not ready: {'; '.join(unready)}", "see `appliance status` and the log")
    degraded = [f"{one['name']}: {one['degraded']}" for one in status["models"] if one["degraded"]]
    if degraded:
        return Check("daemon", "warn", f"on a fallback: {'; '.join(degraded)}", "see the faults in `appliance status`")
    count = len(status["models"])
    return Check("daemon", "ok", f"ready with {count} model{'' if count == 1 else 's'}")


def imported() -> tuple[str, str]:
    """Load every library in a process of its own, which a broken wheel may take with it."""
    command = [sys.executable, "-c", _IMPORT, *_LIBRARIES]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S, check=False)  # noqa: S603 - ours
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(), f"it did not end within {_IMPORT_S} s"
    why = ended.stderr.strip().splitlines()[-1:] or [f"it ended with {ended.returncode}"]
    return ended.stdout, why[0] if ended.returncode else ""


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _mebibytes(size_bytes: int) -> str:
    return f"{math.floor(size_bytes / 2**20)} MiB"
