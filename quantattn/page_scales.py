"""Which pages have had the scales inside them initialised: once, and never over written entries.

A view of pages is known by its bytes (address, pages, stride, size) and its layout, for as long as
a storage that was given with it lives. So layers that share a cache, layers packed in one storage,
padded pages, and storage that is freed and allocated again are told apart by their bytes alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from quantattn.errors import FormatError
from quantattn.layout import PageLayout
from quantattn.validation import check_pages

__all__ = ["forget_page_scales", "initialize_page_scales", "reset_page_scales"]

INITIAL = (1.0, 0.0)
"""Scale and offset of a row that nothing was written to."""


class _Extent(NamedTuple):
    """The bytes of a view of pages."""

    device: torch.device
    address: int
    num_pages: int
    stride: int
    size: int

    @property
    def end(self) -> int:
        return self.address + (self.num_pages - 1) * self.stride + self.size

    def starts(self, base: int) -> Tensor:
        return torch.arange(self.num_pages) * self.stride + (self.address - base)


class _View(NamedTuple):
    extent: _Extent
    layout: PageLayout


_owners: dict[_View, set[StorageWeakRef]] = {}
_lock = threading.Lock()


def initialize_page_scales(pages: Tensor, layout: PageLayout) -> bool:
    """Set the scales inside pages to 1.0 (offsets to 0.0), the first time these pages are seen.

    Call it before anything is written. Where the bytes are also seen through another view whose
    scales have been written since, those pages are left as they are. A page whose rows are all
    zero counts as not written. Waits for the device only where views overlap.

    Args:
        pages: One layer's pages, `[num_blocks, page_size]`, uint8.
        layout: How a page is laid out.

    Returns:
        Whether any scale was set; False for a format that keeps no scales in its pages.

    Raises:
        FormatError: The pages do not fit the layout, or a CUDA graph is being captured, which would
            set the scales again at each replay.

    Example:
        >>> from quantattn.formats import parse_kv_cache_dtype
        >>> layout = PageLayout(2, 8, 8, format=parse_kv_cache_dtype("int8_per_token_head"))
        >>> pages = torch.zeros(4, layout.page_size(16), dtype=torch.uint8)
        >>> initialize_page_scales(pages, layout), initialize_page_scales(pages, layout)
        (True, False)
        >>> layout.key_scale_view(pages).unique()
        tensor([1.])
    """
    if not layout.format.has_page_scales or _has_no_data(pages):
        return False
    view = _View(_extent(pages), layout)
    owner = StorageWeakRef(pages.untyped_storage())
    if owner in _owners.get(view, ()):
        return False
    check_pages(pages, layout, layout.format, device=pages.device)
    with _lock:
        _drop_dead_views()
        is_set = view not in _owners and _initialize(pages, view)
        _owners.setdefault(view, set()).add(owner)
    return is_set


def forget_page_scales(pages: Tensor) -> None:
    """Forget every view of these bytes: they were released and mapped anew under a living storage.

    Args:
        pages: `[num_blocks, page_size]`, of any layout.

    Example:
        >>> from quantattn.formats import parse_kv_cache_dtype
        >>> layout = PageLayout(2, 8, 8, format=parse_kv_cache_dtype("int8_per_token_head"))
        >>> pages = torch.zeros(4, layout.page_size(16), dtype=torch.uint8)
        >>> initialize_page_scales(pages, layout)
        True
        >>> forget_page_scales(pages)
        >>> initialize_page_scales(pages, layout)
        True
    """
    if _has_no_data(pages):
        return
    extent = _extent(pages.view(torch.uint8))
    with _lock:
        for view in [view for view in _owners if _overlaps(extent, view.extent)]:
            del _owners[view]


def reset_page_scales(pages: Tensor, layout: PageLayout, blocks: Tensor | None = None) -> None:
    """Set the scales inside pages to 1.0 and offsets to 0.0, whatever they hold.

    Args:
        pages: One layer's pages, `[num_blocks, page_size]`.
        layout: How a page is laid out; nothing is done for a format without such scales.
        blocks: Block ids, int64, on the pages' device; None: all.

    Example:
        >>> from quantattn.formats import parse_kv_cache_dtype
        >>> layout = PageLayout(1, 4, 4, format=parse_kv_cache_dtype("int8_per_token_head"))
        >>> pages = torch.zeros(3, layout.page_size(1), dtype=torch.uint8)
        >>> reset_page_scales(pages, layout, torch.tensor([1]))
        >>> layout.value_scale_view(pages).flatten()
        tensor([0., 1., 0.])
    """
    for numbers, initial in _initial_numbers(pages, layout):
        if blocks is None:
            numbers.fill_(initial)
        else:
            numbers.index_fill_(0, blocks, initial)


def _initialize(pages: Tensor, view: _View) -> bool:
    if pages.is_cuda and torch.cuda.is_current_stream_capturing():
        raise FormatError(
            "kv_cache: the scales in these pages are not initialised and a CUDA graph is being"
            " captured; call initialize_page_scales before the capture"
        )
    written = torch.zeros(view.extent.num_pages, dtype=torch.bool)
    for other in _owners:
        if _overlaps(view.extent, other.extent):
            first, last = _pages_under(view.extent, other.extent)
            count = _written_pages(pages, other).cumsum(0)
            count = torch.cat([count.new_zeros(1), count])
            written |= count[last] > count[first]
    if written.all():
        return False
    blocks = (~written).nonzero().flatten().to(pages.device) if written.any() else None
    reset_page_scales(pages, view.layout, blocks)
    return True


def _written_pages(pages: Tensor, other: _View) -> Tensor:
    """Which pages of another view of the same memory hold scales that were written, on the host."""
    storage, extent = pages.untyped_storage(), other.extent
    offset = extent.address - storage.data_ptr()
    if offset < 0 or extent.end - storage.data_ptr() > storage.nbytes():
        # Seen through another storage only: it cannot be read here, so nothing is risked.
        return torch.ones(extent.num_pages, dtype=torch.bool)
    seen = pages.as_strided((extent.num_pages, extent.size), (extent.stride, 1), offset)
    differs = [
        (numbers != initial).flatten(1).any(1)
        for numbers, initial in _initial_numbers(seen, other.layout)
    ]
    return torch.stack(differs).any(0).cpu()


def _initial_numbers(pages: Tensor, layout: PageLayout) -> Iterator[tuple[Tensor, float]]:
    """Views of all scales and of all offsets in the pages, each with its initial value."""
    for view in layout.scale_views(pages):
        parts = (view,) if layout.format.row_scales == 1 else view.unbind(-1)
        yield from zip(parts, INITIAL, strict=False)


def _pages_under(extent: _Extent, other: _Extent) -> tuple[Tensor, Tensor]:
    """For each page of `extent`: the range of the pages of `other` that it shares bytes with."""
    base = min(extent.address, other.address)
    starts, others = extent.starts(base), other.starts(base)
    first = torch.searchsorted(others + other.size, starts, right=True)
    last = torch.searchsorted(others, starts + extent.size)
    return first, last


def _overlaps(extent: _Extent, other: _Extent) -> bool:
    if extent.device != other.device or extent.end <= other.address or other.end <= extent.address:
        return False
    first, last = _pages_under(extent, other)
    return bool((first < last).any())


def _extent(pages: Tensor) -> _Extent:
    num_pages, size = pages.shape
    return _Extent(pages.device, pages.data_ptr(), num_pages, pages.stride(0), size)


def _has_no_data(pages: Tensor) -> bool:
    return pages.is_meta or isinstance(pages, FakeTensor) or pages.numel() == 0


def _drop_dead_views() -> None:
    for view, owners in list(_owners.items()):
        living = {owner for owner in owners if not owner.expired()}
        if living:
            _owners[view] = living
        else:
            del _owners[view]
