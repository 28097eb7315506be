"""Samples for graphs that read no text: what a recipe says that they are shown.

    pictures  every JPEG and PNG file under a folder, whole and in quarters, resized and normalised; of the files in
              order of their names every second one is gate, the others are calibrate
    tokens    sentences of random token ids, padded at their end, with their attention mask; from a fixed seed

Nothing here is labelled: such graphs are compared with themselves as published.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np

from models.errors import CallerError, ConfigError, SourceError
from models.spec import Array
from models.tasks import picture
from provisioning.recipe import FIRST_WORD, SHORTEST, Samples

SPLITS = ("calibrate", "gate")
_MAX_PIXELS = 50_000_000

Inputs = dict[str, Array]


def load(samples: Samples, shape: Sequence[int], folder: Path, split: str) -> tuple[tuple[Inputs, ...], str]:
    """The samples of `split` for a graph whose input has `shape`, and their digest.

    Raises ConfigError for a split that there is none of, SourceError when the folder has too few usable pictures.
    """
    if split not in SPLITS:
        msg = f"there is no split {split!r} of unlabelled samples: choose {' or '.join(SPLITS)}"
        raise ConfigError(msg)
    made = KINDS[samples.kind](samples, shape, folder, split)
    digest = hashlib.sha256()
    for sample in made:
        for name, array in sample.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return made, digest.hexdigest()


def _pictures(samples: Samples, shape: Sequence[int], folder: Path, split: str) -> tuple[Inputs, ...]:
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in {".jpg", ".jpeg", ".png"})
    chosen = files[SPLITS.index(split) :: len(SPLITS)]
    if not chosen:
        msg = f"{folder} has {len(files)} pictures (JPEG, PNG), two are the least: give another folder with --data"
        raise SourceError(msg)
    height, width = shape[2:]
    parts = [part for file in chosen for part in _whole_and_quarters(_read(file), height, width)]
    few = (
        [parts[i * len(parts) // samples.count] for i in range(samples.count)] if samples.count < len(parts) else parts
    )
    return tuple({"x": _normalised(part, samples, height, width)} for part in few)


def _read(file: Path) -> Array:
    try:
        return picture.decode_picture(file.read_bytes(), _MAX_PIXELS)
    except (OSError, CallerError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        msg = f"picture {file} cannot be used ({reason}): take it away or give another folder with --data"
        raise SourceError(msg) from error


def _whole_and_quarters(picture_HWC: Array, height: int, width: int) -> list[Array]:
    """A picture, and its quarters where they have pixels enough for the graph."""
    h, w = (size // 2 for size in picture_HWC.shape[:2])
    if h < height or w < width:
        return [picture_HWC]
    quarters = [picture_HWC[top : top + h, left : left + w] for top in (0, h) for left in (0, w)]
    return [picture_HWC, *quarters]


def _normalised(picture_HWC: Array, samples: Samples, height: int, width: int) -> Array:
    resized = cv2.resize(picture_HWC, (width, height), interpolation=cv2.INTER_AREA)
    rgb = resized[:, :, ::-1].astype(np.float32) / 255
    x_HWC = (rgb - np.array(samples.mean, np.float32)) / np.array(samples.deviation, np.float32)
    return np.ascontiguousarray(x_HWC.transpose(2, 0, 1)[None])


def _tokens(samples: Samples, shape: Sequence[int], folder: Path, split: str) -> tuple[Inputs, ...]:
    del shape, folder
    random = np.random.default_rng(SPLITS.index(split))
    made = []
    for _ in range(samples.count):
        ids = np.zeros((1, samples.longest), np.int64)
        mask = np.zeros_like(ids)
        words = int(random.integers(SHORTEST, samples.longest + 1))
        ids[0, :words] = random.integers(FIRST_WORD, samples.vocabulary, words)
        mask[0, :words] = 1
        made.append({"input_ids": ids, "attention_mask": mask})
    return tuple(made)


KINDS: dict[str, Callable[[Samples, Sequence[int], Path, str], tuple[Inputs, ...]]] = {
    "pictures": _pictures,
    "tokens": _tokens,
}
