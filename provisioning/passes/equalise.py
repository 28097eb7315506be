"""Centres and evens out the channels of what convolutions read, exactly, so that one INT8 scale serves them all.

Requires: pass normalise; the smallest and largest x of every channel on calibration samples, for the inputs of the
convolutions that matter.
Ensures: the same operators and, within rounding, the same numbers as before; only constants have changed.

Let a convolution with weights w read x, and let x be made by an operator whose constants can take a factor for each
channel: a scale and shift (x = a h + b) or another convolution (x = v * h + b). For any s_c > 0

    conv(x, w) = conv(x / s, w s),    x / s = (a / s) h + b / s    or    (v / s) * h + b / s

with s along the channels of x: the input channels of w, the output channels of v. Depthwise: s_c = max|x_c|,
because there each output channel has a weight scale of its own. Dense: s_c = max|x_c|^A / max|w_c|^(1-A)
(Xiao et al. 2023, "SmoothQuant", equation 4; for convolutions in a row, with A = 1/2, Nagel et al. 2019,
"Data-Free Quantization through Weight Equalization and Bias Correction", section 4.1). A = 0.7 serves PP-OCRv4 best:
what rounding does to weights is largely taken back by pass quantize, what it does to activations is not.
A scale without a shift serves as well. Between maker and reader may stand what commutes with a positive factor for each
channel: pooling, Relu, a product with another tensor, concatenation of channels. Where two tensors are
added both get the same factors, so a whole residual stream is evened out at once, for all that read it.

Activations such as HardSwish lie almost wholly on one side of 0, which leaves half of a symmetric scale unused.
Where only 1 x 1 convolutions without padding read x, and nothing stands between, the middle m of each channel's range
moves to 0 as well, at no cost (with padding the border, which is 0, would move too):

    conv(x, w) + b = conv((x - m) / s, w s) + (b + w m)

Axes in names: M output channels, C input channels, G input channels of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from models.spec import Array
from provisioning.passes import constant, group, held, initializer, operand, sizes

_COMMUTING = frozenset({"AveragePool", "GlobalAveragePool", "MaxPool", "ReduceMean", "Relu", "Resize"})
"""Operators of one tensor that a positive factor on a channel passes through; none of them mixes channels here."""
_BIAS = 2
"""The input of a convolution that holds its bias."""
_WIDEST = 1e4
"""Limit of max(s) / min(s): a channel that was silent in calibration must not get a factor without bound."""
_Place: TypeAlias = "tuple[ir.Node, int]"
"""A constant operand: the node and which of its inputs."""


class _LeftAloneError(Exception):
    """A tensor cannot be equalised, for the reason in the message."""


@dataclass(slots=True)
class _Reach:
    """All that a factor on one tensor reaches, forwards and, where tensors are added, backwards."""

    outputs: set[ir.Value]
    scaled: set[ir.Value] = field(default_factory=set)
    scales: list[_Place] = field(default_factory=list)
    """Constants that are divided by the factors ..."""
    shifts: list[_Place] = field(default_factory=list)
    """... and those that are moved by the middle before."""
    readers: list[tuple[ir.Node, int]] = field(default_factory=list)
    """Convolutions, each with the first of its input channels that is meant."""
    products: list[ir.Node] = field(default_factory=list)

    def spread(self, value: ir.Value) -> None:
        """Scale all of `value`: whatever makes it, and whatever reads it, has to agree."""
        if value not in self.scaled:
            self.scaled.add(value)
            self._back(value)
            self._forth(value, 0, whole=True)

    def _back(self, value: ir.Value) -> None:
        maker = value.producer()
        if maker is None:
            raise _LeftAloneError("it is joined with the input of the graph")
        if maker.op_type in _COMMUTING:
            self.spread(operand(maker, 0))
        elif maker.op_type in {"Add", "Mul"} and _constant_input(maker) is None:
            if maker.op_type == "Mul" and any(one in self.scaled for one in maker.inputs):
                return
            for one in maker.inputs:
                if one is not None and (maker.op_type == "Add" or sizes(one)[2:] != (1, 1)):
                    self.spread(one)
        else:
            scale, shift = _constants(maker)
            self.scales.append(scale)
            self.shifts += [shift] if shift else []

    def _forth(self, value: ir.Value, first: int, *, whole: bool) -> None:
        """Follow a factor on `value`, or on its channels from `first` on, to the convolutions that take it back."""
        if value in self.outputs:
            raise _LeftAloneError("it is an output of the graph")
        for user, index in value.uses():
            made = user.outputs[0]
            if user.op_type == "Conv" and index == 0 and constant(user.inputs[1]) is not None:
                if group(user) not in {1, len(held(user, 1))}:
                    raise _LeftAloneError("a grouped convolution reads it")
                self.readers.append((user, first))
                continue
            joins = user.op_type == "Add" and whole and _constant_input(user) is None
            concat = user.op_type == "Concat" and user.attributes["axis"].as_int() == 1
            if user.op_type == "Mul":
                self.products.append(user)
            elif not joins and not concat and user.op_type not in _COMMUTING:
                msg = f"{user.op_type} reads it"
                raise _LeftAloneError(msg)
            if whole and not concat:
                self.spread(made)
            else:
                before = sum(sizes(operand(user, i))[1] for i in range(index)) if concat else 0
                self.scaled.add(made)
                self._forth(made, first + before, whole=False)


def equalise(
    model: ir.Model, low: Mapping[str, Array], high: Mapping[str, Array], share: float = 0.7
) -> dict[str, str]:
    """Centre and equalise wherever it is possible; answers the tensors left alone, each with the reason.

    `low[name]` and `high[name]` are the smallest and largest x_c of the convolution input `name`; `share` is A above.
    """
    left_alone = {}
    done: set[ir.Value] = set()
    for maker in list(model.graph):
        value = maker.outputs[0]
        if maker.op_type not in {"Add", "Conv", "Mul"} or value in done or _scale_of_a_shift(maker):
            continue
        name = str(value.name)
        try:
            reach = _reach(value, model)
            middle = np.zeros(sizes(value)[1])
            plain = reach.scaled == {value} and reach.shifts and all(_pointwise(reader) for reader, _ in reach.readers)
            if plain and name in low:
                middle = (low[name].astype(np.float64) + high[name]) / 2
            factors = _factors(reach.readers, low, high, middle, share)
        except _LeftAloneError as reason:
            left_alone[name] = str(reason)
            continue
        done |= reach.scaled
        for place in reach.shifts:
            _change(model, *place, lambda old, m, s: (old - m) / s, middle, factors)
        for place in reach.scales:
            _change(model, *place, lambda old, _, s: old / s, middle, factors)
        for reader, first in reach.readers:
            _take_back(model, reader, first, middle, factors)
    common.RemoveUnusedNodesPass()(model)
    return left_alone


def _constants(maker: ir.Node) -> tuple[_Place, _Place | None]:
    """Where scale and shift stand that decide the channels of what `maker` makes."""
    if maker.op_type == "Conv":
        if not _has_bias(maker) or constant(maker.inputs[1]) is None:
            raise _LeftAloneError("its weights or its bias are not constant")
        return (maker, 1), (maker, 2)
    held_at = _constant_input(maker) if maker.op_type in {"Add", "Mul"} else None
    if held_at is None:
        msg = f"{maker.op_type} makes it"
        raise _LeftAloneError(msg)
    if maker.op_type == "Mul":
        return (maker, held_at), None
    product = operand(maker, 1 - held_at).producer()
    scale = _constant_input(product) if product is not None and product.op_type == "Mul" else None
    if product is None or scale is None or len(product.outputs[0].uses()) > 1:
        raise _LeftAloneError("it is a sum without a scale of its own")
    return (product, scale), (maker, held_at)


def _scale_of_a_shift(node: ir.Node) -> bool:
    """Whether `node` is the scale of a scale and shift, which are looked at together."""
    users = [user for user, _ in node.outputs[0].uses()]
    shifts = [user for user in users if user.op_type == "Add" and _constant_input(user) is not None]
    return node.op_type == "Mul" and len(users) == 1 and shifts == users


def _constant_input(node: ir.Node) -> int | None:
    """The first input of `node` that is constant."""
    return next((index for index, value in enumerate(node.inputs) if constant(value) is not None), None)


def _reach(value: ir.Value, model: ir.Model) -> _Reach:
    """What a factor on the channels of `value` reaches."""
    reach = _Reach(set(model.graph.outputs))
    reach.spread(value)
    for product in reach.products:
        if sum(factor in reach.scaled for factor in product.inputs) > 1:
            raise _LeftAloneError("it is multiplied by what depends on it in proportion")
    if not reach.readers:
        raise _LeftAloneError("no convolution reads it")
    return reach


def _factors(
    readers: list[tuple[ir.Node, int]], low: Mapping[str, Array], high: Mapping[str, Array], middle: Array, share: float
) -> Array:
    """Factors s [C]: the geometric mean of what is best for each reader that was watched."""
    watched = [item for item in readers if operand(item[0], 0).name in low]
    if not watched:
        raise _LeftAloneError("no convolution that reads it was watched")
    # What is pooled from a map is a trifle beside it, and must not cost the map's readers precision.
    maps = [item for item in watched if sizes(operand(item[0], 0))[2:] != (1, 1)]
    logarithms = [np.log(_factors_for(*item, low, high, middle, share)) for item in maps or watched]
    return np.asarray(np.exp(np.mean(logarithms, axis=0)))


def _factors_for(
    reader: ir.Node, first: int, low: Mapping[str, Array], high: Mapping[str, Array], middle: Array, share: float
) -> Array:
    name = str(operand(reader, 0).name)
    loudest, rest = _cut(np.maximum(-low[name], high[name]), first, len(middle))
    if middle.any():
        loudest, _ = _cut((high[name] - low[name]) / 2, 0, len(middle))
    if group(reader) > 1:
        factors = loudest
    else:
        heaviest, _ = _cut(np.abs(held(reader, 1)).max(axis=(0, 2, 3)), first, len(middle))
        factors = loudest**share / heaviest ** (1 - share)
    # Beside other channels of the same tensor these may be as loud as those, which set the scale in any case.
    return np.asarray(factors * (loudest / factors).max() / rest.max() if rest.size else factors)


def _cut(of_all: Array, first: int, channels: int) -> tuple[Array, Array]:
    """What belongs to the channels from `first` on, never close to 0, and what belongs to all others."""
    meant = slice(first, first + channels)
    chosen = of_all[meant].astype(np.float64)
    return np.maximum(chosen, chosen.max() / _WIDEST), np.delete(of_all, meant)


def _has_bias(node: ir.Node) -> bool:
    return len(node.inputs) > _BIAS and constant(node.inputs[_BIAS]) is not None


def _pointwise(reader: ir.Node) -> bool:
    """Whether the middle can be moved in what `reader` reads."""
    plain = group(reader) == 1 and held(reader, 1).shape[2:] == (1, 1) and _has_bias(reader)
    return plain and not any(reader.attributes.get_ints("pads", ()))


def _change(
    model: ir.Model, node: ir.Node, index: int, formula: Callable[..., Array], middle: Array, factors: Array
) -> None:
    """Apply `formula` (old, m, s) to a constant of `node` along its channels."""
    old = held(node, index).astype(np.float64)
    shape = (-1, *[1] * (old.ndim - 1)) if node.op_type == "Conv" else (-1, 1, 1)
    _replace(model, node, index, formula(old, middle.reshape(shape), factors.reshape(shape)))


def _take_back(model: ir.Model, reader: ir.Node, first: int, middle: Array, factors: Array) -> None:
    """Undo factors, and the move of the middle, in a convolution that reads the channels from `first` on."""
    weights_MGHW = held(reader, 1).astype(np.float64)
    meant = slice(first, first + len(factors))
    if middle.any():
        _replace(model, reader, _BIAS, held(reader, _BIAS) + weights_MGHW[:, :, 0, 0] @ middle)
    if group(reader) > 1:
        weights_MGHW[meant] *= factors.reshape(-1, 1, 1, 1)
    else:
        weights_MGHW[:, meant] *= factors.reshape(-1, 1, 1)
    _replace(model, reader, 1, weights_MGHW)


def _replace(model: ir.Model, node: ir.Node, index: int, array: Array) -> None:
    """A new constant for this node alone: the old one may have other users."""
    name = f"{node.name}_in{index}"
    model.graph.initializers.pop(name, None)
    node.replace_input_with(index, initializer(model, name, array.astype(np.float32)))
