"""paged_attention on a GPU: which kernel serves which sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from quantattn.kernels._attention_arguments import TileSizes, paged_arguments
from quantattn.kernels._attention_call import AttentionCall
from quantattn.kernels._prefill import launch_prefill
from quantattn.kernels._split_decode import launch_decode
from quantattn.kernels.hopper import decode, prefill

__all__ = ["paged_attention"]


def paged_attention(
    call: AttentionCall,
    *,
    decode_sizes: TileSizes | None = None,
    prefill_sizes: TileSizes | None = None,
) -> tuple[Tensor, Tensor]:
    """See `quantattn.ops.paged_attention`; the LSE is empty where it is not asked for.

    Queries of up to `call.decode_limit` tokens go to a decode kernel: to that for Hopper where it
    supports the call, and else, or where `decode_sizes` are given, to that for every device.
    Longer ones go to a prefill kernel, which is chosen likewise.
    """
    if len(call.query) == 0:
        return call.new_outputs()
    out, lse = call.new_outputs()
    arguments = paged_arguments(call, out, lse)
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(call.query):
        plan = None
        if call.max_seqlen_q > call.decode_limit:
            if prefill_sizes is None and prefill.unsupported(call) is None:
                plan = prefill.launch(arguments, call.decode_limit)
            else:
                launch_prefill(arguments, call.decode_limit, prefill_sizes)
        if decode_sizes is None and decode.unsupported(call) is None:
            decode.launch(call, arguments, beside=plan)
        else:
            launch_decode(arguments, call.decode_limit, decode_sizes)
    return out, lse
