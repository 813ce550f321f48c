"""Let one operation rotate queries and keys, write keys and values, and quantize the queries."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from quantattn.fusion.graphs import (
    bound_arguments,
    depends_on,
    erase_unused,
    insert_before,
    item,
    lift_above,
    op_name,
    value_of,
)
from quantattn.fusion.patterns import ATTENTION_OPS, QUANT_OPS
from quantattn.fusion.rotation import Rotation, match_rotation
from quantattn.fusion.static_quant import NotFusedError, find_static_quant

__all__ = ["fuse_rope_write", "write_nodes"]

_ATEN = torch.ops.aten
_IOTA = torch.ops.prims.iota.default
_WRITE = torch.ops.quantattn.write_kv.default
_FUSED = torch.ops.quantattn.rope_write_kv.default
_FUNCTIONALIZED = (
    torch.ops.higher_order.auto_functionalized,
    torch.ops.higher_order.auto_functionalized_v2,
)

AngleTables = dict[tuple[Node, Node], dict[str, Node]]
"""Arguments of the fused operation, by the cosines and sines that they come from."""


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
    key = write.kwargs["key"]
    assert isinstance(key, Node)
    turn = match_rotation(key)
    if turn is None:
        raise NotFusedError(f"its key {key.name} is no rotation in float32, halves by cos and sin")
    if len(key.users) > 1:
        raise NotFusedError(f"the rotated key {key.name} is used besides")
    query, query_turn = _rotated_query(write, turn)
    codes, scale = _quantized(query, value_of(key).shape[1])
    if len(codes.users) > 1:
        raise NotFusedError(f"the rotated query {codes.name} is used besides")
    inputs = {"query": query_turn.input, "key": turn.input, "q_scale": scale}
    early = [turn.cos, turn.sin, *filter(None, inputs.values())]
    if any(depends_on(node, write) for node in early):
        raise NotFusedError(f"the query {query.name} is computed from the pages that it writes")
    for node in early:
        lift_above(node, write)
    _replace(write, codes, inputs | _angles(write, turn, tables))


def _rotated_query(write: Node, turn: Rotation) -> tuple[Node, Rotation]:
    """What attends to the pages written, before it is quantized, and its rotation."""
    pages = item(write, 1)
    for user in pages.users if pages else ():
        if op_name(user) in ATTENTION_OPS:
            query = bound_arguments(user)["query"]
            quant = QUANT_OPS.get(op_name(query) or "")
            if quant is not None:
                query = bound_arguments(query)[quant.input]
            found = match_rotation(query)
            if found and (found.cos, found.sin) == (turn.cos, turn.sin):
                return query, found
    raise NotFusedError("no query that attends to its pages is rotated by the key's angles")


def _quantized(query: Node, num_kv_heads: int) -> tuple[Node, Node | None]:
    """The query as it is used, and the scale that it is quantized with; None: it is not."""
    try:
        quant = find_static_quant(query)
    except NotFusedError:
        return query, None
    fits = value_of(quant.scale).numel() in (1, num_kv_heads) and value_of(quant.scale).dim() < 2
    return (quant.nodes[-1], quant.scale) if fits else (query, None)


def _angles(write: Node, turn: Rotation, tables: AngleTables) -> dict[str, Any]:
    """Every token's angles as a table, made once for all layers, and the tokens' rows in it."""
    made = tables.get((turn.cos, turn.sin))
    if made is None:
        cos, sin = (insert_before(write, _ATEN.squeeze.dim, x, 1) for x in (turn.cos, turn.sin))
        table = insert_before(write, _ATEN.cat.default, [cos, sin], -1)
        rows = insert_before(write, _ATEN.sym_size.int, table, 0)
        options = {"dtype": torch.int64, "device": value_of(table).device, "requires_grad": False}
        positions = insert_before(write, _IOTA, rows, start=0, step=1, **options)
        made = tables[turn.cos, turn.sin] = {"cos_sin_cache": table, "positions": positions}
    return {"interleaved": False, **made}


def _replace(write: Node, codes: Node, inputs: dict[str, Any]) -> None:
    """Put the fused operation in place of the write, and its results in place of the others."""
    pages = item(write, 1)
    assert pages is not None
    kwargs = {**write.kwargs, **inputs}
    graph = write.graph
    with graph.inserting_before(write):
        fused = graph.create_node("call_function", write.target, (_FUSED,), kwargs)
    fused.meta["val"] = (value_of(codes), *value_of(write)[1:])
    for index, replaced in enumerate((codes, pages)):
        replaced.replace_all_uses_with(insert_before(write, operator.getitem, fused, index))
        erase_unused(replaced)
