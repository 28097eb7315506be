"""Open Inference Protocol v2 documents about models, and orders to load and unload them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from appliance.adapters import oip
from appliance.core.budget import Admission
from appliance.service import ModelInfo
from models.errors import BadInput
from models.spec import TensorSpec

EXTENSIONS = ("binary_tensor_data", "schedule_policy", "model_configuration", "statistics", "model_repository")


def metadata(info: ModelInfo) -> dict[str, Any]:
    """The metadata document of a model."""

    def tensors(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]

    return {
        "name": info.name,
        "versions": [info.version],
        "platform": info.platform,
        "inputs": tensors(info.spec.inputs),
        "outputs": tensors(info.spec.outputs),
    }


def config(info: ModelInfo) -> dict[str, Any]:
    """A model in the form of Triton's configuration, with what has a meaning here.

    `max_batch_size` 0 says that shapes are whole: the first dimension is the model's own affair.
    """

    def tensors(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [
            {"name": spec.name, "data_type": _config_type(spec.datatype), "dims": list(spec.shape)} for spec in specs
        ]

    return {
        "name": info.name,
        "platform": info.platform,
        "backend": "",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": tensors(info.spec.inputs),
        "output": tensors(info.spec.outputs),
        "parameters": {},
    }


def only_ready(body: bytes) -> bool:
    """Whether a repository index request asks for ready models only; raises BadInput."""
    return bool(body) and oip.flag(oip.json_object(body), "ready") is True


def check_repository_order(body: bytes) -> None:
    """Raise BadInput when an order to load or unload brings more than a name.

    The stock client says `unload_dependents`, which has no meaning here: nothing depends on a model. A
    configuration or files of a model by request would be a way around every check of a bundle.
    """
    parameters = oip.parameters_of(oip.json_object(body)) if body else {}
    oip.flag(parameters, "unload_dependents")
    for key in parameters:
        if key != "unload_dependents":
            msg = f"parameter {key[:100]!r} is not taken: a model is loaded as it was installed, or not at all"
            raise BadInput(msg)


def admission(admission: Admission) -> dict[str, Any]:
    """Whether a model fits into memory, as plain data."""
    return {
        "fits": admission.fits,
        "need_bytes": admission.need_bytes,
        "have_bytes": admission.have_bytes,
        "would_evict": list(admission.would_evict),
    }


def _config_type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
