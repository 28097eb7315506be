"""Samples for graphs without labelled data: what a recipe says that they are shown.

    pictures  every JPEG and PNG file under a folder, made to fit as the graph's task does it, or for a graph without
              such a task whole and in quarters; of the files in order of their names every second one is gate, the
              others are calibrate
    tensors   every npz file under a folder, the arrays in it named as the graph's inputs, or `x` if there is one;
              divided in the same way
    tokens    sentences of random token ids, padded at their end, with their attention mask; from a fixed seed

Nothing here is labelled: such graphs are compared with themselves as published.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from models.errors import CallerError, ConfigError, SourceError
from models.folder import unpack_arrays
from models.spec import Array
from models.tasks import fit, picture
from provisioning.recipe import FIRST_WORD, SHORTEST, Samples

SPLITS = ("calibrate", "gate")
_MAX_PIXELS = 50_000_000

T = TypeVar("T")
Inputs = dict[str, Array]


def load(
    samples: Samples, shape: Sequence[int], folder: Path, split: str, settings: fit.FitSettings | None = None
) -> tuple[tuple[Inputs, ...], str]:
    """The samples of `split` for a graph whose input has `shape`, and their digest.

    Pictures are made to fit by the `settings` of the graph's task; without them as `samples` says.

    Raises ConfigError for a split that there is none of, SourceError when the folder has too few usable pictures.
    """
    if split not in SPLITS:
        msg = f"there is no split {split!r} of unlabelled samples: choose {' or '.join(SPLITS)}"
        raise ConfigError(msg)
    made = _TAKEN[samples.kind](samples, shape, folder, split, settings)
    digest = hashlib.sha256()
    for sample in made:
        for name, array in sample.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return made, digest.hexdigest()


def _files(samples: Samples, folder: Path, split: str, endings: set[str]) -> list[Path]:
    """The files of `split`."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in endings)
    chosen = files[SPLITS.index(split) :: len(SPLITS)]
    if not chosen:
        kinds = ", ".join(sorted(ending[1:] for ending in endings))
        msg = (
            f"{folder} has {len(files)} {samples.kind} (files {kinds}), two are the least: "
            "put more there, or give another folder with --data"
        )
        raise SourceError(msg)
    return chosen


def _pictures(
    samples: Samples, shape: Sequence[int], folder: Path, split: str, settings: fit.FitSettings | None
) -> tuple[Inputs, ...]:
    files = _files(samples, folder, split, {".jpg", ".jpeg", ".png"})
    if settings:
        return tuple({"x": fit.prepare(_read(file), settings)} for file in _few(files, samples.count))
    height, width = shape[2:]
    parts = [part for file in files for part in _whole_and_quarters(_read(file), height, width)]
    whole = fit.FitSettings(width, height, "stretch", mean=samples.mean, deviation=samples.deviation)
    return tuple({"x": fit.prepare(part, whole)} for part in _few(parts, samples.count))


def _tensors(
    samples: Samples, _shape: Sequence[int], folder: Path, split: str, _settings: fit.FitSettings | None
) -> tuple[Inputs, ...]:
    made = []
    for file in _few(_files(samples, folder, split, {".npz"}), samples.count):
        try:
            arrays = unpack_arrays(file.read_bytes())
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            msg = f"{file} is no file of numpy arrays ({error}): write it with numpy.savez, or take it away"
            raise SourceError(msg) from error
        made.append(dict(zip(["x"], arrays.values(), strict=True)) if len(arrays) == 1 else arrays)
    return tuple(made)


def _few(found: Sequence[T], count: int) -> Sequence[T]:
    """As many of `found`, evenly chosen."""
    return [found[i * len(found) // count] for i in range(count)] if count < len(found) else found


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


def _tokens(
    samples: Samples, _shape: Sequence[int], _folder: Path, split: str, _settings: fit.FitSettings | None
) -> tuple[Inputs, ...]:
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


_TAKEN: dict[str, Callable[[Samples, Sequence[int], Path, str, fit.FitSettings | None], tuple[Inputs, ...]]] = {
    "pictures": _pictures,
    "tensors": _tensors,
    "tokens": _tokens,
}
