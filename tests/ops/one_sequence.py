"""One sequence of FP8 keys and values, attended to in pages or packed, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantattn import ops
from quantattn.testing import GARBAGE_BLOCK, poisoned_pages

__all__ = ["PATHS", "attend", "attend_packed", "attend_paged"]

PATHS = ["paged", "packed"]
BLOCK_SIZE = 16


def attend(path: str, *tensors: Tensor, device: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and LSE, on the CPU, of `attend_paged` or `attend_packed`."""
    run = {"paged": attend_paged, "packed": attend_packed}[path]
    query, key, value, k_scale, v_scale = (t.to(device) for t in tensors)
    given = {n: o.to(device) if isinstance(o, Tensor) else o for n, o in options.items()}
    out, lse = run(query, key, value, k_scale, v_scale, **given)
    return out.cpu(), lse.cpu()


def attend_paged(
    query: Tensor, key: Tensor, value: Tensor, k_scale: Tensor, v_scale: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Write keys and values to poisoned pages, the last block first, and attend to them."""
    num_keys, num_kv_heads, head_dim = key.shape
    count, device = -(-num_keys // BLOCK_SIZE), query.device
    page_size = BLOCK_SIZE * num_kv_heads * (head_dim + value.shape[2])
    pages = poisoned_pages(count + 1, page_size, torch.float8_e4m3fn, gap=64).to(device)
    slots = torch.arange(num_keys)
    slots = (count - 1 - slots // BLOCK_SIZE) * BLOCK_SIZE + slots % BLOCK_SIZE
    scales = {"k_scale": k_scale, "v_scale": v_scale, "kv_cache_dtype": "fp8"}
    ops.write_kv(key, value, pages, slots.to(device), **scales)
    table = [*reversed(range(count)), GARBAGE_BLOCK]
    return ops.paged_attention(
        query,
        pages,
        cu_seqlens_q=torch.tensor([0, len(query)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_keys], dtype=torch.int32, device=device),
        block_table=torch.tensor([table], dtype=torch.int32, device=device),
        max_seqlen_q=len(query),
        num_kv_heads=num_kv_heads,
        head_dim_v=value.shape[2],
        return_lse=True,
        **scales,
        **options,
    )


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, k_scale: Tensor, v_scale: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Quantize keys and values and attend to them where they lie."""
    ends = torch.tensor([[0, len(query)], [0, len(key)]], dtype=torch.int32, device=query.device)
    return ops.varlen_attention(
        query,
        ops.static_quant_fp8(key, k_scale),
        ops.static_quant_fp8(value, v_scale),
        cu_seqlens_q=ends[0],
        cu_seqlens_k=ends[1],
        max_seqlen_q=len(query),
        max_seqlen_k=len(key),
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=True,
        **options,
    )
