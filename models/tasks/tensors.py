"""Raw tensors: the bundle has graphs, and nothing around them."""

from __future__ import annotations

from typing import Any

from models.errors import BadInput
from models.spec import Array
from models.tasks import Run


class Tensors:
    """A model without pre- and postprocessing; its callers send tensors and get tensors."""

    def predict(self, picture_HWC: Array, run: Run) -> dict[str, Any]:  # noqa: ARG002 - the protocol's names
        """Raise BadInput: there is nothing here that could turn a picture into tensors."""
        raise BadInput("this model takes raw tensors, not pictures: use its infer endpoint")
