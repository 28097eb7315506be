"""What a bundle does with a picture: pre- and postprocessing around its graphs, one file a task.

A task knows pictures and tensors; it is given `run`, so it knows no runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from models.bundle import TaskSpec
from models.errors import BundleError
from models.spec import Array

try:
    import cv2  # noqa: F401 - every task needs it; loaded here so that its absence is explained once
except ImportError as error:
    msg = f"OpenCV cannot be loaded ({error}): install what it needs with `apt-get install -y libgl1 libglib2.0-0`"
    raise ImportError(msg) from error

Run: TypeAlias = Callable[[str, Mapping[str, Array]], Mapping[str, Array]]
"""`run(graph, inputs)` computes all outputs of one graph of the bundle."""


class Task(Protocol):
    """Turns a picture into the part of an answer that belongs to the task."""

    def predict(self, picture_HWC: Array, run: Run) -> dict[str, Any]:
        """Answer for one picture (uint8, BGR). Plain JSON data; raises BadInput for unusable pictures."""


def make(spec: TaskSpec, labels: Sequence[str]) -> Task:
    """The task a bundle asks for; raises BundleError when this version does not know it."""
    if spec.kind == "reading":
        from models.tasks.reading import Reading  # noqa: PLC0415 - a worker loads one task only

        return Reading(spec.settings, labels)
    if spec.kind == "lines":
        from models.tasks.lines import Lines  # noqa: PLC0415 - a worker loads one task only

        return Lines(spec.settings, labels)
    if spec.kind == "classification":
        from models.tasks.classification import Classification  # noqa: PLC0415 - a worker loads one task only

        return Classification(spec.settings, labels)
    if spec.kind == "detection":
        from models.tasks.detection import Detection  # noqa: PLC0415 - a worker loads one task only

        return Detection(spec.settings, labels)
    if spec.kind == "tensors":
        from models.tasks.tensors import Tensors  # noqa: PLC0415 - a worker loads one task only

        return Tensors()
    msg = f"task {spec.kind!r} is not known here: update the appliance"
    raise BundleError(msg)
