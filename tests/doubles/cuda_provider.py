"""onnxruntime with a stand-in for its CUDA provider, which computes on the CPU.

It takes what the real one takes and refuses the rest: options by their documented names, an arena registered for the
card, shrinking of an arena that is there. A graph that needs operators in `without_kernel` is refused when the CPU was
forbidden. With `works=False` the library for CUDA does not load, and sessions go to the CPU with no more than a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnxruntime as real
import pytest

from appliance.runtime import onnx as ours

CUDA = "CUDAExecutionProvider"
OPTIONS = frozenset({"device_id", "gpu_mem_limit", "cudnn_conv_algo_search", "use_tf32"})
"""Those of the documented options of the provider that are used."""
NO_CPU = "session.disable_cpu_ep_fallback"
SHRINK = "memory.enable_memory_arena_shrinkage"


class CudaOnnxRuntime:
    """The module `onnxruntime` as it is in onnxruntime-gpu."""

    def __init__(self, *, works: bool = True, without_kernel: Sequence[str] = ()) -> None:
        """Stand in on a machine where CUDA `works`, with no kernel for some operators."""
        self.works, self.without_kernel = works, frozenset(without_kernel)
        self.preloaded = False
        self.given: list[Mapping[str, str]] = []
        """Options of each session that was opened on the card."""
        self.arenas: list[Mapping[str, str]] = []
        """Options of each arena that was registered for the card."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the real module has
        return getattr(real, name)

    def get_available_providers(self) -> list[str]:
        """What was compiled in, whether it works or not."""
        return [CUDA, *real.get_available_providers()]

    def preload_dlls(self) -> None:
        """Load CUDA's own libraries; silent where there are none, like the real one."""
        self.preloaded = True

    def create_and_register_allocator_v2(
        self, provider: str, info: real.OrtMemoryInfo, options: Mapping[str, str], arena: real.OrtArenaCfg
    ) -> None:
        """One arena for all sessions; of the card it lies in our own memory here."""
        if provider == CUDA:
            self._check(options)
            self.arenas.append(options)
            kind, place = real.OrtAllocatorType.ORT_ARENA_ALLOCATOR, real.OrtMemType.DEFAULT
            provider, info, options = "CPUExecutionProvider", real.OrtMemoryInfo("Cpu", kind, 0, place), {}
        real.create_and_register_allocator_v2(provider, info, options, arena)

    def InferenceSession(  # noqa: N802 - its name
        self,
        graph: bytes,
        options: real.SessionOptions,
        *,
        providers: Sequence[tuple[str, Mapping[str, str]]],
        enable_fallback: int,
    ) -> _Session:
        """A session on the first provider of `providers` that works here."""
        ((provider, told),) = providers
        if enable_fallback:
            msg = "whoever lets the library fall back by itself is not told of it"
            raise AssertionError(msg)
        if provider == CUDA:
            self._check(told)
            strict = _forbids_cpu(options)
            options.add_session_config_entry(NO_CPU, "0")  # here the CPU stands for the card
            opened = _Session(graph, options, on_card=self.works)
            if strict and (not self.works or self._operators(graph) & self.without_kernel):
                msg = (
                    "This session contains graph nodes that are assigned to the default CPU EP, but fallback to CPU EP "
                    "has been explicitly disabled by the user."
                )
                raise RuntimeError(msg)
            self.given.append(told)
            return opened
        return _Session(graph, options, on_card=False)

    @staticmethod
    def _check(options: Mapping[str, str]) -> None:
        unknown = set(options) - OPTIONS
        if unknown or not all(isinstance(value, str) for value in options.values()):
            msg = f"Unknown provider option: {sorted(unknown)}, or a value that is no text"
            raise RuntimeError(msg)

    @staticmethod
    def _operators(graph: bytes) -> set[str]:
        return {node.op_type for node in onnx.load_from_string(graph).graph.node}


def _forbids_cpu(options: real.SessionOptions) -> bool:
    try:
        return bool(options.get_session_config_entry(NO_CPU) == "1")
    except RuntimeError:  # it was never set
        return False


class _Session(real.InferenceSession):
    """One graph; on the CPU, whatever it says."""

    def __init__(self, graph: bytes, options: real.SessionOptions, *, on_card: bool) -> None:
        self._on_card = on_card
        super().__init__(graph, options, providers=["CPUExecutionProvider"], enable_fallback=0)

    def get_providers(self) -> list[str]:
        return [CUDA] * self._on_card + ["CPUExecutionProvider"]

    def run(self, names: Any, feeds: Any, options: real.RunOptions | None = None) -> Any:  # noqa: ANN401 - the library's own
        if options is not None and self._on_card:
            assert options.get_run_config_entry(SHRINK) == "gpu:0"
            options = real.RunOptions()
            options.add_run_config_entry(SHRINK, "cpu:0")
        return super().run(names, feeds, options)


def install(monkeypatch: pytest.MonkeyPatch, **options: Any) -> CudaOnnxRuntime:  # noqa: ANN401 - those of the double
    """Put the stand-in where the runtime finds its library."""
    stand_in = CudaOnnxRuntime(**options)
    monkeypatch.setattr(ours, "ort", stand_in)
    return stand_in
