"""Recognise a rotary embedding, however it is spelled: what is rotated, and by which angles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from quantattn.fusion.columns import columns_of, has_shape, joined_parts
from quantattn.fusion.graphs import (
    convert_target,
    is_view,
    op_name,
    positional,
    same_size,
    value_of,
)

__all__ = ["Rotation", "match_rotation"]

_ATEN = torch.ops.aten
_MUL, _ADD, _SUB = _ATEN.mul.Tensor, _ATEN.add.Tensor, _ATEN.sub.Tensor
_FIRST = (_SUB, (_MUL, "a", "cos"), (_MUL, "b", "sin"))
_SECOND = (_ADD, (_MUL, "b", "cos"), (_MUL, "a", "sin"))
_WHOLE = (_ADD, (_MUL, "x", "cos"), (_MUL, "turned", "sin"))
_COMPLEX = (
    _ATEN.view_as_real.default,
    (_MUL, (_ATEN.view_as_complex.default, "x"), "angles"),
)
"""An operator and its inputs; a name stands for any node, everywhere for the same."""
_ANGLES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Rotation:
    """Pairs (a, b) of a head's first numbers -> (a cos - b sin, b cos + a sin); the others stay.

    Attributes:
        input: What is rotated, `[..., head_dim]`, shape and dtype of the result.
        width: How many numbers of a head turn.
        cos: Cosines, broadcast against `input`; with `is_complex` cosines and sines.
        sin: Sines, likewise.
        is_interleaved: Which numbers are pairs: (2 i, 2 i + 1), or (i, i + width / 2).
        is_doubled: Whether `cos` and `sin` have a number for each of a pair, not one for both.
    """

    input: Node
    width: int
    cos: Node
    sin: Node
    is_interleaved: bool
    is_doubled: bool = False

    @property
    def is_complex(self) -> bool:
        """Whether cosines and sines are one complex tensor."""
        return self.cos is self.sin


def match_rotation(node: Node) -> Rotation | None:
    """The rotation whose result `node` gives; None if it gives something else."""
    value = value_of(node)
    result = positional(node)[0] if convert_target(node) is value.dtype else node
    if value_of(result).dtype not in (value.dtype, torch.float32):
        return None
    parts = joined_parts(result)
    rest = None if parts is None or parts[2] else columns_of(parts[1])
    for turned, others in ((result, None), *([(parts[0], rest)] if parts and rest else [])):
        for found in (*_by_parts(turned), *_by_whole(turned), *_by_complex(turned)):
            end = value_of(found.input).shape[-1]
            stays = _rest(found, end)
            if others == stays and _fits(found, value):
                return found
    return None


def _rest(rotation: Rotation, end: Any) -> tuple[Node, range] | None:
    """The columns that stay; None: all turn."""
    is_whole = same_size(rotation.width, end)
    return None if is_whole else (rotation.input, range(rotation.width, end))


def _by_parts(node: Node) -> Iterator[Rotation]:
    """Both numbers of a pair by themselves, then joined."""
    parts = joined_parts(node)
    if parts is None:
        return
    first, second, is_interleaved = parts
    for begun in _unified(_FIRST, first, {}):
        for bound in _unified(_SECOND, second, begun):
            found = _turned(bound["a"], bound["b"], is_interleaved)
            if found is not None:
                yield Rotation(*found, bound["cos"], bound["sin"], is_interleaved)


def _by_whole(node: Node) -> Iterator[Rotation]:
    """The sum x * cos + turned * sin, where (a, b) is turned to (-b, a)."""
    for bound in _unified(_WHOLE, node, {}):
        parts = joined_parts(bound["turned"])
        if parts is not None and op_name(parts[0]) == "aten::neg":
            found = _turned(parts[1], positional(parts[0])[0], parts[2])
            if found is not None and columns_of(bound["x"]) == (found[0], range(found[1])):
                yield Rotation(*found, bound["cos"], bound["sin"], parts[2], is_doubled=True)


def _by_complex(node: Node) -> Iterator[Rotation]:
    """Pairs as complex numbers, multiplied by complex angles."""
    for bound in _unified(_COMPLEX, positional(node)[0] if is_view(node) else None, {}):
        pairs, angles = bound["x"], bound["angles"]
        whole = positional(pairs)[0] if is_view(pairs) else None
        if isinstance(whole, Node) and has_shape(node, value_of(whole).shape):
            source, columns = columns_of(whole)
            width = len(columns)
            keeps_rows = has_shape(pairs, (*value_of(whole).shape[:-1], width // 2, 2))
            if keeps_rows and columns == range(width):
                yield Rotation(source, width, angles, angles, True)


def _unified(pattern: Any, node: Any, bound: dict[str, Node]) -> Iterator[dict[str, Node]]:
    """All ways in which the nodes behind `node` are the pattern."""
    if isinstance(pattern, str):
        if bound.get(pattern, node) is node:
            yield {**bound, pattern: node}
        return
    target, *parts = pattern
    if not isinstance(node, Node) or node.target is not target or node.kwargs:
        return
    inputs = [leaf for leaf in tree_leaves(node.args) if isinstance(leaf, Node)]
    for order in permutations(inputs) if target in (_MUL, _ADD) else [inputs]:
        ways = [bound] if len(order) == len(parts) else []
        for part, given in zip(parts, order, strict=False):
            ways = [way for earlier in ways for way in _unified(part, given, earlier)]
        yield from ways


def _turned(first: Node, second: Node, is_interleaved: bool) -> tuple[Node, int] | None:
    """The tensor of whose last axis these are the pairs, and how many of its numbers they are."""
    (source, ours), (other, others) = columns_of(first), columns_of(second)
    width = 2 * len(ours)
    columns = range(width)
    half = width // 2
    cut = (columns[::2], columns[1::2]) if is_interleaved else (columns[:half], columns[half:])
    return (source, width) if source is other and width and (ours, others) == cut else None


def _fits(rotation: Rotation, result: torch.Tensor) -> bool:
    """Whether input and result are alike, and there is an angle for each pair."""
    source, cos, sin = (value_of(n) for n in (rotation.input, rotation.cos, rotation.sin))
    angles = rotation.width if rotation.is_doubled else rotation.width // 2
    dtypes = (torch.complex64,) if rotation.is_complex else _ANGLES
    return (
        source.dtype is result.dtype
        and has_shape(rotation.input, result.shape)
        and cos.dtype is sin.dtype
        and cos.dtype in dtypes
        and cos.shape == sin.shape
        and cos.dim() > 0
        and same_size(cos.shape[-1], angles)
    )
