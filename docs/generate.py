"""Writes what documents take from the code: docs/configuration.md, and the state diagrams of docs/architecture.md.

    .venv/bin/python docs/generate.py

A test compares, so a document cannot say less or other than the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from appliance.core import deployment, health
from appliance.settings import ENV_PREFIX, Settings

DOCS = Path(__file__).parent
CONFIGURATION, ARCHITECTURE = DOCS / "configuration.md", DOCS / "architecture.md"
_MIB = 2**20
_SIGNS = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}
_INTRODUCTION = f"""# Configuration

Every setting of `appliance run`, made from the settings classes by `docs/generate.py`.

Flags win over `{ENV_PREFIX}*` variables, these over the file, and that over the [profile](server.md#profiles).
The file is the one given with `--config`, or `/etc/appliance/config.toml`; it is TOML.
`http.port` below is `port` under `[http]` in the file, and `{ENV_PREFIX}HTTP__PORT` in the environment.
What is no setting, or has no usable value, ends the start with one sentence that names the key, and the nearest known.
"""
_TABLES: Mapping[str, Mapping[Any, Enum]] = {"worker": health.TABLE, "deployment": deployment.TABLE}
_FIRST: Mapping[str, Enum] = {"worker": health.State.LOADING, "deployment": deployment.Step.CHECK}


def configuration() -> str:
    """The whole of docs/configuration.md."""
    plain = {name: field for name, field in Settings.model_fields.items() if _part(field) is None}
    sections = ["\n## Top level\n", *_rows(plain, "")]
    for name, field in Settings.model_fields.items():
        part = _part(field)
        if part is not None:
            sections += [f"\n## {name}\n", f"{(part.__doc__ or '').strip()}\n", *_rows(part.model_fields, f"{name}.")]
    return _INTRODUCTION + "\n".join(sections) + "\n"


def _part(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _rows(fields: Mapping[str, FieldInfo], prefix: str) -> Iterator[str]:
    yield "| key | value | default | what |\n|---|---|---|---|"
    for name, field in fields.items():
        cells = (f"`{prefix}{name}`", _kind(field), _default(field), field.description or "")
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _kind(field: FieldInfo) -> str:
    """What may stand there, in words."""
    limits = [
        f"{sign} {_number(getattr(limit, kind.__name__.lower()))}"
        for limit in field.metadata
        for kind, sign in _SIGNS.items()
        if isinstance(limit, kind)
    ]
    return ", ".join([_type(field.annotation), *limits])


def _type(kind: Any) -> str:  # noqa: ANN401 - any type expression
    names = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path", SecretStr: "text"}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if NoneType in arguments:
        return _type(next(one for one in arguments if one is not NoneType))
    if hasattr(kind, "__metadata__"):
        return _type(arguments[0])
    if origin in {tuple, frozenset}:
        return f"list of {_type(arguments[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"table of {_type(arguments[1])} by name"
    return names.get(kind, str(kind))


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "`/var/lib/appliance` for root, otherwise `~/.local/state/appliance`"
    value = field.default
    if value is None or value in ("", (), frozenset()) or value == {} or isinstance(value, SecretStr):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"`{json.dumps(value)}`"
    return _number(value) if isinstance(value, (int, float)) else f"`{value}`"


def _number(value: float) -> str:
    plain = str(int(value)) if value == int(value) else f"{value:g}"
    mebibytes, rest = divmod(value, _MIB)
    return f"{plain} ({mebibytes} MiB)" if mebibytes >= 1 and not rest else plain


def architecture() -> str:
    """docs/architecture.md with its diagrams made anew."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    for name, table in _TABLES.items():
        mark = f"<!-- made by docs/generate.py: {name} -->"
        drawn = f"{mark}\n```mermaid\n{_diagram(table, _FIRST[name])}\n```\n"
        text, count = re.subn(re.escape(mark) + r"\n```mermaid\n.*?\n```\n", lambda _: drawn, text, flags=re.DOTALL)  # noqa: B023
        if count != 1:
            msg = f"{ARCHITECTURE} must have one diagram after {mark}"
            raise ValueError(msg)
    return text


def _diagram(table: Mapping[Any, Enum], first: Enum) -> str:
    """A table of (state, event) -> state as Mermaid's state diagram: one arrow for all events between two states."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), after in table.items():
        arrows.setdefault((state.value, after.value), []).append(event.value)
    order = [state.value for state in type(first)]
    ordered = sorted(arrows.items(), key=lambda arrow: [order.index(state) for state in arrow[0]])
    rows = [f"  {here} --> {there}: {', '.join(sorted(events))}" for (here, there), events in ordered]
    return "\n".join(["stateDiagram-v2", f"  [*] --> {first.value}", *rows])


def main() -> None:
    """Write both."""
    CONFIGURATION.write_text(configuration(), encoding="utf-8")
    ARCHITECTURE.write_text(architecture(), encoding="utf-8")


if __name__ == "__main__":
    main()
