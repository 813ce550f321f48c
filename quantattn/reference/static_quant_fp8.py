"""static_quant_fp8 in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from quantattn.arithmetic import quantize_fp8

__all__ = ["static_quant_fp8"]


def static_quant_fp8(input: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `quantattn.ops.static_quant_fp8`."""
    if scale.numel() == 1:
        return quantize_fp8(input, scale.reshape(()), dtype).contiguous()
    num_groups = scale.numel()
    columns = input.shape[1:].numel()
    grouped = input.reshape(input.shape[0], num_groups, columns // num_groups)
    return quantize_fp8(grouped, scale[:, None], dtype).contiguous().view(input.shape)
