"""Puts published bundles into a state folder before there is a device: `python -m appliance.accept`.

The client of the repository is the one that runs on devices, so an image starts with bundles that its own root of
trust has accepted, knows who may order it, and has metadata below which no repository can take it back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from appliance.adapters.journal import Facts, Journal
from appliance.adapters.repository import Repository
from appliance.adapters.store import JOURNAL, METADATA, SLOTS
from models.errors import ApplianceError, UpdateError


def accept(state_dir: Path, url: str, root: bytes, channel: str, names: Sequence[str], now: float) -> dict[str, str]:
    """Bring what `channel` holds of each bundle into its slot below `state_dir`: name -> digest.

    `now` is trusted wall time in Unix seconds. Raises UpdateError for what is not signed, not fresh or not published.
    """
    repository = Repository(url, root, state_dir / METADATA)
    accepted = repository.refresh(now)
    revoked, found = accepted.revoked(), {}
    for name in names:
        release = accepted.release(channel, name)
        if release is None or release.pointer.digest in revoked:
            why = "nothing" if release is None else f"{release.pointer.version}, which was revoked,"
            msg = f"channel {channel} holds {why} for {name}: publish it there, or name another channel"
            raise UpdateError(msg)
        repository.fetch(release.manifest, state_dir / SLOTS / release.pointer.digest, {})
        found[name] = release.pointer.digest
    facts = Facts(time_floor=float(accepted.signed_at), revoked=revoked, commanders=accepted.commanders())
    with contextlib.closing(Journal(state_dir / JOURNAL)) as journal:
        journal.write([], [], facts)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Accept, and print the digests as JSON; 0 done, 1 with a reason."""
    parser = argparse.ArgumentParser(prog="appliance.accept", description="Fill the slots of a state folder.")
    parser.add_argument("--state-dir", type=Path, required=True, help="state folder of a daemon that does not run")
    parser.add_argument("--url", required=True, help="address of the repository")
    parser.add_argument("--root", type=Path, required=True, help="its root.json")
    parser.add_argument("--channel", default="stable", help="dev, canary or stable (default)")
    parser.add_argument("names", nargs="+", metavar="NAME", help="bundles")
    options = parser.parse_args(arguments)
    try:
        given = options.state_dir, options.url, options.root.read_bytes(), options.channel, options.names
        print(json.dumps(accept(*given, now=time.time())))
    except (ApplianceError, OSError) as error:
        print(f"appliance.accept: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
