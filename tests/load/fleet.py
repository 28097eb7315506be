"""How many devices one upstream takes: a real server process, and up to 2,000 devices in this one over real HTTP.

.venv/bin/python tests/load/fleet.py --database sqlite        (or: make scale-bench)

Each device sends what the real client sends, by the real adapter (zstd, kept connections, a token of its own that the
door checks), and comes again when the answer says so. An exchange is timed from when it was due, so one that this
process was late with counts as slow. Then 96 devices come at once, as fast as they are let. Server and devices share
the machine; PostgreSQL, where it is used, too.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import os
import random
import sqlite3
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psycopg

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.daemon import Daemon
from support.postgres import Cluster
from support.processes import resident_bytes
from support.reporting import Reporter

from appliance.adapters.exchange import Exchanges
from appliance.adapters.tls import Calling
from appliance.upstream.callers import Tokens
from appliance.upstream.database import Database
from appliance.upstream.fleet import Fleet
from models import schema, sync
from models.sync import Answer, Batch

MOST_DEVICES, MOST_S = 2000, 60.0
SENDERS, CROWD = 32, 96
LEAST_S, PER_S = 10.0, 100.0
"""What the server tells devices: come no more often than that, and no more of you in a second."""
TELEMETRY_A_DAY = 86400 / 300
CHANCE = random.Random(7)  # noqa: S311 - not for secrets
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
TLS = ssl.create_default_context()  # one for all: on loopback none is used, and each would read the system's list


class SharedTls(Calling):
    """Whom to trust, read once."""

    def context(self) -> ssl.SSLContext:
        """The one of this process."""
        return TLS


@dataclass
class Seen:
    """What came of the exchanges of one phase."""

    took_s: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, took_s: float, refused: str) -> None:
        """One more."""
        with self.lock:
            if refused:
                self.refused[refused] += 1
            else:
                self.took_s.append(took_s)


class Device(Reporter):
    """One device with a connection and a token of its own."""

    def __init__(self, device_id: str, url: str, token_file: Path) -> None:
        """Report to `url`."""
        super().__init__(device_id, self._exchanged)
        self._exchanges = Exchanges(url, SharedTls(), token_file)
        self.state = state(device_id)
        self.wait_s, self.refused, self.seen = 0.0, "", False

    def turn(self, number: int) -> None:
        """One exchange, with one telemetry item in it."""
        self.refused = ""
        if not self.waiting:
            self.tell("telemetry", **telemetry(number))
        with contextlib.suppress(ConnectionError):
            self.wait_s = self.report().wait_s
            self.seen = True

    def _exchanged(self, batch: Batch) -> Answer:
        reply = self._exchanges(orjson.dumps(schema.dump(batch)))
        if reply.status != 200:
            self.refused, self.wait_s = str(reply.status or reply.reason), reply.retry_after_s or 1.0
            raise ConnectionError
        return sync.answer(orjson.loads(reply.content))

    def close(self) -> None:
        """Hang up."""
        self._exchanges.close()


def run(devices: list[Device], until: float, seen: Seen, first_s: float, *, eager: bool = False) -> None:
    """Have devices come when they are due until the monotonic time `until`, the first time within `first_s`."""
    now, order = time.monotonic(), itertools.count()
    due = [(now + CHANCE.uniform(0, first_s), next(order), device) for device in devices]
    heapq.heapify(due)
    lock = threading.Lock()

    def send() -> None:
        while True:
            with lock:
                if not due:
                    return
                at, number, device = heapq.heappop(due)
            if at >= until:
                return
            time.sleep(max(0.0, at - time.monotonic()))
            device.turn(number)
            ended = time.monotonic()
            seen.count(ended - at, device.refused)
            wait_s = 0.0 if eager and not device.refused else device.wait_s
            with lock:
                heapq.heappush(due, (ended + wait_s * CHANCE.uniform(0.95, 1.05), next(order), device))

    threads = [threading.Thread(target=send) for _ in range(CROWD if eager else SENDERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def state(device_id: str) -> dict[str, Any]:
    """As a device with one bundle says it."""
    model = {"name": "ppocr-v4", "version": "1.0.0", "digest": "5f" * 32, "ready": True, "degraded": None}
    model |= {"state": "serving", "precision": "int8", "runtime": "onnxruntime-cpu", "slot": "good", "concurrency": 1}
    clock = {"synced": True, "assumed": False, "started_at": 1796000000}
    update: dict[str, Any] = {
        "channel": "stable",
        "version": "1.0.0",
        "reason": None,
        "deployment": None,
        "pins": {},
        "paused": False,
    }
    told: dict[str, Any] = {"device_id": device_id, "appliance": "0.1.0", "ready": True, "models": [model]}
    told |= {"clock": clock, "update": update, "memory_step": "normal", "throttled": [], "profile": "orin-nano"}
    return {**told, "labels": {"site": "north", "line": device_id[-1]}}


def telemetry(number: int) -> dict[str, Any]:
    """As a device with one bundle measures it."""
    requests, p95_ms = CHANCE.randint(0, 9000), round(CHANCE.uniform(20, 90), 3)
    model = {"name": "ppocr-v4", "version": "1.0.0", "ready": True, "degraded": None, "waiting": 0}
    model |= {"requests": requests, "errors": 0, "p95_ms": p95_ms}
    memory = {"total": 8_000_000_000, "available": CHANCE.randint(10**9, 4 * 10**9), "budget": 6_000_000_000}
    told = {"at": round(time.time(), 3), "session": 3, "uptime_s": number, "ready": True, "models": [model]}
    return {**told, "restarts": 0, "memory_bytes": memory, "event_loop": {"p99_ms": p95_ms / 10, "worst_ms": p95_ms}}


def cpu_s(pid: int) -> float:
    """Of a process and its children, those that have ended too."""
    used = 0.0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(entry.name) == pid or int(words[1]) == pid:
                    used += sum(map(int, words[11:15] if int(entry.name) == pid else words[11:13])) * TICK_S
    return used


@dataclass
class Store:
    """A database: how the server is told of it, how large it is, and what else takes CPU for it."""

    name: str
    url: str
    size_bytes: Callable[[], int]
    cpu_s: Callable[[], float] = lambda: 0.0


@contextlib.contextmanager
def store(name: str, folder: Path) -> Iterator[Store]:
    """An empty one."""
    if name == "sqlite":
        path = folder / "upstream.db"

        def pages() -> int:
            with contextlib.closing(sqlite3.connect(path)) as opened:
                ((count,), (each,)) = (
                    opened.execute(f"PRAGMA {what}").fetchone() for what in ("page_count", "page_size")
                )
                return int(count * each)

        yield Store("SQLite", f"sqlite:///{path}", pages)
        return
    with contextlib.closing(Cluster(durable=True)) as cluster:
        url = cluster.database()

        def size() -> int:
            with psycopg.connect(url.replace("+psycopg", "")) as opened:
                (row,) = opened.execute("SELECT pg_database_size(current_database())").fetchall()
                return int(row[0])

        yield Store("PostgreSQL", url, size, lambda: cpu_s(cluster.pid))


def fleet(folder: Path, url: str, home: str, count: int) -> list[Device]:
    """That many devices with tokens, which are made in the database as an administrator would have them made."""
    folder.mkdir()
    with contextlib.closing(Database(url)) as database:
        tokens = Tokens(database, Fleet(database, time.time, 180.0), time.time)
        devices = []
        for number in range(count):
            name = f"device-{number:04}"
            path = folder / name
            path.write_text(tokens.create("bench", name, "device", name)["token"])
            devices.append(Device(name, home, path))
        return devices


def measure(at: Store, home: Daemon, devices: list[Device], for_s: float, *, eager: bool = False) -> None:
    """One line of the table."""
    if not eager:  # all come once, with their states, before anything is measured
        warm = [device for device in devices if not device.seen]
        run(warm, time.monotonic() + len(warm) / PER_S + 1, Seen(), len(warm) / PER_S)
    wait_s = 0.0 if eager else max(LEAST_S, len(devices) / PER_S)
    seen, began, size = Seen(), time.monotonic(), at.size_bytes()
    used_s = [cpu_s(home.pid), at.cpu_s(), time.process_time()]
    run(devices, began + for_s, seen, wait_s, eager=eager)
    took_s, count = time.monotonic() - began, len(seen.took_s)
    spent_s = [
        now - before for now, before in zip((cpu_s(home.pid), at.cpu_s(), time.process_time()), used_s, strict=True)
    ]
    spent_ms = " + ".join(f"{spent * 1e3 / count:.1f}" for spent in spent_s)
    percentiles = statistics.quantiles(seen.took_s, n=100)
    item_bytes = (at.size_bytes() - size) / count
    print(
        f"| {at.name} | {len(devices)}{', as fast as they can' if eager else ''} | {count / took_s:.0f} | "
        f"{spent_ms} | {percentiles[49] * 1e3:.0f} | {percentiles[98] * 1e3:.0f} | "
        f"{item_bytes * TELEMETRY_A_DAY / 1e6:.2f} | {resident_bytes(home.pid) / 2**20:.0f} | "
        f"{', '.join(f'{many} x {why}' for why, many in seen.refused.items()) or 'none'} |",
        flush=True,
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--devices", type=int, nargs="+", default=[100, 500, MOST_DEVICES], metavar="N")
    parser.add_argument("--seconds", type=float, default=22.0, help="of each line")
    options = parser.parse_args()
    if not all(0 < count <= MOST_DEVICES for count in options.devices) or not 0 < options.seconds <= MOST_S:
        parser.error(f"up to {MOST_DEVICES} devices, and up to {MOST_S:g} seconds")
    settings = {"EXCHANGE_S": f"{LEAST_S}", "EXCHANGES_PER_S": f"{PER_S}"}
    with tempfile.TemporaryDirectory() as name, store(options.database, Path(name)) as at:
        env = {f"APPLIANCE_FLEET__{key}": value for key, value in {**settings, "DATABASE": at.url}.items()}
        home = Daemon(Path(name) / "home", "--role", "upstream", env=env)
        devices: list[Device] = []
        try:
            home.wait_serving(60)
            devices = fleet(Path(name) / "tokens", at.url, home.url, max(options.devices))
            print(
                "| database | devices | exchanges/s | CPU ms each: server + database + devices | P50 ms | P99 ms ",
                end="",
            )
            print("| MB a device-day | server MiB | refused |\n|---|---:|---:|---:|---:|---:|---:|---:|---|")
            for count in sorted(options.devices):
                measure(at, home, devices[:count], options.seconds)
            measure(at, home, devices[:CROWD], options.seconds / 2, eager=True)
        finally:
            for device in devices:
                device.close()
            home.close()


if __name__ == "__main__":
    main()
