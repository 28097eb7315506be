"""The state folder: one daemon at a time, and what it remembers between runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from appliance.adapters.store import Store
from models.errors import ConfigError
from models.measurements import Measurements

pytestmark = pytest.mark.unit

DIGEST = "0" * 64
MEASURED = Measurements({"cpu": "a", "onnxruntime": "1.23"}, {"rec": {"fp32": 5.5, "int8": 3.25}})
BROKEN = [
    b'{"machine": {"cpu": "a", "onnxruntime": "1.23"}%s}' % latency_ms
    for latency_ms in (
        b"",
        b', "latency_ms": []',
        b', "latency_ms": {"rec": 5}',
        b', "latency_ms": {"rec": {"fp32": "fast"}}',
        b', "latency_ms": {"rec": {"fp32": 1e999}}',
        b', "latency_ms": ' + b"[" * 100_000,
    )
]
"""Documents that say nothing usable."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An open store in a folder that did not exist."""
    with closing(Store(tmp_path / "made" / "state")) as opened:
        yield opened


def test_a_second_daemon_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    first = Store(tmp_path)
    with pytest.raises(ConfigError, match=r"another daemon uses the state folder .* --state-dir"):
        Store(tmp_path)
    first.close()
    Store(tmp_path).close()


def test_a_state_folder_that_cannot_be_made_is_refused_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"file/state cannot be used \(Not a directory\): give another"):
        Store(tmp_path / "file" / "state")


def test_a_device_keeps_the_name_it_made_for_itself(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        name = store.device_id()
        assert re.fullmatch(r"device-[0-9a-f]{12}", name)
        assert store.device_id() == name
    with closing(Store(tmp_path)) as store:
        assert store.device_id() == name


def test_two_devices_make_different_names(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "a")) as one, closing(Store(tmp_path / "b")) as other:
        assert one.device_id() != other.device_id()


def test_a_name_written_by_hand_is_taken_without_its_line_end(store: Store) -> None:
    (store.path / "device_id").write_text("press-7\n")
    assert store.device_id() == "press-7"


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe", b"press/7", b"press 7", b"#", b"a\nb", b"x" * 65])
def test_a_name_that_could_not_stand_in_a_topic_is_refused_with_its_file(store: Store, content: bytes) -> None:
    (store.path / "device_id").write_bytes(content)
    with pytest.raises(ConfigError, match=r"state/device_id holds no name that a device may have"):
        store.device_id()


def test_a_name_that_cannot_be_kept_is_refused(store: Store) -> None:
    (store.path / "device_id").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be kept in .*state/device_id \(Is a directory\)"):
        store.device_id()


def test_measurements_are_remembered_after_a_restart_for_the_same_bundle(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        assert store.measurements(DIGEST) is None
        store.keep_measurements(DIGEST, MEASURED)
    with closing(Store(tmp_path)) as store:
        assert store.measurements(DIGEST) == MEASURED
        assert store.measurements("1" * 64) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", *BROKEN], ids=lambda content: repr(content[:90]))
def test_measurements_that_cannot_be_read_are_none(store: Store, content: bytes) -> None:
    store.keep_measurements(DIGEST, MEASURED)
    (kept,) = store.path.glob("engines/*/cpu/measurements.json")
    kept.write_bytes(content)
    assert store.measurements(DIGEST) is None
