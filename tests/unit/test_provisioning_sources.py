"""Checkpoints come from installed distributions, and only if they are exactly the ones wanted."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from pathlib import Path

import pytest
from support import checkpoint

from models.bundle import Source
from models.errors import SourceError
from provisioning.sources import fetch

pytestmark = pytest.mark.unit

CONTENT = b"weights"
SOURCE = Source(
    checkpoint.PACKAGE, checkpoint.VERSION, checkpoint.FILE, hashlib.sha256(CONTENT).hexdigest()
)  # fmt: skip


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    checkpoint.install(tmp_path, CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_checkpoint_is_found_without_importing_its_package() -> None:
    assert fetch(SOURCE) == CONTENT
    assert "tiny_checkpoint" not in sys.modules


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"package": "no-such-package"},
            r'no-such-package is not installed: run `pip install "edge-appliance\[build\]"`',
        ),
        ({"version": "9.9.9"}, r"version 1\.2\.3, but .* come from 9\.9\.9: run `pip install"),
        ({"file": "tiny_checkpoint/other.onnx"}, r"1\.2\.3 has no file tiny_checkpoint/other\.onnx"),
        ({"sha256": "0" * 64}, r"has sha256 \w{12}\.\.\., not 000000000000\.\.\. as wanted"),
    ],
)
def test_anything_else_is_refused_with_what_to_do(changed: dict[str, str], reason: str) -> None:
    with pytest.raises(SourceError, match=reason):
        fetch(dataclasses.replace(SOURCE, **changed))


def test_a_file_that_is_listed_but_gone_is_named(installed: Path) -> None:
    (installed / checkpoint.FILE).unlink()
    with pytest.raises(SourceError, match="cannot be read"):
        fetch(SOURCE)
