"""The decode kernel over latent rows of 512 + 64 compiles for each architecture and fits there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from quantattn.formats import parse_kv_cache_dtype
from quantattn.kernels._attend_rows import Batch, Query, Scale, Scales
from quantattn.kernels._attend_spec import Side
from quantattn.kernels._attention_arguments import latent_arguments
from quantattn.kernels._attention_call import LatentCall
from quantattn.kernels._split_decode import Partials, decode_kernel
from quantattn.kernels.mla_attention import tile_sizes
from quantattn.layout import PageLayout
from tests.kernels.compiling import compile_for

SHARED_MEMORY = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
SPILLS = "ptxas keeps descriptors of the products, which no loop changes, in local memory"


def latent_call() -> LatentCall:
    """One token of 128 heads over e4m3 pages of 64."""
    ends = torch.tensor([0, 1], dtype=torch.int32)
    return LatentCall(
        query=torch.zeros(1, 128, 576, dtype=torch.bfloat16),
        kv_cache=torch.zeros(2, 64 * 576, dtype=torch.float8_e4m3fn),
        layout=PageLayout(1, 576, 0, format=parse_kv_cache_dtype("fp8")),
        latent_dim=512,
        cu_seqlens_q=ends,
        seq_lens=ends[1:],
        block_table=ends[:1, None],
        max_seqlen_q=1,
        k_scale=torch.tensor(0.5),
        v_scale=torch.tensor(0.5),
        q_scale=None,
        prob_scale=None,
        softmax_scale=0.1,
        causal=True,
        sliding_window=None,
        logits_soft_cap=None,
        sinks=None,
        out_scale=None,
        round_through=False,
        out_dtype=torch.bfloat16,
        return_lse=False,
    )


@pytest.mark.parametrize(
    "architecture",
    [80, 89, pytest.param(90, marks=pytest.mark.xfail(reason=SPILLS, strict=True)), 100, 120],
)
def test_compiles_and_fits(architecture, monkeypatch) -> None:
    monkeypatch.setattr(LatentCall, "is_hopper", architecture == 90)
    monkeypatch.setattr(LatentCall, "product_dtype", torch.bfloat16)
    call = latent_call()
    sizes = tile_sizes(call)
    spec = latent_arguments(call, *call.new_outputs()).spec_for(sizes.block_m, sizes.block_n)
    spec = replace(spec, native=architecture >= 89)
    side, scale = Side("*u8", "i32", "*fp32", "i32"), Scale("*fp32", "i32")
    signature = {
        "partials": Partials("*fp32", "*fp32"),
        "query": Query("*bf16", "i32", "i32"),
        "keys": side,
        "values": side,
        "scales": Scales(scale, scale, scale, scale),
        "batch": Batch("*i32", "*i32", "*i32", *["i32"] * 4),
        "softmax_scale": "fp32",
        "decode_limit": "i32",
    }
    divisible = [(place, part) for place in (1, 2, 3) for part in range(3)]
    options = {"num_warps": sizes.num_warps, "num_stages": sizes.num_stages}
    constants = {"SPEC": spec}
    jit = decode_kernel
    compiled = compile_for(architecture, jit, signature, constants, divisible, **options)
    assert compiled.metadata.shared <= SHARED_MEMORY[architecture]
    assert "mma" in compiled.asm["ptx"]
