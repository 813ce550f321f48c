"""Prefill on Hopper: what the kernel can do, and how it is launched."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton import next_power_of_2
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quantattn.kernels import _hopper_prefill_fp8 as fp8
from quantattn.kernels._attend_spec import Side, SideSpec, Spec
from quantattn.kernels._attention_arguments import Arguments
from quantattn.kernels._attention_call import AttentionCall, PackedCall
from quantattn.kernels._devices import is_hopper, multiprocessors
from quantattn.kernels._hopper_memory import tile_layout
from quantattn.kernels._hopper_prefill_kernel import hopper_prefill_kernel
from quantattn.kernels._hopper_prefill_plan import (
    ENTRY,
    entries_of_a_sequence,
    first_entry,
    hopper_prefill_plan_kernel,
    most_entries,
)
from quantattn.kernels._launches import Launches

__all__ = ["Sizes", "choose_sizes", "launch", "unsupported"]

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
    dtypes = (call.query.dtype, stored)
    if dtypes != (torch.float8_e4m3fn, torch.float8_e4m3fn):
        return f"query of {dtypes[0]} over {dtypes[1]}: expected e4m3 over e4m3"
    if call.prob_scale is None:
        return "prob_scale: expected one"
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


def launch(arguments: Arguments, decode_limit: int) -> None:
    """Attend with all queries of more than `decode_limit` tokens; where it is 0, write padding."""
    sizes = choose_sizes(arguments.spec)
    spec = arguments.spec_for(STRIP, sizes.block_n)
    device = arguments.query.numbers.device
    plan, num_entries = _make_plan(arguments, decode_limit, spec, sizes.groups)
    constants = (spec, arguments.output_spec, sizes.stages, sizes.groups, sizes.registers)
    _PREFILL.launch(
        (device, constants, *_output_key(arguments)),
        (min(multiprocessors(device), num_entries * spec.num_kv_heads), 1, 1),
        (
            arguments.output,
            _describe_query(arguments),
            _describe(arguments.keys, spec.keys, spec),
            _describe(arguments.values, spec.values, spec),
            plan,
            arguments.sinks,
            arguments.batch,
        ),
        constants,
        num_warps=4,
        launch_pdl=True,
    )


def _output_key(arguments: Arguments) -> tuple[Hashable, ...]:
    """What the kernel is compiled for, beside its constants."""
    rows, lse, scale = arguments.output
    tensors = (rows, lse, scale, arguments.sinks)
    return tuple([None if x is None else (x.dtype, x.data_ptr() % 16) for x in tensors])


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
    if values == 256:
        return Sizes(block_n=64, stages=3, groups=2, registers=232)
    if keys == 256:
        return Sizes(block_n=128, stages=2, groups=2, registers=232)
    if values == 64:
        return Sizes(block_n=128, stages=4, groups=3, registers=152)
    return Sizes(block_n=128, stages=4, groups=3, registers=160)


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
    constants = (groups, spare, fp8.HEADROOM.value, heads, spec, SLOTS)
    absent = tuple([scale.numbers is None for scale in arguments.scales])
    _PLAN.launch(
        (plan.device, constants, absent),
        (1, 1, 1),
        (plan, arguments.scales, batch, arguments.softmax_scale, decode_limit, count),
        constants,
        num_warps=8,
    )
    return plan, count


def _describe_query(arguments: Arguments) -> TensorDescriptor:
    """Describe the query to the engine that loads boxes of it: the tokens of a strip."""
    numbers = arguments.query.numbers.view(torch.float8_e4m3fn)
    part = min(128, arguments.spec.keys.columns)
    layout = tile_layout(part, 8, 3)
    return TensorDescriptor.from_tensor(numbers, [STRIP, 1, part], layout)


def _describe(rows: Side, side: SideSpec, spec: Spec) -> TensorDescriptor:
    """Describe K or V rows as `[blocks, tokens, heads, width]`; without blocks there is one."""
    columns, length = min(128, side.columns), rows.codes.shape[0]
    if spec.block_size is None:
        blocks, tokens, token_stride = 1, length, rows.block_stride
        box = spec.block_n
    else:
        blocks, tokens, token_stride = length, spec.block_size, side.token_stride
        box = min(tokens, spec.block_n)
    return TensorDescriptor(
        rows.codes.view(torch.float8_e4m3fn),
        [blocks, tokens, spec.num_kv_heads, side.width],
        [rows.block_stride, token_stride, side.head_stride, 1],
        [1, box, 1, columns],
        tile_layout(columns, 8, 4),
    )


def _unsupported_pages(call: AttentionCall) -> str | None:
    pages = call.kv_cache
    if call.layout.format.name != "fp8_e4m3":
        return f"kv_cache_dtype {call.layout.format.name}: expected fp8_e4m3"
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
