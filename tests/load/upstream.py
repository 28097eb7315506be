"""What one exchange costs a server: CPU of this process and exchanges a second, without HTTP, on both databases.

.venv/bin/python tests/load/upstream.py
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.postgres import POSTGRES, Cluster
from support.reporting import running

from appliance.upstream.database import Database
from appliance.upstream.ingest import Ingest
from models.sync import Batch, Item

DEVICES, EXCHANGES, THREADS = 200, 1500, (1, 6)


def measure(name: str, url: str, threads: int) -> None:
    """Have devices report one item each, again and again, and print what that took."""
    database = Database(url)
    ingest = Ingest(database, time.time, lambda: 1.0)
    for i in range(DEVICES):
        ingest.exchange(f"d{i}", Batch("b0", f"d{i}", "life", 1.0, state=running("1")), 1000)

    def report(number: int) -> None:
        device, turn = f"d{number % DEVICES}", 1 + number // DEVICES
        item = Item(turn, "telemetry", 1.0, {"uptime_s": turn, "models": [{"name": "m", "requests": 3}]})
        batch = Batch(f"b{turn}", device, "life", 1.0 + turn, etag="old", items=(item,), exchange=turn)
        ingest.exchange(device, batch, 1000)

    began, used = time.monotonic(), time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(report, range(EXCHANGES)))
    took_s, used_s = time.monotonic() - began, time.process_time() - used
    print(
        f"{name}, {threads} at a time: {EXCHANGES / took_s:.0f} a second, {used_s / EXCHANGES * 1e3:.2f} ms of CPU each"
    )
    database.close()


def main() -> None:
    """Measure all."""
    for threads in THREADS:
        with tempfile.TemporaryDirectory() as folder:
            measure("SQLite", f"sqlite:///{folder}/upstream.db", threads)
    if POSTGRES:
        cluster = Cluster()
        try:
            for threads in THREADS:
                measure("PostgreSQL", cluster.database(), threads)
        finally:
            cluster.close()


if __name__ == "__main__":
    main()
