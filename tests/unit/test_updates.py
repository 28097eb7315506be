"""What a daemon serves at its start, by the journal of updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from support import tiny
from support.device import Wishes, recover
from support.mirror import Mirror

from appliance.adapters.journal import Facts, Journal
from appliance.core.deployment import Slot
from appliance.service import Bundle
from appliance.settings import Settings, Update
from appliance.updates import Updates
from models.errors import BundleError, ConfigError
from models.folder import BundleFolder

pytestmark = pytest.mark.unit


class Device:
    """A state folder with versions 1 (given), 2 and 3 (slots) of the bundle `scale`."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.given = tiny.scale_bundle(folder / "given", 1, null=True)
        self.digests = {}
        for version in (2, 3):
            made = tiny.scale_bundle(folder / f"v{version}", version, null=True)
            self.digests[version] = BundleFolder(made).manifest.digest
            (self.state / "slots").mkdir(parents=True, exist_ok=True)
            made.rename(self.state / "slots" / self.digests[version])

    def journal(self, states: dict[int, str], **facts: Any) -> None:  # noqa: ANN401 - as in Facts
        """Write what is known of the slots."""
        slots = [Slot(self.digests[one], "scale", f"{one}.0.0", state, one) for one, state in states.items()]
        with closing(Journal(self.state / "journal.db")) as journal:
            journal.write([], slots, Facts(**facts))

    def serves(self) -> str:
        """Version that a start would serve."""
        config = Settings(bundles=(self.given,), state_dir=self.state)
        with closing(Updates(config, lambda: 0.0)) as updates:

            def open_bundle(folder: Path) -> Bundle:
                manifest = BundleFolder(folder).manifest
                updates.trusts(folder, manifest.digest)
                return cast("Bundle", manifest.version)

            return str(updates.present(self.given, open_bundle))


@pytest.fixture
def device(tmp_path: Path) -> Device:
    """One without a journal."""
    return Device(tmp_path)


def test_without_a_journal_the_folder_that_was_given_is_served(device: Device) -> None:
    assert device.serves() == "1.0.0"
    assert not (device.state / "journal.db").exists()


def test_what_passed_its_trial_is_served_also_where_no_updates_are_looked_for_any_more(device: Device) -> None:
    device.journal({2: "good", 3: "staged"})
    assert device.serves() == "2.0.0"
    device.journal({3: "trial"})
    assert device.serves() == "3.0.0"


def test_a_revoked_version_is_not_served_at_a_start_without_any_link(device: Device) -> None:
    device.journal({2: "good", 3: "good"}, revoked={device.digests[3]: "reads 0 as O"})
    assert device.serves() == "2.0.0"


def test_a_slot_that_holds_another_bundle_or_none_is_passed_over(device: Device) -> None:
    device.journal({2: "good", 3: "good"})
    slots = device.state / "slots"
    (slots / device.digests[3] / "manifest.json").write_bytes((device.given / "manifest.json").read_bytes())
    assert device.serves() == "2.0.0"
    (slots / device.digests[2] / "manifest.json").unlink()
    assert device.serves() == "1.0.0"


def test_a_good_slot_is_served_when_the_folder_that_was_given_is_broken(device: Device) -> None:
    device.journal({2: "good"})
    assert device.serves() == "2.0.0"
    (device.given / "manifest.json").unlink()
    assert device.serves() == "2.0.0"
    device.journal({2: "bad"}, given={str(device.given): "scale"})
    with pytest.raises(BundleError, match="given is no bundle"):
        device.serves()


def test_a_trusted_root_that_cannot_be_read_is_refused_at_the_start(device: Device, tmp_path: Path) -> None:
    update = Update(url="http://127.0.0.1:9", root=tmp_path / "missing.json")
    config = Settings(bundles=(device.given,), state_dir=device.state, update=update)
    with pytest.raises(ConfigError, match=r"update\.root names .*missing\.json, which cannot be read"):
        Updates(config, lambda: 0.0)


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mirror, Path, list[str]]]:
    """Versions 2, 3 and 4, of which the channel holds the last; what a device was given, and the digests of 1 to 4."""
    folder = tmp_path_factory.mktemp("published")
    made = [tiny.scale_bundle(folder / f"v{version}", version, null=True) for version in (1, 2, 3, 4)]
    with Mirror(folder / "published") as published:
        for bundle in made[1:]:
            published.add(bundle)
        yield published, made[0], [BundleFolder(bundle).manifest.digest for bundle in made]


@pytest.mark.parametrize(
    ("wishes", "serves"),
    [
        (Wishes(), 4),
        (Wishes(pins={"scale": "2.0.0"}), 2),
        (Wishes(pins={"another": "2.0.0"}), 4),
        (Wishes(pins={"scale": "2.0.0"}, own={"scale": "3.0.0"}), 3),
    ],
    ids=["no wish", "upstream's", "of another model", "own and upstream's"],
)
def test_a_pin_of_upstream_is_followed_unless_the_device_has_one_of_its_own(
    mirror: tuple[Mirror, Path, list[str]], tmp_path: Path, wishes: Wishes, serves: int
) -> None:
    published, given, digests = mirror
    found = recover(tmp_path / "state", given, published.url, published.root, published.folder, wishes)
    assert (found.fault, found.last) == ("", digests[serves - 1])


def test_a_pin_of_upstream_to_what_is_not_published_changes_nothing(
    mirror: tuple[Mirror, Path, list[str]], tmp_path: Path
) -> None:
    published, given, digests = mirror
    wishes = Wishes(pins={"scale": "9.0.0"})
    found = recover(tmp_path / "state", given, published.url, published.root, published.folder, wishes)
    assert found.last == digests[0]


def test_while_upstream_holds_a_device_nothing_is_begun(mirror: tuple[Mirror, Path, list[str]], tmp_path: Path) -> None:
    published, given, digests = mirror
    wishes = Wishes(paused=True)
    found = recover(tmp_path / "state", given, published.url, published.root, published.folder, wishes)
    assert (found.fault, found.last, found.steps) == ("paused", digests[0], ())


def test_wishes_of_upstream_that_the_device_overrules_are_named(device: Device) -> None:
    device.journal({})
    config = Settings(
        bundles=(device.given,), state_dir=device.state, update=Update(pins={"scale": "1.0.0", "other": "2"})
    )
    with closing(Updates(config, lambda: 0.0)) as updates:
        updates.desire({"scale": "2.0.0", "other": "2"}, paused=True)
        assert updates.overruled() == ["scale"]
