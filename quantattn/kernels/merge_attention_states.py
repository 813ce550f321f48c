"""merge_attention_states in Triton: out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b)."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantattn.kernels._counts import cdiv, next_power_of_2
from quantattn.kernels._tiles import convert, divide, encode_fp8, is_native

__all__ = ["merge_attention_states"]

TILE = 2048
"""Numbers of a side that a program takes at most, 16 a thread."""


@triton.jit
def _load_lse(lse_ptr, heads, mask) -> tl.tensor:
    """LSE of some heads, -inf where a side saw no key and outside the mask."""
    lse = tl.load(lse_ptr + heads, mask=mask, other=float("-inf"))
    return tl.where(lse == float("inf"), float("-inf"), lse)


@triton.jit
def _load_out(out_ptr, lse, heads, columns, mask) -> tl.tensor:
    """Output of some heads as float32, 0 where there is no key and outside the mask."""
    seen = (lse != float("-inf"))[:, None]
    offsets = heads[:, None] + columns[None, :]
    return tl.load(out_ptr + offsets, mask=mask & seen, other=0.0).to(tl.float32)


@triton.jit
def _merge_kernel(
    out_ptr,
    lse_ptr,
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    scale_ptr,
    out_a_strides,
    lse_a_strides,
    out_b_strides,
    lse_b_strides,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ROUND_THROUGH: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Merge some heads of one token.

    Grid: tokens, NUM_HEADS / BLOCK_HEADS.
    Layout: inputs at any stride of tokens and heads, unit stride in a head; outputs contiguous,
        bytes where there is a scale. lse_ptr is None where no LSE is asked for, scale_ptr where the
        output is not quantized. GROUP_SIZE is the columns of a token that share a scale, None where
        all share one.
    Precision: float32; a side without keys is not read and leaves the other's numbers as they are.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = heads < NUM_HEADS
    lse_a = _load_lse(lse_a_ptr + token * lse_a_strides[0], heads * lse_a_strides[1], is_head)
    lse_b = _load_lse(lse_b_ptr + token * lse_b_strides[0], heads * lse_b_strides[1], is_head)
    largest = tl.maximum(lse_a, lse_b)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a, weight_b = tl.exp(lse_a - largest), tl.exp(lse_b - largest)
    total = weight_a + weight_b
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    if lse_ptr is not None:
        lse = tl.where(is_empty, float("-inf"), largest + tl.log(total))
        tl.store(lse_ptr + token * NUM_HEADS + heads, lse, mask=is_head)

    columns = tl.arange(0, BLOCK_D)
    mask = is_head[:, None] & (columns < HEAD_DIM)[None, :]
    a_ptr, b_ptr = out_a_ptr + token * out_a_strides[0], out_b_ptr + token * out_b_strides[0]
    a = _load_out(a_ptr, lse_a, heads * out_a_strides[1], columns, mask)
    b = _load_out(b_ptr, lse_b, heads * out_b_strides[1], columns, mask)
    out = tl.div_rn(weight_a, total)[:, None] * a + tl.div_rn(weight_b, total)[:, None] * b
    places = heads[:, None] * HEAD_DIM + columns[None, :]
    out_ptr += token * (NUM_HEADS * HEAD_DIM)
    if scale_ptr is None:
        tl.store(out_ptr + places, convert(out, DTYPE, NATIVE), mask=mask)
    else:
        if ROUND_THROUGH:
            out = convert(out, DTYPE, NATIVE).to(tl.float32)
        if GROUP_SIZE is None:
            scale = tl.load(scale_ptr)
        else:
            scale = tl.load(scale_ptr + places // GROUP_SIZE, mask=mask, other=1.0)
        tl.store(out_ptr + places, encode_fp8(divide(out, scale, NATIVE), 3, NATIVE), mask=mask)


def merge_attention_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out_scale: Tensor | None,
    round_through: bool,
    out_dtype: torch.dtype,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """See `quantattn.ops.merge_attention_states`; the LSE is empty where it is not asked for."""
    num_tokens, num_heads, head_dim = out_a.shape
    stored = out_dtype if out_scale is None else torch.float8_e4m3fn
    out = torch.empty(out_a.shape, dtype=stored, device=out_a.device)
    lse = torch.empty((num_tokens, num_heads) if return_lse else 0, device=out_a.device)
    if lse_a.numel() == 0:
        return out, lse
    out_a, out_b = (x if x.stride(2) == 1 else x.contiguous() for x in (out_a, out_b))
    block_d = next_power_of_2(max(head_dim, 1))
    block_heads = min(max(TILE // block_d, 1), next_power_of_2(num_heads))
    num_groups = 1 if out_scale is None else out_scale.numel()
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(out_a):
        _merge_kernel[(num_tokens, cdiv(num_heads, block_heads))](
            out if out_scale is None else out.view(torch.uint8),
            lse if return_lse else None,
            out_a,
            lse_a,
            out_b,
            lse_b,
            None if out_scale is None else out_scale.contiguous(),
            out_a.stride()[:2],
            lse_a.stride(),
            out_b.stride()[:2],
            lse_b.stride(),
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            GROUP_SIZE=num_heads * head_dim // num_groups if num_groups > 1 else None,
            DTYPE=getattr(tl, str(out_dtype).removeprefix("torch.")),
            ROUND_THROUGH=round_through,
            NATIVE=is_native(out_a.device),
            BLOCK_HEADS=block_heads,
            BLOCK_D=block_d,
        )
    return out, lse
