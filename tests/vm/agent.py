"""Runs in the machine under test: takes a command (a JSON list of words, one line), runs it as root, answers.

It knows nothing of the appliance, and no image for users holds it.
"""

from __future__ import annotations

import json
import socketserver
import subprocess


class Command(socketserver.StreamRequestHandler):
    """One connection, one command."""

    def handle(self) -> None:
        """Run what is asked."""
        words = json.loads(self.rfile.readline())
        done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        answer = {"status": done.returncode, "out": done.stdout, "err": done.stderr}
        self.wfile.write(json.dumps(answer).encode() + b"\n")


class Server(socketserver.ThreadingTCPServer):
    """A thread for each command."""

    allow_reuse_address = True
    daemon_threads = True


if __name__ == "__main__":
    Server(("0.0.0.0", 9000), Command).serve_forever()  # noqa: S104 - the machine has no network but the tester's
