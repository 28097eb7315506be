"""How read text is compared with labelled text. Pure; used wherever accuracy is measured.

Labels of public sets do not follow one convention (all upper case, signs left out), so both sides
are normalised first. The source of a labelled file is its name up to the first "_".
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable


def source_of(file: str) -> str:
    """Source of a labelled file: "sroie" for "sroie_0001.png"."""
    return file.partition("_")[0]


def normalise(text: str, source: str) -> str:
    """Text in the form that is compared: Unicode NFKC, case folded, without white space.

    Number plates (`source` "lprnet") also lose every character but letters and digits,
    because their labels leave out the printed dot.
    """
    folded = "".join(unicodedata.normalize("NFKC", text).casefold().split())
    return "".join(filter(str.isalnum, folded)) if source == "lprnet" else folded


def edit_distance(left: str, right: str) -> int:
    """Fewest insertions, deletions and substitutions of one character that turn `left` into `right`."""
    before = list(range(len(right) + 1))
    for row, have in enumerate(left, start=1):
        now = [row]
        for column, want in enumerate(right, start=1):
            now.append(min(before[column] + 1, now[-1] + 1, before[column - 1] + (have != want)))
        before = now
    return before[-1]


def exact_and_cer(pairs: Iterable[tuple[str, str]]) -> tuple[float, float]:
    """Exact match and character error rate (CER) of (label, read) pairs of *normalised* texts.

    Exact match is a share of the pairs; CER is the total edit distance over the total length of the labels,
    and so may pass 1. Both are shares, not percentages. Raises ValueError when there is no label character.
    """
    lines = same = distance = characters = 0
    for label, read in pairs:
        lines += 1
        same += label == read
        distance += edit_distance(label, read)
        characters += len(label)
    if not characters:
        raise ValueError("accuracy needs at least one labelled character")
    return same / lines, distance / characters
