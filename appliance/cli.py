"""The `appliance` command. `run` is the daemon; everything else is a client of its local HTTP."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point. The daemon must not pay for the clients' libraries, so `run` branches off first."""
    if sys.argv[1:2] == ["run"]:
        # structlog loads rich when it finds it; a terminal's comfort has no place in a daemon's memory.
        sys.modules["rich"] = None  # type: ignore[assignment] # documented way to make an import fail
        from appliance import start  # noqa: PLC0415 - only this branch may load it

        sys.exit(start.main(sys.argv[2:]))
    from appliance import client_cli  # noqa: PLC0415 - only this branch may load typer

    client_cli.app()
