"""`make soak`: ten minutes at 80 % of the measured capacity, after which memory and latency are what they were before.

Arrival times are those of one third of the time, drawn at random, three times over: thirds differ by what the daemon
does and not by chance. Memory is PSS of all processes of the daemon, once a second; of each third the median counts.
Served is the recogniser of the benchmark.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from bench import RECOGNISER, a_line
from support.daemon import Daemon
from support.processes import marked

from appliance.adapters.host import process_bytes
from appliance.bench.elasticity import OK, REFUSALS, Loads, Verdict, p99_ms
from appliance.bench.openloop import Answers, Floats
from appliance.bench.question import Question, difference
from appliance.runtime.machine import cpu_name

ROOT = Path(__file__).resolve().parent.parent.parent
GROWTH = 0.01
DRIFT = 0.1
THIRDS = 3
MIB = 2**20


@dataclass(frozen=True)
class Soaked:
    """What was seen; the thirds are equally long."""

    due_s: Floats
    answers: Answers
    memory: Sequence[tuple[float, float]]
    """(seconds from the start, MiB)."""
    apart: float
    """Difference of the answer to the same question before and after."""


def main() -> int:
    """Measure, print, write, and say by the exit status whether it passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seconds", type=float, default=600.0, help="default 600")
    add("--load", type=float, default=0.8, help="share of capacity (default 0.8)")
    add("--json", type=Path, metavar="FILE", default=ROOT / "build/soak.json", help="default build/soak.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Daemon(Path(name), "--onnx", f"recogniser={RECOGNISER}") as daemon:
        asked = Question.of("recogniser", {"x": a_line()})
        rate, seen = soak(daemon, asked, options.seconds, options.load, tell)
    verdicts = judge(seen)
    facts = {
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "model": RECOGNISER.name,
        "arguments": sys.argv[1:],
        "requests_per_s": round(rate, 2),
        "requests": len(seen.due_s),
    }
    print(*(f"{key:15} {value}" for key, value in facts.items()), *verdicts, sep="\n")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    report = {**facts, "verdicts": [{**asdict(one), "passed": one.passed} for one in verdicts], "memory": seen.memory}
    options.json.write_text(json.dumps(report, indent=1))
    return 1 if any(one.passed is False for one in verdicts) else 0


def tell(done: float, mib: float) -> None:
    """Show how far it is, on one line."""
    print(f"\r{min(done, 1):4.0%}  {mib:.1f} MiB ", end="" if done < 1 else "\n", file=sys.stderr, flush=True)


def soak(
    daemon: Daemon, asked: Question, lasts_s: float, load: float, tell: Callable[[float, float], None]
) -> tuple[float, Soaked]:
    """Requests a second that are `load` of the capacity, and what was seen under them; `tell` hears of each sample."""
    with httpx.Client(base_url=daemon.url, timeout=60, trust_env=False) as client:
        before = asked.ask(client)
        loads = Loads(daemon.url, asked, daemon.status()["models"][0]["concurrency"], samples=0, longest_s=lasts_s / 10)
        loads.measure_capacity()
        rate = load * loads.capacity
        third_s = lasts_s / THIRDS
        gaps = np.random.default_rng(6).exponential(1, max(int(rate * third_s), 1)).cumsum()
        third = gaps * third_s / (gaps[-1] + 1)  # all fall into it
        due_s = np.concatenate([third + third_s * number for number in range(THIRDS)])
        sent = daemon.run_later(loads.send, due_s)
        memory, began = [], time.monotonic()
        while not sent.done():
            mib = sum(process_bytes(pid) or 0 for pid in marked(daemon.mark)) / MIB
            at_s = time.monotonic() - began
            memory.append((round(at_s, 1), round(mib, 2)))
            tell(at_s / lasts_s, mib)
            time.sleep(1)
        return rate, Soaked(due_s, sent.result(), memory, difference(asked.ask(client), before))


def judge(seen: Soaked) -> list[Verdict]:
    """The first third beside the last."""
    count = len(seen.due_s) // THIRDS
    first_ms, last_ms = (p99_ms(_part(seen.answers, part)) for part in (slice(count), slice(-count, None)))
    memory = np.array([mib for _, mib in seen.memory])
    first_mib, last_mib = (float(np.median(part)) for part in (memory[: len(memory) // 3], memory[-len(memory) // 3 :]))
    refused, lost = np.isin(seen.answers.status, REFUSALS), ~np.isin(seen.answers.status, (OK, *REFUSALS))
    note, of = f"{first_ms:.1f} ms, then {last_ms:.1f}", f"of {len(seen.due_s):,}"
    return [
        Verdict("growth of memory", last_mib / first_mib - 1, GROWTH, note=f"{first_mib:.1f} MiB, then {last_mib:.1f}"),
        Verdict("drift of P99", abs(last_ms / first_ms - 1), DRIFT, note=note),
        Verdict("requests that failed, or had no answer", float(lost.sum()), 0.0, note=of),
        Verdict("requests that were refused", float(refused.sum()), None, note=of),
        Verdict("difference of the right answer before and after", seen.apart, 1e-5),
    ]


def _part(answers: Answers, part: slice) -> Answers:
    return Answers(**{name: array[part] for name, array in vars(answers).items()})


if __name__ == "__main__":
    sys.exit(main())
