"""Prefill on Hopper: what the kernel can do, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton import next_power_of_2
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quantattn.kernels._attend_spec import Side, SideSpec, Spec
from quantattn.kernels._attention_arguments import Arguments
from quantattn.kernels._attention_call import AttentionCall, PackedCall
from quantattn.kernels._devices import is_hopper, multiprocessors
from quantattn.kernels._launches import Launches
from quantattn.kernels.hopper import prefill_fp8 as fp8
from quantattn.kernels.hopper.memory import tile_layout
from quantattn.kernels.hopper.prefill_kernel import hopper_prefill_kernel
from quantattn.kernels.hopper.prefill_plan import (
    ENTRY,
    entries_of_a_sequence,
    first_entry,
    hopper_prefill_plan_kernel,
    most_entries,
)

__all__ = ["Sizes", "choose_sizes", "launch", "unsupported"]

CODES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int4": torch.int8,
}
"""Dtypes of stored codes; of int4, of two."""
NUMBERS = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 96, 128, 192, 256)
BLOCK_SIZES = (16, 32, 64, 128, 256)
STRIP = 64
"""Query rows of a strip: those of a product."""
SLOTS = 1024
"""Slots of a plan that are read at once."""


def unsupported(call: AttentionCall | PackedCall) -> str | None:
    """Why the kernel cannot serve a call; None: it can."""
    if not is_hopper(call.query.device):
        return f"device {call.query.device}: expected a GPU of compute capability 9"
    stored = _stored_dtype(call)
    served = _served_dtypes(call)
    if call.query.dtype not in served:
        return f"query of {call.query.dtype} over {stored}: expected one of {served}"
    if call.softmax_scale < 0:
        return f"softmax_scale {call.softmax_scale}: expected no negative one"
    dims = (call.query.shape[2], call.head_dim_v)
    if not set(dims) <= set(HEAD_DIMS):
        return f"head_dim and head_dim_v {dims}: expected each of {HEAD_DIMS}"
    if call.num_seqs == 0 or len(call.query) == 0:
        return "query: expected at least one token and one sequence"
    return _unsupported_pages(call) if isinstance(call, AttentionCall) else _unsupported_rows(call)


_PLAN = Launches(hopper_prefill_plan_kernel)
_PREFILL = Launches(hopper_prefill_kernel)


def launch(arguments: Arguments, decode_limit: int) -> Tensor:
    """Attend with all queries of more than `decode_limit` tokens; where it is 0, write padding.

    Returns:
        The plan that the kernel reads while it runs.
    """
    sizes = choose_sizes(arguments.spec)
    spec = arguments.spec_for(STRIP, sizes.block_n)
    device = arguments.query.numbers.device
    plan, num_entries = _make_plan(arguments, decode_limit, spec, sizes.groups)
    constants = (spec, arguments.output_spec, sizes.stages, sizes.groups, sizes.registers)
    _PREFILL.launch(
        (device, constants, arguments.query.numbers.dtype),
        (min(multiprocessors(device), num_entries * spec.num_kv_heads), 1, 1),
        (
            arguments.output,
            _describe_query(arguments),
            None if spec.has_inline_scales else _describe(arguments.keys, spec.keys, spec),
            None if spec.has_inline_scales else _describe(arguments.values, spec.values, spec),
            _row_scales(arguments),
            plan,
            arguments.sinks,
            # What only the plan needs: in a tuple each number would be compiled for.
            arguments.batch._replace(max_keys=0, num_seqs=0, num_tokens=0),
        ),
        constants,
        num_warps=4,
        launch_pdl=True,
    )
    return plan


@dataclass(frozen=True)
class Sizes:
    """How a CTA works.

    Attributes:
        block_n: Keys of a tile.
        stages: Tiles of keys and values that are in shared memory.
        groups: Warpgroups that attend, each with a strip of query rows.
        registers: Those of a thread of such a group; the one that loads has what they leave.
    """

    block_n: int
    stages: int
    groups: int
    registers: int


@lru_cache(maxsize=1024)
def choose_sizes(spec: Spec) -> Sizes:
    """Sizes that fit in 227 KB of shared memory and 64 K registers."""
    keys, values = spec.keys.columns, spec.values.columns
    if not spec.rounds_prob:
        return _sizes_for_numbers(spec)
    if 256 in (keys, values):
        return Sizes(block_n=128, stages=2, groups=2, registers=224)
    if (keys, values) == (64, 64) and spec.window is None and spec.soft_cap is None:
        return Sizes(block_n=128, stages=4, groups=4, registers=112)
    if values == 64:
        return Sizes(block_n=128, stages=4, groups=3, registers=152)
    return Sizes(block_n=128, stages=4, groups=3, registers=160)


def _row_scales(arguments: Arguments) -> tuple[Tensor, Tensor, int] | None:
    """The scales of K rows and of V rows, and the step between two blocks; None: there are none."""
    keys, values = arguments.keys, arguments.values
    if keys.numbers is None:
        return None
    return keys.numbers, values.numbers, keys.number_block_stride


def _sizes_for_numbers(spec: Spec) -> Sizes:
    """Sizes where operands are bf16 or fp16 numbers; those of codes need room for codes too."""
    columns = max(spec.keys.columns, spec.values.columns)
    if spec.has_row_scales and columns <= 128:
        return Sizes(block_n=64, stages=3, groups=3, registers=144)
    if columns == 64:
        return Sizes(block_n=128, stages=4, groups=3, registers=152)
    if columns == 128:
        return Sizes(block_n=128, stages=2, groups=3, registers=160)
    return Sizes(block_n=64 if spec.codes is None else 32, stages=2, groups=2, registers=232)


def _make_plan(
    arguments: Arguments, decode_limit: int, spec: Spec, groups: int
) -> tuple[Tensor, int]:
    """List the entries of a batch on the device, and say how many there can be."""
    batch = arguments.batch
    shape = (batch.num_tokens, batch.num_seqs, spec.group_size, STRIP, groups)
    count = most_entries(*shape)
    size = first_entry(spec.num_kv_heads) + count * ENTRY.value
    plan = arguments.query.numbers.new_empty((size,), dtype=torch.int32)
    spare = entries_of_a_sequence(spec.group_size, STRIP, groups)
    heads = next_power_of_2(spec.num_kv_heads)
    constants = (
        groups,
        spare,
        (fp8.HEADROOM.value if spec.rounds_prob else spec.headroom),
        heads,
        spec,
        SLOTS,
    )
    _PLAN.launch(
        (plan.device, constants),
        (1, 1, 1),
        (
            plan,
            arguments.scales,
            batch.cu_seqlens_q,
            batch.keys,
            arguments.softmax_scale,
            decode_limit,
            batch.max_keys,
            batch.num_seqs,
            batch.num_tokens,
            count,
        ),
        constants,
        num_warps=8,
    )
    return plan, count


def _describe_query(arguments: Arguments) -> TensorDescriptor:
    """Describe the query to the engine that loads boxes of it: the tokens of a strip."""
    rows = arguments.query.numbers
    if rows.dtype == torch.uint8:
        rows = rows.view(torch.float8_e4m3fn)
    part = min(128 // rows.itemsize, arguments.spec.keys.columns)
    layout = tile_layout(part, 8 * rows.itemsize, 3)
    return TensorDescriptor.from_tensor(rows, [STRIP, 1, part], layout)


def _describe(rows: Side, side: SideSpec, spec: Spec) -> TensorDescriptor:
    """Describe K or V rows as `[blocks, tokens, heads, width]`; without blocks there is one."""
    codes = rows.codes if spec.codes is None else rows.codes.view(CODES[spec.codes])
    packed = 2 if spec.codes == "int4" else 1
    columns, length = min(128 // codes.itemsize, side.columns // packed), codes.shape[0]
    if spec.block_size is None:
        blocks, tokens, token_stride = 1, length, rows.block_stride
        box = spec.block_n
    else:
        blocks, tokens, token_stride = length, spec.block_size, side.token_stride
        box = min(tokens, spec.block_n)
    return TensorDescriptor(
        codes,
        [blocks, tokens, spec.num_kv_heads, side.width // packed],
        [rows.block_stride, token_stride, side.head_stride, 1],
        [1, box, 1, columns],
        tile_layout(columns, 8 * codes.itemsize, 4),
    )


def _served_dtypes(call: AttentionCall | PackedCall) -> tuple[torch.dtype, ...]:
    """Dtypes of a query over the keys of a call."""
    stored = _stored_dtype(call)
    if call.prob_scale is not None:
        return (torch.float8_e4m3fn,) if stored == torch.float8_e4m3fn else ()
    if stored == torch.float32:
        return ()
    return (*((stored,) if stored in NUMBERS else NUMBERS), torch.float8_e4m3fn)


def _unsupported_pages(call: AttentionCall) -> str | None:
    pages = call.kv_cache
    if len(pages) == 0 or call.block_table.shape[1] == 0:
        return "kv_cache: expected at least one block and a block table with room for one"
    if call.layout.block_size(pages) not in BLOCK_SIZES:
        return f"block_size {call.layout.block_size(pages)}: expected one of {BLOCK_SIZES}"
    return _misaligned(query=call.query, kv_cache=pages)


def _unsupported_rows(call: PackedCall) -> str | None:
    if len(call.key) == 0:
        return "key: expected at least one token"
    return _misaligned(query=call.query, key=call.key, value=call.value)


def _misaligned(**tensors: Tensor) -> str | None:
    """Which of some tensors the engine that loads boxes cannot read."""
    for name, tensor in tensors.items():
        bytes_apart = [stride * tensor.itemsize for stride in tensor.stride()[:-1]]
        if tensor.stride(-1) != 1 or any(n % 16 for n in (*bytes_apart, tensor.data_ptr())):
            return f"{name}: expected rows at multiples of 16 bytes, got strides {tensor.stride()}"
    return None


def _stored_dtype(call: AttentionCall | PackedCall) -> torch.dtype:
    if isinstance(call, PackedCall):
        return call.key.dtype
    return call.layout.format.storage_dtype or call.kv_cache.dtype
