"""Let one operation rotate queries and keys, write keys and values, and quantize the queries."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from quantattn.fusion.graphs import (
    are_alike,
    bound_arguments,
    depends_on,
    erase_unused,
    insert_before,
    is_view,
    item,
    lift_above,
    op_name,
    positional,
    same_size,
    value_of,
)
from quantattn.fusion.patterns import ATTENTION_OPS, QUANT_OPS
from quantattn.fusion.rotation import Rotation, match_rotation
from quantattn.fusion.rotation_angles import AngleTables, check_angles, table_of_angles
from quantattn.fusion.static_quant import NotFusedError, find_static_quant

__all__ = ["fuse_rope_write", "write_nodes"]

_ATEN = torch.ops.aten
_WRITE = torch.ops.quantattn.write_kv.default
_FUSED = torch.ops.quantattn.rope_write_kv.default
_FUNCTIONALIZED = (
    torch.ops.higher_order.auto_functionalized,
    torch.ops.higher_order.auto_functionalized_v2,
)


@dataclass(frozen=True)
class _RotatedRows:
    """A rotation, and how its result became rows of tokens.

    Attributes:
        rotation: The rotation.
        order: The axes of what is rotated, those of tokens first, then heads, then columns.
        nodes: From the rotation's result to the rows `[num_tokens, heads, head_dim]`.
    """

    rotation: Rotation
    order: tuple[int, ...]
    nodes: tuple[Node, ...]

    def turns_as(self, other: _RotatedRows) -> bool:
        """Whether both are rotated by the same angles, in the same way."""
        ours, others = (
            (x.rotation.cos, x.rotation.sin, x.rotation.is_interleaved, x.rotation.width, x.order)
            for x in (self, other)
        )
        rows, others_rows = (value_of(x.nodes[-1]) for x in (self, other))
        are_rows_alike = rows.dtype is others_rows.dtype and same_size(
            rows.shape[0], others_rows.shape[0]
        )
        return are_rows_alike and all(map(are_alike, ours, others))


def write_nodes(graph: Graph) -> list[Node]:
    """Writes of keys and values, as the compiler sees them: functional, giving the new cache."""
    return [
        node for node in graph.nodes if node.target in _FUNCTIONALIZED and node.args == (_WRITE,)
    ]


def fuse_rope_write(write: Node, tables: AngleTables) -> None:
    """Write keys that the write rotates itself, with the queries that attend to them.

    Args:
        write: One of `write_nodes`; it, both rotations and a quantization of the queries go.
        tables: What earlier calls on this graph have made; added to.

    Raises:
        NotFusedError: The key is not a rotation that only this write uses, or the query that
            attends to these pages is not rotated by the same angles.
    """
    node = write.kwargs["key"]
    assert isinstance(node, Node)
    key = _rotated_rows(node)
    if key is None:
        raise NotFusedError(f"its key {node.name} is no rotation by cosines and sines")
    check_angles(key.rotation, key.order[-2])
    _check_sole_use("key", key.nodes)
    query = _rotated_query(write, key)
    codes, scale = _quantized(query.nodes[-1], value_of(node).shape[1])
    _check_sole_use("query", (*query.nodes[:-1], codes))
    early = [key.rotation.cos, key.rotation.sin, key.rotation.input, query.rotation.input]
    early += [scale] if scale else []
    if any(depends_on(node, write) for node in early):
        raise NotFusedError(f"the query {codes.name} is computed from the pages that it writes")
    for node in early:
        lift_above(node, write)
    inputs = {"query": _unrotated(write, query), "key": _unrotated(write, key), "q_scale": scale}
    angles = table_of_angles(write, key.rotation, key.order, tables)
    _replace(write, codes, inputs | angles)


def _rotated_rows(rows: Node) -> _RotatedRows | None:
    """The rotation behind rows `[num_tokens, heads, head_dim]`, through views and permutations."""
    nodes, shape = [rows], value_of(rows).shape
    order: list[int] | None = None
    while True:
        node = nodes[-1]
        rotation = match_rotation(node)
        if rotation is not None or not _sees_input(node, order):
            break
        if not is_view(node):
            axes = positional(node)[1]
            order = [axes[axis] % len(axes) for axis in order or range(len(axes))]
        nodes.append(positional(node)[0])
    if rotation is None:
        return None
    order = order or list(range(value_of(node).dim()))
    whole = value_of(node).shape
    ends_alike = len(whole) > 2 and all(
        map(same_size, (whole[axis] for axis in order[-2:]), shape[1:])
    )
    if not ends_alike or order[-1] != len(whole) - 1:
        return None
    return _RotatedRows(rotation, tuple(order), tuple(reversed(nodes)))


def _sees_input(node: Node, order: list[int] | None) -> bool:
    """Whether a node only sees its input in another shape; views lie behind permutations."""
    return op_name(node) == "aten::permute" or (is_view(node) and order is None)


def _check_sole_use(name: str, nodes: tuple[Node, ...]) -> None:
    used = next((node for node in nodes if len(node.users) > 1), None)
    if used is not None:
        raise NotFusedError(f"the rotated {name} {used.name} is used besides")


def _rotated_query(write: Node, key: _RotatedRows) -> _RotatedRows:
    """What attends to the pages written, before it is quantized, and its rotation."""
    pages = item(write, 1)
    for user in pages.users if pages else ():
        if op_name(user) in ATTENTION_OPS:
            query = bound_arguments(user)["query"]
            quant = QUANT_OPS.get(op_name(query) or "")
            if quant is not None:
                query = bound_arguments(query)[quant.input]
            found = _rotated_rows(query)
            if found is not None and found.turns_as(key):
                return found
    raise NotFusedError("no query that attends to its pages is rotated by the key's angles")


def _quantized(query: Node, num_kv_heads: int) -> tuple[Node, Node | None]:
    """The query as it is used, and the scale that it is quantized with; None: it is not."""
    try:
        quant = find_static_quant(query)
    except NotFusedError:
        return query, None
    fits = value_of(quant.scale).numel() in (1, num_kv_heads) and value_of(quant.scale).dim() < 2
    return (quant.nodes[-1], quant.scale) if fits else (query, None)


def _unrotated(place: Node, rows: _RotatedRows) -> Node:
    """What is rotated, as rows `[num_tokens, heads, head_dim]`."""
    node, shape = rows.rotation.input, value_of(rows.nodes[-1]).shape
    if list(rows.order) != sorted(rows.order):
        node = insert_before(place, _ATEN.permute.default, node, list(rows.order))
    if len(rows.order) != 3:
        node = insert_before(place, _ATEN.reshape.default, node, [-1, *shape[1:]])
    return node


def _replace(write: Node, codes: Node, inputs: dict[str, Any]) -> None:
    """Put the fused operation in place of the write, and its results in place of the others."""
    pages = item(write, 1)
    assert pages is not None
    kwargs = {**write.kwargs, **inputs}
    graph = write.graph
    with graph.inserting_before(write):
        fused = graph.create_node("call_function", write.target, (_FUSED,), kwargs)
    fused.meta["val"] = (value_of(codes).contiguous(), *value_of(write)[1:])
    for index, replaced in enumerate((codes, pages)):
        replaced.replace_all_uses_with(insert_before(write, operator.getitem, fused, index))
        erase_unused(replaced)
