"""merge_attention_states: schema, checks, fake and dispatch."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from quantattn.ops._checks import model_dtype
from quantattn.ops._library import register
from quantattn.reference import merge_attention_states as reference
from quantattn.validation import MODEL_DTYPES, check_group_scale, check_tensor

__all__ = ["merge_attention_states"]


@overload
def merge_attention_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out_scale: Tensor | None = None,
    round_through: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def merge_attention_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out_scale: Tensor | None = None,
    round_through: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def merge_attention_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out_scale: Tensor | None = None,
    round_through: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Merge the attention of the same queries over two disjoint sets of keys.

    lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b: what
    attention over both sets at once gives. More sets are merged one after another, in any order.
    Sinks belong to one of the sets only, or they count twice.

    Where an LSE is infinite, that side saw no key (some kernels say so by +inf): its output is not
    read, and the other side's values come back unchanged. Where both are, 0 and -inf come back.

    Args:
        out_a: `[num_tokens, num_heads, head_dim_v]`, fp32, fp16 or bf16, any strides.
        lse_a: Natural log of its denominator, `[num_tokens, num_heads]`, float32, any strides.
        out_b: As `out_a`, same dtype.
        lse_b: As `lse_a`.
        out_scale: float32, `[]`, `[1]` or `[num_groups]`: the output is quantized to e4m3 with it,
            as `static_quant_fp8` does, from float32.
        round_through: Round to the model's dtype before quantizing the output.
        out_dtype: The model's dtype; None: that of `out_a`.
        return_lse: Also return the merged LSE.

    Returns:
        Output `[num_tokens, num_heads, head_dim_v]`, model dtype or e4m3, contiguous. With
        `return_lse` also the LSE `[num_tokens, num_heads]`, float32.

    Raises:
        FormatError: A dtype, shape or device does not fit.
        ScaleError: The dtype, shape or device of `out_scale` does not fit.

    Example:
        >>> some, rest = torch.full((1, 1, 2), 4.0), torch.full((1, 1, 2), 8.0)
        >>> lse = torch.zeros(1, 1)
        >>> merge_attention_states(some, lse, rest, lse)
        tensor([[[6., 6.]]])
    """
    check_tensor("out_a", out_a, shape=(None, None, None), dtypes=MODEL_DTYPES)
    shape, device, float32 = tuple(out_a.shape), out_a.device, (torch.float32,)
    check_tensor("lse_a", lse_a, shape=shape[:2], dtypes=float32, device=device)
    check_tensor("out_b", out_b, shape=shape, dtypes=(out_a.dtype,), device=device)
    check_tensor("lse_b", lse_b, shape=shape[:2], dtypes=float32, device=device)
    if out_scale is not None:
        check_group_scale("out_scale", out_scale, shape[1] * shape[2], device)
    out, lse = torch.ops.quantattn.merge_attention_states(
        out_a,
        lse_a,
        out_b,
        lse_b,
        out_scale,
        round_through,
        model_dtype(out_a, out_dtype),
        return_lse,
    )
    return (out, lse) if return_lse else out


def _cuda(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out_scale: Tensor | None,
    round_through: bool,
    out_dtype: torch.dtype,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    from quantattn.kernels import merge_attention_states as kernel

    return kernel.merge_attention_states(
        out_a, lse_a, out_b, lse_b, out_scale, round_through, out_dtype, return_lse
    )


def _fake(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out_scale: Tensor | None,
    round_through: bool,
    out_dtype: torch.dtype,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    dtype = out_dtype if out_scale is None else torch.float8_e4m3fn
    lse_shape = out_a.shape[:2] if return_lse else (0,)
    return out_a.new_empty(out_a.shape, dtype=dtype), lse_a.new_empty(lse_shape)


register(
    "merge_attention_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b,"
    " Tensor? out_scale, bool round_through, ScalarType out_dtype, bool return_lse)"
    " -> (Tensor, Tensor)",
    cpu=reference.merge_attention_states,
    cuda=_cuda,
    fake=_fake,
)
