"""Puts greedy decoding's first half into the graph: best class and its probability instead of all classes.

Requires: the only output is the Softmax over the last axis of logits [N, T, K].
Ensures: the outputs are `index` INT64 [N, T] and `probability` FP32 [N, T], as `kernels.reference.ctc_head`
defines them; the Softmax is gone.

For K = 6625 and T = 40 that is 480 bytes a line to copy instead of a megabyte.
Axes in names: N batch, T time steps, K classes.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import tape
from onnx_ir.passes import common

from models.errors import SourceError
from provisioning.passes import fused, operand


def ctc_head(model: ir.Model) -> ir.Model:
    """Replace the Softmax at the end of `model`; raises SourceError when there is none."""
    softmax = model.graph.outputs[0].producer()
    if len(model.graph.outputs) != 1 or softmax is None or softmax.op_type != "Softmax":
        raise SourceError("the graph must end in one Softmax over its classes for pass ctc_head")
    logits_NTK = operand(softmax, 0)
    head = tape.Tape()
    best = fused.best_class(head, logits_NTK)
    for node in head.nodes:
        node.name = node.outputs[0].name = f"ctc_{node.op_type}"
    # The names and types of the two outputs are what models.tasks.lines reads.
    for value, name, kind in zip(best, ("index", "probability"), (ir.DataType.INT64, ir.DataType.FLOAT), strict=True):
        value.name = name
        value.type = ir.TensorType(kind)
        value.shape = ir.Shape([logits_NTK.shape[0], "t"] if logits_NTK.shape else ["n", "t"])
    model.graph.extend(head.nodes)
    model.graph.outputs.clear()
    model.graph.outputs.extend(best)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.RemoveUnusedNodesPass()(model)
    return model
