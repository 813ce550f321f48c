"""What the fusions need to know about FX graphs, and the few changes that they make to them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

__all__ = [
    "are_alike",
    "bound_arguments",
    "convert_target",
    "depends_on",
    "erase_unused",
    "insert_before",
    "is_view",
    "item",
    "lift_above",
    "op_name",
    "positional",
    "refresh",
    "same_size",
    "set_argument",
    "sole_user",
    "target_name",
    "value_of",
]

_VIEWS = {
    "aten::_unsafe_view",
    "aten::alias",
    "aten::clone",
    "aten::reshape",
    "aten::squeeze",
    "aten::unsqueeze",
    "aten::view",
}


def target_name(target: object) -> str | None:
    """`namespace::name` of an operator; None for anything else.

    Example:
        >>> target_name(torch.ops.aten.add.Tensor)
        'aten::add'
    """
    return target.name().partition(".")[0] if isinstance(target, OpOverload) else None


def op_name(node: Node) -> str | None:
    """Name of the operator that a node calls; None for any other node."""
    return target_name(node.target)


def value_of(node: Node) -> Any:
    """The fake tensor, number or tuple that stands for what a node gives."""
    return node.meta["val"]


def is_view(node: Node) -> bool:
    """Whether a node keeps all elements in their order: reshape, contiguous and the like.

    What sees the same bytes as another dtype has other elements.
    """
    return op_name(node) in _VIEWS and node.target is not torch.ops.aten.view.dtype


def positional(node: Node) -> tuple[Any, ...]:
    """Arguments of a node that stand by position: nodes, numbers, lists of such."""
    return node.args


def convert_target(node: Node) -> torch.dtype | None:
    """The dtype that a node converts to; None for a node that is no conversion."""
    if node.target is torch.ops.prims.convert_element_type.default:
        return _dtype(node.args[1])
    if op_name(node) == "aten::_to_copy" and set(node.kwargs) <= {"dtype"}:
        return _dtype(node.kwargs.get("dtype"))
    return None


def _dtype(argument: object) -> torch.dtype | None:
    return argument if isinstance(argument, torch.dtype) else None


def bound_arguments(node: Node) -> dict[str, Any]:
    """Arguments of an operator's node by name, defaults included."""
    schema = node.target._schema  # type: ignore[union-attr]
    bound = {argument.name: argument.default_value for argument in schema.arguments}
    names = [argument.name for argument in schema.arguments]
    return bound | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def set_argument(node: Node, name: str, argument: Any) -> None:
    """Give one argument of an operator's node, which may stand by position or by name."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    index = names.index(name)
    if index < len(node.args):
        node.update_arg(index, argument)
    else:
        node.update_kwarg(name, argument)


def item(node: Node, index: int) -> Node | None:
    """The node that takes one entry of what `node` gives, if it is taken."""
    taken = (user for user in node.users if user.target is operator.getitem)
    return next((user for user in taken if user.args[1] == index), None)


def sole_user(node: Node) -> Node | None:
    """The only node that uses `node`; None if there are several, or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def same_size(first: Any, second: Any) -> bool:
    """Whether two sizes, numbers or symbols, are equal in every run of the graph."""
    return bool(statically_known_true(first == second))


def are_alike(first: Any, second: Any) -> bool:
    """Whether two arguments are the same, or views and conversions of the same."""
    if not (isinstance(first, Node) and isinstance(second, Node)) or first is second:
        return bool(first is second or first == second)
    passes_on = is_view(first) or convert_target(first) is not None
    arguments = (first.args, second.args)
    return (
        passes_on
        and first.target is second.target
        and first.kwargs == second.kwargs
        and len({*map(len, arguments)}) == 1
        and all(map(are_alike, *arguments))
    )


def depends_on(node: Node, other: Node) -> bool:
    """Whether `node` is `other` or is computed from it."""
    seen: set[Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current is other:
            return True
        if current not in seen and other < current:
            seen.add(current)
            waiting.extend(current.all_input_nodes)
    return False


def lift_above(node: Node, place: Node) -> None:
    """Move `node` and all that it is computed from above `place`, which it must not depend on."""
    late: set[Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if place < current and current not in late:
            late.add(current)
            waiting.extend(current.all_input_nodes)
    for current in sorted(late):
        place.prepend(current)


def erase_unused(node: Node) -> None:
    """Erase a node that nothing uses any more, and then what only it had used."""
    erased: set[Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current.op == "call_function" and not current.users and current not in erased:
            waiting.extend(current.all_input_nodes)
            current.graph.erase_node(current)
            erased.add(current)


def insert_before(place: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Call `target` just above `place`, with the value that stands for its result."""
    graph = place.graph
    with graph.inserting_before(place):
        node = graph.call_function(target, args, kwargs)
    node.meta = {key: place.meta[key] for key in ("stack_trace",) if key in place.meta}
    refresh(node)
    return node


def refresh(node: Node) -> None:
    """Compute anew the value that stands for a node's result, after its arguments changed."""
    values = (other.meta.get("val") for other in node.graph.nodes)
    fake_mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    args, kwargs = (map_arg(part, value_of) for part in (node.args, node.kwargs))
    with fake_mode:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator,arg-type]
