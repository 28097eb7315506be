"""A PostgreSQL of the tests' own: a cluster in a temporary folder, spoken to over a socket in it, gone afterwards."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from support.processes import clean_environment, eventually

_FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name))
POSTGRES = next((folder for folder in reversed(_FOLDERS) if (folder / "postgres").exists()), None)
"""Where the programs of the newest version are, which distributions keep off the path."""

needs_postgres = pytest.mark.skipif(POSTGRES is None, reason="condition postgresql: the database is not installed")


class Cluster:
    """A server that runs until `close`, and takes only who is on this machine."""

    def __init__(self, *, durable: bool = False) -> None:
        """Make and start it, as the unprivileged user that it insists on; unless `durable`, it waits for no disk."""
        assert POSTGRES
        self._user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        self._folder = Path(tempfile.mkdtemp(prefix="pg-"))  # short: the path of a socket is
        if os.geteuid() == 0:
            shutil.chown(self._folder, self._user)
        self._numbers = itertools.count(1)
        data = self._folder / "data"
        self._call("initdb", "-D", data, "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C")
        options = [f"unix_socket_directories={self._folder}", "listen_addresses=", "max_connections=60"]
        options += [] if durable else ["fsync=off", "synchronous_commit=off", "full_page_writes=off"]
        options += ["shared_buffers=32MB"]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [POSTGRES / "postgres", "-D", data, *(word for option in options for word in ("-c", option))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=clean_environment(),
                user=self._user if os.geteuid() == 0 else None,
            )
        self.pid = self._process.pid
        eventually(self._answers, "PostgreSQL takes connections", 60)

    def database(self, like: str = "template1") -> str:
        """The address of a new database, an empty one unless it is to be like another."""
        name = f"fleet_{next(self._numbers)}"
        self.copy(like, name)
        return self.address(name)

    def copy(self, source: str, name: str) -> None:
        """Make a database that is like another, to which nobody may be connected."""
        self._call("psql", "-h", self._folder, "-U", "postgres", "-qc", f"CREATE DATABASE {name} TEMPLATE {source}")

    def address(self, name: str) -> str:
        """How the upstream is told of a database."""
        return f"postgresql+psycopg://postgres@/{name}?host={self._folder}"

    def close(self) -> None:
        """End it, and leave nothing behind."""
        self._process.send_signal(signal.SIGQUIT)  # its data are of no more use
        self._process.wait(30)
        shutil.rmtree(self._folder)

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self._folder / "log").read_text()
        return self._run("pg_isready", "-q", "-h", self._folder).returncode == 0

    def _call(self, program: str, *arguments: str | Path) -> None:
        ended = self._run(program, *arguments)
        assert ended.returncode == 0, ended.stdout

    def _run(self, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        assert POSTGRES
        return subprocess.run(
            [POSTGRES / program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._folder,
            env=clean_environment(),
            user=self._user if os.geteuid() == 0 else None,
            check=False,
        )
