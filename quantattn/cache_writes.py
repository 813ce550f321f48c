"""Which scales have written entries into which caches, while both are alive.

A cache's entries can be read only with the scale that wrote them. This table lets the owner of a
scale ask, before changing it, whether any cache still holds such entries. Replaying a CUDA graph
writes no notes: after `forget`, capture again or write once eagerly before relying on
`holds_entries`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["follow", "forget", "holds_entries", "note_write"]

_Pair = tuple[StorageWeakRef, StorageWeakRef]
# Bytes of a view of pages: address, number of pages, from a page to the next, of a page.
_Place = tuple[int, int, int, int]

# scale address -> pages -> weak references to both storages; an address alone may be reused.
_writes: dict[int, dict[_Place, _Pair]] = {}
_lock = threading.Lock()


def note_write(scale: Tensor, cache: Tensor) -> None:
    """Note that entries of `cache` were written with `scale`.

    Args:
        scale: The scale's own storage (a layer's buffer, or a view that starts where it starts).
        cache: Pages of one layer, `[num_blocks, page_size]`.

    Example:
        >>> import torch
        >>> scale, cache = torch.tensor(0.5), torch.zeros(2, 32)
        >>> note_write(scale, cache)
        >>> holds_entries(scale)
        True
    """
    address, place = scale.data_ptr(), _place(cache)
    known = _writes.get(address, {}).get(place)
    if known is not None and _alive(known):
        return
    pair = StorageWeakRef(scale.untyped_storage()), StorageWeakRef(cache.untyped_storage())
    with _lock:
        _keep(lambda _, pair: _alive(pair))
        _writes.setdefault(address, {})[place] = pair


def holds_entries(scale: Tensor) -> bool:
    """Whether a living cache holds entries that were written with `scale`.

    Args:
        scale: The tensor that was given to `note_write`, or one that shares its address.

    Example:
        >>> import torch
        >>> holds_entries(torch.tensor(0.25))
        False
    """
    if not _writes or scale.is_meta or isinstance(scale, FakeTensor):
        return False
    with _lock:
        return any(_alive(pair) for pair in _writes.get(scale.data_ptr(), {}).values())


def forget(cache: Tensor) -> None:
    """Drop every note about `cache` and the views of pages inside it: their entries are gone.

    Args:
        cache: Pages of one layer, `[num_blocks, page_size]`.

    Example:
        >>> import torch
        >>> scale, cache = torch.tensor(0.5), torch.zeros(2, 32)
        >>> note_write(scale, cache)
        >>> forget(cache)
        >>> holds_entries(scale)
        False
    """
    if cache.is_meta or isinstance(cache, FakeTensor):
        return
    own = _place(cache)
    with _lock:
        _keep(lambda place, _: not _covers(own, place))


def follow(scale: Tensor, moved: Tensor) -> None:
    """Let the notes about a scale hold for the tensor that takes its place.

    Args:
        scale: The tensor that was given to `note_write`.
        moved: Where its value is from now on.

    Example:
        >>> import torch
        >>> scale, cache = torch.tensor(0.5), torch.zeros(2, 32)
        >>> note_write(scale, cache)
        >>> moved = scale.clone()
        >>> follow(scale, moved)
        >>> holds_entries(moved)
        True
    """
    if scale.is_meta or moved.is_meta:
        return
    own = StorageWeakRef(moved.untyped_storage())
    with _lock:
        notes = _writes.get(scale.data_ptr(), {})
        followed = {place: (own, pair[1]) for place, pair in notes.items() if _alive(pair)}
        if followed:
            _writes.setdefault(moved.data_ptr(), {}).update(followed)


def _keep(is_kept: Callable[[_Place, _Pair], bool]) -> None:
    for address, notes in list(_writes.items()):
        kept = {place: pair for place, pair in notes.items() if is_kept(place, pair)}
        if kept:
            _writes[address] = kept
        else:
            del _writes[address]


def _place(cache: Tensor) -> _Place:
    (num_pages, size), (stride, _), width = cache.shape, cache.stride(), cache.element_size()
    return cache.data_ptr(), num_pages, (stride if num_pages > 1 else size) * width, size * width


def _covers(own: _Place, other: _Place) -> bool:
    """Whether every page of another view lies in these pages."""
    (address, num_pages, stride, size), (other_address, count, step, width) = own, other
    offset = other_address - address
    if offset < 0 or offset + (count - 1) * step + width > (num_pages - 1) * stride + size:
        return False
    in_step = count == 1 or step % stride == 0
    return stride == size or (in_step and offset % stride + width <= size)


def _alive(pair: _Pair) -> bool:
    return not (pair[0].expired() or pair[1].expired())
