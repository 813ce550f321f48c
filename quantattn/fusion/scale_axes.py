"""Which columns each number of a broadcast scale reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from quantattn.fusion.graphs import is_view, op_name, positional, same_size, value_of

__all__ = ["BroadcastScale", "broadcast_scale"]

_ATEN = torch.ops.aten
Axes = tuple[tuple[Any, bool], ...]
"""Row-major axes as (size, whether the scale varies along it), those of size 1 left out."""


@dataclass(frozen=True)
class BroadcastScale:
    """A tensor that was reshaped, expanded or inverted on its way to a division.

    Attributes:
        node: What gives the tensor.
        axes: How its numbers lie in what it is broadcast to; None: along no whole axes.
        is_inverted: Whether the division is a multiplication by its reciprocal.
    """

    node: Node
    axes: Axes | None
    is_inverted: bool = False

    def cuts(self, columns: Any) -> bool:
        """Whether it scales equal runs of a row's `columns`, in order and alike in every row."""
        numbers = value_of(self.node).numel()
        if same_size(numbers, 1):
            return True
        axes, width = self.axes or (), 1
        while axes and not axes[0][1]:
            axes = axes[1:]
        while axes and not axes[-1][1]:
            width, axes = width * axes[-1][0], axes[:-1]
        in_order = bool(axes) and all(varies for _, varies in axes)
        return in_order and same_size(width * numbers, columns)


def broadcast_scale(node: Node, shape: Sequence[Any]) -> BroadcastScale:
    """Follow a scale, broadcast to `shape`, back through views, expansions and reciprocals."""
    source = _source(node)
    axes = _expanded(source.axes, value_of(node).shape, shape)
    return BroadcastScale(source.node, axes, source.is_inverted)


def _source(node: Node) -> BroadcastScale:
    inner = _passed_on(node)
    if inner is None:
        sizes = (size for size in value_of(node).shape if not same_size(size, 1))
        return BroadcastScale(node, tuple((size, True) for size in sizes))
    source = _source(inner)
    if op_name(node) == "aten::expand":
        axes = _expanded(source.axes, value_of(inner).shape, value_of(node).shape)
        return BroadcastScale(source.node, axes, source.is_inverted)
    inverts = op_name(node) in ("aten::reciprocal", "aten::div")
    return BroadcastScale(source.node, source.axes, source.is_inverted ^ inverts)


def _passed_on(node: Node) -> Node | None:
    """What a node gives on, as it is or inverted; None where the tensor begins."""
    if is_view(node) or op_name(node) in ("aten::expand", "aten::reciprocal"):
        inner: Node = positional(node)[0]
        return inner
    if node.target is _ATEN.mul.Tensor and 1.0 in node.args:
        return next((arg for arg in node.args if isinstance(arg, Node)), None)
    if node.target is _ATEN.div.Tensor and node.args[0] == 1.0:
        divisor: Node = positional(node)[1]
        return divisor
    return None


def _expanded(axes: Axes | None, sizes: Sequence[Any], to: Sequence[Any]) -> Axes | None:
    """Axes of a tensor of `sizes` after it is expanded to the sizes `to`."""
    sizes = [1] * (len(to) - len(sizes)) + list(sizes)
    behind: Any = 1
    for old, new in zip(reversed(sizes), reversed(to), strict=True):
        if axes is not None and not same_size(old, new):
            axes = _with_constant_axis(axes, new, behind)
        behind = behind * new
    return axes


def _with_constant_axis(axes: Axes, size: Any, behind: Any) -> Axes | None:
    """The axes with one more, along which nothing varies, ahead of the last `behind` elements."""
    product: Any = 1
    for place in range(len(axes), -1, -1):
        if same_size(product, behind):
            return (*axes[:place], (size, False), *axes[place:])
        product = product * axes[place - 1][0]
    return None
