"""Builds the disk of the machine under test: an arm64 Debian without any emulation, and the image overlay over it.

Packages are only extracted, never configured: what maintainer scripts would do and is needed here is done by `_mend`.
The overlay is that of `provision image`, made by the same code as for Orin, for Python 3.11.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import trustme
from support import tiny

from appliance.adapters.tokens import Role, TokenFile
from models.bundle import Manifest, TaskSpec
from models.folder import BundleFolder, write_bundle
from provisioning import overlay, overlay_build
from provisioning.keys import Keys
from provisioning.publish import Repository, Shape

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = 24
"""Of the tiny bundle, published one after the other: version N answers N times its input."""
READER = "srv/reader"
_SUITE = "bookworm"
_PACKAGES = (
    "base-files",
    "base-passwd",
    "bash",
    "dash",
    "coreutils",
    "util-linux",
    "mount",
    "libc-bin",
    "login",
    "passwd",
    "grep",
    "sed",
    "findutils",
    "systemd",
    "systemd-sysv",
    "udev",
    "dbus",
    "python3",
    "libstdc++6",
    "iproute2",
    "procps",
    "linux-image-cloud-arm64",
    "busybox-static",
    "e2fsprogs",
    "fdisk",
    "kmod",
    "ncurses-base",
    "libgl1",
    "libglib2.0-0",
)
_NOT_NEEDED = (
    "usr/lib/aarch64-linux-gnu/libLLVM*",
    "usr/lib/aarch64-linux-gnu/dri",
    "usr/share/doc",
    "usr/share/locale",
)
"""What libgl1 brings: OpenCV links it, and nobody draws."""
_MODULES = ("virtio_pci", "virtio_mmio", "virtio_blk", "virtio_net", "virtio_rng")
_LABEL = "appliance-data"
_DATA_BYTES, _DATA_MIB = 2**30, 64
"""The data partition is smaller than its disk, so that the first boot has something to grow."""
_SERVE = "/usr/bin/python3 -m http.server 8090 --bind 127.0.0.1 --directory /srv/repository/now"
_UNITS = {
    "vm-agent.service": "[Service]\nExecStart=/usr/bin/python3 /srv/agent.py\nRestart=always\n",
    "vm-repository.service": f"[Service]\nExecStart={_SERVE}\nRestart=always\n",
}
_SLOW = {
    "appliance": "[Service]\nWatchdogSec=60\nTimeoutStartSec=2400\nTimeoutStopSec=180\n",
    "appliance-firstboot": "[Service]\nTimeoutStartSec=2400\n",
    "appliance-rollback": "[Service]\nTimeoutStartSec=600\n",
}
"""Emulated beside other work, the daemon was seen not to come to feed its watchdog within its 15 s."""
_INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /new
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
for module in /modules/*.ko; do /bin/busybox insmod "$module"; done
while [ ! -b /dev/vda ]; do /bin/busybox sleep 0.1; done
/bin/busybox mount -t ext4 -o rw /dev/vda /new
exec /bin/busybox switch_root /new /lib/systemd/systemd
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is booted and how it is spoken to."""

    disks: tuple[Path, Path]
    """Of the system, and of the data, not booted yet."""
    kernel: Path
    initrd: Path
    authority: Path
    """PEM of the authority of the daemon's certificate."""
    token: str
    """An administrator's."""
    reader: Path
    """The bundle of the recogniser, as it is in the machine."""

    @classmethod
    def kept(cls, work: Path) -> Machine:
        """What `build` has left in `work`."""
        disks = work / "fresh.raw", work / "fresh-data.raw"
        paths = (work / name for name in ("vmlinuz", "initrd.img", "authority.pem"))
        return cls(disks, *paths, token=(work / "token").read_text(), reader=work / "reader")


def build(work: Path, bundle: Path) -> Machine:
    """Everything in `work`, with the recogniser of `bundle`; needs root, mmdebstrap, cpio, kmod and e2fsprogs."""
    root = work / "root"
    base = work / "base.tar"
    if not base.exists():
        _debian(root)
        _mend(root)
        _run("tar", "-C", root, "-cf", work / "base.tar.new", ".")
        (work / "base.tar.new").rename(base)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    _run("tar", "-C", root, "-xpf", base)
    _furnish(work, root, bundle)
    _boot_files(work, root)
    disk = work / "fresh.raw"
    disk.unlink(missing_ok=True)
    _run("mke2fs", "-q", "-t", "ext4", "-d", root, disk, "3G")
    data = work / "fresh-data.raw"
    data.unlink(missing_ok=True)
    data.touch()
    os.truncate(data, _DATA_BYTES)
    layout = f"label: gpt\nsize={_DATA_MIB}MiB, name={_LABEL}\n"
    subprocess.run(["sfdisk", "--quiet", data], input=layout, text=True, check=True)
    return Machine.kept(work)


def _debian(root: Path) -> None:
    sources = Path("/etc/apt/sources.list.d/debian.sources").read_text(encoding="utf-8")
    main, security = [line.split()[1] for line in sources.splitlines() if line.startswith("URIs:")][:2]
    shutil.rmtree(root, ignore_errors=True)
    _run(
        *("mmdebstrap", "--quiet", "--architectures=arm64", "--variant=extract", "--mode=root"),
        "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
        '--aptopt=APT::Install-Recommends "false"',
        f"--include={','.join(_PACKAGES)}",
        *(_SUITE, root, f"deb {main} {_SUITE} main", f"deb {main} {_SUITE}-updates main"),
        f"deb {security} {_SUITE}-security main",
    )


def _mend(root: Path) -> None:
    """What maintainer scripts would have done."""
    for pattern in _NOT_NEEDED:
        for path in root.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    etc, master = root / "etc", root / "usr/share/base-passwd"
    passwd = (master / "passwd.master").read_text() + "messagebus:x:100:100::/nonexistent:/usr/sbin/nologin\n"
    (etc / "passwd").write_text(passwd)
    (etc / "group").write_text((master / "group.master").read_text() + "messagebus:x:100:\n")
    (etc / "shadow").write_text("".join(f"{line.split(':')[0]}:*:19700:0:99999:7:::\n" for line in passwd.splitlines()))
    (etc / "shadow").chmod(0o640)
    (root / "usr/bin/sh").unlink(missing_ok=True)
    (root / "usr/bin/sh").symlink_to("dash")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
    (etc / "hosts").write_text("127.0.0.1 localhost\n")
    (etc / "hostname").write_text("vm\n")
    (etc / "fstab").write_text("")
    (etc / "machine-id").write_text(f"{1:032x}\n")  # with none, systemd would take it for a first boot of its own
    for kind in ("auth", "account", "password", "session"):  # without them runuser ends before it begins
        (etc / f"pam.d/common-{kind}").write_text(f"{kind} required pam_unix.so\n")
    system = etc / "systemd/system"
    system.mkdir(parents=True, exist_ok=True)
    for unit in ("systemd-logind.service", "getty.target", "e2scrub_reap.service", "systemd-update-utmp.service"):
        (system / unit).symlink_to("/dev/null")


def _furnish(work: Path, root: Path, bundle: Path) -> None:
    """Lay the overlay over `root`, and beside it what only a test needs: token, authority, reader."""
    trusted = _publish(work)
    scratch = work / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    wheel = work / "wheel"
    shutil.rmtree(wheel, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", wheel, ROOT)
    image = overlay.Image(
        config=_config(),
        python="3.11",
        tensorrt=False,
        published=overlay.Published("repository/1", str(trusted), ("scale",)),
        first_boot=overlay.FirstBoot(),
        data=_LABEL,
        network=overlay.Network("10.0.2.15/24", manager="systemd-networkd"),
    )
    parts = overlay_build.gather(image, work, next(wheel.glob("*.whl")), None, scratch)
    (work / "overlay.tar").write_bytes(overlay.tar(overlay.overlay(image, parts)))
    _run("tar", "-C", root, "-xpf", work / "overlay.tar")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    pem = certificate.private_key_pem.bytes() + b"".join(part.bytes() for part in certificate.cert_chain_pems)
    (root / "etc/appliance/tls.pem").write_bytes(pem)
    authority.cert_pem.write_to_path(str(work / "authority.pem"))
    (work / "token").write_text(TokenFile(root / "usr/share/appliance/state").create("tester", Role.ADMIN))
    shutil.copytree(work / "repository", root / "srv/repository", symlinks=True)
    shutil.copy(Path(__file__).with_name("agent.py"), root / "srv/agent.py")
    reader = _reader(bundle, work / "reader")
    shutil.copytree(reader, root / READER)
    system = root / "etc/systemd/system"
    for name, text in _SLOW.items():
        (system / f"{name}.service.d").mkdir()
        (system / f"{name}.service.d/slow.conf").write_text(text)
    wants = system / "multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    for name, text in _UNITS.items():
        (system / name).write_text(text)
        (wants / name).symlink_to(f"../{name}")
    (wants / "systemd-networkd.service").symlink_to("/lib/systemd/system/systemd-networkd.service")


def _config() -> dict[str, Any]:
    """The device's settings: emulated, everything takes twenty times as long, so nothing is judged by its speed."""
    return {
        "http": {"host": "0.0.0.0", "tls_certificate": "/etc/appliance/tls.pem"},  # noqa: S104 - with TLS and tokens
        "clock": {"assume_synced": True},
        "limits": {"hang_s": 120.0},
        "update": {
            "url": "http://127.0.0.1:8090",
            "check_s": 604800,
            "reserve_bytes": 0,
            "shadow_requests": 0,
            "latency_ratio": 100.0,
            "trial_ratio": 100.0,
            "trial_s": 3.0,
        },
    }


def _publish(work: Path) -> Path:
    """Repositories 1 to VERSIONS, each with one version more, and `now`, a link to the first; the trusted root."""
    home = work / "repository"
    shutil.rmtree(home, ignore_errors=True)
    shutil.rmtree(work / "keys", ignore_errors=True)
    keys = Keys([work / "keys"], lambda: b"only for this test")
    (work / "bundles").mkdir(exist_ok=True)
    one, folder = Shape(), home / "work"
    repository = Repository(folder, keys, lambda: datetime.now(timezone.utc).replace(microsecond=0))
    trusted = repository.init({"root": one, "targets": one, "snapshot": one, "timestamp": one})
    for number in range(1, VERSIONS + 1):
        version = tiny.scale_bundle(work / "bundles" / f"v{number}", number)
        repository.add(BundleFolder(version), "stable")
        shutil.copytree(folder, home / str(number))
    shutil.copy(trusted, work / "root.json")
    shutil.rmtree(folder)
    (home / "now").symlink_to("1")
    return work / "root.json"


def _reader(bundle: Path, out: Path) -> Path:
    """A bundle of the recogniser of a reading bundle alone, for pictures of one line."""
    folder = BundleFolder(bundle)
    whole = folder.manifest
    rec = whole.graphs["rec"]
    floats = {"fp32": rec.variants["fp32"]}
    manifest = Manifest(
        name="reader",
        version=whole.version,
        licence=whole.licence,
        task=TaskSpec("lines", labels=whole.task.labels),
        graphs={"rec": type(rec)(rec.spec, floats)},
        provenance=whole.provenance,
    )
    blobs: dict[str, bytes] = {blob.sha256: folder.read(blob) for blob in manifest.blobs()}
    shutil.rmtree(out, ignore_errors=True)
    write_bundle(out, manifest, blobs, {})
    return out


def _boot_files(work: Path, root: Path) -> None:
    """Kernel and a small initrd that mounts the disk and nothing more."""
    (version,) = (path.name for path in (root / "usr/lib/modules").iterdir())
    _run("depmod", "-b", root, version)
    tree = work / "initrd"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("bin", "modules"):
        (tree / name).mkdir(parents=True)
    shutil.copy(root / "usr/bin/busybox", tree / "bin/busybox")
    modules: list[str] = []
    for name in _MODULES:
        shown = _run("modprobe", "-S", version, "-d", root, "--show-depends", name)
        found = [line.split()[1] for line in shown.splitlines() if line.startswith("insmod ")]
        modules += [path for path in found if path not in modules]
    for number, path in enumerate(modules):
        shutil.copy(path, tree / "modules" / f"{number:02}.ko")
    (tree / "init").write_text(_INIT)
    (tree / "init").chmod(0o755)
    names = "\n".join(sorted(str(path.relative_to(tree)) for path in tree.rglob("*")))
    packed = subprocess.run(
        ["cpio", "--quiet", "-o", "-H", "newc"], cwd=tree, input=names.encode(), capture_output=True, check=True
    )
    (work / "initrd.img").write_bytes(packed.stdout)
    shutil.copy(root / f"boot/vmlinuz-{version}", work / "vmlinuz")


def _run(*command: str | Path) -> str:
    """Run a tool; what it printed. Its error ends the test, with its last words."""
    words: Sequence[str] = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words[:3])} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
