"""Let an attention quantize its own output, in place of the quantization that follows it."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from quantattn.fusion.graphs import (
    bound_arguments,
    depends_on,
    erase_unused,
    insert_before,
    is_view,
    item,
    lift_above,
    op_name,
    refresh,
    set_argument,
    value_of,
)
from quantattn.fusion.patterns import ATTENTION_OPS
from quantattn.fusion.static_quant import NotFusedError, StaticQuant, find_static_quant

__all__ = ["attention_nodes", "fuse_attention_quant"]

_ATEN = torch.ops.aten


def attention_nodes(graph: Graph) -> list[Node]:
    """Attentions of a graph whose output is not quantized yet."""
    nodes = (node for node in graph.nodes if op_name(node) in ATTENTION_OPS)
    return [node for node in nodes if bound_arguments(node)["out_scale"] is None]


def fuse_attention_quant(attention: Node, round_through: bool) -> None:
    """Quantize inside the attention what a static quantization behind it would.

    Args:
        attention: One of `attention_nodes`; the quantization and the views before it go.
        round_through: Round to the model's dtype before quantizing.

    Raises:
        NotFusedError: No static quantization follows, or it is not the output's only use.
    """
    output = item(attention, 0)
    if output is None:
        raise NotFusedError(f"the output of {attention.name} is not used")
    quant = find_static_quant(output)
    if depends_on(quant.scale, attention):
        raise NotFusedError(f"its scale {quant.scale.name} is computed from {attention.name}")
    lift_above(quant.scale, attention)
    set_argument(attention, "out_scale", _as_op_scale(quant.scale, attention))
    set_argument(attention, "round_through", round_through)
    refresh(attention)
    refresh(output)
    _drop_quantization(output, quant)


def _as_op_scale(scale: Node, attention: Node) -> Node:
    """The scale in a shape that the operators take."""
    shape = value_of(scale).shape
    if len(shape) <= 1:
        return scale
    return insert_before(attention, _ATEN.reshape.default, scale, [shape.numel()])


def _drop_quantization(output: Node, quant: StaticQuant) -> None:
    """Keep the views between the output and its former quantization, on codes."""
    codes = output
    for node in quant.nodes:
        if is_view(node) and node.target is not _ATEN.clone.default:
            node.update_arg(0, codes)
            refresh(node)
            codes = node
    quant.nodes[-1].replace_all_uses_with(codes)
    erase_unused(quant.nodes[-1])
