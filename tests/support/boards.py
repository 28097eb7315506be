"""Trees of /proc, /sys, /etc and UEFI variables of a Jetson, made of the files in tests/data/boards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BOARDS = Path(__file__).parent.parent / "data" / "boards"
_ASLEEP = "ASLEEP"
_ATTRIBUTES = bytes((7, 0, 0, 0))
_GUID = "781e084c-a330-417c-b678-38e696380cb9"


def plant(root: Path, board: str, release: str) -> Path:
    """Lay the files of `board` under `release` out below `root`, and return that."""
    told: dict[str, Any] = tomllib.loads((BOARDS / f"{board}.toml").read_text())
    for table in (told, told[release]):
        for path, content in table.get("files", {}).items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if content == _ASLEEP:
                file.mkdir()  # cannot be read, as such a sensor
            else:
                file.write_text(content)
        for path, target in table.get("links", {}).items():
            (root / path).symlink_to(target)
    variables = root / "sys/firmware/efi/efivars"
    variables.mkdir(parents=True)
    for name, number in told["uefi"].items():
        (variables / f"{name}-{_GUID}").write_bytes(_ATTRIBUTES + number.to_bytes(4, "little"))
    return root
