"""A nvidia-smi that says what lies in tests/data/nvidia-smi, which was written from documented formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from appliance.hardware import Run

SAID = Path(__file__).parent.parent / "data" / "nvidia-smi"
COMMANDS = {
    "-L": "L",
    "--query-gpu=index,mig.mode.current --format=csv,noheader": "modes",
    "mig -lgip": "lgip",
}


def said(card: str) -> Run:
    """Runs nvidia-smi on a machine with that card, and no other command."""

    def run(command: Sequence[str]) -> str:
        program, *arguments = command
        path = SAID / card / COMMANDS.get(" ".join(arguments), "")
        return path.read_text() if program == "nvidia-smi" and path.is_file() else ""

    return run


def install(folder: Path, card: str) -> Path:
    """Put such a program into `folder`, for a search path; where that is."""
    folder.mkdir(exist_ok=True)
    cases = "".join(f'"{arguments}") exec cat {SAID / card / file};;\n' for arguments, file in COMMANDS.items())
    script = folder / "nvidia-smi"
    script.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}esac\nexit 1\n')
    script.chmod(0o755)
    return folder
