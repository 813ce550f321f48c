"""MLA decode on Hopper: what the kernel can do, and how it is launched."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from quantattn.kernels._attend_spec import Spec
from quantattn.kernels._attention_arguments import SPECS, latent_arguments
from quantattn.kernels._attention_call import LatentCall
from quantattn.kernels._devices import multiprocessors
from quantattn.kernels._hopper_decode import launch_merge
from quantattn.kernels._hopper_mla_kernel import hopper_mla_kernel
from quantattn.kernels._split_decode import Partials

__all__ = ["decode", "grouped", "spec_of", "unsupported"]

WIDTHS = (512, 64)
"""Latent and rotated part of a row: those of DeepSeek's models."""
MODEL_DTYPES = {torch.bfloat16, torch.float16}
TILE = 64
"""Query rows and keys of a tile."""
MOST_REGISTERS = 168
"""Registers of a thread, before the two computing groups and the loading one share them out."""
REGISTERS = (200, 104)
"""Registers of a thread that computes, and of one that loads."""


def unsupported(call: LatentCall) -> str | None:
    """Why the kernel cannot serve a call; None: it can."""
    layout, pages = call.layout, call.kv_cache
    if not call.is_hopper:
        return f"device {call.query.device}: expected a GPU of compute capability 9"
    widths = (call.latent_dim, layout.head_dim - call.latent_dim)
    if widths != WIDTHS:
        return f"latent_dim and rope_dim {widths}: expected {WIDTHS}"
    served = MODEL_DTYPES if layout.format.is_quantized else {pages.dtype} & MODEL_DTYPES
    if call.query.dtype not in served:
        return (
            f"query of {call.query.dtype} over pages of {pages.dtype}: expected bf16 or fp16, the"
            " same over such pages"
        )
    pitch = pages.stride(0) * pages.itemsize
    if pitch % 16 != 0 or pages.data_ptr() % 16 != 0:
        return f"kv_cache: expected pages at multiples of 16 bytes, got one every {pitch} bytes"
    if call.num_seqs == 0 or len(pages) == 0:
        return "cu_seqlens_q and kv_cache: expected at least one sequence and one block"
    if call.decode_limit == 0:
        return f"max_seqlen_q {call.max_seqlen_q}: no decode rows"
    return None


def decode(call: LatentCall) -> tuple[Tensor, Tensor]:
    """Attend with all queries of up to `call.decode_limit` tokens, and write all padding.

    Returns:
        Output and LSE as `LatentCall.new_outputs` makes them; rows of longer queries are not
        written.
    """
    call = grouped(call)
    out, lse = call.new_outputs()
    arguments = latent_arguments(call, out, lse)
    spec = spec_of(arguments.spec)
    rows = call.decode_limit * call.group_size
    # All CTAs run at once, one on an SM.
    num_workers = max(1, multiprocessors(call.query.device) // spec.num_kv_heads)
    shape = (num_workers + call.num_seqs, spec.num_kv_heads, rows)
    partials = Partials(
        call.query.new_empty((*shape, spec.values.width), dtype=torch.float32),
        call.query.new_empty(shape, dtype=torch.float32),
    )
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(call.query):
        hopper_mla_kernel[(num_workers * spec.num_kv_heads,)](
            partials,
            arguments.query,
            arguments.keys,
            arguments.scales,
            arguments.batch,
            call.softmax_scale,
            call.decode_limit,
            ROWS=rows,
            SPEC=spec,
            REGISTERS=REGISTERS,
            num_warps=4,
            maxnreg=MOST_REGISTERS,
        )
        launch_merge(call, arguments, spec, partials, num_workers, rows)
    return out, lse


def grouped(call: LatentCall) -> LatentCall:
    """The call with as many heads in a group as fill a tile."""
    return replace(call, tile_rows=TILE)


@lru_cache(maxsize=SPECS)
def spec_of(spec: Spec) -> Spec:
    """The spec of the kernel, which multiplies FP8 codes as float16 numbers."""
    compute = spec.compute if spec.codes is None else tl.float16
    return replace(spec, block_m=TILE, block_n=TILE, compute=compute)
