"""What a device takes from a repository, and what it does not: the attacks of the TUF specification and bad links.

The server is real and on loopback; the time is handed in. Past 400 lines because every test is one attack or fault
against the same mirror and device.
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import shutil
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import zstandard
from support import tiny
from support.mirror import ONE, SMALL, Mirror
from tuf.api.metadata import Root

from appliance.adapters import repository as tuf
from appliance.adapters.repository import Accepted, Link, Repository
from models import published
from models.bundle import Blob
from models.errors import ConfigError, Unreachable, UntrustedUpdate
from models.folder import BundleFolder
from provisioning import publish
from provisioning.keys import Keys
from provisioning.publish import Shape

pytestmark = pytest.mark.unit

NOW = datetime(2027, 3, 1, tzinfo=timezone.utc)
DAY_S = 86400.0


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    """A repository with version 1 of the bundle `scale` in its channel stable, published at NOW."""
    with Mirror(tmp_path / "published") as served:
        served.at = NOW
        served.add(bundle(tmp_path, 1))
        yield served


def bundle(folder: Path, version: int, **keys: float) -> Path:
    """A bundle of the null runtime, made once."""
    path = folder / f"v{version}"
    return path if path.exists() else tiny.scale_bundle(path, version, null=True, **keys)


class Device:
    """What one device keeps of a repository."""

    def __init__(self, folder: Path, mirror: Mirror, link: Link | None = None) -> None:
        self.folder = folder
        self.repository = Repository(mirror.url, mirror.root.read_bytes(), folder / "metadata", link)

    def accept(self, after_days: float = 0.0) -> Accepted:
        return self.repository.refresh(NOW.timestamp() + after_days * DAY_S)

    def version(self, after_days: float = 0.0) -> str:
        """What the channel stable holds, as far as this device believes it."""
        release = self.accept(after_days).release("stable", "scale")
        return release.pointer.version if release else "none"

    def fetch(self, others: dict[str, Path] | None = None) -> BundleFolder:
        """Fetch what the channel holds into a slot, and check it."""
        release = self.accept().release("stable", "scale")
        assert release
        self.repository.fetch(release.manifest, self.slot, others or {})
        folder = BundleFolder(self.slot)
        folder.check_content()
        return folder

    @property
    def slot(self) -> Path:
        return self.folder / "slot"


@pytest.fixture
def device(tmp_path: Path, mirror: Mirror) -> Device:
    """A device that has seen nothing yet."""
    return Device(tmp_path / "device", mirror, Link(read_s=2.0))


def later(mirror: Mirror, days: float) -> None:
    mirror.at = NOW + timedelta(days=days)


# What is signed


def test_a_device_sees_what_its_channel_holds_and_when_that_was_signed(mirror: Mirror, device: Device) -> None:
    assert device.version() == "1.0.0"
    assert device.accept().release("canary", "scale") is None
    assert device.accept().signed_at == NOW.timestamp()
    assert mirror.repository.promote("scale", "1.0.0", "canary").version == "1.0.0"
    assert device.accept().release("canary", "scale")


def test_a_pinned_version_is_had_whatever_the_channel_holds(mirror: Mirror, device: Device, tmp_path: Path) -> None:
    mirror.add(bundle(tmp_path, 2))
    accepted = device.accept()
    pinned = accepted.release("stable", "scale", "1.0.0")
    assert pinned
    assert pinned.manifest == BundleFolder(bundle(tmp_path, 1)).manifest
    assert accepted.release("stable", "scale", "7.0.0") is None


def test_an_older_state_of_the_repository_is_refused(mirror: Mirror, device: Device, tmp_path: Path) -> None:
    shutil.copytree(mirror.folder / "metadata", tmp_path / "old")
    mirror.add(bundle(tmp_path, 2))
    assert device.version() == "2.0.0"
    for file in (tmp_path / "old").iterdir():
        shutil.copy(file, mirror.folder / "metadata")
    with pytest.raises(UntrustedUpdate, match="BadVersionNumber"):
        device.accept()


def test_a_state_that_is_held_back_is_refused_once_it_should_have_been_signed_anew(
    mirror: Mirror, device: Device
) -> None:
    assert device.version(1.9) == "1.0.0"
    with pytest.raises(UntrustedUpdate, match=r"not fresh.*provision publish refresh"):
        device.accept(2.1)
    later(mirror, 2.1)
    mirror.repository.refresh()
    assert device.version(2.1) == "1.0.0"


def test_freshness_is_judged_by_the_time_that_is_handed_in_not_by_the_clock_of_the_system(
    mirror: Mirror, device: Device
) -> None:
    later(mirror, -20 * 365)  # the system's clock finds this long expired
    mirror.repository.promote("scale", "1.0.0", "stable")
    with pytest.raises(UntrustedUpdate, match="not fresh"):
        device.accept()
    assert device.version(-20 * 365) == "1.0.0"


def test_parts_of_different_states_are_refused_together(mirror: Mirror, device: Device, tmp_path: Path) -> None:
    newest = max((mirror.folder / "metadata").glob("*.targets.json"))
    mirror.add(bundle(tmp_path, 2))
    mixed = max((mirror.folder / "metadata").glob("*.targets.json"))
    shutil.copy(newest, mixed)
    with pytest.raises(UntrustedUpdate, match="not to be trusted"):
        device.accept()


@pytest.mark.parametrize("file", ["timestamp.json", r"\d.snapshot.json", r"\d.targets.json"])
def test_metadata_that_does_not_end_is_refused_at_its_limit(mirror: Mirror, device: Device, file: str) -> None:
    mirror.bodies[file] = b" " * 6_000_000
    with pytest.raises(UntrustedUpdate, match="sends more than was signed"):
        device.accept()


@pytest.mark.parametrize("content", [b"{}", b"", b"\x00" * 100, b"[" * 10_000])
def test_metadata_that_is_something_else_is_refused(mirror: Mirror, device: Device, content: bytes) -> None:
    mirror.bodies["timestamp.json"] = content
    with pytest.raises(UntrustedUpdate):
        device.accept()


def test_a_manifest_of_another_length_or_content_is_refused(mirror: Mirror, device: Device) -> None:
    accepted = device.accept()
    mirror.bodies["/targets/bundles/"] = b"{}"
    with pytest.raises(UntrustedUpdate):
        accepted.release("stable", "scale")
    mirror.bodies["/targets/bundles/"] = b"{}" * 100_000
    with pytest.raises(UntrustedUpdate, match="sends more than was signed"):
        accepted.release("stable", "scale")


def test_keys_below_the_threshold_cannot_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Mirror(tmp_path / "published", {**SMALL, "targets": Shape(3, 2)}) as mirror:
        mirror.at = NOW
        mirror.add(bundle(tmp_path, 1))
        device = Device(tmp_path / "device", mirror)
        assert device.version() == "1.0.0"
        stolen = tmp_path / "stolen"
        shutil.copytree(tmp_path / "published" / "keys", stolen, ignore=shutil.ignore_patterns("targets-[23].*"))
        thief = publish.Repository(mirror.folder, Keys([stolen], lambda: b"passphrase"), lambda: NOW)
        with pytest.raises(ConfigError, match="not enough keys are here to sign as targets"):
            thief.add(BundleFolder(bundle(tmp_path, 2)), "stable")
        with monkeypatch.context() as patched:
            patched.setattr(Root, "verify_delegate", lambda *_any: None)  # a thief's own tool asks nobody
            thief.add(BundleFolder(bundle(tmp_path, 2)), "stable")
        with pytest.raises(UntrustedUpdate, match="UnsignedMetadata"):
            device.accept()


def test_a_repository_of_somebody_else_is_refused(mirror: Mirror, tmp_path: Path) -> None:
    with Mirror(tmp_path / "other") as other:
        stranger = Repository(other.url, mirror.root.read_bytes(), tmp_path / "stranger")
        with pytest.raises(UntrustedUpdate):
            stranger.refresh(NOW.timestamp())


def test_an_expired_root_is_refused_until_it_is_signed_anew(mirror: Mirror, device: Device) -> None:
    later(mirror, 366)
    mirror.repository.promote("scale", "1.0.0", "stable")
    with pytest.raises(UntrustedUpdate, match="root"):
        device.accept(366)
    mirror.repository.rotate_key("root", "root-1")
    assert device.version(366) == "1.0.0"


@pytest.mark.parametrize("role", ["root", "targets", "snapshot", "timestamp"])
def test_devices_follow_a_key_that_is_replaced(mirror: Mirror, device: Device, tmp_path: Path, role: str) -> None:
    assert device.version() == "1.0.0"
    assert mirror.repository.rotate_key(role, f"{role}-1") == f"{role}-2"
    (tmp_path / "published" / "keys" / f"{role}-1.pem").unlink()
    mirror.add(bundle(tmp_path, 2))
    assert device.version() == "2.0.0"
    assert Device(tmp_path / "new", mirror).version() == "2.0.0"


def test_a_revoked_version_is_named_with_its_reason_and_leaves_its_channels(mirror: Mirror, device: Device) -> None:
    digest = next(one["digest"] for one in mirror.repository.status()["bundles"])
    assert mirror.repository.revoke("scale", "1.0.0", "reads 0 as O") == ["stable"]
    accepted = device.accept()
    assert dict(accepted.revoked()) == {digest: "reads 0 as O"}
    assert accepted.release("stable", "scale") is None
    with pytest.raises(ConfigError, match="was revoked"):
        mirror.repository.promote("scale", "1.0.0", "stable")


def test_a_version_is_published_with_one_content_only(mirror: Mirror, tmp_path: Path) -> None:
    other = tiny.scale_bundle(tmp_path / "other", 1, null=True, delay_s=0.5)
    with pytest.raises(ConfigError, match=r"scale 1\.0\.0 is published with other content"):
        mirror.add(other)
    assert mirror.repository.add(BundleFolder(bundle(tmp_path, 1)), "dev").new_blobs == 0


def test_a_repository_that_is_away_is_asked_again_later(mirror: Mirror, device: Device) -> None:
    mirror.bodies["timestamp.json"] = b""
    (mirror.folder / "metadata" / "timestamp.json").unlink()
    mirror.bodies.clear()
    with pytest.raises(Unreachable, match="404"):
        device.accept()


# Blobs


def big_blob(mirror: Mirror, tmp_path: Path) -> Blob:
    """Publish version 9, whose graph is 160 kB that cannot be compressed much; that blob."""
    noise = "".join(f"{number * 2654435761 % 2**32:08x}" for number in range(20_000))
    path = tiny.scale_bundle(tmp_path / "v9", 9, null=True, noise=noise)  # type: ignore[arg-type] # one more key
    mirror.add(path)
    return max(BundleFolder(path).manifest.blobs(), key=lambda blob: blob.size_bytes)


def test_a_bundle_arrives_as_it_was_published(device: Device, tmp_path: Path) -> None:
    assert device.fetch().manifest == BundleFolder(bundle(tmp_path, 1)).manifest
    assert not list(device.slot.rglob("*.part"))


def test_a_link_that_breaks_again_and_again_brings_each_byte_once(
    mirror: Mirror, device: Device, tmp_path: Path
) -> None:
    blob = big_blob(mirror, tmp_path)
    packed_bytes = (mirror.folder / published.blob_file(blob)).stat().st_size
    mirror.cuts[blob.sha256] = packed_bytes // 4 + 1
    device.fetch()
    ranges = [wanted for path, wanted in mirror.asked if blob.sha256 in path]
    assert len(ranges) == 4
    assert ranges[0] == ""
    assert all(wanted.startswith("bytes=") for wanted in ranges[1:])
    others = sum(path.stat().st_size for path in (mirror.folder / published.BLOBS).iterdir()) - packed_bytes
    assert mirror.sent_bytes <= packed_bytes + others


def test_what_came_before_the_link_was_lost_is_not_fetched_again(
    mirror: Mirror, device: Device, tmp_path: Path
) -> None:
    blob = big_blob(mirror, tmp_path)
    file = mirror.folder / published.blob_file(blob)
    content = file.read_bytes()
    mirror.cuts[blob.sha256] = 0
    with pytest.raises(Unreachable, match="tried again later"):
        device.fetch()
    assert not (device.slot / "manifest.json").exists()
    part = next(device.slot.rglob(f"{blob.sha256}.part"))
    part.write_bytes(content[:10_000])
    mirror.cuts.clear()
    mirror.asked.clear()
    device.fetch()
    assert [wanted for path, wanted in mirror.asked if "/blobs/" in path] == ["bytes=10000-"]


def test_a_part_from_another_time_costs_a_second_download_no_more(
    mirror: Mirror, device: Device, tmp_path: Path
) -> None:
    blob = big_blob(mirror, tmp_path)
    part = device.slot / "blobs" / "sha256" / f"{blob.sha256}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(zstandard.ZstdCompressor().compress(b"something else entirely")[:20])
    device.fetch()


def test_a_server_that_knows_no_ranges_is_enough(mirror: Mirror, device: Device, tmp_path: Path) -> None:
    blob = big_blob(mirror, tmp_path)
    content = (mirror.folder / published.blob_file(blob)).read_bytes()
    part = device.slot / "blobs" / "sha256" / f"{blob.sha256}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(content[:1000])
    mirror.bodies[blob.sha256] = content
    device.fetch()


@pytest.mark.parametrize("damage", ["other", "shorter", "endless", "bomb", "noise"])
def test_a_blob_that_is_not_what_was_signed_is_refused_and_leaves_no_bundle(
    mirror: Mirror, device: Device, tmp_path: Path, damage: str
) -> None:
    blob = big_blob(mirror, tmp_path)
    packed = (mirror.folder / published.blob_file(blob)).read_bytes()
    content = zstandard.ZstdDecompressor().decompress(packed)
    pack = zstandard.ZstdCompressor().compress
    mirror.bodies[blob.sha256] = {
        "other": pack(content[::-1]),
        "shorter": pack(content[:-1]),
        "endless": b"\x28\xb5\x2f\xfd" + b"\x00" * 3_000_000,
        "bomb": pack(b"\x00" * 200_000_000),
        "noise": b"no zstd at all",
    }[damage]
    tracemalloc.start()
    with pytest.raises(UntrustedUpdate, match="is not what was signed"):
        device.fetch()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 20e6
    assert not (device.slot / "manifest.json").exists()
    assert not (device.slot / "blobs" / "sha256" / blob.sha256).exists()
    mirror.bodies.clear()
    device.fetch()


def test_only_what_a_device_lacks_is_fetched(mirror: Mirror, device: Device, tmp_path: Path) -> None:
    one, two = BundleFolder(bundle(tmp_path, 1)), BundleFolder(bundle(tmp_path, 2))
    mirror.add(two.path)
    others = {blob.sha256: one.path / "blobs" / "sha256" / blob.sha256 for blob in one.manifest.blobs()}
    device.fetch(others)
    fetched = {path.split("/")[-1].removesuffix(".zst") for path, _range in mirror.asked if "/blobs/" in path}
    assert fetched == {blob.sha256 for blob in two.manifest.blobs()} - set(others)


def test_whoever_waits_is_told_of_every_byte_that_came_and_that_is_there(mirror: Mirror, device: Device) -> None:
    release = device.accept().release("stable", "scale")
    assert release
    whole_bytes = sum(blob.size_bytes for blob in release.manifest.blobs())
    for came_bytes in (True, False):
        told: list[tuple[int, int]] = []
        device.repository.fetch(release.manifest, device.slot, {}, lambda *counts: told.append(counts))  # noqa: B023
        assert sum(ready for _packed, ready in told) == whole_bytes
        assert sum(packed for packed, _ready in told) == came_bytes * mirror.sent_bytes


def test_a_damaged_blob_of_another_slot_is_fetched_instead(device: Device, tmp_path: Path) -> None:
    one = BundleFolder(bundle(tmp_path, 1))
    others = {blob.sha256: one.path / "blobs" / "sha256" / blob.sha256 for blob in one.manifest.blobs()}
    for path in others.values():
        path.write_bytes(b"damaged")
    device.fetch(others)


def test_an_update_that_would_fill_the_disk_is_refused_before_a_byte_is_fetched(mirror: Mirror, tmp_path: Path) -> None:
    device = Device(tmp_path / "device", mirror, Link(reserve_bytes=2**60))
    with pytest.raises(Unreachable, match=r"needs \d+ bytes of disk and 0 are free beyond the reserve"):
        device.fetch()
    assert mirror.sent_bytes == 0


def test_a_limit_of_the_link_is_kept(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big_blob(mirror, tmp_path)
    waited: list[float] = []
    monkeypatch.setattr(tuf.time, "sleep", waited.append)
    Device(tmp_path / "device", mirror, Link(limit_bytes_per_s=1000.0)).fetch()
    assert max(waited) == pytest.approx(mirror.sent_bytes / 1000.0, rel=0.05)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_blob_above_two_gibibytes_arrives_in_bounded_memory(mirror: Mirror, device: Device) -> None:
    size_bytes, zeros = 2**31 + 5, bytes(2**20)
    sha256 = hashlib.sha256()
    for _ in range(2**11):
        sha256.update(zeros)
    sha256.update(bytes(5))
    big = Blob(sha256.hexdigest(), size_bytes)
    with (mirror.folder / published.blob_file(big)).open("wb") as file:
        packer = zstandard.ZstdCompressor(level=1).stream_writer(file, size=size_bytes)
        for _ in range(2**11):
            packer.write(zeros)
        packer.write(bytes(5))
        packer.close()
    release = device.accept().release("stable", "scale")
    assert release
    graph = release.manifest.graphs["g"]
    variant = replace(graph.variants["fp32"], graph=big)
    manifest = replace(release.manifest, graphs={"g": replace(graph, variants={"fp32": variant})})
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    device.repository.fetch(manifest, device.slot, {})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100 * 1024
    path = device.slot / "blobs" / "sha256" / big.sha256
    assert path.stat().st_size == size_bytes
    path.unlink()


# The command line of the public conformance suite


def test_the_client_has_the_command_line_of_the_public_conformance_suite(
    mirror: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror.at = None
    mirror.repository.promote("scale", "1.0.0", "stable")
    metadata, targets = str(tmp_path / "metadata"), tmp_path / "targets"
    where = ["--metadata-dir", metadata, "--metadata-url", f"{mirror.url}/metadata"]
    download = [*where, "--target-base-url", f"{mirror.url}/targets", "--target-dir", str(targets), "--target-name"]
    assert tuf.main(["--metadata-dir", metadata, "init", str(mirror.root)]) == 0
    assert tuf.main([*where, "refresh"]) == 0
    assert json.loads((tmp_path / "metadata" / "timestamp.json").read_bytes())["signed"]["version"] > 1
    assert tuf.main([*download, "bundles/scale/1.0.0.json", "download"]) == 0
    assert len(list(targets.iterdir())) == 1
    assert tuf.main([*download, "bundles/scale/7.0.0.json", "download"]) == 1
    assert capsys.readouterr().err.endswith("bundles/scale/7.0.0.json is not signed here\n")


class Judged:
    """Our client, called as the suite calls it, and what it asked of the repository."""

    def __init__(self, mirror: Mirror, folder: Path) -> None:
        self.mirror, self.metadata, self.targets = mirror, folder / "metadata", folder / "targets"
        self.targets.mkdir(parents=True)

    def run(self, *command: str) -> int:
        """The exit code of one call."""
        where = ["--metadata-url", f"{self.mirror.url}/metadata/", "--metadata-dir", str(self.metadata)]
        to = ["--target-dir", str(self.targets), "--target-base-url", f"{self.mirror.url}/targets/"]
        return tuf.main([*where, *to, *command])

    def asked(self) -> list[str]:
        """Paths of requests since the last call."""
        paths = [path.rpartition("/")[2] for path, _range in self.mirror.asked]
        self.mirror.asked.clear()
        return paths


def test_as_the_suite_wants_it_an_artifact_is_had_without_a_refresh_before_and_not_twice(
    mirror: Mirror, tmp_path: Path
) -> None:
    mirror.at = None
    mirror.repository.promote("scale", "1.0.0", "stable")
    client = Judged(mirror, tmp_path / "client")
    assert (client.run("init", str(mirror.root)), client.asked()) == (0, [])
    assert client.run("--target-name", "channels/stable/scale.json", "download") == 0
    *metadata, artifact = client.asked()
    assert [re.sub(r"^\d+\.", "", name) for name in metadata] == [
        *("root.json", "timestamp.json", "snapshot.json", "targets.json")
    ]
    assert artifact.endswith(".scale.json")
    (kept,) = client.targets.rglob("*.json")
    assert json.loads(kept.read_bytes())["version"] == "1.0.0"
    assert client.run("--target-name", "channels/stable/scale.json", "download") == 0
    assert client.asked() == ["2.root.json", "timestamp.json"]
    roles = ("root", "timestamp", "snapshot", "targets")
    assert all((client.metadata / f"{role}.json").exists() for role in roles)


@pytest.mark.parametrize("damage", ["unsigned", "no version"])
def test_as_the_suite_wants_it_a_first_root_that_is_none_has_nothing_asked(
    mirror: Mirror, tmp_path: Path, damage: str
) -> None:
    client = Judged(mirror, tmp_path / "client")
    root = json.loads(mirror.root.read_bytes())
    if damage == "unsigned":
        root["signatures"][0]["sig"] = "00" * 64
    else:
        del root["signed"]["version"]
    (tmp_path / "root.json").write_text(json.dumps(root))
    client.run("init", str(tmp_path / "root.json"))
    assert (client.run("refresh"), client.asked()) == (1, [])


def test_as_the_suite_wants_it_an_expired_timestamp_fails_and_the_one_before_stays(
    mirror: Mirror, tmp_path: Path
) -> None:
    mirror.at = None
    mirror.repository.refresh()
    client = Judged(mirror, tmp_path / "client")
    client.run("init", str(mirror.root))
    assert client.run("refresh") == 0
    before = (client.metadata / "timestamp.json").read_bytes()
    mirror.at = datetime.now(timezone.utc) - timedelta(days=10)
    mirror.repository.refresh()
    assert client.run("refresh") == 1
    assert (client.metadata / "timestamp.json").read_bytes() == before


def test_a_threshold_that_no_number_of_keys_can_reach_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 of 1 keys cannot sign as root"):
        Mirror(tmp_path, {**SMALL, "root": Shape(1, 2)})
    assert ONE.threshold == 1
