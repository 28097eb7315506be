"""An image from end to end: wheels for another processor, bundles as a device accepts them, and the daemon on them."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename
from support import tiny
from support.daemon import StartDaemon
from support.mirror import Mirror
from support.processes import clean_environment, eventually, new_mark
from support.workshop import PROVISION

from provisioning import overlay_wheels

pytestmark = pytest.mark.journey

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    """An empty repository that is served."""
    with Mirror(tmp_path / "published") as served:
        yield served


def accept(mirror: Mirror, state_dir: Path, root: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance.accept", "--state-dir", str(state_dir), "--url", mirror.url]
    command += ["--root", str(root or mirror.root), "scale"]
    return subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)


def test_a_device_serves_the_bundle_of_its_image_as_signed_and_keeps_it_to_go_back_to(
    start_daemon: StartDaemon, mirror: Mirror, tmp_path: Path
) -> None:
    one, two = (tiny.scale_bundle(tmp_path / f"v{n}", n, null=True) for n in (1, 2))
    digest = mirror.add(one)
    state_dir = tmp_path / "daemon/state"
    done = accept(mirror, state_dir)
    assert json.loads(done.stdout) == {"scale": digest}, done.stderr
    short = {"TRIAL_S": "0.5", "SHADOW_REQUESTS": "0", "RESERVE_BYTES": "0", "TRIAL_RATIO": "50", "CHECK_S": "3600"}
    daemon = start_daemon(
        "--bundle",
        str(state_dir / "slots" / digest),
        APPLIANCE_RUNTIME="null",
        APPLIANCE_CLOCK__ASSUME_SYNCED="true",
        APPLIANCE_UPDATE__URL=mirror.url,
        APPLIANCE_UPDATE__ROOT=str(mirror.root),
        **{f"APPLIANCE_UPDATE__{name}": value for name, value in short.items()},
    )
    daemon.wait_serving().wait_ready()
    assert (daemon.model("scale")["version"], daemon.model("scale")["trust"]) == ("1.0.0", "signed")
    mirror.add(two)
    admin = daemon.authorized("admin")
    for command, version, end in (("update", "2.0.0", "good"), ("rollback", "1.0.0", "undone")):
        order = {"id": new_mark(), "command": command, "args": {}}
        daemon.http.post("/v1/commands", json=order, headers=admin).raise_for_status()

        def ended(version: str = version, end: str = end) -> bool:
            found = daemon.http.get("/v1/deployments").json()["deployments"]
            return bool(found) and found[0]["step"] == end and daemon.model("scale")["version"] == version

        eventually(ended, f"{version} serves and its deployment is {end}", 60)
        assert (state_dir / "slots" / digest / "manifest.json").is_file()
    assert daemon.model("scale")["trust"] == "signed"
    daemon.stop()


def test_an_image_takes_nothing_that_its_root_of_trust_has_not_signed(mirror: Mirror, tmp_path: Path) -> None:
    mirror.add(tiny.scale_bundle(tmp_path / "v1", 1, null=True))
    with Mirror(tmp_path / "stranger") as stranger:
        done = accept(mirror, tmp_path / "state", stranger.root)
    assert done.returncode == 1
    assert "not to be trusted" in done.stderr
    assert not (tmp_path / "state/slots").exists()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where wheels are kept that were downloaded once."""
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture
def index(tmp_path: Path) -> None:
    """Skips what needs wheels where this machine cannot download any."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
    probe = [*pip, "--retries", "0", "--dest", str(tmp_path / "probe"), "tomli"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached: wheels for devices were not resolved")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(("python", "newest_glibc"), [("3.10", 35), ("3.12", 39)])
def test_every_wheel_of_a_device_is_pinned_and_there_for_its_python_processor_and_glibc(
    wheel: Path, store: Path, python: str, newest_glibc: int
) -> None:
    found = overlay_wheels.resolve(
        python, wheel, (ROOT / "constraints.txt").read_text(), store / f"cp{python.replace('.', '')}"
    )
    names = {parse_wheel_filename(path.name)[0] for path in found}
    assert {"edge-appliance", "numpy", "onnxruntime", "opencv-python", "uvloop", "cryptography"} <= names
    assert ("tomli" in names) == (python == "3.10")
    fitting = {f"manylinux_2_{minor}_aarch64" for minor in range(newest_glibc + 1)} | {"manylinux2014_aarch64", "any"}
    for path in found:
        tags = parse_wheel_filename(path.name)[3]
        assert any(tag.platform in fitting for tag in tags), path.name
        assert any(tag.abi in {"none", "abi3", f"cp{python.replace('.', '')}"} for tag in tags), path.name


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("index")
def test_the_command_makes_the_same_archive_twice(wheel: Path, store: Path, mirror: Mirror, tmp_path: Path) -> None:
    mirror.add(tiny.scale_bundle(tmp_path / "v1", 1, null=True))
    (tmp_path / "image.toml").write_text(
        f'[config.update]\nurl = "https://updates.example.com/repository"\n'
        f'[published]\nfolder = "published/repository"\nroot = "{mirror.root}"\nbundles = ["scale"]\n'
    )
    made = []
    for name in ("one.tar", "two.tar"):
        command = ["image", "image.toml", "--out", name, "--wheel", str(wheel), "--wheels", str(store), "--json"]
        done = subprocess.run(
            [PROVISION, *command], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        made.append(json.loads(done.stdout)["sha256"])
    assert made[0] == made[1]
    with tarfile.open(tmp_path / "one.tar") as archive:
        names = archive.getnames()
        owners = {(one.uid, one.gid) for one in archive.getmembers()}
    assert owners == {(0, 0)}
    assert "opt/appliance/lib/python3.10/site-packages/onnxruntime/__init__.py" in names
    assert any(name.startswith("usr/share/appliance/state/slots/") and name.endswith("manifest.json") for name in names)
