"""merge_attention_states in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from quantattn.reference._attend import finish_output

__all__ = ["merge_attention_states"]


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
    logs = torch.stack([lse_a, lse_b])
    empty = logs.isinf()
    logs = logs.masked_fill(empty, -torch.inf)
    largest = logs.amax(0).masked_fill(empty.all(0), 0.0)
    weights = torch.exp(logs - largest)
    total = weights.sum(0)
    weights = weights / total.masked_fill(total == 0.0, 1.0)
    # What an empty side holds may be NaN, and a weight of 0 would not hide it.
    outs = torch.stack([out_a.float(), out_b.float()]).masked_fill(empty[..., None], 0.0)
    out = finish_output((weights[..., None] * outs).sum(0), out_scale, round_through, out_dtype)
    return out, largest + total.log() if return_lse else largest.new_empty(0)
