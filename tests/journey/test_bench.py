"""The benchmark on a running daemon, which it must leave as it was."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from support import tiny
from support.daemon import Daemon, StartDaemon, appliance

from appliance.bench.measure import Bench, Findings, Plan
from models.errors import ApplianceError

pytestmark = [pytest.mark.journey, pytest.mark.long]

DIMENSIONS = ["Speed", "Cost", "Elasticity", "Stability", "Repeatability", "Recovery"]


def measured(daemon: Daemon, model: str, plan: Plan, token: str = "") -> Findings:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(base_url=daemon.url, timeout=60, trust_env=False, headers=headers) as client:
        return Bench(client, model, plan, lambda _text: None).run()


def test_every_dimension_is_measured_and_the_daemon_goes_on_as_before(tiny_daemon: Daemon) -> None:
    before = tiny_daemon.worker_pid("linear")
    found = measured(tiny_daemon, "linear", Plan(lasts_s=2, drill=False))
    assert [one.name for one in found.dimensions] == DIMENSIONS
    lines = {one.what: one for dimension in found.dimensions for one in dimension.verdicts}
    assert "linear 1" in found.facts["model"]
    bad = lines["restarts in 1,000 bad inputs"]
    assert (bad.have, "x 400" in bad.note) == (0, True)
    assert sum(int(part.split(" x ")[0]) for part in bad.note.split(", ")) == 1000
    repeated = [one for what, one in lines.items() if "largest difference" in what]
    assert [one.passed for one in repeated] == [True, True]
    assert lines["slowest recovery"].have is None
    assert tiny_daemon.worker_pid("linear") == before


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_bundle_of_pictures_is_measured_with_a_page(tiny_daemon: Daemon) -> None:
    found = measured(tiny_daemon, "blank", Plan(lasts_s=3, series_s=2, drill=False))
    assert "a picture of 8 lines" in found.facts["request"]
    (repeats,) = (one for one in found.dimensions if one.name == "Repeatability")
    thousand, batched = repeats.verdicts
    assert thousand.passed or thousand.note.startswith("not measured")
    assert batched.passed


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_model_that_is_slower_than_the_limit_has_no_rate_and_no_price(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    path = tiny.null_model(tmp_path / "slow.json", 0.12)
    daemon = start_daemon("--onnx", f"slow={path}", APPLIANCE_RUNTIME="null").wait_serving().wait_ready()
    found = measured(daemon, "", Plan(lasts_s=3, series_s=1, drill=False))
    (speed,), (cost,) = (one.verdicts for one in found.dimensions[:2])
    assert (speed.have, speed.passed, cost.have) == (0, False, None)
    assert not found.passed
    runs = found.dimensions[4].verdicts[0]
    assert (runs.passed, "of 1,000" in runs.note) == (None, True)
    daemon.stop()


def test_a_model_that_is_not_served_is_one_sentence(tiny_daemon: Daemon) -> None:
    ended = appliance("bench", "--quick", "--model", "none", "--url", tiny_daemon.url)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "there is no model 'none'" in ended.stderr


def test_a_benchmark_over_tls_is_refused_for_what_it_would_measure() -> None:
    with httpx.Client(base_url="https://127.0.0.1:1") as client, pytest.raises(ApplianceError, match="plain HTTP"):
        Bench(client, "", Plan(), lambda _text: None)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_command_prints_one_document_writes_its_page_and_says_by_its_status_whether_all_passed(
    tiny_daemon: Daemon, tmp_path: Path
) -> None:
    page = tmp_path / "bench.html"
    arguments = ("bench", "--quick", "--json", "--model", "linear", "--report", str(page), "--url", tiny_daemon.url)
    ended = tiny_daemon.run_later(lambda: appliance(*arguments, within_s=280)).result(290)
    document = json.loads(ended.stdout)
    assert list(document["dimensions"]) == DIMENSIONS
    assert ended.returncode == (0 if document["passed"] else 1)
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_recovery_is_drilled_where_faults_are_enabled_and_availability_follows(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    path = tiny.null_model(tmp_path / "null.json", 0.002)
    more = {"APPLIANCE_RUNTIME": "null", "APPLIANCE_FAULTS__ENABLED": "true", "APPLIANCE_LIMITS__HANG_S": "1.5"}
    daemon = start_daemon("--onnx", f"null={path}", **more).wait_serving().wait_ready()
    found = measured(daemon, "null", Plan(lasts_s=3, series_s=3, faults_per_day=2), daemon.token("admin"))
    slowest, wrong, available = found.dimensions[-1].verdicts
    assert slowest.have is not None
    assert available.have is not None
    assert 0 < slowest.have < 60
    assert wrong.have == 0
    assert 99.5 < available.have < 100
    assert "computed" in available.what
    daemon.stop()
