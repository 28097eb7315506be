"""Small graphs with one attention block, spelled in the ways in which exporters spell it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper

HEADS, SIZE = 4, 3
WIDTH = HEADS * SIZE

Array = npt.NDArray[Any]


def weights(*, alike: Sequence[Sequence[int]] = (), seed: int = 0) -> dict[str, Array]:
    """Random layers q, k, v, o. Heads of one group of `alike` differ in keys and values by a change of basis only."""
    random = np.random.default_rng(seed)
    made = {}
    for name in "qkvo":
        made[f"w{name}"] = random.normal(0, 0.6, (WIDTH, WIDTH))
        made[f"b{name}"] = random.normal(0, 0.3, WIDTH)
    for group in alike:
        for name in "kv":
            for head in group[1:]:
                basis = random.normal(size=(SIZE, SIZE)) + 2 * np.eye(SIZE)
                here, first = (slice(h * SIZE, (h + 1) * SIZE) for h in (head, group[0]))
                made[f"w{name}"][:, here] = made[f"w{name}"][:, first] @ basis
                made[f"b{name}"][here] = made[f"b{name}"][first] @ basis
    return {name: array.astype(np.float32) for name, array in made.items()}


@dataclass
class Spelling:
    """Collects nodes and constants of x [n, t, 12] -> y [n, t, 12], with a mask [n, 1, 1, t] if one is wanted."""

    layers: Mapping[str, Array]
    constants_are_nodes: bool = False
    opset: int = 17
    nodes: list[NodeProto] = field(default_factory=list)
    held: dict[str, Array] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=lambda: ["y"])

    def node(self, operator: str, *inputs: str, made: str | Sequence[str], **attributes: Any) -> str:  # noqa: ANN401
        """Add a node; the name of what it makes first."""
        names = [made] if isinstance(made, str) else list(made)
        self.nodes.append(helper.make_node(operator, list(inputs), names, name=f"make_{names[0]}", **attributes))
        return names[0]

    def hold(self, name: str, array: object, dtype: npt.DTypeLike = np.float32) -> str:
        """Add a constant."""
        self.held[name] = np.array(array, dtype)
        return name

    def linear(self, read: str, layer: str, made: str, *, bias: str = "right") -> str:
        """Add x w + b, the bias on either side of its Add, or none."""
        product = self.node("MatMul", read, self.hold(f"w{layer}", self.layers[f"w{layer}"]), made=f"{made}_product")
        if not bias:
            return product
        b = self.hold(f"b{layer}", self.layers[f"b{layer}"])
        return self.node("Add", *((product, b) if bias == "right" else (b, product)), made=made)

    def finish(self, *, mask: bool = False) -> bytes:
        """The model."""
        nodes = self.nodes
        held = [numpy_helper.from_array(array, name) for name, array in self.held.items()]
        if self.constants_are_nodes:
            nodes = [helper.make_node("Constant", [], [one.name], value=one) for one in held] + nodes
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "t", WIDTH])]
        if mask:
            inputs.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["n", 1, 1, "t"]))
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in self.outputs]
        graph = helper.make_graph(nodes, "attention", inputs, outputs, [] if self.constants_are_nodes else held)
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString(deterministic=True)

    def attend(self, q: str, k_turned: str, v: str, *, scores: str = "scores") -> str:
        """Products, softmax, and the layer behind; queries are scaled already."""
        scores = self.node("MatMul", q, k_turned, made=scores)
        return self.close(self.node("Softmax", scores, made="attention", axis=-1), v)

    def close(self, attention: str, v: str) -> str:
        """The product with the values and the layer behind."""
        context = self.node("MatMul", attention, v, made="context")
        turned = self.node("Transpose", context, made="turned", perm=[0, 2, 1, 3])
        flat = self.node("Reshape", turned, self.hold("flat_shape", [0, -1, WIDTH], np.int64), made="flat")
        return self.linear(flat, "o", "y")

    def heads(self, read: str, made: str, perm: Sequence[int] = (0, 2, 1, 3)) -> str:
        """[n, t, 12] -> [n, 4, t, 3]."""
        shape = self.hold("heads_shape", [0, -1, HEADS, SIZE], np.int64)
        return self.node("Transpose", self.node("Reshape", read, shape, made=f"{made}_cut"), made=made, perm=perm)


SCALE = 0.4


def apart(**options: Any) -> bytes:  # noqa: ANN401 - passed on
    """Three layers; biases left of their sums; the scale shared by queries and keys; keys turned at once."""
    it = Spelling(**options)
    q, k, v = (it.linear("x", name, f"{name}_all", bias="left") for name in "qkv")
    root = it.hold("root", SCALE**0.5)
    q = it.node("Mul", it.heads(q, "q"), root, made="q_scaled")
    k = it.node("Mul", root, it.heads(k, "k", (0, 2, 3, 1)), made="k_scaled")
    it.attend(q, k, it.heads(v, "v"))
    return it.finish()


def masked(**options: Any) -> bytes:  # noqa: ANN401 - passed on
    """Three layers; the scores divided and a mask added, the softmax in double precision between casts."""
    it = Spelling(**options)
    q, k, v = (it.heads(it.linear("x", name, f"{name}_all"), name) for name in "qkv")
    k = it.node("Transpose", k, made="k_turned", perm=[0, 1, 3, 2])
    scores = it.node("Div", it.node("MatMul", q, k, made="scores"), it.hold("divisor", 1 / SCALE), made="scaled")
    scores = it.node("Add", "mask", scores, made="masked")
    wide = it.node("Cast", scores, made="wide", to=TensorProto.DOUBLE)
    attention = it.node("Softmax", wide, made="attention_wide", axis=-1)
    it.close(it.node("Cast", attention, made="attention", to=TensorProto.FLOAT), v)
    return it.finish(mask=True)


def packed(cut: str = "slice", **options: Any) -> bytes:  # noqa: ANN401 - passed on
    """One layer for q, k and v, apart by Slice and Squeeze, by Gather, by Split, or by Split before the heads are."""
    it = Spelling(**options)
    joined = {part: np.concatenate([it.layers[f"{part}{name}"] for name in "qkv"], axis=-1) for part in "wb"}
    it.layers = {**it.layers, "wqkv": joined["w"], "bqkv": joined["b"]}
    y = it.linear("x", "qkv", "qkv")
    if cut == "early":
        it.node("Split", y, it.hold("lengths", [WIDTH] * 3, np.int64), made=["q_all", "k_all", "v_all"], axis=-1)
        q, k, v = (it.heads(f"{name}_all", name) for name in "qkv")
    else:
        five = it.node("Reshape", y, it.hold("five", [0, -1, 3, HEADS, SIZE], np.int64), made="parts_cut")
        five = it.node("Transpose", five, made="parts", perm=[2, 0, 3, 1, 4])
        q, k, v = _taken_apart(it, five, cut)
    q = it.node("Identity", q, made="q_same")
    q = it.node("Mul", q, it.hold("scale", [SCALE]), made="q_scaled")
    q = it.node("Add", q, it.hold("nothing", [0.0]), made="q_still")
    it.attend(q, it.node("Transpose", k, made="k_turned", perm=[0, 1, 3, 2]), v)
    return it.finish()


def _taken_apart(it: Spelling, five: str, cut: str) -> list[str]:
    if cut == "gather":
        return [
            it.node("Gather", five, it.hold(f"at{i}", i, np.int64), made=name, axis=0) for i, name in enumerate("qkv")
        ]
    first = it.hold("first", [0], np.int64)
    if cut == "split":
        names = ["q_one", "k_one", "v_one"]
        it.node("Split", five, made=names, axis=0)
    else:
        bounds = [it.hold(f"bound{i}", [i], np.int64) for i in range(4)]
        names = [
            it.node("Slice", five, bounds[i], bounds[i + 1], first, made=f"{name}_one") for i, name in enumerate("qkv")
        ]
    return [it.node("Squeeze", one, first, made=one[0]) for one in names]


SPELLINGS = {
    "apart": apart,
    "masked": masked,
    "packed, sliced": packed,
    "packed, gathered": lambda **options: packed("gather", **options),
    "packed, split": lambda **options: packed("split", **options),
    "packed, split before the heads": lambda **options: packed("early", **options),
    "constants as nodes": lambda **options: packed(constants_are_nodes=True, **options),
}

PACKAGE, VERSION, FILE = "tiny-encoder", "1.0.0", "tiny_encoder/encoder.onnx"
WORDS = 1100


def encoder(*, alike: Sequence[Sequence[int]] = ()) -> bytes:
    """A sentence of token ids [n, t] with its attention mask to vectors y [n, t, 12]: one masked block."""
    it = Spelling(weights(alike=alike))
    table = np.random.default_rng(5).normal(size=(WORDS, WIDTH))
    it.node("Gather", it.hold("table", table), "input_ids", made="x")
    wide = it.node("Cast", "attention_mask", made="kept", to=TensorProto.FLOAT)
    wide = it.node("Unsqueeze", wide, it.hold("mask_axes", [1, 2], np.int64), made="kept_4d")
    absent = it.node("Sub", it.hold("all", 1.0), wide, made="absent")
    it.node("Mul", absent, it.hold("far", -1e4), made="mask")
    q, k, v = (it.heads(it.linear("x", name, f"{name}_all"), name) for name in "qkv")
    k = it.node("Transpose", k, made="k_turned", perm=[0, 1, 3, 2])
    scores = it.node("Mul", it.node("MatMul", q, k, made="scores"), it.hold("scale", SCALE), made="scaled")
    attention = it.node("Softmax", it.node("Add", scores, "mask", made="masked"), made="attention", axis=-1)
    it.close(attention, v)
    held = [numpy_helper.from_array(array, name) for name, array in it.held.items()]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "t"]) for name in ("input_ids", "attention_mask")
    ]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "t", WIDTH])
    graph = helper.make_graph(it.nodes, "encoder", inputs, [y], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString(deterministic=True)


def install(folder: Path, content: bytes) -> None:
    """Lay down a distribution that holds `content`; `folder` has to be on sys.path."""
    for name, data in {
        FILE: content,
        f"tiny_encoder-{VERSION}.dist-info/METADATA": f"Name: {PACKAGE}\nVersion: {VERSION}\n".encode(),
        f"tiny_encoder-{VERSION}.dist-info/RECORD": f"{FILE},,\n".encode(),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def recipe(path: Path, content: bytes, cosine: float = 0.5) -> Path:
    """A recipe for that distribution."""
    path.write_text(f"""
        name = "tiny"
        version = "1.0.0"
        licence = "Apache-2.0"
        data = "nowhere"
        source = {{package = "{PACKAGE}", version = "{VERSION}"}}
        task = {{kind = "tensors"}}
        [graphs.encoder]
        role = "encode"
        file = "{FILE}"
        sha256 = "{hashlib.sha256(content).hexdigest()}"
        shape = [-1, -1]
        passes = ["normalise"]
        precisions = ["fp32"]
        gate.cosine = {cosine}
        samples = {{kind = "tokens", count = 20, vocabulary = {WORDS}, longest = 16}}
    """)
    return path
