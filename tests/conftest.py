"""Fixtures of all tests, and a summary that says loudly what was left out and what took how long."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.broker import Mosquitto
from support.daemon import Daemon, StartDaemon
from support.postgres import Cluster
from support.processes import clean_environment

ROOT = Path(__file__).parent.parent
KINDS = ("unit", "property", "contract", "journey")
SHORT_BUDGET_S = 12 * 60.0
"""For everything that is not marked long."""
LONG_BUDGET_S = 45 * 60.0


class Times:
    """Adds up what tests take, each under one heading: long, or else its kind."""

    def __init__(self) -> None:
        """Nothing has run yet."""
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self.tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase of one test; fixtures shared by many count where they were made."""
        heading = next((name for name in ("long", *KINDS) if name in report.keywords), "unmarked")
        self.spent_s[heading] += report.duration
        self.tests[heading] += report.when == "call"

    def over_budget(self) -> list[str]:
        """One sentence for each budget that was overrun."""
        short_s = sum(spent for heading, spent in self.spent_s.items() if heading != "long")
        return [
            f"{name} tests took {spent_s:.0f} s, allowed are {budget_s:.0f} s"
            for name, spent_s, budget_s in (
                ("all but the long", short_s, SHORT_BUDGET_S),
                ("the long", self.spent_s["long"], LONG_BUDGET_S),
            )
            if spent_s > budget_s
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A run over budget is a failed run."""
        if self.over_budget() and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:  # noqa: ANN401 - pytest does not export its type
        """Say what was left out, then what took how long."""
        self._say_skipped(terminalreporter)
        terminalreporter.section("time by marker")
        for heading in sorted(self.spent_s, key=lambda name: -self.spent_s[name]):
            terminalreporter.line(f"{heading:<9} {self.tests[heading]:5} tests {self.spent_s[heading]:8.1f} s")
        for sentence in self.over_budget():
            terminalreporter.line(f"OVER BUDGET: {sentence}", red=True, bold=True)

    @staticmethod
    def _say_skipped(terminalreporter: Any) -> None:  # noqa: ANN401 - pytest does not export its type
        by_reason: defaultdict[str, list[str]] = defaultdict(list)
        for report in terminalreporter.stats.get("skipped", []):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            by_reason[reason.removeprefix("Skipped: ")].append(report.nodeid)
        if not by_reason:
            return
        count = sum(map(len, by_reason.values()))
        terminalreporter.section(f"NOT TESTED HERE: {count} tests were skipped", red=True, bold=True)
        for reason, tests in sorted(by_reason.items()):
            terminalreporter.line(f"{reason} ({len(tests)})", red=True, bold=True)
            for test in tests:
                terminalreporter.line(f"    {test}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the times of this run."""
    config.pluginmanager.register(Times(), "times")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that says no kind is refused: its time would belong to no budget."""
    unmarked = [item.nodeid for item in items if not any(item.get_closest_marker(kind) for kind in KINDS)]
    if unmarked:
        msg = f"each test needs one of the markers {', '.join(KINDS)}; missing on {', '.join(unmarked[:5])}"
        raise pytest.UsageError(msg)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A PostgreSQL of this run's own."""
    started = Cluster()
    yield started
    started.close()


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[StartDaemon]:
    """Starts daemons that are gone after the test, whatever happens."""
    started: list[Daemon] = []

    def start(*arguments: str, folder: str = "daemon", **env: str) -> Daemon:
        daemon = Daemon(tmp_path / folder, *arguments, env=env)
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        daemon.close()


@pytest.fixture
def start_null(start_daemon: StartDaemon, tmp_path: Path) -> StartDaemon:
    """Starts a daemon that serves one null model, `null`, which takes `delay_s` for each request."""

    def start(*arguments: str, delay_s: float = 0.0, **env: str) -> Daemon:
        path = tiny.null_model(tmp_path / "null.json", delay_s)
        daemon = start_daemon("--onnx", f"null={path}", *arguments, APPLIANCE_RUNTIME="null", **env)
        return daemon.wait_serving().wait_ready()

    return start


@pytest.fixture(scope="module")
def tiny_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A ready daemon with tiny real models and the bundle `blank`, shared by the tests of one file."""
    folder = tmp_path_factory.mktemp("tiny")
    models = [
        tiny.linear_model(folder / "linear.onnx"),
        tiny.types_model(folder / "types.onnx"),
        tiny.text_model(folder / "text.onnx"),
        tiny.pair_model(folder / "pair.onnx"),
    ]
    arguments = [part for path in models for part in ("--onnx", f"{path.stem}={path}")]
    with Daemon(folder / "daemon", *arguments, "--bundle", str(tiny.blank_bundle(folder / "blank"))) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def reading_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real text-reading bundle, built from its recipe for the CPU."""
    folder = tmp_path_factory.mktemp("bundle") / "ppocr-v4"
    recipe = ROOT / "models" / "zoo" / "ppocr-v4.toml"
    provision = Path(sys.executable).with_name("provision")
    built = subprocess.run(
        [str(provision), "build", str(recipe), "--target", "cpu", "--out", str(folder)],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    """A broker that is not started yet."""
    mosquitto = Mosquitto(tmp_path / "broker")
    yield mosquitto
    mosquitto.close()
