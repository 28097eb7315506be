"""Which fault an error of a worker is, by its class and by the words of the libraries."""

from __future__ import annotations

import pytest

from appliance.core.faults import Fault, classify, cuda_code
from models.errors import ApplianceError, BadInput, BundleError, ModelError, Overloaded, TooLarge

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (BadInput("out of memory, says the caller"), Fault.BAD_INPUT),
        (TooLarge("too many pixels"), Fault.BAD_INPUT),
        (Overloaded("too many large answers are held: retry shortly"), Fault.BAD_INPUT),
        (ModelError("the model failed: Non-zero status code"), Fault.MODEL_ERROR),
        (BundleError("blob 12 is damaged"), Fault.PLAN_REFUSED),
        (BundleError("loading failed: MemoryError: "), Fault.OUT_OF_MEMORY),
        (ModelError("the model failed: std::bad_alloc"), Fault.OUT_OF_MEMORY),
        (ModelError("Unable to allocate 8.00 GiB for an array"), Fault.OUT_OF_MEMORY),
        (ModelError("NvMapMemAllocInternalTagged: 1075072515 error 12"), Fault.OUT_OF_MEMORY),
        (ModelError("CUDA failure 2: out of memory ; GPU=0"), Fault.OUT_OF_MEMORY),
        (ModelError("CUDA failure 700: an illegal memory access was encountered ; GPU=0"), Fault.POISONED_CONTEXT),
        (ModelError("Error Code 1: Cuda Runtime (unspecified launch failure)"), Fault.POISONED_CONTEXT),
        (ModelError("CUDA error: device-side assert triggered"), Fault.POISONED_CONTEXT),
        (ModelError("CUDA failure 100: no CUDA-capable device is detected"), Fault.DRIVER_GONE),
        (BundleError("CUDA driver version is insufficient for CUDA runtime version"), Fault.DRIVER_GONE),
        (ModelError("cudaError 719"), Fault.POISONED_CONTEXT),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_error_is_classified(error: ApplianceError, fault: Fault) -> None:
    assert classify(error) is fault


def test_what_is_wrong_with_an_input_that_no_caller_sent_is_the_fault_of_the_model() -> None:
    assert classify(TooLarge("names of these tensors take too many bytes"), asked=False) is Fault.PLAN_REFUSED


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("CUDA failure 700: an illegal memory access", 700),
        ("CUDA error: 46", 46),
        ("CUDA runtime error 2", 2),
        ("cudaErrorIllegalAddress (CUDA error 700)", 700),
        ("the model takes 700 inputs", None),
        ("CUDA 12.6 cannot run this", None),
    ],
)
def test_the_cuda_error_code_is_found_where_there_is_one(message: str, code: int | None) -> None:
    assert cuda_code(message) == code
