"""How the client commands print: text as it is, and a failure as one sentence."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

_PIPE_WIDTH = 1000


def plain(*, stderr: bool = False) -> Console:
    """A console that shows text as it is: no line broken unless a terminal is that narrow, no markup, no emoji."""
    console = Console(stderr=stderr, soft_wrap=True, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def fail(message: str) -> NoReturn:
    """Print `message` and exit with status 1."""
    plain(stderr=True).print(message, style="red")
    raise typer.Exit(1)
