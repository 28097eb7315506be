"""`make swap-bench`: P99 at 50 % load while versions are swapped without a pause, over P99 when nothing is swapped.

The limit is 1.15. Steady and swapping rounds take turns, and the median ratio is judged, because machines are noisy.
The model is a chain of matrix products in onnxruntime, so what loads a version and who serves want the same cores.
Almost every request of a swapping round falls into a load, a switch, or an unloading.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from support import tiny
from support.daemon import Daemon

from appliance.bench.elasticity import OK, Loads, Verdict, p99_ms
from appliance.bench.question import Question

LOAD = 0.5
GROWTH = 1.15
SERVERS = 2


class Swapper:
    """Swaps to and fro until told to stop."""

    def __init__(self, daemon: Daemon, link: Path, versions: tuple[Path, Path]) -> None:
        """Point `link`, from which the daemon serves, to one version after the other."""
        self._url, self._headers = daemon.url, daemon.authorized("operate")
        self._link, self._versions = link, versions
        self.swaps = 0

    def go(self, enough: threading.Event) -> None:
        """Swap as often as it goes."""
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=120, trust_env=False) as http:
            while not enough.is_set():
                point(self._link, self._versions[(self.swaps + 1) % 2])
                http.post("/v2/repository/models/scale/load").raise_for_status()
                self.swaps += 1


def point(link: Path, folder: Path) -> None:
    """Let `link` name `folder`, at once."""
    fresh = link.with_name("fresh")
    fresh.symlink_to(folder)
    fresh.rename(link)


def main() -> int:
    """Measure, print, and say by the exit status whether it passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="the median ratio of so many is judged (default 5)")
    parser.add_argument("--samples", type=int, default=1500, help="requests a round (default 1500)")
    parser.add_argument("--products", type=int, default=50, help="matrix products a request (default 50)")
    options = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        versions = (
            tiny.scale_bundle(folder / "v1", 1, products=options.products),
            tiny.scale_bundle(folder / "v2", 2, products=options.products),
        )
        link = folder / "scale"
        link.symlink_to(versions[0])
        env = {"APPLIANCE_LIMITS__CONCURRENCY": str(SERVERS)}
        with Daemon(folder / "daemon", "--bundle", str(link), env=env) as daemon:
            x = np.ones((1, tiny.WIDTH), np.float32)
            loads = Loads(daemon.url, Question.of("scale.g", {"x": x}), SERVERS, options.samples)
            loads.measure_capacity()
            print(f"capacity {loads.capacity:.1f} requests/s, {loads.alone_s * 1e3:.2f} ms when alone")
            swapper = Swapper(daemon, link, versions)
            for _ in range(options.rounds):
                steady, _ideal = loads.poisson(LOAD)
                enough, before = threading.Event(), swapper.swaps
                swapping = daemon.run_later(swapper.go, enough)
                try:
                    during, _ideal = loads.poisson(LOAD)
                finally:
                    enough.set()
                swapping.result(120)
                failed = dict(Counter(during.status[during.status != OK].tolist()))
                print(
                    f"      P99 steady {p99_ms(steady):.2f} ms, during {swapper.swaps - before} swaps "
                    f"{p99_ms(during):.2f} ms; medians {np.median(steady.latency_s) * 1e3:.2f} and "
                    f"{np.median(during.latency_s) * 1e3:.2f} ms; failed: {failed or 'none'}"
                )
                ratios.append(p99_ms(during) / p99_ms(steady))
                time.sleep(1)
            counts = daemon.model("scale")["swaps"]
        print(f"      longest switch {counts['longest_switch_s'] * 1e6:.1f} us of {counts['beside']} swaps")
    verdict = Verdict("P99 while versions are swapped over P99 when none is", float(np.median(ratios)), GROWTH, "x")
    print(verdict)
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main())
