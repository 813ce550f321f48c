"""Which columns of another tensor a node takes, and how nodes are joined to one."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from quantattn.fusion.graphs import (
    convert_target,
    is_view,
    op_name,
    positional,
    same_size,
    value_of,
)

__all__ = ["columns_of", "has_shape", "joined_parts"]

_SPLITS = ("aten::split", "aten::split_with_sizes")
_LAST = (None, 2**63 - 1)


def columns_of(node: Node) -> tuple[Node, range]:
    """The tensor whose last axis `node` takes numbers from, before conversions, and which ones."""
    taken = _taken(node)
    if taken is None:
        width = value_of(node).shape[-1]
        return node, range(width if isinstance(width, int) else 0)
    inner, part = taken
    source, columns = columns_of(inner)
    return source, columns[part]


def _taken(node: Node) -> tuple[Node, slice] | None:
    """What a node takes its last axis from, and which part of it; None where the tensor begins."""
    arguments: Any = positional(node)
    if convert_target(node) is torch.float32:
        return arguments[0], slice(None)
    if op_name(node) == "aten::slice":
        given: list[Any] = [*arguments[1:], *(0, None, None, 1)[len(arguments) - 1 :]]
        bounds = [None if bound in _LAST else bound for bound in given[1:]]
        is_known = all(bound is None or isinstance(bound, int) for bound in bounds)
        return (arguments[0], slice(*bounds)) if is_known and _is_last(given[0], node) else None
    if op_name(node) == "aten::select":
        return _selected(*arguments)
    if node.target is operator.getitem and op_name(arguments[0]) == "aten::unbind":
        whole, *axis = positional(arguments[0])
        return _selected(whole, axis[0] if axis else 0, arguments[1])
    if node.target is operator.getitem and op_name(arguments[0]) in _SPLITS:
        return _split_off(*arguments)
    return None


def _split_off(split: Node, index: int) -> tuple[Node, slice] | None:
    arguments: Any = positional(split)
    whole, sizes = arguments[:2]
    if not isinstance(sizes, list):
        sizes = [sizes] * (index + 1)
    are_known = all(isinstance(size, int) for size in sizes)
    if not (are_known and _is_last(arguments[2] if len(arguments) > 2 else 0, whole)):
        return None
    start = sum(sizes[:index])
    return whole, slice(start, start + sizes[index])


def _selected(view: Node, axis: int, index: int) -> tuple[Node, slice] | None:
    """One of two, where the last axis is seen as pairs of numbers or as two halves."""
    if not is_view(view):
        return None
    whole, shape = positional(view)[0], value_of(view).shape
    if axis % len(shape) == len(shape) - 1 and has_shape(whole, (*shape[:-2], shape[-2] * 2)):
        return (whole, slice(index, None, 2)) if shape[-1] == 2 else None
    if axis % len(shape) == len(shape) - 2 and has_shape(whole, (*shape[:-2], shape[-1] * 2)):
        half = shape[-1]
        return (whole, slice(index * half, (index + 1) * half)) if shape[-2] == 2 else None
    return None


def joined_parts(node: Node) -> tuple[Node, Node, bool] | None:
    """The two nodes that make up the last axis, and whether their numbers alternate in it."""
    if op_name(node) == "aten::cat":
        first_and_second, *axis = positional(node)
        is_pair = len(first_and_second) == 2 and _is_last(axis[0] if axis else 0, node)
        return (*first_and_second, False) if is_pair else None
    inner = positional(node)[0] if is_view(node) else None
    stacked = joined_parts(inner) if isinstance(inner, Node) else None
    if stacked is None or stacked[2] or not all(map(_has_new_last_axis, stacked[:2])):
        return None
    first, second = (positional(part)[0] for part in stacked[:2])
    shape = value_of(first).shape
    return (first, second, True) if has_shape(node, (*shape[:-1], shape[-1] * 2)) else None


def _has_new_last_axis(node: Node) -> bool:
    return is_view(node) and has_shape(node, (*value_of(positional(node)[0]).shape, 1))


def has_shape(node: Node, shape: tuple[Any, ...]) -> bool:
    """Whether a node gives a tensor of this shape in every run of the graph."""
    value: Tensor = value_of(node)
    return value.dim() == len(shape) and all(map(same_size, value.shape, shape))


def _is_last(axis: object, node: Node) -> bool:
    return axis in (-1, value_of(node).dim() - 1)
