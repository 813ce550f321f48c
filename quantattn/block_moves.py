"""Moves of whole blocks, bytes with the scales among them, in the pages of every layer at once.

Each move is one gather and one scatter a layer, whatever the format, the padding between pages and
the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantattn.errors import FormatError

__all__ = [
    "block_ids",
    "block_pairs",
    "copy_blocks",
    "read_blocks",
    "write_blocks",
    "zero_blocks",
]

_WORDS = (torch.int64, torch.int32, torch.int16)


def block_ids(name: str, blocks: Sequence[int] | Tensor, num_blocks: int) -> Tensor:
    """Check a list of blocks and give it as int64 on the host.

    Args:
        name: The argument's name.
        blocks: Block ids, each at most once.
        num_blocks: Pages a layer.

    Raises:
        FormatError: It is no flat list of integers, or an id is out of range or there twice.

    Example:
        >>> block_ids("blocks", [3, 0], 4)
        tensor([3, 0])
    """
    ids = _integers(name, blocks, "[num_blocks]", 1)
    _check_range(name, ids, num_blocks)
    _check_distinct(name, ids)
    return ids


def block_pairs(
    pairs: Sequence[tuple[int, int]] | Tensor, num_blocks: int
) -> tuple[Tensor, Tensor]:
    """Check pairs of blocks and give their sources and destinations, int64 on the host.

    Args:
        pairs: Source and destination of each copy; a source may serve several destinations.
        num_blocks: Pages a layer.

    Raises:
        FormatError: They are no pairs of integers, an id is out of range, or two pairs have the
            same destination.

    Example:
        >>> block_pairs([(3, 0), (3, 1)], 4)
        (tensor([3, 3]), tensor([0, 1]))
    """
    ids = _integers("pairs", pairs, "[num_pairs, 2]", 2).reshape(-1, 2)
    _check_range("pairs", ids, num_blocks)
    sources, destinations = ids.unbind(1)
    _check_distinct("pairs: destination", destinations)
    return sources, destinations


def copy_blocks(layers: Sequence[Tensor], sources: Tensor, destinations: Tensor) -> None:
    """Copy blocks inside each layer; all sources are read before any destination is written.

    Args:
        layers: Pages of each layer, `[num_blocks, page_size]`; the same pages may be there twice.
        sources: Block ids, `[num_pairs]`, int64.
        destinations: Block ids, `[num_pairs]`, int64, each at most once.

    Example:
        >>> pages = torch.tensor([[1, 2], [3, 4]])
        >>> copy_blocks([pages], torch.tensor([0, 1]), torch.tensor([1, 0]))
        >>> pages.tolist()
        [[3, 4], [1, 2]]
    """
    # A layer that is there twice would see an exchange undone by the second turn.
    distinct = {(pages.data_ptr(), pages.stride(0)): pages for pages in layers}
    for pages in distinct.values():
        words = _words(pages)
        moved = words.index_select(0, sources.to(pages.device))
        words.index_copy_(0, destinations.to(pages.device), moved)


def read_blocks(layers: Sequence[Tensor], blocks: Tensor) -> Tensor:
    """Read blocks of all layers into host memory, pinned where the pages are on a CUDA device.

    Args:
        layers: Pages of each layer, `[num_blocks, page_size]`.
        blocks: Block ids, `[num_moved]`, int64.

    Returns:
        `[num_layers, num_moved, bytes of a block]`, uint8, on the CPU.

    Example:
        >>> read_blocks([torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)], torch.tensor([1]))
        tensor([[[3, 4]]], dtype=torch.uint8)
    """
    width = layers[0].shape[1] * layers[0].element_size()
    shape = (len(layers), len(blocks), width)
    data = torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=layers[0].is_cuda)
    for pages, rows in zip(layers, data, strict=True):
        words = _words(pages)
        rows.view(words.dtype).copy_(words.index_select(0, blocks.to(pages.device)))
    return data


def write_blocks(layers: Sequence[Tensor], blocks: Tensor, data: Tensor) -> None:
    """Write what `read_blocks` gave into blocks of all layers.

    Args:
        layers: Pages of each layer, `[num_blocks, page_size]`.
        blocks: Block ids, `[num_moved]`, int64, each at most once.
        data: `[num_layers, num_moved, bytes of a block]`, uint8.

    Example:
        >>> pages = torch.zeros(2, 2, dtype=torch.uint8)
        >>> write_blocks([pages], torch.tensor([1]), torch.tensor([[[3, 4]]], dtype=torch.uint8))
        >>> pages.tolist()
        [[0, 0], [3, 4]]
    """
    for pages, rows in zip(layers, data, strict=True):
        words = _words(pages)
        words.index_copy_(0, blocks.to(pages.device), rows.view(words.dtype).to(pages.device))


def zero_blocks(layers: Sequence[Tensor], blocks: Tensor) -> None:
    """Set every byte of some blocks of all layers to zero, which is zero in every format.

    Args:
        layers: Pages of each layer, `[num_blocks, page_size]`.
        blocks: Block ids, `[num_moved]`, int64.

    Example:
        >>> pages = torch.ones(2, 2)
        >>> zero_blocks([pages], torch.tensor([1]))
        >>> pages.tolist()
        [[1.0, 1.0], [0.0, 0.0]]
    """
    for pages in layers:
        _words(pages).index_fill_(0, blocks.to(pages.device), 0)


def _words(pages: Tensor) -> Tensor:
    """View pages as the widest integers that fit; devices move those faster than bytes."""
    view = pages.view(torch.uint8)
    measures = (view.shape[1], view.stride(0), view.storage_offset())
    for dtype in _WORDS:
        if all(measure % dtype.itemsize == 0 for measure in measures):
            return view.view(dtype)
    return view


def _integers(name: str, given: object, shape: str, ndim: int) -> Tensor:
    try:
        ids = torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise FormatError(f"{name}: got {given!r}, expected integers {shape}") from None
    if ids.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    is_integer = ids.dtype in (torch.int32, torch.int64)
    if not is_integer or ids.ndim != ndim or (ndim == 2 and ids.shape[1] != 2):
        raise FormatError(
            f"{name}: got {ids.dtype} of shape {list(ids.shape)}, expected integers {shape}"
        )
    return ids.to(torch.int64)


def _check_range(name: str, ids: Tensor, num_blocks: int) -> None:
    outside = ids[(ids < 0) | (ids >= num_blocks)].tolist()
    if outside:
        raise FormatError(
            f"{name}: got block {outside[0]}, expected blocks from 0 to {num_blocks - 1}"
        )


def _check_distinct(name: str, ids: Tensor) -> None:
    values, counts = ids.unique(return_counts=True)
    twice = values[counts > 1].tolist()
    if twice:
        raise FormatError(f"{name}: block {twice[0]} is there more than once; name it once")
