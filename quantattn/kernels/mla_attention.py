"""mla_attention on a GPU: the kernels of paged_attention over rows that are key and value."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from quantattn.kernels._attention_arguments import TileSizes, latent_arguments
from quantattn.kernels._attention_call import LatentCall
from quantattn.kernels._prefill import launch_prefill
from quantattn.kernels._split_decode import launch_decode
from quantattn.kernels.hopper import mla

__all__ = ["mla_attention", "tile_sizes"]


def mla_attention(call: LatentCall, *, sizes: TileSizes | None = None) -> tuple[Tensor, Tensor]:
    """See `quantattn.ops.mla_attention`; the LSE is empty where it is not asked for.

    Queries of up to `call.decode_limit` tokens go to the kernel for Hopper where that supports the
    call, and else, or where `sizes` are given, to that for every device. Tile sizes are those of
    `tile_sizes` unless given.
    """
    if call.query.dtype == torch.float8_e4m3fn:
        call = replace(call, query=call.query.half())
    if len(call.query) == 0:
        return call.new_outputs()
    is_hoppers = sizes is None and mla.unsupported(call) is None
    out, lse = mla.decode(call) if is_hoppers else call.new_outputs()
    sizes = sizes or tile_sizes(call)
    arguments = latent_arguments(call, out, lse)
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(call.query):
        if not is_hoppers:
            launch_decode(arguments, call.decode_limit, sizes)
        if call.max_seqlen_q > call.decode_limit:
            launch_prefill(arguments, call.decode_limit, sizes)
    return out, lse


def tile_sizes(call: LatentCall) -> TileSizes:
    """Tiles of 512 + 64 columns that fit: 227 KB of shared memory on Hopper, 99 KB on sm_89."""
    rows = max(16, triton.next_power_of_2(call.group_size * max(1, call.decode_limit)))
    if call.product_dtype == torch.float32:
        return TileSizes(rows, 16, 4, 1)
    return TileSizes(rows, 32, 8, 2 if call.is_hopper else 1)
