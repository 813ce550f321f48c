"""varlen_attention on a GPU: a prefill kernel over keys and values that lie one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from quantattn.kernels._attention_arguments import TileSizes, packed_arguments
from quantattn.kernels._attention_call import PackedCall
from quantattn.kernels._prefill import launch_prefill
from quantattn.kernels.hopper import prefill

__all__ = ["varlen_attention"]


def varlen_attention(
    call: PackedCall, *, prefill_sizes: TileSizes | None = None
) -> tuple[Tensor, Tensor]:
    """See `quantattn.ops.varlen_attention`; the LSE is empty where it is not asked for.

    The kernel for Hopper serves the calls that it supports; that for every device serves others,
    and all calls for which `prefill_sizes` are given.
    """
    is_hoppers = prefill_sizes is None and prefill.unsupported(call) is None
    out, lse = call.new_outputs()
    if len(call.query) == 0:
        return out, lse
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(call.query):
        arguments = packed_arguments(call, out, lse)
        if is_hoppers:
            prefill.launch(arguments, 0)
        else:
            launch_prefill(arguments, 0, prefill_sizes)
    return out, lse
