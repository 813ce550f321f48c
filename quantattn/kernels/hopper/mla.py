"""MLA decode on Hopper: what its two kernels can do, which is launched, and how."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quantattn.kernels._attend_spec import Side, Spec
from quantattn.kernels._attention_arguments import SPECS, Arguments, latent_arguments
from quantattn.kernels._attention_call import LatentCall
from quantattn.kernels._devices import multiprocessors
from quantattn.kernels._launches import Launches
from quantattn.kernels._partials import Partials, new_partials
from quantattn.kernels.hopper.decode import launch_merge
from quantattn.kernels.hopper.memory import tile_layout
from quantattn.kernels.hopper.mla_boxes import PART
from quantattn.kernels.hopper.mla_kernel import hopper_mla_kernel
from quantattn.kernels.hopper.mla_narrow import hopper_mla_narrow_kernel

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
NARROW_ROWS = 16
"""Query rows of a tile of the kernel for few of them."""
NARROW_MOST = 32
"""Rows of a sequence up to which that kernel is the faster one."""
NARROW_BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Tokens of a page that it loads in boxes."""
NARROW_CTAS, NARROW_STAGES, NARROW_REGISTERS, LOADER_REGISTERS = 2, 2, 128, 40
"""CTAs on an SM, tiles of each in shared memory, and registers of a thread."""

_WIDE = Launches(hopper_mla_kernel)
_NARROW = Launches(hopper_mla_narrow_kernel)


def unsupported(call: LatentCall) -> str | None:
    """Why the kernels cannot serve a call; None: one can."""
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
    is_narrow = _is_narrow(call)
    call = grouped(call, is_narrow=is_narrow)
    out, lse = call.new_outputs()
    arguments = latent_arguments(call, out, lse)
    rows = call.decode_limit * call.group_size
    spec = spec_of(arguments.spec, rows, is_narrow=is_narrow)
    # All CTAs run at once.
    ctas = multiprocessors(call.query.device) * (NARROW_CTAS if is_narrow else 1)
    num_workers = max(1, ctas // spec.num_kv_heads)
    partials = new_partials(spec, num_workers, call.num_seqs, rows, call.query.device)
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(call.query):
        _launch(call, arguments, spec, partials, num_workers, rows, is_narrow=is_narrow)
        launch_merge(call, arguments, spec, partials, num_workers, rows)
    return out, lse


def _is_narrow(call: LatentCall) -> bool:
    """Whether all rows of a sequence fit in a narrow tile, and the engine can load its pages."""
    rows = call.query.shape[1] * call.decode_limit
    block_size = call.layout.block_size(call.kv_cache)
    is_fp8 = call.layout.format.is_quantized
    return is_fp8 and rows <= NARROW_MOST and block_size in NARROW_BLOCK_SIZES


def grouped(call: LatentCall, *, is_narrow: bool) -> LatentCall:
    """The call with as many heads in a group as fill a tile."""
    return replace(call, tile_rows=NARROW_ROWS if is_narrow else TILE)


@lru_cache(maxsize=SPECS)
def spec_of(spec: Spec, rows: int, *, is_narrow: bool) -> Spec:
    """The spec of a kernel; the one for many rows multiplies FP8 codes as float16 numbers."""
    if is_narrow:
        block_m = next(m for m in (4, 8, NARROW_ROWS) if m >= rows)
        return replace(spec, block_m=block_m, block_n=TILE)
    compute = spec.compute if spec.codes is None else tl.float16
    return replace(spec, block_m=TILE, block_n=TILE, compute=compute)


def _launch(
    call: LatentCall,
    arguments: Arguments,
    spec: Spec,
    partials: Partials,
    num_workers: int,
    rows: int,
    *,
    is_narrow: bool,
) -> None:
    launches, registers, constants = _WIDE, MOST_REGISTERS, (rows, spec, *REGISTERS)
    pages: tuple[Side | TensorDescriptor, ...] = (arguments.keys,)
    if is_narrow:
        launches, registers = _NARROW, NARROW_REGISTERS
        constants = (rows, spec, NARROW_STAGES, LOADER_REGISTERS)
        pages = (_describe_pages(call, PART.value), _describe_pages(call, WIDTHS[1]))
    launches.launch(
        (call.query.device, spec, rows),
        (num_workers * spec.num_kv_heads, 1, 1),
        (
            partials,
            arguments.query,
            *pages,
            arguments.scales,
            arguments.batch,
            call.softmax_scale,
            call.decode_limit,
        ),
        constants,
        num_warps=4,
        maxnreg=registers,
    )


def _describe_pages(call: LatentCall, columns: int) -> TensorDescriptor:
    """Describe pages to the engine that loads boxes of them, so many columns wide."""
    pages, width = call.kv_cache, call.layout.head_dim
    block_size = call.layout.block_size(pages)
    return TensorDescriptor(
        pages,
        [pages.shape[0], block_size, width],
        [pages.stride(0), width, 1],
        [1, min(block_size, TILE), columns],
        tile_layout(columns, 8, 3),
    )
