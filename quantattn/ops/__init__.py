"""The public operations, also `torch.ops.quantattn.*`; importing them imports no Triton."""

from __future__ import annotations

from quantattn.ops.dynamic_quant_fp8 import dynamic_quant_fp8
from quantattn.ops.merge_attention_states import merge_attention_states
from quantattn.ops.mla_attention import mla_attention
from quantattn.ops.paged_attention import paged_attention
from quantattn.ops.rope_write_kv import rope_write_kv
from quantattn.ops.static_quant_fp8 import static_quant_fp8
from quantattn.ops.varlen_attention import varlen_attention
from quantattn.ops.write_kv import write_kv
from quantattn.ops.write_latent import write_latent

__all__ = [
    "dynamic_quant_fp8",
    "merge_attention_states",
    "mla_attention",
    "paged_attention",
    "rope_write_kv",
    "static_quant_fp8",
    "varlen_attention",
    "write_kv",
    "write_latent",
]
