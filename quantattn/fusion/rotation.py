"""Recognise a rotary embedding in float32: what is rotated, and by which cosines and sines."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from quantattn.fusion.graphs import convert_target, op_name, positional, same_size, value_of

__all__ = ["Rotation", "match_rotation"]

_ATEN = torch.ops.aten
_MUL, _ADD, _SUB = _ATEN.mul.Tensor, _ATEN.add.Tensor, _ATEN.sub.Tensor
_TURN = (
    _ATEN.cat.default,
    (_SUB, (_MUL, "a", "cos"), (_MUL, "b", "sin")),
    (_ADD, (_MUL, "b", "cos"), (_MUL, "a", "sin")),
)
"""An operator and its inputs; a name stands for any node, everywhere for the same."""
_END = 2**63 - 1


@dataclass(frozen=True)
class Rotation:
    """Halves (a, b) of every head -> (a cos - b sin, b cos + a sin), in the input's dtype.

    Attributes:
        input: What is rotated, `[num_tokens, heads, head_dim]`.
        cos: Cosines, `[num_tokens, 1, head_dim / 2]`, float32.
        sin: Sines, likewise.
    """

    input: Node
    cos: Node
    sin: Node


def match_rotation(node: Node) -> Rotation | None:
    """The rotation whose result `node` gives; None if it gives something else."""
    joined = _unconverted(node, value_of(node).dtype)
    for bound in _unified(_TURN, joined, {}):
        whole = _whole(bound["a"], bound["b"])
        rotation = whole and Rotation(whole, bound["cos"], bound["sin"])
        if rotation and _fits(rotation, value_of(node)) and positional(joined)[1:] in ((-1,), (2,)):
            return rotation
    return None


def _unified(pattern: Any, node: Any, bound: dict[str, Node]) -> Iterator[dict[str, Node]]:
    """All ways in which the nodes behind `node` are the pattern."""
    if isinstance(pattern, str):
        if bound.get(pattern, node) is node:
            yield {**bound, pattern: node}
        return
    target, *parts = pattern
    if not isinstance(node, Node) or node.target is not target:
        return
    inputs = [leaf for leaf in tree_leaves(node.args) if isinstance(leaf, Node)]
    for order in permutations(inputs) if target in (_MUL, _ADD) else [inputs]:
        ways = [bound] if len(order) == len(parts) else []
        for part, given in zip(parts, order, strict=False):
            ways = [way for earlier in ways for way in _unified(part, given, earlier)]
        yield from ways


def _whole(first: Node, second: Node) -> Node | None:
    """The tensor whose last axis these are the halves of, before any conversion to float32."""
    first, second = (_unconverted(half, torch.float32) for half in (first, second))
    ours, others = positional(first), positional(second)
    source = ours[0] if ours and isinstance(ours[0], Node) else first
    if first.target is second.target is operator.getitem and op_name(source) == "aten::split":
        whole, size, *axis = positional(source)
        axes = {*axis}
        are_halves = (ours, others) == ((source, 0), (source, 1))
    elif op_name(first) == op_name(second) == "aten::slice":
        whole, size, axes = source, ours[3], {ours[1], others[1]}
        are_halves = ours[2] == 0 and others[0] is whole and others[2:3] == (size,)
        are_halves &= others[3:] in ((_END,), (value_of(whole).shape[-1],))
    else:
        return None
    value = value_of(whole)
    is_last = bool(axes) and axes <= {-1, value.dim() - 1}
    if are_halves and is_last and isinstance(size, int) and same_size(2 * size, value.shape[-1]):
        return _unconverted(whole, torch.float32)
    return None


def _fits(rotation: Rotation, result: torch.Tensor) -> bool:
    """Whether a token's angles serve all its heads, and dtypes are as the operator has them."""
    angles = (result.shape[0], 1, result.shape[-1] // 2)
    return value_of(rotation.input).dtype is result.dtype and all(
        value.dtype is torch.float32
        and result.dim() == value.dim() == 3
        and all(map(same_size, value.shape, angles))
        for value in (value_of(rotation.cos), value_of(rotation.sin))
    )


def _unconverted(node: Node, dtype: torch.dtype) -> Node:
    inner: Node = positional(node)[0] if convert_target(node) is dtype else node
    return inner
