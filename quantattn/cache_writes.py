"""Which scales have written entries into which caches, while both are alive.

A cache's entries can be read only with the scale that wrote them. This table lets the owner of a
scale ask, before changing it, whether any cache still holds such entries. Replaying a CUDA graph
writes no notes: after `forget`, capture again or write once eagerly before relying on
`holds_entries`.
"""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["follow", "forget", "holds_entries", "note_write"]

_Pair = tuple[StorageWeakRef, StorageWeakRef]

# scale address -> cache address -> weak references to both; an address alone may be reused.
_writes: dict[int, dict[int, _Pair]] = {}
# cache address -> addresses of the scales that it was written with.
_scales_of: dict[int, set[int]] = {}


def note_write(scale: Tensor, cache: Tensor) -> None:
    """Note that entries of `cache` were written with `scale`.

    Args:
        scale: The scale's own storage (a layer's buffer, or a view that starts where it starts).
        cache: Pages of one layer.

    Example:
        >>> import torch
        >>> scale, cache = torch.tensor(0.5), torch.zeros(2, 32)
        >>> note_write(scale, cache)
        >>> holds_entries(scale)
        True
    """
    caches = _writes.setdefault(scale.data_ptr(), {})
    known = caches.get(cache.data_ptr())
    if known is not None and _alive(known):
        return
    for address in [a for a, pair in caches.items() if not _alive(pair)]:
        _drop(scale.data_ptr(), address)
    _writes.setdefault(scale.data_ptr(), {})[cache.data_ptr()] = (
        StorageWeakRef(scale.untyped_storage()),
        StorageWeakRef(cache.untyped_storage()),
    )
    _scales_of.setdefault(cache.data_ptr(), set()).add(scale.data_ptr())


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
    caches = _writes.get(scale.data_ptr(), {})
    return any(_alive(pair) for pair in caches.values())


def forget(cache: Tensor) -> None:
    """Drop every note about `cache`, whose entries are gone.

    Args:
        cache: Pages of one layer, as given to `note_write`.

    Example:
        >>> import torch
        >>> scale, cache = torch.tensor(0.5), torch.zeros(2, 32)
        >>> note_write(scale, cache)
        >>> forget(cache)
        >>> holds_entries(scale)
        False
    """
    for scale_address in list(_scales_of.get(cache.data_ptr(), ())):
        _drop(scale_address, cache.data_ptr())


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
    for address, pair in _writes.get(scale.data_ptr(), {}).items():
        if _alive(pair):
            _writes.setdefault(moved.data_ptr(), {})[address] = (own, pair[1])
            _scales_of.setdefault(address, set()).add(moved.data_ptr())


def _drop(scale_address: int, cache_address: int) -> None:
    caches = _writes.get(scale_address, {})
    caches.pop(cache_address, None)
    if not caches:
        _writes.pop(scale_address, None)
    scales = _scales_of.get(cache_address, set())
    scales.discard(scale_address)
    if not scales:
        _scales_of.pop(cache_address, None)


def _alive(pair: _Pair) -> bool:
    return not (pair[0].expired() or pair[1].expired())
