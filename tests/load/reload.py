"""`make reload-bench`: how long a model takes to load, cold and again, in one run, with turns taken.

cold         a new process, on a device that has kept nothing of the model's graphs: the first load of a bundle
new process  a new process, on a device that has loaded the model before, as after a crash: told, not judged
reload       what a request waits for whose model was unloaded because nobody used it

A reload is to be three times as fast as a cold load. All three prove the model on its golden vectors.
Beside the time by the clock stands the processor time of the worker for the load, which says more on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from support.daemon import Daemon
from support.processes import eventually, loaded

from appliance.bench.elasticity import Verdict
from models.folder import BundleFolder

ROOT = Path(__file__).resolve().parent.parent.parent
GOAL = 3.0
UNLOADED_WITHIN_S = 30.0
SETTINGS = {"APPLIANCE_MEMORY__IDLE_UNLOAD_S": "0.5", "APPLIANCE_MEMORY__SAMPLE_S": "2"}
"""So seldom that no other spare worker is started between the end of one and the load."""


def main() -> int:
    """Measure, print, and say by the exit status whether it passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, metavar="DIR", help="default: PP-OCRv4, built for it")
    parser.add_argument("--precision", default="fp32", help="to serve (default fp32)")
    parser.add_argument("--rounds", type=int, default=7, help="medians are over so many (default 7)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bundle = options.bundle or built(Path(name) / "bundle")
        took_s = measure(Path(name) / "daemon", bundle, options.precision, options.rounds)
    verdicts = []
    for i, what in enumerate(("time", "processor time")):
        medians_s = {kind: statistics.median(one[i] for one in times) for kind, times in took_s.items()}
        for kind, times in took_s.items():
            each = " ".join(f"{one[i] * 1e3:.0f}" for one in times)
            print(f"{kind:12} {medians_s[kind] * 1e3:7.0f} ms {what:16} {each}")
        verdicts += [
            Verdict(f"{what}, {kind} over reload", medians_s[kind] / medians_s["reload"], goal, "x", at_least=True)
            for kind, goal in (("cold", GOAL), ("new process", None))
        ]
    print(*verdicts, sep="\n")
    return 1 if any(one.passed is False for one in verdicts) else 0


def built(folder: Path) -> Path:
    """The bundle of PP-OCRv4."""
    build = [Path(sys.executable).parent / "provision", "build", ROOT / "models/zoo/ppocr-v4.toml"]
    subprocess.run([*build, "--target", "cpu", "--out", folder], check=True, stdout=subprocess.DEVNULL)
    return folder


def measure(folder: Path, bundle: Path, precision: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds that each kind of load takes, by the clock and of the worker's processor time."""
    model = BundleFolder(bundle).manifest.name
    took_s: dict[str, list[tuple[float, float]]] = {"cold": [], "new process": [], "reload": []}
    with Daemon(folder, "--bundle", str(bundle), "--precision", precision, env=SETTINGS) as daemon:
        load = f"/v2/repository/models/{model}/load", daemon.authorized("operate")
        for _ in range(rounds):
            for kind, times in took_s.items():
                spare = int(eventually(lambda: daemon.status()["memory"]["spare_pid"], "it rests", UNLOADED_WITHIN_S))
                eventually(partial(loaded, spare, "onnxruntime"), "a worker waits", UNLOADED_WITHIN_S)
                if kind == "cold":
                    shutil.rmtree(daemon.state_dir / "prepared")
                before_s = cpu_s(spare)
                if kind != "reload":
                    before_s = 0.0
                    os.kill(spare, signal.SIGKILL)
                    eventually(lambda: daemon.status()["memory"]["spare_pid"] is None, "it is gone")
                began = time.monotonic()
                daemon.http.post(load[0], headers=load[1]).raise_for_status()
                took = time.monotonic() - began
                times.append((took, cpu_s(daemon.worker_pid(model)) - before_s))
    return took_s


def cpu_s(pid: int) -> float:
    """Processor time of a process, with threads that have ended."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
