"""The wheel as a stranger installs it: what is inside, and that it serves without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.daemon import Daemon

pytestmark = pytest.mark.journey

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment, outside the checkout, with the wheel and what a device needs."""
    home = tmp_path_factory.mktemp("installed") / "env"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    pip = [home / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", wheel], check=True, cwd=home)
    return home / "bin"


def test_the_wheel_holds_exactly_our_four_packages_and_what_they_need_at_run_time(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert packages == {"models", "kernels", "provisioning", "appliance"}
    for needed in (
        "models/zoo/ppocr-v4.toml",
        "appliance/profiles/cpu.toml",
        "appliance/web/index.html",
        "appliance/web/page.css",
        "appliance/web/page.js",
        "appliance/web/parts.js",
        "appliance/web/fleet.html",
        "appliance/web/fleet.js",
        "appliance/systemd/appliance.service",
        "appliance/upstream/migrations/env.py",
        "appliance/upstream/migrations/versions/r0001_fleet.py",
    ):
        assert needed in names


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_installed_wheel_serves_a_bundle(installed: Path, reading_bundle: Path, tmp_path: Path) -> None:
    with Daemon(tmp_path, "--bundle", str(reading_bundle), command=installed / "appliance") as daemon:
        picture = next((ROOT / "tests/data/ocr/pages").glob("sroie*.jpg")).read_bytes()
        answer = daemon.http.post("/v1/models/ppocr-v4/predict", content=picture).json()
        assert len(answer["lines"]) > 5


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_installed_wheel_says_what_the_role_of_upstream_needs(installed: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [installed / "appliance", "run", "--role", "upstream", "--http", "127.0.0.1:0", "--state-dir", tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert "install edge-appliance[upstream], or choose --role device" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("package", ["models", "kernels"])
def test_the_daemon_refuses_to_start_with_a_foreign_package_of_our_name(
    installed: Path, tmp_path: Path, package: str
) -> None:
    (tmp_path / package).mkdir()
    ours = next((installed.parent / "lib").glob("python*/site-packages")) / package
    for file in ours.glob("*.py"):
        (tmp_path / package / file.name).write_bytes(file.read_bytes())
    (tmp_path / package / "tasks").symlink_to(ours / "tasks") if (ours / "tasks").exists() else None
    result = subprocess.run(
        [installed / "appliance", "run", "--http", "127.0.0.1:0", "--state-dir", tmp_path / "state"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 1
    assert f"package '{package}' comes from {tmp_path}" in result.stderr


def test_a_missing_system_library_of_opencv_is_one_sentence_with_the_command_that_brings_it(tmp_path: Path) -> None:
    (tmp_path / "cv2.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')\n")
    result = subprocess.run(
        [sys.executable, "-c", "import models.tasks"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    last = result.stderr.strip().splitlines()[-1]
    assert "libGL.so.1" in last
    assert "apt-get install -y libgl1" in last
