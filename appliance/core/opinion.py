"""What becomes of a doubtful answer when a larger model has read its pictures again. Pure.

Of a crop only what lies where the device found something is taken: what else is seen in it belongs to neighbours. Of a
whole picture all is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.answers import found, said
from models.sync import Part

_OVERLAP = 0.3
"""Share of the smaller of two boxes that must lie in the other, for both to be the same thing."""


def corrected(parts: Sequence[Part], results: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], bool]:
    """The predict document that the larger model's `results` make of `parts`, and whether both say the same.

    Places are pixels of the picture that the device was sent.
    """
    key, items, agrees = "", [], True
    for part, result in zip(parts, results, strict=True):
        key, mine = found(part.answer)
        _key, theirs = found(result)
        if not part.whole:
            theirs = [one for one in (_same(item, theirs) for item in mine) if one]
        agrees = agrees and _texts({key: mine}) == _texts({key: theirs})
        items += [_moved(one, part) for one in theirs]
    return ({key: items} if key else {}), agrees


def _texts(document: Mapping[str, Any]) -> list[str]:
    return [" ".join(text.split()) for text, _confidence in said(document)]


def _same(item: Mapping[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The one of `others` that lies where `item` does; None where nothing does."""
    shares = [_overlap(item["box"], one["box"]) for one in others]
    best = int(np.argmax(shares)) if shares else -1
    return others[best] if shares and shares[best] >= _OVERLAP else None


def _overlap(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Of the rectangles around two boxes, float [4, 2]: the share of the smaller that lies in the other."""
    (left, top), (right, bottom) = (
        np.maximum(np.min(one, 0), np.min(other, 0)),
        np.minimum(np.max(one, 0), np.max(other, 0)),
    )
    smaller = min(float(np.prod(np.ptp(box, axis=0))) for box in (one, other))
    return float(max(0.0, right - left) * max(0.0, bottom - top) / max(smaller, 1.0))


def _moved(item: Mapping[str, Any], part: Part) -> dict[str, Any]:
    if "box" not in item:
        return dict(item)
    return {**item, "box": [[round(x + part.left, 1), round(y + part.top, 1)] for x, y in item["box"]]}
