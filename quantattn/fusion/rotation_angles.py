"""The angles of a rotation as the table of cosines and sines that the fused operation reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from quantattn.fusion.columns import joined_parts
from quantattn.fusion.graphs import (
    convert_target,
    insert_before,
    is_view,
    op_name,
    positional,
    same_size,
    value_of,
)
from quantattn.fusion.rotation import Rotation
from quantattn.fusion.static_quant import NotFusedError

__all__ = ["AngleTables", "check_angles", "table_of_angles"]

_ATEN = torch.ops.aten
_IOTA = torch.ops.prims.iota.default
_ELEMENTWISE = {"aten::cos", "aten::sin", "aten::mul", "aten::div", "aten::clone"}

AngleTables = dict[tuple[Any, ...], dict[str, Any]]
"""Arguments of the fused operation, by the rotation's angles and the order of its axes."""


def check_angles(rotation: Rotation, heads_axis: int) -> None:
    """Check that each token has its angles, the same for all heads and both numbers of a pair.

    Raises:
        NotFusedError: They vary in another way, or nothing in the graph says that they do not.
    """
    shape, whole = value_of(rotation.cos).shape, value_of(rotation.input).shape
    for behind in range(2, len(shape) + 1):
        axis = len(whole) - behind
        is_heads = axis == heads_axis
        fits = same_size(shape[-behind], 1) or same_size(shape[-behind], whole[axis])
        if not fits or (is_heads and not same_size(shape[-behind], 1)):
            raise NotFusedError(f"its cosines {rotation.cos.name} {list(shape)} are not a token's")
    for angles in (rotation.cos, rotation.sin):
        if rotation.is_doubled and not _stands_twice(angles, rotation.is_interleaved):
            raise NotFusedError(
                f"nothing in the graph says that both numbers of a pair turn by the same angle:"
                f" {angles.name} is not made of two copies"
            )


def _stands_twice(angles: Node, is_interleaved: bool) -> bool:
    """Whether the last axis is made of two copies, one behind the other or number by number."""
    parts = joined_parts(angles)
    if parts is not None:
        return parts[0] is parts[1] and parts[2] is is_interleaved
    wide = [node for node in angles.all_input_nodes if _has_columns(value_of(node))]
    if len(wide) != 1:
        return False
    inner = wide[0]
    old, new = value_of(inner).shape, value_of(angles).shape
    if is_view(angles) and len(old) > 1 and not same_size(old[-1], new[-1]):
        is_joined = same_size(old[-2] * old[-1], new[-1])
        return is_joined and _is_expanded(inner, -1 if is_interleaved else -2)
    return _keeps_last_axis(angles, len(old)) and _stands_twice(inner, is_interleaved)


def _keeps_last_axis(node: Node, dim: int) -> bool:
    """Whether a node gives rows of its input, `dim` axes, in which equal columns stay equal."""
    name, arguments = op_name(node), positional(node)
    if name in ("aten::select", "aten::slice"):
        axis: Any = arguments[1] if len(arguments) > 1 else 0
        return bool(axis % dim != dim - 1)
    if name == "aten::permute":
        axes: Any = arguments[1]
        return bool(axes[-1] % dim == dim - 1)
    return name in _ELEMENTWISE or is_view(node) or convert_target(node) is not None


def _has_columns(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and not same_size(value.shape[-1], 1)


def _is_expanded(node: Node, axis: int) -> bool:
    """Whether an axis of two numbers is one that was expanded, and is the last or before it."""
    while op_name(node) == "aten::clone":
        node = positional(node)[0]
    if op_name(node) != "aten::expand":
        return False
    old, new = value_of(positional(node)[0]).shape, value_of(node).shape
    return len(old) == len(new) > 1 and same_size(old[axis], 1) and same_size(new[axis], 2)


def table_of_angles(
    place: Node, rotation: Rotation, order: Sequence[int], tables: AngleTables
) -> dict[str, Any]:
    """Arguments of the fused operation: every token's angles, and its row among them.

    Args:
        place: Where new nodes go; the angles lie above it.
        rotation: A rotation whose angles `check_angles` has passed.
        order: The axes of its input, tokens first, then heads, then columns.
        tables: What earlier calls on this graph have made; added to.
    """
    key = (rotation.cos, rotation.sin, rotation.is_interleaved, *order)
    if key not in tables:
        halves = [_per_token(place, x, rotation, order) for x in _cos_and_sin(place, rotation)]
        table = insert_before(place, _ATEN.cat.default, halves, -1)
        rows = _size(place, table, 0)
        options = {"dtype": torch.int64, "device": value_of(table).device, "requires_grad": False}
        positions = insert_before(place, _IOTA, rows, start=0, step=1, **options)
        tables[key] = {
            "cos_sin_cache": table,
            "positions": positions,
            "interleaved": rotation.is_interleaved,
        }
    return tables[key]


def _cos_and_sin(place: Node, rotation: Rotation) -> list[Node]:
    """Cosines and sines, a number for each pair."""
    if rotation.is_complex:
        parts = insert_before(place, _ATEN.view_as_real.default, rotation.cos)
        return [insert_before(place, _ATEN.select.int, parts, -1, part) for part in range(2)]
    if not rotation.is_doubled:
        return [rotation.cos, rotation.sin]
    half = rotation.width // 2
    cut = (0, rotation.width, 2) if rotation.is_interleaved else (0, half, 1)
    return [
        insert_before(place, _ATEN.slice.Tensor, x, -1, *cut) for x in (rotation.cos, rotation.sin)
    ]


def _per_token(place: Node, angles: Node, rotation: Rotation, order: Sequence[int]) -> Node:
    """Angles with a row for each token, `[num_tokens, width / 2]`."""
    whole, shape = value_of(rotation.input).shape, value_of(angles).shape
    sizes: list[Any] = [_size(place, rotation.input, axis) for axis in range(len(whole) - 1)]
    for behind in range(2, len(shape) + 1):
        if same_size(shape[-behind], whole[-behind]):
            sizes[len(whole) - behind] = -1
    sizes[order[-2]] = 1
    expanded = insert_before(place, _ATEN.expand.default, angles, [*sizes, rotation.width // 2])
    ordered = insert_before(place, _ATEN.permute.default, expanded, list(order))
    return insert_before(place, _ATEN.reshape.default, ordered, [-1, rotation.width // 2])


def _size(place: Node, node: Node, axis: int) -> Any:
    size = value_of(node).shape[axis]
    return size if isinstance(size, int) else insert_before(place, _ATEN.sym_size.int, node, axis)
