"""The public operations, also `torch.ops.quantattn.*`; importing them imports no Triton."""

from __future__ import annotations

from quantattn.ops.mla_attention import mla_attention
from quantattn.ops.paged_attention import paged_attention
from quantattn.ops.static_quant_fp8 import static_quant_fp8
from quantattn.ops.write_kv import write_kv
from quantattn.ops.write_latent import write_latent

__all__ = [
    "mla_attention",
    "paged_attention",
    "static_quant_fp8",
    "write_kv",
    "write_latent",
]
