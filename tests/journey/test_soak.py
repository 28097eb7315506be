"""What `make soak` and `make bench` measure, in short forms of them, and how they judge it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from load.soak import Soaked, judge, soak
from support.daemon import StartDaemon

from appliance.bench.openloop import Answers
from appliance.bench.question import Question

TESTS = Path(__file__).parents[1]
pytestmark = [pytest.mark.journey, pytest.mark.timeout(300)]


def seen(*, memory: float = 1.0, latency: float = 1.0, status: int = 200, apart: float = 0.0) -> Soaked:
    """300 requests of which those of the last third take `latency` times as long, with so much more memory."""
    latency_s = np.where(np.arange(300) < 200, 0.02, 0.02 * latency)
    answers = Answers(latency_s, np.where(np.arange(300) % 50, 200, status), np.zeros(300, np.bool_), np.zeros(300))
    samples = [(float(i), 100.0 if i < 20 else 100.0 * memory) for i in range(30)]
    return Soaked(np.arange(300) / 10, answers, samples, apart)


@pytest.mark.parametrize(
    ("soaked", "passed"),
    [
        (seen(memory=1.009, latency=1.09), [True, True, True, None, True]),
        (seen(memory=1.011), [False, True, True, None, True]),
        (seen(latency=1.11), [True, False, True, None, True]),
        (seen(latency=0.89), [True, False, True, None, True]),
        (seen(status=500), [True, True, False, None, True]),
        (seen(status=429), [True, True, True, None, True]),
        (seen(apart=0.1), [True, True, True, None, False]),
    ],
)
def test_a_soak_fails_by_memory_that_grows_latency_that_drifts_and_answers_that_are_missing_or_wrong(
    soaked: Soaked, passed: list[bool | None]
) -> None:
    assert [verdict.passed for verdict in judge(soaked)] == passed


@pytest.mark.long
def test_a_soak_sees_a_leak_of_the_daemon_and_not_one_request_is_lost(start_null: StartDaemon) -> None:
    daemon = start_null(delay_s=0.02, APPLIANCE_FAULTS__ENABLED="true")
    leak = {"fault": "leak", "model": "null", "amount": 1.0, "for_s": 60}
    leaked = []

    def tell(done: float, _mib: float) -> None:
        if done > 0.4 and not leaked:
            leaked.append(daemon.http.post("/v1/faults", json=leak, headers=daemon.authorized("admin")))

    rate, soaked = soak(daemon, Question.of("null", {"x": np.ones((1, 16), np.float32)}), 20, 0.8, tell)
    assert [answer.status_code for answer in leaked] == [200]
    assert len(soaked.due_s) == pytest.approx(20 * rate, abs=3)
    assert 0 < soaked.due_s.max() <= 20
    growth, _drift, lost, _refused, wrong = judge(soaked)
    assert growth.passed is False
    assert (lost.passed, wrong.passed) == (True, True), (lost, wrong)


@pytest.mark.long
def test_the_command_prints_and_writes_the_same_verdicts_and_says_by_its_status_whether_all_passed(
    tmp_path: Path,
) -> None:
    report = tmp_path / "soak.json"
    command = [sys.executable, TESTS / "load/soak.py", "--seconds", "4", "--load", "0.4", "--json", report]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    written = json.loads(report.read_text())
    assert [verdict["what"] in ended.stdout for verdict in written["verdicts"]] == [True] * 5
    assert ended.returncode == (1 if any(verdict["passed"] is False for verdict in written["verdicts"]) else 0)
    assert {"date", "machine", "model", "requests_per_s"} <= written.keys()
    assert len(written["memory"]) > 3


@pytest.mark.long
def test_the_benchmark_measures_ours_beside_bare_onnxruntime_and_a_server_written_by_hand(tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    short = ["--work", "tiny", "--rounds", "1", "--seconds", "0.5", "--json", report]
    subprocess.run([sys.executable, TESTS / "bench.py", *short], capture_output=True, text=True, check=True)
    written = json.loads(report.read_text())
    assert {"date", "machine", "versions"} <= written.keys()
    loads = {(row["server"], row["clients"]): row for row in written["tables"]["load"]}
    wanted = {("onnxruntime", 1), *((server, clients) for server in ("ours", "fastapi") for clients in (1, 4, 16))}
    assert wanted <= set(loads)
    assert all(row.get("errors", 0) == 0 and row["per_s"] > 0 for row in loads.values())
    for kind, figures in {"start": ["first_answer_s"], "memory": ["idle_mib", "loaded_mib"]}.items():
        found = {row["server"]: [row[figure] for figure in figures] for row in written["tables"][kind]}
        assert {"ours", "fastapi"} <= set(found)
        assert min(map(min, found.values())) > 0
