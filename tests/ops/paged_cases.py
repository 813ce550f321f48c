"""Batches for the kernels of paged attention: the call on any device, its result in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantattn.formats import parse_kv_cache_dtype
from quantattn.kernels._attention_call import AttentionCall
from quantattn.layout import PageLayout
from quantattn.testing import PagedBatch, make_batch
from tests import fp8_oracle
from tests.ops import oracles, page_oracle

MIXED = ([1, 3, 0, 20, 1, 2], [17, 3, 0, 41, 33, 16])
FORMATS = ("auto", "fp8_e4m3", "fp8_e5m2", *page_oracle.FORMATS)


@dataclass(frozen=True)
class Case:
    """A batch in poisoned pages, with what the bytes of the pages mean."""

    batch: PagedBatch
    layout: PageLayout
    block_size: int
    scales: tuple[Tensor | None, Tensor | None]

    def call(self, device: str = "cpu", **changes: Any) -> AttentionCall:
        """The call of the kernels, some of its arguments changed."""
        meta = self.batch.metadata
        given = {
            "query": self.batch.query,
            "kv_cache": self.batch.pages,
            "cu_seqlens_q": meta.cu_seqlens_q,
            "seq_lens": meta.seq_lens,
            "block_table": meta.block_table,
            "k_scale": self.scales[0],
            "v_scale": self.scales[1],
            "q_scale": None,
            "prob_scale": None,
            "softmax_scale": self.layout.head_dim**-0.5,
            "causal": True,
            "sliding_window": None,
            "logits_soft_cap": None,
            "sinks": None,
            "out_scale": None,
            "round_through": False,
            "out_dtype": self.batch.query.dtype,
            "return_lse": True,
            **changes,
        }
        given = {name: moved(value, device) for name, value in given.items()}
        return AttentionCall(layout=self.layout, max_seqlen_q=meta.max_seqlen_q, **given)

    def expected(self, query: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Output and LSE in float64; the options are those of `oracles.Options`."""
        query = self.batch.query.double() if query is None else query
        options.setdefault("softmax_scale", self.layout.head_dim**-0.5)
        query_lens = self.batch.metadata.cu_seqlens_q.diff().tolist()
        return oracles.attend(query, self.sequences(), query_lens, oracles.Options(**options))

    def sequences(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each sequence, float64 `[length, heads, width]`."""
        meta, size = self.batch.metadata, self.block_size
        lengths, tables = meta.seq_lens.tolist(), meta.block_table.tolist()
        slots = [
            [table[place // size] * size + place % size for place in range(length)]
            for table, length in zip(tables, lengths, strict=True)
        ]
        read = self._read_scaled if self.layout.format.has_page_scales else self._read
        return [read(some) for some in slots]

    def _read(self, slots: list[int]) -> tuple[Tensor, Tensor]:
        return oracles.read_cache(
            self.batch.pages,
            slots,
            heads=self.layout.num_kv_heads,
            dims=(self.layout.head_dim, self.layout.head_dim_v),
            order=self.layout.layout,
            kv_cache_dtype=self.layout.format.name,
            scales=self.scales,
        )

    def _read_scaled(self, slots: list[int]) -> tuple[Tensor, Tensor]:
        layout, heads = self.layout, range(self.layout.num_kv_heads)
        where = page_oracle.Pages(
            layout.format.name,
            (layout.head_dim, layout.head_dim_v),
            layout.num_kv_heads,
            self.block_size,
            layout.layout,
            layout.scale_placement,
        )
        pages = self.batch.pages.numpy()
        sides = []
        for side, width in enumerate(where.dims):
            rows = [
                where.read(pages[slot // where.size], side, slot % where.size, head)
                for slot in slots
                for head in heads
            ]
            found = np.array(rows, np.float64).reshape(len(slots), len(heads), width)
            sides.append(torch.from_numpy(found))
        return sides[0], sides[1]


def draw(
    name: str,
    lens: tuple[Sequence[int], Sequence[int]] = MIXED,
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    dims: tuple[int, int] = (24, 16),
    block_size: int = 16,
    order: str = "NHD",
    placement: str = "page",
    **more: Any,
) -> Case:
    """Draw a batch, with a scale a KV head where it needs any; `more` goes to `make_batch`."""
    fmt = parse_kv_cache_dtype(name)
    k_scale = v_scale = None
    if fmt.uses_layer_scales:
        k_scale = torch.linspace(0.03, 0.011, num_kv_heads)
        v_scale = torch.linspace(0.017, 0.05, num_kv_heads)
    batch = make_batch(
        *lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dims[0],
        head_dim_v=dims[1],
        block_size=block_size,
        kv_cache_dtype=name,
        layout=order,
        scale_placement=placement,
        k_scale=k_scale,
        v_scale=v_scale,
        **more,
    )
    layout = PageLayout(num_kv_heads, *dims, order, fmt, placement)
    return Case(batch, layout, block_size, (k_scale, v_scale))


def fp8_query(case: Case, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The query as e4m3 codes, and what they mean in float64."""
    heads = case.layout.num_kv_heads
    factor = torch.tensor(oracles.per_head(scale, heads), dtype=torch.float64)
    factor = factor.repeat_interleave(case.batch.query.shape[1] // heads)[:, None]
    numbers = (case.batch.query.double() / factor).numpy()
    codes = torch.from_numpy(fp8_oracle.encode(numbers, torch.float8_e4m3fn))
    meaning = fp8_oracle.decode(codes, torch.float8_e4m3fn) * factor
    return codes.view(torch.float8_e4m3fn), meaning


def moved(value: Any, device: str) -> Any:
    """The value on a device: of a tensor, all of its storage, so that gaps move too."""
    if not isinstance(value, Tensor) or value.device.type == device:
        return value
    storage = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).to(device)
    whole = storage.view(value.dtype)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())
