"""What engines are compiled for, and by what: words that a command line can show without loading any library."""

from __future__ import annotations

from collections.abc import Mapping

TARGETS: Mapping[str, str] = {"orin-nano": "8.7", "orin-nx": "8.7", "agx-orin": "8.7", "a100": "8.0", "rtx": "8.6"}
"""Target that engines are compiled for -> compute capability of its GPU."""


def arch(target: str) -> str:
    """The same in the words of CUDA's compilers: "sm_87"."""
    return "sm_" + TARGETS[target].replace(".", "")


BACKENDS = ("tensorrt", "tensorrt-rtx")
SERVE, BUILD_CHECK = "serve", "build-check"
"""Purposes: compiled on the kind of device that runs it, or only to see that it can be compiled."""
