"""Every command is described somewhere in the documents, and its help has an example."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from typer.main import get_command

from appliance import client_cli
from provisioning import cli as workshop_cli

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = "\n".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))


def commands() -> Iterator[tuple[str, click.Command]]:
    """Each command of both programs with all its names, as it is typed."""

    def below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        inner = getattr(command, "commands", {})
        if not inner:
            yield name, command
        for word, one in inner.items():
            yield from below(f"{name} {word}", one)

    yield from below("appliance", get_command(client_cli.app))
    yield from below("provision", get_command(workshop_cli.app))


@pytest.mark.parametrize(("name", "command"), list(commands()))
def test_a_command_is_in_the_documents_and_explains_itself(name: str, command: click.Command) -> None:
    assert name in DOCUMENTS or f"`{name.rpartition(' ')[2]}`" in DOCUMENTS
    assert command.help
    if name != "appliance run":  # it has a parser of its own
        assert name.split(maxsplit=1)[0] in (command.epilog or "")
