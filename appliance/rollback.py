"""Takes back what is on trial, for a daemon that does not start: `python -m appliance.rollback --state-dir DIR`.

The daemon counts the starts of a version on trial itself, but only when it comes that far. systemd runs this after too
many starts in a row. It needs the store and nothing else; what proved good stays, whatever keeps the daemon from
starting.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from appliance.adapters.journal import Journal
from appliance.adapters.store import JOURNAL, Store
from appliance.core import deployment as rules
from appliance.core.deployment import Deployment, Event, Step
from models.errors import ApplianceError

_REASON = "the daemon was started too often in a row while this version was on trial"


def take_back(state_dir: Path, now: float) -> list[Deployment]:
    """Give up every deployment on trial at `now` (Unix seconds), so that the next start serves what was before it.

    Raises ConfigError while a daemon uses the folder or where the journal cannot be used, OSError when nothing can be
    written.
    """
    if not (state_dir / JOURNAL).exists():
        return []
    with contextlib.closing(Store(state_dir)), contextlib.closing(Journal(state_dir / JOURNAL)) as journal:
        known = journal.read()
        given_up = [
            rules.after(one, Event.FAILED, now, reason=_REASON) for one in known.deployments if one.at is Step.TRIAL
        ]
        slots = {slot.digest: slot for slot in known.slots}
        spoiled = [slot for one in given_up if (slot := rules.slot_of(one, slots.get(one.digest)))]
        journal.write(given_up, spoiled, None)
    return given_up


def main(arguments: Sequence[str] | None = None) -> int:
    """Take back, and say what; 0 also where nothing was on trial, 1 with a reason."""
    parser = argparse.ArgumentParser(prog="appliance.rollback", description="Take back the versions that are on trial.")
    parser.add_argument("--state-dir", type=Path, required=True, help="state folder of a daemon that does not run")
    state_dir = parser.parse_args(arguments).state_dir
    try:
        given_up = take_back(state_dir, time.time())
    except (ApplianceError, OSError) as error:
        print(f"appliance.rollback: {error}", file=sys.stderr)
        return 1
    for one in given_up:
        print(f"{one.name} {one.version} was taken back: {_REASON}")
    if not given_up:
        print("no version is on trial: what proved good stays, and the reason is in the daemon's log")
    return 0


if __name__ == "__main__":
    sys.exit(main())
