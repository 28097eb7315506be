"""`make elasticity`: how latency grows with load, beside what queueing theory allows, with a verdict a line.

What is measured and what passes stands in `appliance/bench/elasticity.py`; `appliance bench` takes a shorter look at
any daemon. Without --bundle a model of the null runtime is served that waits for --service-ms: the machine's own
cost of computing is then out of the way, and what is left is how the daemon queues. What the machine adds when it has
next to nothing to do shows in a line beside: the lowest load again, on Python's own HTTP server, which waits as long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from support import tiny
from support.daemon import Daemon

from appliance.bench.elasticity import POISSON, Loads, Verdict, overload, phased, random_arrivals
from appliance.bench.question import Question
from appliance.runtime.machine import cpu_name
from models.folder import BundleFolder


def main() -> int:
    """Measure, print, and say by the exit status whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--bundle", type=Path, metavar="DIR", help="serve its graph rec in fp32 on its golden vector")
    add("--service-ms", type=float, default=20.0, help="of the null model (default 20)")
    add("--servers", type=int, default=2, help="limits.concurrency of the daemon (default 2)")
    add("--rounds", type=int, default=3, help="medians are over so many (default 3)")
    add(
        "--samples",
        type=int,
        default=400,
        help="requests of each load of (b), half of it in (a), five times in (c) (default 400)",
    )
    add("--only", choices=("a", "b", "c"), action="append", help="part to measure; may be repeated")
    add("--json", type=Path, metavar="FILE", help="write the verdicts there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, serve(options, Path(name)) as daemon:
        loads = Loads(daemon.url, question(options), options.servers, options.samples)
        loads.measure_capacity()
        took = f"{loads.service_s * 1e3:.2f} ms of one of {options.servers} threads"
        print(f"capacity {loads.capacity:.1f} requests/s, each taking {took}; {loads.alone_s * 1e3:.2f} ms when alone")
        wanted = options.only or ("a", "b", "c")
        verdicts: list[Verdict] = []
        if "a" in wanted:
            verdicts += phased(loads, options.rounds, print)
        if "b" in wanted:
            verdicts += random_arrivals(loads, options.rounds, print, POISSON[:1])[0]
            if not options.bundle:
                verdicts.append(beside(options))
            verdicts += random_arrivals(loads, options.rounds, print, POISSON[1:])[0]
        if "c" in wanted:
            verdicts += overload(loads, options.rounds, print)
    print(*verdicts, sep="\n")
    if options.json:
        report: dict[str, Any] = {
            "machine": cpu_name(),
            "arguments": sys.argv[1:],
            "capacity_per_s": loads.capacity,
            "verdicts": [{**asdict(one), "passed": one.passed} for one in verdicts],
        }
        options.json.write_text(json.dumps(report, indent=1))
    return 0 if all(one.passed for one in verdicts) else 1


def beside(options: argparse.Namespace) -> Verdict:
    """The lowest load on a server that does nothing but wait; told, not judged."""
    with plain_server(options.service_ms / 1e3, options.servers) as url:
        loads = Loads(url, question(options), options.servers, options.samples)
        loads.measure_capacity()
        (verdict,), _points = random_arrivals(loads, options.rounds, print, POISSON[:1])
    return replace(verdict, what=f"the same on a server that only waits, at {POISSON[0]:.0%}", limit=None)


@contextlib.contextmanager
def plain_server(service_s: float, servers: int) -> Iterator[str]:
    """The address of an HTTP server that answers so many requests at a time, each after `service_s`."""
    free = threading.Semaphore(servers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with free:
                time.sleep(service_s)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_about: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def serve(options: argparse.Namespace, folder: Path) -> Daemon:
    """The daemon to measure."""
    env = {"APPLIANCE_LIMITS__CONCURRENCY": str(options.servers)}
    if options.bundle:
        return Daemon(folder, "--bundle", str(options.bundle), "--precision", "fp32", env=env)
    path = tiny.null_model(folder / "null.json", options.service_ms / 1e3)
    # Alone in its run: a null model would answer eight as fast as one, which no law of single services describes.
    env |= {"APPLIANCE_RUNTIME": "null", "APPLIANCE_LIMITS__BATCH": "1"}
    return Daemon(folder, "--onnx", f"null={path}", env=env)


def question(options: argparse.Namespace) -> Question:
    """What is asked."""
    if not options.bundle:
        return Question.of("null", {"x": np.ones((1, 16), np.float32)})
    folder = BundleFolder(options.bundle)
    golden = folder.manifest.graphs["rec"].variants["fp32"].golden
    return Question.of(f"{folder.manifest.name}.rec", folder.read_arrays(golden.inputs))


if __name__ == "__main__":
    sys.exit(main())
