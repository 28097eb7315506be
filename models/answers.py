"""What a predict document says, whatever its task: the one place that knows the keys of every task's answer.

    reading, lines    "lines":   [{"text", "confidence", "box"}]    in reading order
    detection         "objects": [{"label", "confidence", "box"}]   surest first
    classification    "classes": [{"label", "confidence"}]          likeliest first

A box is four corner points (x, y) in pixels of the picture as sent, clockwise from top left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {"lines": "text", "objects": "label", "classes": "label"}
"""Key of the list -> key of what an item of it is called by."""


def items(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Everything that was found, each with its confidence; empty for a document of no known task."""
    return found(document)[1]


def found(document: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Key and items of what was found; an empty key for a document of no known task."""
    return next(((key, list(document[key])) for key in _NAMES if key in document), ("", []))


def doubtful(document: Mapping[str, Any], confidence: float) -> list[int]:
    """Which items were found with less than `confidence`; of classes only the likeliest is judged."""
    key, all_items = found(document)
    judged = all_items[:1] if key == "classes" else all_items
    return [i for i, item in enumerate(judged) if item["confidence"] < confidence]


def said(document: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Texts of lines, labels of objects, or the one likeliest class, each with its confidence.

    Further classes are left out: two answers that agree about the likeliest one say the same.
    """
    for key, name in _NAMES.items():
        if key in document:
            found = document[key][:1] if key == "classes" else document[key]
            return [(str(item[name]), float(item["confidence"])) for item in found]
    return []
