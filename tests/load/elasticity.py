"""`make elasticity`: how latency grows with load, beside what queueing theory allows, with a verdict a line.

(a) evenly spaced requests, from 2 % to 20 % of capacity: P99 grows at most 15 %.
(b) Poisson arrivals, from 5 % to 50 %: P99 at most 1.15 times that of an M/D/c queue with the measured service time:
    the P99 wait, in services as capacity shows them, and then the time of a request that meets nobody.
(c) twice the capacity: those that are admitted keep the P99 of 90 % load, the others are refused in under 5 ms.

Loads are taken in turn, several times over, and medians of the rounds are judged, because machines are noisy.
Without --bundle a model of the null runtime is served that waits for --service-ms: the machine's own cost of
computing is then out of the way, and what is left is how the daemon queues.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from load import client
from load.mdc import Queue, waits_of
from support import tiny
from support.daemon import Daemon, binary_request

from appliance.runtime.machine import cpu_name
from models.folder import BundleFolder
from models.spec import Array

PHASED = (0.02, 0.2)
POISSON = (0.05, 0.1, 0.2, 0.35, 0.5)
FULL, OVER = 0.9, 2.0
LONGER = 5
"""How many times more requests near and beyond capacity: a queue that is nearly full changes slowly."""
GROWTH = 1.15
REFUSED_WITHIN_S = 0.005
OK = 200
_REFUSALS = (429, 503)


@dataclass(frozen=True)
class Verdict:
    """One line: what was measured, what it may be, and whether it is."""

    what: str
    have: float
    limit: float
    unit: str

    @property
    def passed(self) -> bool:
        """Whether it is within its limit; NaN is not."""
        return self.have <= self.limit

    def __str__(self) -> str:
        mark = "pass" if self.passed else "FAIL"
        return f"{mark}  {self.what:68} {self.have:9.3f} {self.unit:2}  limit {self.limit:9.3f} {self.unit}"


class Bench:
    """One daemon under load."""

    def __init__(self, daemon: Daemon, path: str, inputs: dict[str, Array], servers: int, samples: int) -> None:
        """Ask `path` for the answer to `inputs`; each load is of `samples` requests."""
        body, headers = binary_request(inputs)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        where = urlsplit(daemon.url)
        self._address = (where.hostname or "", where.port or 0)
        head = f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body
        self._servers, self._samples = servers, samples
        self._random = np.random.default_rng(2)
        self.capacity = self.alone_s = 0.0

    def measure_capacity(self) -> None:
        """Answers a second when somebody always waits, but nobody is refused."""
        for count in (64, 512):
            answers = client.run(self._address, self._request, np.zeros(count), at_once=4 * self._servers)
            if not (answers.status == OK).all():
                msg = f"the daemon answered {sorted(set(answers.status.tolist()))}"
                raise RuntimeError(msg)
            self.capacity = count / float(answers.latency_s.max())
        alone = client.run(self._address, self._request, np.zeros(100), at_once=1)
        self.alone_s = float(np.median(np.diff(alone.latency_s)))  # due at once, so one follows the other

    @property
    def service_s(self) -> float:
        """What a request takes of one server."""
        return self._servers / self.capacity

    def evenly(self, load: float) -> client.Answers:
        """Sources in phase: one request due in each slot."""
        return self._run(np.arange(self._samples // 2) / (load * self.capacity))

    def poisson(self, load: float, times: int = 1) -> tuple[client.Answers, float]:
        """Arrivals at random, and the P99 wait, in services, of those very arrivals in an ideal queue."""
        due_s = np.cumsum(self._random.exponential(1 / (load * self.capacity), times * self._samples))
        ideal = waits_of((due_s / self.service_s).tolist(), self._servers)
        return self._run(due_s), float(np.quantile(ideal, 0.99))

    def _run(self, due_s: client.Floats) -> client.Answers:
        time.sleep(0.2)  # what the load before has left in the queue
        return client.run(self._address, self._request, due_s)


def p99_ms(answers: client.Answers) -> float:
    """P99 of the answered, in milliseconds."""
    return float(np.quantile(answers.latency_s[answers.status == OK], 0.99)) * 1e3


def phased(bench: Bench, rounds: int) -> list[Verdict]:
    """Part (a)."""
    ratios = []
    for _ in range(rounds):
        low, high = (p99_ms(bench.evenly(load)) for load in PHASED)
        print(f"      {PHASED[0]:.0%} load: P99 {low:.2f} ms, {PHASED[1]:.0%}: {high:.2f} ms")
        ratios.append(high / low)
    what = f"(a) evenly spaced, P99 at {PHASED[1]:.0%} over P99 at {PHASED[0]:.0%}"
    return [Verdict(what, float(np.median(ratios)), GROWTH, "x")]


def random_arrivals(bench: Bench, servers: int, rounds: int) -> list[Verdict]:
    """Part (b)."""
    service_ms, alone_ms = bench.service_s * 1e3, bench.alone_s * 1e3
    verdicts = []
    for load in POISSON:
        measured = [bench.poisson(load) for _ in range(rounds)]
        have = float(np.median([p99_ms(answers) for answers, _ideal in measured]))
        same = float(np.median([ideal for _answers, ideal in measured])) * service_ms + alone_ms
        law = Queue.at(load, servers).wait(0.99) * service_ms + alone_ms
        print(
            f"      {load:.0%} load: P99 {have:.2f} ms, M/D/{servers} {law:.2f} ms (these very arrivals {same:.2f} ms)"
        )
        verdicts.append(Verdict(f"(b) Poisson at {load:.0%} load, P99 over M/D/{servers}", have / law, GROWTH, "x"))
    return verdicts


def overload(bench: Bench, rounds: int) -> list[Verdict]:
    """Part (c)."""
    growth, refusal_s, accepted, hinted, lost = [], [], [], True, 0
    for _ in range(rounds):
        full, _ideal = bench.poisson(FULL, LONGER)
        over, _ideal = bench.poisson(OVER, LONGER)
        refused = np.isin(over.status, _REFUSALS)
        answered = over.status == OK
        lost += int((~refused & ~answered).sum())
        hinted = hinted and bool(over.hinted[refused].all())
        growth.append(p99_ms(over) / p99_ms(full))
        refusal_s.append(float(np.quantile(over.latency_s[refused], 0.99)))
        accepted.append(float(answered.mean()) * OVER)
        shed = over.latency_s[refused] * 1e3
        print(
            f"      {FULL:.0%} load: P99 {p99_ms(full):.2f} ms, {np.isin(full.status, _REFUSALS).mean():.1%} refused; "
            f"{OVER:.0%}: P99 {p99_ms(over):.2f} ms, {refused.mean():.1%} refused in {np.quantile(shed, 0.99):.2f} ms "
            f"(P99), {shed.max():.2f} ms (longest); client late by {over.late_s.max() * 1e3:.2f} ms"
        )
    return [
        Verdict(
            f"(c) P99 of the admitted at {OVER:.0%} load over P99 at {FULL:.0%}", float(np.median(growth)), GROWTH, "x"
        ),
        Verdict("(c) P99 of a refusal", float(np.median(refusal_s)) * 1e3, REFUSED_WITHIN_S * 1e3, "ms"),
        Verdict("(c) capacity left unused", 1 - float(np.median(accepted)), 0.1, ""),
        Verdict("(c) refusals without a Retry-After, or answers that are neither", float(lost + (not hinted)), 0.0, ""),
    ]


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
        path, inputs = question(options)
        bench = Bench(daemon, path, inputs, options.servers, options.samples)
        bench.measure_capacity()
        took = f"{bench.service_s * 1e3:.2f} ms of one of {options.servers} threads"
        print(f"capacity {bench.capacity:.1f} requests/s, each taking {took}; {bench.alone_s * 1e3:.2f} ms when alone")
        wanted = options.only or ("a", "b", "c")
        verdicts: list[Verdict] = []
        if "a" in wanted:
            verdicts += phased(bench, options.rounds)
        if "b" in wanted:
            verdicts += random_arrivals(bench, options.servers, options.rounds)
        if "c" in wanted:
            verdicts += overload(bench, options.rounds)
    print(*verdicts, sep="\n")
    if options.json:
        report: dict[str, Any] = {
            "machine": cpu_name(),
            "arguments": sys.argv[1:],
            "capacity_per_s": bench.capacity,
            "verdicts": [{**asdict(one), "passed": one.passed} for one in verdicts],
        }
        options.json.write_text(json.dumps(report, indent=1))
    return 0 if all(one.passed for one in verdicts) else 1


def serve(options: argparse.Namespace, folder: Path) -> Daemon:
    """The daemon to measure."""
    env = {"APPLIANCE_LIMITS__CONCURRENCY": str(options.servers)}
    if options.bundle:
        return Daemon(folder, "--bundle", str(options.bundle), "--precision", "fp32", env=env)
    path = tiny.null_model(folder / "null.json", options.service_ms / 1e3)
    # Alone in its run: a null model would answer eight as fast as one, which no law of single services describes.
    env |= {"APPLIANCE_RUNTIME": "null", "APPLIANCE_LIMITS__BATCH": "1"}
    return Daemon(folder, "--onnx", f"null={path}", env=env)


def question(options: argparse.Namespace) -> tuple[str, dict[str, Array]]:
    """Path and inputs."""
    if not options.bundle:
        return "/v2/models/null/infer", {"x": np.ones((1, 16), np.float32)}
    folder = BundleFolder(options.bundle)
    golden = folder.manifest.graphs["rec"].variants["fp32"].golden
    return f"/v2/models/{folder.manifest.name}.rec/infer", dict(folder.read_arrays(golden.inputs))


if __name__ == "__main__":
    sys.exit(main())
