"""The decode kernels over latent rows of 512 + 64 compile, fit, and say what they cannot serve."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from quantattn.formats import format_of_numbers
from quantattn.kernels._attend_rows import Batch, Query, Scale, Scales
from quantattn.kernels._attend_spec import Side
from quantattn.kernels._attention_arguments import latent_arguments
from quantattn.kernels._attention_call import LatentCall
from quantattn.kernels._partials import Partials
from quantattn.kernels._split_decode import decode_kernel
from quantattn.kernels.hopper import mla
from quantattn.kernels.hopper.memory import tile_layout
from quantattn.kernels.hopper.mla_kernel import hopper_mla_kernel
from quantattn.kernels.hopper.mla_narrow import hopper_mla_narrow_kernel
from quantattn.kernels.mla_attention import tile_sizes
from quantattn.layout import PageLayout
from tests.kernels.compiling import ARCHITECTURES, compile_for

SHARED_MEMORY = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
E4M3 = torch.float8_e4m3fn
TYPES = {E4M3: "*u8", torch.bfloat16: "*bf16"}
PARTIALS = Partials("*fp32", "*fp32")
SCALES = Scales(*[Scale("*fp32", "i32")] * 4)
BATCH = Batch("*i32", "*i32", "*i32", *["i32"] * 4)
QUERY = Query("*bf16", "i32", "i32")


def latent_call(stored=E4M3) -> LatentCall:
    """One token of 128 heads over pages of 64."""
    ends = torch.tensor([0, 1], dtype=torch.int32)
    return LatentCall(
        query=torch.zeros(1, 128, 576, dtype=torch.bfloat16),
        kv_cache=torch.zeros(2, 64 * 576, dtype=stored),
        layout=PageLayout(1, 576, 0, format=format_of_numbers(stored)),
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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_and_fits(architecture, monkeypatch) -> None:
    monkeypatch.setattr(LatentCall, "is_hopper", architecture == 90)
    monkeypatch.setattr(LatentCall, "product_dtype", torch.bfloat16)
    call = latent_call()
    sizes = tile_sizes(call)
    spec = latent_arguments(call, *call.new_outputs()).spec_for(sizes.block_m, sizes.block_n)
    spec = replace(spec, native=architecture >= 89)
    side = Side("*u8", "i32", "*fp32", "i32")
    signature = {
        "partials": PARTIALS,
        "query": QUERY,
        "keys": side,
        "values": side,
        "scales": SCALES,
        "batch": BATCH,
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


@pytest.mark.parametrize("stored", TYPES, ids=str)
def test_the_hopper_kernel_for_many_rows_compiles_and_fits(stored, monkeypatch) -> None:
    monkeypatch.setattr(LatentCall, "product_dtype", torch.bfloat16)
    call = mla.grouped(latent_call(stored), is_narrow=False)
    spec = latent_arguments(call, *call.new_outputs()).spec
    computing, loading = mla.REGISTERS
    signature = {
        "partials": PARTIALS,
        "query": QUERY,
        "keys": Side(TYPES[stored], "i32", "*fp32", "i32"),
        "scales": SCALES,
        "batch": BATCH,
        "softmax_scale": "fp32",
        "decode_limit": "i32",
    }
    constants = {
        "ROWS": 64,
        "SPEC": mla.spec_of(spec, 64, is_narrow=False),
        "COMPUTING_REGISTERS": computing,
        "LOADING_REGISTERS": loading,
    }
    compiled = compile_for(
        90,
        hopper_mla_kernel,
        signature,
        constants,
        [(0, 0), (0, 1), *((place, part) for place in (1, 2) for part in range(2))],
        num_warps=4,
        maxnreg=mla.MOST_REGISTERS,
    )
    assert compiled.metadata.shared <= SHARED_MEMORY[90]
    assert "wgmma" in compiled.asm["ptx"]


@pytest.mark.parametrize(("heads", "block_size"), [(16, 16), (16, 64), (5, 128), (2, 256)])
def test_the_hopper_kernel_for_few_rows_compiles_and_fits_twice(heads, block_size) -> None:
    call = replace(
        latent_call(),
        query=torch.zeros(1, heads, 576, dtype=torch.bfloat16),
        kv_cache=torch.zeros(1, block_size * 576, dtype=E4M3),
    )
    call = mla.grouped(call, is_narrow=True)
    spec = latent_arguments(call, *call.new_outputs()).spec
    boxes = [
        f"tensordesc<fp8e4nv[1, {min(64, block_size)}, {width}],{tile_layout(width, 8, 3)!r}>"
        for width in (128, 64)
    ]
    signature = {
        "partials": PARTIALS,
        "query": QUERY,
        "latent_pages": boxes[0],
        "rope_pages": boxes[1],
        "scales": SCALES,
        "batch": BATCH,
        "softmax_scale": "fp32",
        "decode_limit": "i32",
    }
    constants = {
        "ROWS": heads,
        "SPEC": mla.spec_of(spec, heads, is_narrow=True),
        "STAGES": mla.NARROW_STAGES,
        "LOADER_REGISTERS": mla.LOADER_REGISTERS,
    }
    compiled = compile_for(
        90,
        hopper_mla_narrow_kernel,
        signature,
        constants,
        [(0, 0), (0, 1), *((1, part) for part in range(3))],
        num_warps=4,
        maxnreg=mla.NARROW_REGISTERS,
    )
    assert 2 * (compiled.metadata.shared + 1024) <= SHARED_MEMORY[90] + 1024
    assert "wgmma" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"latent_dim": 448}, "latent_dim and rope_dim (448, 128)"),
        ({"query": torch.zeros(1, 128, 576)}, "query of torch.float32"),
        ({"kv_cache": torch.zeros(2 * 36872).to(E4M3).as_strided((2, 36864), (36872, 1))}, "16"),
        ({"kv_cache": torch.zeros(0, 64 * 576).to(E4M3)}, "at least one"),
        ({"max_seqlen_q": 0}, "max_seqlen_q"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_the_hopper_kernel_cannot_serve_is_named(changes, reason, monkeypatch) -> None:
    call = latent_call()
    assert "device cpu" in mla.unsupported(call)
    monkeypatch.setattr(LatentCall, "is_hopper", True)
    assert mla.unsupported(call) is None
    assert reason in mla.unsupported(replace(call, **changes))
