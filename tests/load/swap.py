"""`make swap-bench`: P99 at 50 % load of requests within one second of a swap, over P99 of others in the same run.

The limit is 1.15. Time is cut into slots of 5 s, in pairs: the same Poisson arrivals come twice, and in one of both
slots, now the first and now the second, a swap is ordered after one second. Near the swap is what was due from then on
less a second until a second after the old version's worker was gone; it is compared with the same arrivals of the
other slot. All of this is drawn in advance. The model is a chain of matrix products in onnxruntime, so what loads a
version and who serves want the same cores.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from support import tiny
from support.daemon import Daemon

from appliance.bench.elasticity import OK, Loads, Verdict
from appliance.bench.openloop import Floats
from appliance.bench.question import Question

LOAD = 0.5
GROWTH = 1.15
SERVERS = 2
SLOT_S = 5.0
NEAR_S = 1.0
LEAD_S = 3.0
"""From when a round is planned until its first request is due."""


class Swapper:
    """Swaps to and fro."""

    def __init__(self, daemon: Daemon, link: Path, versions: tuple[Path, Path]) -> None:
        """Point `link`, from which the daemon serves, to one version after the other."""
        self._daemon, self._link, self._versions = daemon, link, versions
        self._headers = daemon.authorized("operate")
        self._swaps = 0

    def swap_at(self, moments: Sequence[float]) -> list[tuple[float, float, float]]:
        """Of the swap at each of them: when it was ordered, had switched, and the old worker was gone."""
        swaps = []
        with httpx.Client(base_url=self._daemon.url, headers=self._headers, timeout=120, trust_env=False) as http:
            for moment in moments:
                old = os.pidfd_open(self._daemon.worker_pid())
                self._swaps += 1
                point(self._link, self._versions[self._swaps % 2])
                time.sleep(max(moment - time.perf_counter(), 0.0))
                ordered_at = time.perf_counter()
                http.post("/v2/repository/models/scale/load").raise_for_status()
                switched_at = time.perf_counter()
                select.select([old], (), ())
                swaps.append((ordered_at, switched_at, time.perf_counter()))
                os.close(old)
        return swaps


def point(link: Path, folder: Path) -> None:
    """Let `link` name `folder`, at once."""
    fresh = link.with_name("fresh")
    fresh.symlink_to(folder)
    fresh.rename(link)


def main() -> int:
    """Measure, print, and say by the exit status whether it passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="the median ratio of so many is judged (default 5)")
    parser.add_argument("--swaps", type=int, default=5, help="in each round, 10 s each (default 5)")
    parser.add_argument("--products", type=int, default=50, help="matrix products a request (default 50)")
    options = parser.parse_args()
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
            loads = Loads(daemon.url, Question.of("scale.g", {"x": x}), SERVERS, samples=0)
            loads.measure_capacity()
            print(f"capacity {loads.capacity:.1f} requests/s, {loads.alone_s * 1e3:.2f} ms when alone")
            swapper, chance = Swapper(daemon, link, versions), np.random.default_rng(2)
            ratios = [one_round(daemon, loads, swapper, chance, options.swaps) for _ in range(options.rounds)]
            counts = daemon.model("scale")["swaps"]
        print(f"      longest switch {counts['longest_switch_s'] * 1e6:.1f} us of {counts['beside']} swaps")
    what = "P99 of requests within one second of a swap over P99 of others"
    note = "rounds " + " ".join(f"{ratio:.2f}" for ratio in ratios)
    verdict = Verdict(what, float(np.median(ratios)), GROWTH, "x", note=note)
    print(verdict)
    return 0 if verdict.passed else 1


def one_round(daemon: Daemon, loads: Loads, swapper: Swapper, chance: np.random.Generator, swaps: int) -> float:
    """P99 of the requests near a swap over P99 of as many others."""
    rate = LOAD * loads.capacity
    drawn = chance.exponential(1 / rate, (swaps, int(2 * rate * SLOT_S))).cumsum(1)
    slots = [due_s[due_s < SLOT_S] for due_s in drawn for _ in range(2)]
    due_s = np.concatenate([SLOT_S * i + slot for i, slot in enumerate(slots)])
    swapped = [2 * pair + pair % 2 for pair in range(swaps)]
    start_at = time.perf_counter() + LEAD_S
    swapping = daemon.run_later(swapper.swap_at, [start_at + SLOT_S * i + NEAR_S for i in swapped])
    answers = loads.send(due_s, start_at=start_at)
    took = np.array(swapping.result(120)) - start_at
    ok = answers.status == OK
    latency_s = np.split(np.where(ok, answers.latency_s, np.inf), np.cumsum([len(slot) for slot in slots[:-1]]))
    is_near = [slots[i] < over_s + NEAR_S - SLOT_S * i for i, over_s in zip(swapped, took[:, 2], strict=True)]
    near_s = np.concatenate([latency_s[i][near] for i, near in zip(swapped, is_near, strict=True)])
    other_s = np.concatenate([latency_s[i ^ 1][near] for i, near in zip(swapped, is_near, strict=True)])
    switch_s, leave_s = np.median(np.diff(took), axis=0)
    late_s, failed = np.quantile(answers.late_s, 0.99), dict(Counter(answers.status[~ok].tolist()))
    print(
        f"      {len(near_s)} requests near {swaps} swaps: P99 {p99_ms(near_s):.2f} ms, "
        f"others {p99_ms(other_s):.2f} ms; medians {np.median(near_s) * 1e3:.2f} and "
        f"{np.median(other_s) * 1e3:.2f} ms; {switch_s:.2f} s to the switch, {leave_s:.2f} s more to the end; "
        f"client late by {late_s * 1e3:.2f} ms (P99); failed: {failed or 'none'}"
    )
    return p99_ms(near_s) / p99_ms(other_s)


def p99_ms(latency_s: Floats) -> float:
    """P99 in milliseconds; what failed was never answered."""
    return float(np.quantile(latency_s, 0.99, method="higher")) * 1e3


if __name__ == "__main__":
    sys.exit(main())
