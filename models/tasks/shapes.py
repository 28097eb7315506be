"""Which shapes a task sends to each graph of its bundle: what optimization profiles of engines are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from models.bundle import TaskSpec
from models.engine import Shapes
from models.spec import ModelSpec
from models.tasks.lines import HEIGHT, MAX_WIDTH, MIN_WIDTH, WIDTH_STEP, LinesSettings, load_settings
from models.tasks.reading import CLASSIFY_WIDTH, SIDE_STEP, ReadingSettings

Shape = tuple[int, ...]


def profiles(task: TaskSpec, graph: str, spec: ModelSpec, example: Mapping[str, Shape]) -> list[Mapping[str, Shapes]]:
    """Profiles of `graph`, each a range of shapes for every input, smallest first.

    Lines are bucketed by width, each bucket twice as wide as the one before. Where a task says nothing about a graph,
    variable sizes go from 1 to that of `example`, the shapes of the golden vector.
    """
    pictures = list(_of_task(task, graph))
    if not pictures or len(spec.inputs) != 1:
        return [{one.name: _fixed(one.shape, _up_to(example[one.name])) for one in spec.inputs}]
    (x,) = spec.inputs
    return [{x.name: _fixed(x.shape, shapes)} for shapes in pictures]


def width_buckets(max_width: int, min_width: int = MIN_WIDTH) -> list[tuple[int, int]]:
    """Narrowest and widest line of each bucket, in pixels: the widest doubles until `max_width` is reached.

    The first reaches from `min_width` to the 320 of training.
    """
    last = -(-max_width // WIDTH_STEP) * WIDTH_STEP
    least = -(-min_width // WIDTH_STEP) * WIDTH_STEP
    found, low, high = [], least, max(least, MIN_WIDTH)
    while high < last:
        found.append((low, high))
        low, high = high + WIDTH_STEP, high * 2
    return [*found, (min(low, max(last, least)), max(last, least))]


def _of_task(task: TaskSpec, graph: str) -> Iterator[Shapes]:
    """Shapes NCHW of the picture that goes into `graph`."""
    if task.kind == "lines" and graph == "rec":
        lines = load_settings(LinesSettings, task.settings)
        yield from _lines(lines.max_width, lines.min_width, 8)
    if task.kind != "reading":
        return
    settings = load_settings(ReadingSettings, task.settings)
    if graph == "rec":
        yield from _lines(settings.max_line_width, settings.min_line_width, settings.max_batch)
    elif graph == "cls":
        yield _batched(CLASSIFY_WIDTH, CLASSIFY_WIDTH, settings.max_batch)
    elif graph == "det":
        side, most = (-(-size // SIDE_STEP) * SIDE_STEP for size in (settings.min_side, settings.max_side))
        usual = min(side, most)
        yield Shapes((1, 3, SIDE_STEP, SIDE_STEP), (1, 3, usual, usual), (1, 3, most, most))


def _lines(max_width: int, min_width: int, max_batch: int) -> Iterator[Shapes]:
    for low, high in width_buckets(min(max_width, MAX_WIDTH), min_width):
        yield _batched(low, high, max_batch)


def _batched(low: int, high: int, max_batch: int) -> Shapes:
    return Shapes((1, 3, HEIGHT, low), (max(max_batch // 2, 1), 3, HEIGHT, high), (max_batch, 3, HEIGHT, high))


def _up_to(shape: Shape) -> Shapes:
    return Shapes(tuple(min(size, 1) for size in shape), shape, shape)


def _fixed(shape: Shape, wanted: Shapes) -> Shapes:
    """`wanted` with the sizes that the graph itself fixes."""
    least, usual, most = (
        tuple(size if limit == -1 else limit for limit, size in zip(shape, sizes, strict=True))
        for sizes in (wanted.least, wanted.usual, wanted.most)
    )
    return Shapes(least, usual, most)
