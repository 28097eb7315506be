"""Which machine this is, which profile suits it, and how a GPU is divided among workers.

The parsers of nvidia-smi are pure. They follow outputs as they are documented; docs/server.md says what was never run.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from appliance.runtime import machine

Run: TypeAlias = "Callable[[Sequence[str]], str]"
"""Runs a command and gives its standard output; empty where it cannot be run or fails."""

EVERYWHERE = "cpu"
_PROFILES = (
    # Product numbers of modules first: what boards call themselves differs by who made them.
    ("orin-nano", re.compile(r"p3767-000[345]|orin nano", re.IGNORECASE)),
    ("orin-nx", re.compile(r"p3767-000[01]|orin nx", re.IGNORECASE)),
    ("agx-orin", re.compile(r"p3701-|agx orin", re.IGNORECASE)),
    ("a100", re.compile(r"\bA100\b")),
)
_CARD = re.compile(r"GPU (\d+): (.+?) \(UUID: (GPU-[^)]+)\)")
_INSTANCE = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")
_OFFER = re.compile(r"\|\s+(\d+)\s+MIG (\S+)\s+(\d+)\s+\d+/(\d+)\s+[\d.]+\s+\S+\s+(\d+)\s")
_PLAIN = re.compile(r"\d+g\.\d+gb")
"""Sizes without extensions (`+me`, `+gfx`), of which a card has one at most."""
_A100 = ((7, "19", 14), (4, "15", 14), (3, "14", 28), (2, "9", 42), (1, "0", 98))
"""Instances of one size that an A100 holds, the size's number, and its multiprocessors, as NVIDIA documents them.

nvidia-smi lists sizes only while MIG is on; the numbers are the same with 40 and with 80 GB.
"""
_CONTROL = "tmp/nvidia-mps/control"
_COMMAND_S = 10


def output(command: Sequence[str]) -> str:
    """See `Run`."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)  # noqa: S603 - ours
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


@dataclass(frozen=True, slots=True)
class Instance:
    """A MIG instance of a card: its size, as `1g.10gb`, and the name that CUDA_VISIBLE_DEVICES takes."""

    size: str
    uuid: str


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as nvidia-smi tells of it."""

    index: int
    name: str
    uuid: str
    instances: tuple[Instance, ...] = ()
    mig: str = ""
    """Enabled, Disabled, or what nvidia-smi says of a card that has no MIG."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A size of MIG instance that a card can be cut into."""

    most: int
    """Instances of this size that the whole card holds."""
    number: str
    multiprocessors: int


def listed(listing: str, modes: str = "") -> list[Card]:
    """Cards with their instances from `nvidia-smi -L`, and their MIG mode from a query of `index,mig.mode.current`."""
    by_index = dict(re.findall(r"^(\d+), (.+?)\s*$", modes, re.MULTILINE))
    found: list[Card] = []
    for line in listing.splitlines():
        if card := _CARD.match(line):
            found.append(Card(int(card[1]), card[2], card[3], mig=by_index.get(card[1], "")))
        elif found and (instance := _INSTANCE.match(line)):
            found[-1] = replace(found[-1], instances=(*found[-1].instances, Instance(instance[1], instance[2])))
    return found


def cards(run: Run = output) -> list[Card]:
    """The cards of this machine; none where nvidia-smi is not there. A Jetson's own GPU is no card."""
    listing = run(["nvidia-smi", "-L"])
    query = ["nvidia-smi", "--query-gpu=index,mig.mode.current", "--format=csv,noheader"]
    return listed(listing, run(query) if listing else "")


def offers(table: str, index: int) -> list[Offer]:
    """What `nvidia-smi mig -lgip` offers on a card."""
    return [
        Offer(int(most), number, int(multiprocessors))
        for card, size, number, most, multiprocessors in _OFFER.findall(table)
        if int(card) == index and _PLAIN.fullmatch(size)
    ]


def cut(card: Card, parts: int, offered: Sequence[Offer]) -> list[str]:
    """Commands that cut `card` into so many instances of one size, the largest there is; none where it cannot be."""
    if card.mig not in {"Enabled", "Disabled"}:
        return []
    this = f"-i {card.index}"
    steps = [f"sudo nvidia-smi {this} -mig 1"] if card.mig == "Disabled" else []
    known = offered or ([Offer(*one) for one in _A100] if "A100" in card.name else [])
    if steps and not known:  # nvidia-smi tells the sizes afterwards
        return [*steps, "appliance doctor"]
    able = [one for one in known if one.most >= parts]
    if not able:
        return []
    size = max(able, key=lambda one: (one.multiprocessors, -one.most))  # where fewer fit, each has more memory
    if card.instances:
        steps += [f"sudo nvidia-smi mig {this} -dci", f"sudo nvidia-smi mig {this} -dgi"]
    return [*steps, f"sudo nvidia-smi mig {this} -cgi {','.join([size.number] * parts)} -C", "nvidia-smi -L"]


def mps_runs(root: Path = Path("/")) -> bool:
    """Whether the control daemon of MPS has its pipe where it is by default."""
    return (root / _CONTROL).exists()


def suited(root: Path = Path("/"), run: Run = output) -> tuple[str, str]:
    """The profile that is made for this machine, and what says so."""
    tree = root / "proc/device-tree"
    told = [_text(tree / "compatible").replace("\0", " ").strip(), machine.module(_text(tree / "model"))]
    found = [card.name for card in cards(run)]
    for text in (*told, *found):
        for name, pattern in _PROFILES:
            if pattern.search(text):
                return name, f"this machine is {told[1] if text in told and told[1] else text}"
    strangers = ", ".join(filter(None, [told[1], *found]))
    return EVERYWHERE, f"no profile is made for {strangers or 'this machine in particular'}"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class Seats:
    """Where workers may run: each gets the device that the fewest others have, in its environment."""

    def __init__(self, devices: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> None:
        """Seat workers on `devices` (names for CUDA_VISIBLE_DEVICES; none: as the daemon sees them)."""
        self._taken = dict.fromkeys(devices, 0)
        self._environment = environment or {}

    def __len__(self) -> int:
        """Devices among which workers are spread."""
        return len(self._taken)

    def take(self) -> tuple[str, Mapping[str, str]]:
        """A device, empty where there is no choice, and the variables of the worker that sits there."""
        if not self._taken:
            return "", self._environment
        device = min(self._taken, key=self._taken.__getitem__)
        self._taken[device] += 1
        return device, {"CUDA_VISIBLE_DEVICES": device, **self._environment}

    def leave(self, device: str) -> None:
        """The worker that had `device` is gone."""
        if device:
            self._taken[device] -= 1


def seats(share: str, parts: int, devices: Sequence[str], memory_bytes: int, found: Callable[[], list[Card]]) -> Seats:
    """The seats of workers that share a card as settings say (see `settings.Gpu`); `found` tells the cards."""
    if share == "mig" and not devices:
        devices = [instance.uuid for card in found() for instance in card.instances]
    environment = {}
    if share == "mps":
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // parts)
        if memory_bytes:
            environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={memory_bytes // 2**20}M"
    return Seats(devices, environment)
