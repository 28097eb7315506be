"""`make bench`: the served recogniser beside the same graph called in process, in one run.

Correctness is checked before any time is printed. Machines are noisy: trust the ratio, and the
medians more than the extremes. Results go to standard output and, with --json FILE, to a file.
With PEER_BENCH, PEERS_DIR and MODELS_DIR set, other servers are measured beside ours after that (tests/peers).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime as dt
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from support.daemon import Daemon

from appliance.bench.question import binary_answer, binary_request
from appliance.runtime import choose
from appliance.runtime.machine import cpu_name
from models.folder import BundleFolder

ROOT = Path(__file__).resolve().parent.parent
RUNS = 40


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        build = [Path(sys.executable).parent / "provision", "build", ROOT / "models/zoo/ppocr-v4.toml"]
        subprocess.run([*build, "--target", "cpu", "--out", bundle], check=True)
        rows = measure(bundle, Path(folder))
    for row in rows:
        print(f"{row['what']:44} {row['median_ms']:8.2f} ms   x {row['ratio']:.2f} of in process")
    report = {
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "machine": cpu_name(),
        "versions": {name: version(name) for name in ("onnxruntime", "numpy", "uvicorn", "fastapi")},
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    harness = os.environ.get("PEER_BENCH")
    if harness:
        beside_peers(Path(harness))


def beside_peers(harness: Path) -> None:
    """Measure other servers and ours with `harness` (see tests/peers), and print its tables."""
    python = Path(os.environ["PEERS_DIR"], "tools/bin/python")
    with tempfile.TemporaryDirectory() as folder:
        bench = Path(shutil.copytree(harness, Path(folder) / "bench"))
        shutil.copy(ROOT / "tests/peers/ours.sh", bench / "peers/ours.sh")
        with (bench / "peers.toml").open("r+") as known:
            if "[ours]" not in known.read():
                known.write((ROOT / "tests/peers/ours.toml").read_text())
        rows = Path(folder) / "rows.jsonl"
        env = {**os.environ, "OURS_BIN": str(Path(sys.executable).parent)}
        for workload, workers in (("mlp", "1"), ("rec", "2")):  # ours computes two runs at a time by default
            subprocess.run(
                [
                    *(python, bench / "bench.py", "--out", rows, "--workloads", workload, "--forms", "v2bin,raw"),
                    *("--peers", f"ours,{os.environ.get('PEERS', 'triton,fastapi')}"),
                ],
                check=True,
                env={**env, "BENCH_WORKERS": workers, "OURS_MODELS": workload},
                stdout=subprocess.DEVNULL,
            )
        subprocess.run([python, bench / "report.py", rows], check=True)


def measure(bundle: Path, folder: Path) -> list[dict[str, Any]]:
    """Rows of median milliseconds, each with its ratio to the call in process."""
    opened = BundleFolder(bundle)
    variant = opened.manifest.graphs["rec"].variants["fp32"]
    inputs = opened.read_arrays(variant.golden.inputs)
    session = choose("onnxruntime-cpu").open(opened.read(variant.graph), threads=1)
    want = session.run(inputs)
    with Daemon(folder, "--bundle", str(bundle), "--precision", "fp32") as daemon, httpx.Client() as client:
        url = f"{daemon.url}/v2/models/ppocr-v4.rec/infer"
        body, headers = binary_request(inputs)

        def served() -> None:
            have = binary_answer(client.post(url, content=body, headers=headers).raise_for_status())
            for name, array in want.items():
                np.testing.assert_allclose(have[name], array, rtol=1e-5, atol=1e-6)

        served()
        alone_ms, one_ms = paired(lambda: session.run(inputs), served)
        rows = [
            {"what": "recogniser in process, one thread", "median_ms": alone_ms, "ratio": 1.0},
            {"what": "recogniser served, one client", "median_ms": one_ms, "ratio": one_ms / alone_ms},
        ]
        for clients in (4, 16):
            each_ms = together(served, clients)
            what = f"recogniser served, {clients} clients, per answer"
            rows.append({"what": what, "median_ms": each_ms, "ratio": each_ms / alone_ms})
    return rows


def paired(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Median milliseconds of each, run in turn so that both meet the same noise."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(RUNS):
        for call, spent in zip((first, second), times, strict=True):
            started = time.perf_counter()
            call()
            spent.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def together(call: Callable[[], object], clients: int) -> float:
    """Milliseconds an answer, with `clients` asking at the same time."""
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        started = time.perf_counter()
        pending: Sequence[concurrent.futures.Future[object]] = [pool.submit(call) for _ in range(RUNS * 2)]
        for future in pending:
            future.result()
        return (time.perf_counter() - started) * 1e3 / len(pending)


if __name__ == "__main__":
    main()
