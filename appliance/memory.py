"""States of models in memory."""

from __future__ import annotations

from enum import Enum


class ModelState(Enum):
    """States of a model as Triton names them."""

    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"
