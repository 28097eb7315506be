"""The kernels in the recogniser: does it read the same text as the graph that ships?

The graph of a bundle is cut at its function nodes. The front runs in onnxruntime, neck and head through
`kernels.launch` on a GPU that may be on another machine; the answers are decoded here. Three steps, because a machine
with a GPU needs nothing but numpy, a driver and the compiled kernels:

    python tests/device/recogniser.py front BUNDLE DATA work.npz      here: the input of the neck for every line
    python tests/device/recogniser.py kernels KERNELS work.npz        there: neck and head of every line
    python tests/device/recogniser.py score BUNDLE DATA work.npz      here: texts beside those of the whole graph
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernels.reference import WIDTH, Form, Neck

_NEED = 0.99
"""Share of lines that must read the same."""
_CER_POINT = 0.001


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 when the kernels read other texts than the graph."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    for name in ("front", "score"):
        step = steps.add_parser(name)
        step.add_argument("bundle", type=Path)
        step.add_argument("data", type=Path)
        step.add_argument("work", type=Path)
        step.add_argument("--json", type=Path)
    step = steps.add_parser("kernels")
    step.add_argument("kernels", type=Path)
    step.add_argument("work", type=Path)
    given = parser.parse_args(arguments)
    if given.step == "kernels":
        launch(given.kernels, given.work)
        return 0
    if given.step == "front":
        front(given.bundle, given.data, given.work)
        return 0
    told = score(given.bundle, given.data, given.work)
    print(json.dumps(told, indent=1))
    if given.json:
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0 if told["same"] >= _NEED and abs(told["cer"] - told["graph_cer"]) <= _CER_POINT else 1


def front(bundle: Path, data: Path, work: Path) -> None:
    """Run each labelled line up to the neck; keep the neck's input in FP16, and the weights of both nodes."""
    import onnx_ir as ir  # noqa: PLC0415 (not on the machine with the GPU)
    from onnx_ir.passes import common  # noqa: PLC0415

    from appliance.runtime.onnx import OnnxRuntime  # noqa: PLC0415
    from models.tasks import lines as lines_task  # noqa: PLC0415
    from provisioning import passes  # noqa: PLC0415
    from provisioning.passes import constant, fused  # noqa: PLC0415

    model = passes.load(_graph(bundle), "the recogniser")
    nodes = {node.op_type: node for node in model.graph if node.domain == fused.DOMAIN}
    neck_node, head_node = nodes[fused.CONV_ATTENTION], nodes[fused.CTC_HEAD]
    form: Form = "v6" if neck_node.attributes["form"].as_string() == "v6" else "v4"
    neck = Neck(form, neck_node.attributes["kv_heads"].as_int())
    weights = {f"neck.{name}": constant(value) for name, value in zip(neck.shapes(), neck_node.inputs[1:], strict=True)}
    weights |= {
        f"head.{name}": constant(value) for name, value in zip(("w_CK", "b_K"), head_node.inputs[1:], strict=True)
    }
    x_BTC = neck_node.inputs[0]
    assert x_BTC is not None
    x_BTC.shape = ir.Shape([None, None, neck.channels])
    model.graph.outputs[:] = [x_BTC]
    common.RemoveUnusedNodesPass()(model)
    session = OnnxRuntime().open(passes.save(model), threads=2)
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in weights.items()}
    arrays["form"], arrays["kv_heads"] = np.array(form), np.array(neck.kv_heads)
    for i, line in enumerate(_lines(data)):
        (answer,) = session.run({"x": lines_task.prepare(line.picture)}).values()
        arrays[f"line{i}"] = answer[0].astype(np.float16)
    np.savez(work, **arrays)


def launch(kernels: Path, work: Path) -> None:
    """Neck and head of every line on the GPU; best class and probability are added to the file."""
    from kernels import launch as face  # noqa: PLC0415
    from kernels.timing import Bench  # noqa: PLC0415

    with np.load(work) as stored:
        arrays = dict(stored)
    spec = Neck(str(arrays["form"]), int(arrays["kv_heads"]))  # type: ignore[arg-type] # written by `front`
    weights = {name: arrays[f"neck.{name}"] for name in spec.shapes()}
    bench = Bench(face.Driver())
    arch, compiled = bench.driver.arch, face.read_kernels(kernels)
    most = max(len(value) for name, value in arrays.items() if name.startswith("line"))
    neck = face.NeckRunner(bench.driver, compiled, spec, face.pack_neck_for(arch, spec, weights))
    packed = face.pack_head_for(arch, arrays["head.w_CK"], arrays["head.b_K"])
    head = face.HeadRunner(bench.driver, compiled, packed, max_rows=most)
    out = {}
    for name, x_TC in arrays.items():
        if not name.startswith("line"):
            continue
        steps = len(x_TC)
        x, y = bench.driver.upload(np.ascontiguousarray(x_TC).tobytes()), bench.driver.allocate(steps * WIDTH * 2)
        best = bench.driver.allocate(steps * 12 + 16)
        probability = best + -(-steps // 2) * 16
        neck(x, y, 1, steps, bench.stream)
        head(y, best, probability, steps, bench.stream)
        out[f"best.{name}"] = bench.download(best, (steps,), np.int64)
        out[f"probability.{name}"] = bench.download(probability, (steps,), np.float32)
        for pointer in (x, y, best):
            bench.driver.free(pointer)
    np.savez(work, **arrays, **out)


def score(bundle: Path, data: Path, work: Path) -> dict[str, Any]:
    """What the kernels read beside what the whole graph reads, on the same lines."""
    from appliance.runtime.onnx import OnnxRuntime  # noqa: PLC0415
    from models.folder import BundleFolder  # noqa: PLC0415
    from models.tasks import lines as lines_task  # noqa: PLC0415
    from models.tasks import text  # noqa: PLC0415

    labels = BundleFolder(bundle).read_labels()
    session = OnnxRuntime().open(_graph(bundle), threads=2)
    same, ours, graphs, lines = 0, [], [], _lines(data)
    with np.load(work) as stored:
        for i, line in enumerate(lines):
            whole = session.run({"x": lines_task.prepare(line.picture)})
            texts = [
                lines_task.decode(best, probability, labels)[0]
                for best, probability in (
                    (stored[f"best.line{i}"], stored[f"probability.line{i}"]),
                    (whole["index"][0], whole["probability"][0]),
                )
            ]
            same += texts[0] == texts[1]
            source = text.source_of(line.file)
            label, *read = (text.normalise(one, source) for one in (line.text, *texts))
            ours.append((label, read[0]))
            graphs.append((label, read[1]))
        form, kv_heads = str(stored["form"]), int(stored["kv_heads"])
    exact, cer = text.exact_and_cer(ours)
    graph_exact, graph_cer = text.exact_and_cer(graphs)
    return {
        "neck": f"{form}, {kv_heads} key/value heads",
        "lines": len(lines),
        "same": same / len(lines),
        "exact": exact,
        "cer": cer,
        "graph_exact": graph_exact,
        "graph_cer": graph_cer,
    }


def _graph(bundle: Path) -> bytes:
    from models.folder import BundleFolder  # noqa: PLC0415

    folder = BundleFolder(bundle)
    graph = next(graph for graph in folder.manifest.graphs.values() if graph.original)
    return folder.read(graph.variants["fp32"].graph)


def _lines(data: Path) -> Sequence[Any]:
    from provisioning import data as labelled  # noqa: PLC0415

    return labelled.load(data, labelled.ALL).lines


if __name__ == "__main__":
    sys.exit(main())
