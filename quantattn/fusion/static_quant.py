"""Find the static FP8 quantization that follows a tensor, however it is spelled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from quantattn.formats import FP8_E4M3_MAX
from quantattn.fusion.graphs import (
    bound_arguments,
    convert_target,
    is_view,
    op_name,
    same_size,
    sole_user,
    value_of,
)
from quantattn.fusion.patterns import QUANT_OPS
from quantattn.fusion.scale_axes import broadcast_scale

__all__ = ["NotFusedError", "StaticQuant", "find_static_quant"]

_ATEN = torch.ops.aten
_E4M3 = torch.float8_e4m3fn
_CLAMPS = ("aten::clamp", "aten::clamp_min", "aten::clamp_max")
_DIVISIONS = (_ATEN.div.Tensor, _ATEN.mul.Tensor)


class NotFusedError(Exception):
    """Why something is not fused; never leaves the pass."""


@dataclass(frozen=True)
class StaticQuant:
    """A tensor's only use: perhaps views, then code = e4m3(x / scale).

    Attributes:
        nodes: From the first view to the codes, in order.
        scale: What gives the scale, float32, of one number or one a group of columns.
    """

    nodes: tuple[Node, ...]
    scale: Node


def find_static_quant(tensor: Node) -> StaticQuant:
    """Follow the only use of `tensor`, `[tokens, ...]`, to its e4m3 codes.

    Raises:
        NotFusedError: Something else than a static quantization to e4m3 follows, or besides it.
    """
    nodes: list[Node] = []
    scale = None
    uses = _uses(tensor)
    for previous, node in uses:
        nodes.append(node)
        if op_name(node) in QUANT_OPS:
            scale = _scale_of_op(node, tensor)
            break
        if node.target in _DIVISIONS:
            scale = _scale_of_division(node, previous, tensor)
            nodes += _clamped_codes(uses, value_of(tensor).dtype)
            break
        if not is_view(node):
            _check_conversion(node, value_of(tensor).dtype)
    assert scale is not None  # the uses end in an exception otherwise
    return StaticQuant(tuple(nodes), _checked(scale, value_of(tensor)))


def _uses(node: Node) -> Iterator[tuple[Node, Node]]:
    """What uses a node, what uses that, and so on: pairs of (used, user)."""
    while True:
        user = sole_user(node)
        if user is None:
            users = ", ".join(user.name for user in node.users)
            raise NotFusedError(f"{node.name} is used by {users}, expected one quantization")
        if user.op == "output":
            raise NotFusedError(f"{node.name} is an output of the graph, expected a quantization")
        yield node, user
        node = user


def _check_conversion(node: Node, dtype: torch.dtype) -> None:
    target = convert_target(node)
    if target is None:
        raise NotFusedError(f"{node.target} follows, expected a static quantization to {_E4M3}")
    if target not in (torch.float32, dtype):
        raise NotFusedError(
            f"it is converted from {dtype} to {target} and not quantized with a scale"
        )


def _scale_of_op(node: Node, tensor: Node) -> Node:
    names, arguments = QUANT_OPS[op_name(node) or ""], bound_arguments(node)
    # Of the argument torch drops what equals the schema's default, which is a number there.
    if value_of(node).dtype is not _E4M3:
        raise NotFusedError(f"it is quantized to {value_of(node).dtype}, expected {_E4M3}")
    scale: Node = arguments[names.scale]
    shape, rows = value_of(scale).shape, value_of(arguments[names.input]).shape
    cuts_rows = len(rows) == 2 or not names.cuts_last_axis
    is_whole = same_size(rows[0], value_of(tensor).shape[0])
    in_groups = shape[:-1].numel() == 1 and is_whole and cuts_rows
    if shape.numel() != 1 and not in_groups:
        raise NotFusedError(_uneven(scale))
    return scale


def _scale_of_division(node: Node, dividend: Node, tensor: Node) -> Node:
    is_product = node.target is _ATEN.mul.Tensor
    first, second = node.args[:2]
    scale = first if is_product and second is dividend else second
    if not isinstance(scale, Node) or not isinstance(value_of(scale), Tensor) or scale is dividend:
        raise NotFusedError(f"{node.target} with {scale}, expected a division by a scale's tensor")
    source = broadcast_scale(scale, value_of(node).shape)
    if source.is_inverted != is_product:
        raise NotFusedError(f"{node.target} with {scale}, expected a division by a scale")
    if value_of(node).dim() != value_of(dividend).dim() or not source.cuts(
        value_of(tensor).shape[1:].numel()
    ):
        raise NotFusedError(_uneven(source.node))
    return source.node


def _clamped_codes(uses: Iterator[tuple[Node, Node]], dtype: torch.dtype) -> list[Node]:
    """What leads from the quotient to its e4m3 codes: clamps at +-448, and a conversion."""
    nodes: list[Node] = []
    lowest: set[object] = set()
    highest: set[object] = set()
    for _, node in uses:
        nodes.append(node)
        target = convert_target(node)
        if target is not None and target.itemsize == 1:
            break
        if op_name(node) in _CLAMPS:
            bounds = bound_arguments(node)
            lowest |= {bounds.get("min")} - {None}
            highest |= {bounds.get("max")} - {None}
        elif not is_view(node):
            _check_conversion(node, dtype)
    if target is not _E4M3:
        raise NotFusedError(f"it is quantized to {target}, expected {_E4M3}")
    if (lowest, highest) != ({-FP8_E4M3_MAX}, {FP8_E4M3_MAX}):
        raise NotFusedError(
            f"its quotient is clamped at {sorted(map(str, lowest | highest))}, expected "
            f"-{FP8_E4M3_MAX:g} from below and {FP8_E4M3_MAX:g} from above"
        )
    return nodes


def _checked(scale: Node, tensor: Tensor) -> Node:
    value = value_of(scale)
    if value.device != tensor.device:
        raise NotFusedError(f"its scale {scale.name} is on {value.device}, it on {tensor.device}")
    if value.dtype is not torch.float32:
        raise NotFusedError(f"its scale {scale.name} is {value.dtype}, expected float32")
    return scale


def _uneven(scale: Node) -> str:
    shape = list(value_of(scale).shape)
    return f"its scale {scale.name} {shape} does not cut the columns into equal runs"
