"""What `make demo` and `make fleet-demo` show a newcomer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.broker import needs_mosquitto
from support.processes import clean_environment, end_marked, marked, new_mark

pytestmark = [pytest.mark.journey, pytest.mark.long, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


def demonstrated(script: str) -> str:
    """What a demo shows; it must end well and leave no process."""
    mark = new_mark()
    try:
        shown = subprocess.run(
            [sys.executable, ROOT / "docs" / script],
            env=clean_environment(mark),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert marked(mark) == []
    finally:
        end_marked(mark)
    return shown.stdout


@needs_mosquitto
@pytest.mark.usefixtures("reading_bundle")  # its steps are then done, as in a second run of the demo
def test_the_demo_reads_both_pictures_answers_over_mqtt_and_leaves_nothing_behind() -> None:
    shown = demonstrated("demo.py")
    for expected in (
        "60000053668",
        "Thank",  # "ThankYou" in float, "Thank You" in INT8: the faster of them reads it
        "GIVE",
        "YOUR",
        "done: device demo",
        "exited with 0",
        "What to try next",
    ):
        assert expected in shown


@needs_mosquitto
def test_the_fleet_demo_rolls_a_good_version_out_stops_a_bad_one_and_leaves_nothing_behind() -> None:
    shown = demonstrated("fleet_demo.py")
    for expected in (
        "version 2.0.0: done, 3 of 3 devices committed",
        "version 3.0.0: stopped, wave 1: 1 of 1 devices rolled back (100%)",
        "devices serve press-1 2.0.0, press-2 2.0.0, press-3 2.0.0",
    ):
        assert expected in shown
