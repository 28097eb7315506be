"""A workshop: a tiny recipe, its checkpoint, its data, a cache of its own, and the real command `provision`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from provisioning.build import Built, build
from provisioning.cache import Cache
from provisioning.recipe import read
from support import checkpoint
from support.processes import clean_environment

PROVISION = Path(sys.executable).with_name("provision")


class Workshop:
    """Everything in one folder."""

    def __init__(self, folder: Path) -> None:
        """Lay everything down."""
        self.folder = folder
        self.data = checkpoint.labelled(folder / "data", {"calibrate": 3, "gate": 4})
        self.out = str(folder / "bundle")
        self.reports: list[str] = []
        self.install(checkpoint.recogniser())

    def install(self, content: bytes) -> None:
        """Make `content` the installed checkpoint that the recipe names."""
        self.content = content
        checkpoint.install(self.folder / "packages", content)
        self.recipe = str(checkpoint.recipe(self.folder / "tiny.toml", content))

    def build(self, precision: str = "auto", cache: Path | None = None, **changes: str) -> Built:
        """Build in this process with a changed recipe; needs `packages` on sys.path."""
        recipe = read(checkpoint.recipe(self.folder / "tiny.toml", self.content, **changes))
        return build(recipe, self.data, precision, Cache(cache), self.reports.append)

    def environment(self) -> dict[str, str]:
        """What the command sees: the installed checkpoint, and a cache of its own."""
        own = {"PYTHONPATH": str(self.folder / "packages"), "XDG_CACHE_HOME": str(self.folder / "cache")}
        return clean_environment() | own

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:  # noqa: ANN401 - those of Popen
        """Start a `provision` command."""
        piped: Mapping[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [str(PROVISION), *arguments], env=self.environment(), cwd=self.folder, text=True, **piped, **options
        )

    def provision(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:  # noqa: ANN401 - see start
        """Run a `provision` command to its end."""
        with self.start(*arguments, **options) as process:
            out, err = process.communicate()
            return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def failed(self, *arguments: str, **options: Any) -> str:  # noqa: ANN401 - see start
        """Run a command that must fail with status 1; the last line it prints."""
        return reason(self.provision(*arguments, **options))


def reason(ended: subprocess.CompletedProcess[str]) -> str:
    """The one sentence in which a command that failed with status 1 says why."""
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    return ended.stderr.splitlines()[-1]
