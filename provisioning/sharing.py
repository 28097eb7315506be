"""Attention heads that share keys and values: what can be asked for, and who does it.

Nothing of onnx is imported before a graph is looked at: on a second build none is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from appliance.runtime import Runtime
from models import schema
from models.errors import ConfigError
from models.spec import Array
from provisioning.steps import THREADS

METHODS = ("subspace", "average")


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many key and value heads attention keeps, and how they are found (one of METHODS)."""

    kv_heads: int
    method: str


@dataclass(frozen=True, slots=True)
class Overview:
    """All attention of a graph in plain data."""

    heads: Mapping[str, int]
    """Of each block, by its name."""
    not_understood: Mapping[str, str]
    """Node -> reason."""


def divisors(heads: int) -> list[int]:
    """Numbers of key and value heads that `heads` can share."""
    return [n for n in range(1, heads + 1) if heads % n == 0]


def check(attention: Mapping[str, Overview], kv_heads: int) -> None:
    """Raise ConfigError unless some of the graphs (name -> attention) can be converted, and none of them not."""
    if not any(one.heads for one in attention.values()):
        unlike = "".join(
            f"; {node} of {graph} looks like it, but {reason}"
            for graph, one in attention.items()
            for node, reason in one.not_understood.items()
        )
        where = ", ".join(attention)
        msg = f"there is no attention to convert in {where}{unlike}: leave out --kv-heads, or take another recipe"
        raise ConfigError(msg)
    for graph, one in attention.items():
        for node, heads in one.heads.items():
            if not 1 <= kv_heads <= heads or heads % kv_heads:
                msg = (
                    f"the {heads} heads at {node} of {graph} cannot share {kv_heads} key and value heads evenly: "
                    f"give --kv-heads one of {', '.join(map(str, divisors(heads)))}"
                )
                raise ConfigError(msg)


def look(content: bytes, what: str) -> bytes:
    """The Overview of a graph, in JSON."""
    from provisioning import passes  # noqa: PLC0415 - see the top
    from provisioning.passes import attention  # noqa: PLC0415

    found = attention.find(passes.load(content, what))
    heads = {block.name: block.heads for block in found.blocks}
    overview = Overview(heads, {one.node: one.reason for one in found.not_understood})
    return json.dumps(schema.dump(overview)).encode()


def share(content: bytes, wanted: Sharing, samples: Sequence[Mapping[str, Array]], runtime: Runtime) -> bytes:
    """`content` with its attention converted; what is fitted is fitted on `samples`."""
    from provisioning import passes  # noqa: PLC0415 - see the top
    from provisioning.activations import collector  # noqa: PLC0415
    from provisioning.passes import attention, gqa  # noqa: PLC0415

    model = passes.load(content, "the graph")
    found = attention.find(model)
    collect = collector(samples, runtime, THREADS)
    return passes.save(gqa.convert(model, found, wanted.kv_heads, wanted.method, collect))
