"""Decode on Hopper: what the kernel can do, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quantattn.kernels._attend_spec import Side, Spec
from quantattn.kernels._attention_arguments import SPECS, Arguments
from quantattn.kernels._attention_call import AttentionCall, LatentCall
from quantattn.kernels._counts import next_power_of_2
from quantattn.kernels._devices import is_hopper, multiprocessors
from quantattn.kernels._launches import Launches
from quantattn.kernels._partials import Partials, new_partials
from quantattn.kernels.hopper.decode_kernel import hopper_decode_kernel
from quantattn.kernels.hopper.decode_row_numbers import box_width, numbers_of_row
from quantattn.kernels.hopper.decode_tiles import part_columns
from quantattn.kernels.hopper.memory import tile_layout
from quantattn.kernels.hopper.merge import hopper_merge_kernel
from quantattn.layout import PageLayout

__all__ = ["launch", "launch_merge", "unsupported"]

OPERANDS = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int4": torch.int8,
}
"""What the engine that loads pages takes codes for."""
MODEL_DTYPES = {torch.bfloat16, torch.float16}
QUERY_DTYPES = MODEL_DTYPES | {torch.float8_e4m3fn}
HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128, 256)
STAGES_BYTES = 96 << 10
"""Shared memory for tiles of keys and values: what two CTAs on an SM have."""
MOST_STAGES = 6
"""Tiles of keys and values that are in shared memory; more would add nothing."""
LOADER_REGISTERS = 40
"""Registers of a thread of the warp that loads."""
FEW_MERGES = 512
"""Below so many sequences times KV heads, each query head is merged by a program of its own."""
MERGED_BY_WARP = 2048
"""Numbers that a warp reads at once."""
MERGED_BY_PROGRAM = 8192
"""Most numbers of the output that a program writes."""

_DECODE, _MERGE = Launches(hopper_decode_kernel), Launches(hopper_merge_kernel)


def unsupported(call: AttentionCall) -> str | None:
    """Why the kernel cannot serve a call; None: it can."""
    layout, pages = call.layout, call.kv_cache
    if not _is_hopper(call):
        return f"device {call.query.device}: expected a GPU of compute capability 9"
    if layout.format.has_page_scales and layout.scale_placement != "page":
        return f"scale_placement {layout.scale_placement}: expected page"
    served = QUERY_DTYPES if layout.format.is_quantized else {pages.dtype} & MODEL_DTYPES
    if call.query.dtype not in served:
        return (
            f"query of {call.query.dtype} over pages of {pages.dtype}: expected bf16 or fp16, the"
            " same over such pages, or e4m3 over FP8 pages"
        )
    if call.prob_scale is not None:
        return "prob_scale: expected none"
    dims = (layout.head_dim, layout.head_dim_v)
    if dims[0] != dims[1] or dims[0] not in HEAD_DIMS:
        return f"head_dim and head_dim_v {dims}: expected equal ones, of {HEAD_DIMS}"
    if pages.shape[0] == 0:
        return "kv_cache: expected at least one block"
    if layout.block_size(pages) not in BLOCK_SIZES:
        return f"block_size {layout.block_size(pages)}: expected one of {BLOCK_SIZES}"
    pitch = pages.stride(0) * pages.itemsize
    if pitch % 16 != 0 or pages.data_ptr() % 16 != 0:
        return f"kv_cache: expected pages at multiples of 16 bytes, got one every {pitch} bytes"
    if call.num_seqs == 0:
        return "cu_seqlens_q: expected at least one sequence"
    if call.decode_limit == 0:
        return f"max_seqlen_q {call.max_seqlen_q}, group size {call.group_size}: no decode rows"
    return None


def launch(call: AttentionCall, arguments: Arguments, *, beside: Tensor | None = None) -> None:
    """Attend with all queries of up to `call.decode_limit` tokens, and write all padding.

    The device must be the current one.

    Args:
        call: What is asked for.
        arguments: The same as kernels take it; rows of longer queries are not written.
        beside: The plan of the prefill that was launched last, whose tail this may run in; None:
            there is none. It must live until this is launched: what this allocates is written
            while that is read.
    """
    rows = call.decode_limit * call.group_size
    sizes = choose_sizes(rows, call.layout, call.kv_cache.itemsize)
    spec = arguments.spec_for(sizes.block_m, sizes.block_n)
    is_beside = beside is not None
    partials, num_workers = _launch_decode(call, arguments, spec, sizes, rows, is_beside=is_beside)
    launch_merge(call, arguments, spec, partials, num_workers, rows)


@dataclass(frozen=True)
class Sizes:
    """How a CTA works.

    Attributes:
        block_m: Query rows of a tile.
        block_n: Keys of a tile.
        stages: Tiles of keys and values that are in shared memory.
        ctas: CTAs that an SM runs at a time.
        registers: Registers of a thread, before loading and computing warps share them out.
    """

    block_m: int
    block_n: int
    stages: int
    ctas: int
    registers: int


@lru_cache(maxsize=SPECS)
def choose_sizes(rows: int, layout: PageLayout, itemsize: int) -> Sizes:
    """Sizes for so many query rows of a KV head, and pages of elements of so many bytes.

    Measured on an H200, 2026-11-30: at 128 numbers of FP8, two CTAs of three tiles of 128 keys read
    as fast as the device copies; tiles of 64 keys are 3 % slower, one CTA 6 %.
    """
    row_bytes = layout.format.code_width(layout.head_dim) * itemsize
    is_wide = max(row_bytes, layout.head_dim) > 128
    most_rows = _most_rows(layout)
    # Products have at least 8 columns, of which codes take two a row.
    fewest = 4 if layout.format.is_quantized else 8
    block_m = next(m for m in (fewest, 8, 16, 32) if m >= min(rows, most_rows))
    block_n = 64 if is_wide or block_m == most_rows else 128
    stages = min(MOST_STAGES, STAGES_BYTES // (2 * block_n * row_bytes))
    registers = 128 if is_wide or block_m > 8 else 112 if layout.format.bits == 4 else 96
    if stages < 3:
        return Sizes(block_m, block_n, stages=3, ctas=1, registers=registers)
    return Sizes(block_m, block_n, stages, ctas=2, registers=registers)


def _most_rows(layout: PageLayout) -> int:
    """Query rows whose sums fit in registers; more of a KV head read its keys once more."""
    if not layout.format.is_quantized:
        return 32
    return 32 >> int(layout.head_dim > 128) + int(layout.format.has_page_scales)


def _launch_decode(
    call: AttentionCall,
    arguments: Arguments,
    spec: Spec,
    sizes: Sizes,
    rows: int,
    *,
    is_beside: bool,
) -> tuple[Partials, int]:
    sharing = spec.num_kv_heads * -(-rows // sizes.block_m)
    # All CTAs run at once.
    num_workers = max(1, sizes.ctas * multiprocessors(call.query.device) // sharing)
    partials = new_partials(spec, num_workers, call.num_seqs, rows, call.query.device)
    _DECODE.launch(
        (call.query.device, spec, sizes, rows, is_beside),
        (num_workers * sharing, 1, 1),
        (
            partials,
            arguments.query,
            _describe_pages(call, spec),
            _describe_numbers(arguments.keys, spec),
            arguments.scales,
            arguments.batch,
            call.softmax_scale,
            call.decode_limit,
        ),
        (rows, spec, sizes.stages, LOADER_REGISTERS),
        num_warps=4,
        maxnreg=sizes.registers,
        launch_pdl=is_beside,
    )
    return partials, num_workers


def launch_merge(
    call: AttentionCall | LatentCall,
    arguments: Arguments,
    spec: Spec,
    partials: Partials,
    num_workers: int,
    rows: int,
) -> None:
    """Merge what a kernel found that deals out keys as `schedule` does."""
    heads, workers, num_warps = merge_sizes(spec, call.num_seqs, num_workers)
    parts = spec.num_kv_heads * -(-call.group_size // heads)
    constants = (rows, heads, workers, spec, arguments.output_spec)
    _MERGE.launch(
        (call.query.device, constants),
        (call.num_seqs * call.decode_limit, parts, 1),
        (
            arguments.output,
            partials,
            arguments.scales,
            call.sinks,
            arguments.batch,
            num_workers,
            call.decode_limit,
        ),
        constants,
        num_warps=num_warps,
        launch_pdl=True,
    )


@lru_cache(maxsize=SPECS)
def merge_sizes(spec: Spec, num_seqs: int, num_workers: int) -> tuple[int, int, int]:
    """Heads of a program, partial results that it reads at once, and its warps.

    Few sequences have many partial results each, and few programs.
    """
    heads = min(next_power_of_2(spec.group_size), MERGED_BY_PROGRAM // spec.values.width)
    heads = 1 if num_seqs * spec.num_kv_heads < FEW_MERGES else heads
    workers = min(64, max(2, next_power_of_2(num_workers // num_seqs + 1)))
    numbers = heads * workers * spec.values.width
    return heads, workers, min(8, max(1, numbers // MERGED_BY_WARP))


def _describe_pages(call: AttentionCall, spec: Spec) -> TensorDescriptor:
    """Describe each page as a matrix, K above V, to the engine that loads boxes of it."""
    pages, pitch = call.kv_cache, spec.keys.token_stride
    box, shared = _box(spec, pages.itemsize)
    block_size = call.layout.block_size(pages)
    rows = call.layout.page_size(block_size) // pitch
    return TensorDescriptor(
        pages if spec.codes is None else pages.view(OPERANDS[spec.codes]),
        [pages.shape[0], rows, pitch],
        [pages.stride(0), pitch, 1],
        box,
        shared,
    )


@lru_cache(maxsize=SPECS)
def _box(spec: Spec, itemsize: int) -> tuple[list[int], NVMMASharedLayout]:
    """What of a page is loaded at a time, and how it lies in shared memory."""
    part = part_columns(spec)
    tokens = min(spec.block_size or spec.block_n, spec.block_n)
    return [1, tokens, part], tile_layout(part, 8 * itemsize, 3)


def _describe_numbers(keys: Side, spec: Spec) -> TensorDescriptor | None:
    """Describe the numbers of each page's rows, which begin with K's: by side, head and kind."""
    if keys.numbers is None:
        return None
    kinds, head = numbers_of_row(spec), spec.keys.number_head_stride
    tokens = head // kinds
    return TensorDescriptor(
        keys.numbers,
        [len(keys.numbers), 2, spec.num_kv_heads * kinds, tokens],
        [keys.number_block_stride, spec.num_kv_heads * head, tokens, 1],
        [1, 2, kinds, box_width(spec)],
        NVMMASharedLayout(0, 32, rank=4),
    )


def _is_hopper(call: AttentionCall) -> bool:
    return is_hopper(call.query.device)
