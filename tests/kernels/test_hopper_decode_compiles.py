"""Decode on Hopper without a GPU: what it refuses, and what it compiles to.

It must compile without spills, to the products that it is made of.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.experimental.gluon.language import NVMMASharedLayout

from quantattn.formats import parse_kv_cache_dtype
from quantattn.kernels._attend_rows import Batch, Output, Query, Scale, Scales
from quantattn.kernels._attention_arguments import paged_arguments
from quantattn.kernels._attention_call import AttentionCall
from quantattn.kernels._partials import Partials
from quantattn.kernels.hopper import decode as launcher
from quantattn.kernels.hopper.decode_kernel import hopper_decode_kernel
from quantattn.kernels.hopper.decode_row_numbers import box_width, numbers_of_row
from quantattn.kernels.hopper.decode_tiles import part_columns
from quantattn.kernels.hopper.memory import tile_layout
from quantattn.kernels.hopper.merge import hopper_merge_kernel
from quantattn.layout import PageLayout
from tests.kernels.compiling import ARCHITECTURES, compile_for

E4M3 = torch.float8_e4m3fn
PARTIALS = Partials("*fp32", "*fp32")
SCALES = Scales(*[Scale("*fp32", "i32")] * 4)
BATCH = Batch("*i32", "*i32", "*i32", "i32", "i32", "i32", "i32")
FP8, INT8 = (parse_kv_cache_dtype(name) for name in ("fp8_e4m3", "int8_per_token_head"))
TYPES = {"e4m3": "fp8e4nv", "int8": "i8", "int4": "i8", None: "bf16"}


def make_call(name, heads, head_dim, query_len, block_size, window, soft_cap) -> AttentionCall:
    fmt = parse_kv_cache_dtype(name)
    layout = PageLayout(heads[1], head_dim, head_dim, "NHD", fmt)
    stored = fmt.storage_dtype or torch.bfloat16
    numbers = torch.zeros(2, dtype=torch.int32)
    return AttentionCall(
        query=torch.zeros(query_len, heads[0], head_dim, dtype=torch.bfloat16),
        kv_cache=torch.zeros(1, layout.page_size(block_size)).to(stored),
        layout=layout,
        cu_seqlens_q=numbers,
        seq_lens=numbers[:1],
        block_table=numbers[None, :1],
        max_seqlen_q=query_len,
        k_scale=torch.ones(()),
        v_scale=torch.ones(()),
        q_scale=None,
        prob_scale=None,
        softmax_scale=0.1,
        causal=True,
        sliding_window=window,
        logits_soft_cap=soft_cap,
        sinks=None,
        out_scale=None,
        round_through=False,
        out_dtype=torch.bfloat16,
        return_lse=True,
    )


def compile_call(call: AttentionCall):
    rows = call.decode_limit * call.group_size
    itemsize = call.kv_cache.itemsize
    sizes = launcher.choose_sizes(rows, call.layout, itemsize)
    spec = paged_arguments(call, *call.new_outputs()).spec
    spec = replace(spec, block_m=sizes.block_m, block_n=sizes.block_n)
    part = part_columns(spec)
    box = [1, box_width(spec), part]
    tile = tile_layout(part, 8 * itemsize, 3)
    signature = {
        "partials": PARTIALS,
        "query": Query("*bf16", "i32", "i32"),
        "pages": f"tensordesc<{TYPES[spec.codes]}{box},{tile!r}>",
        "row_numbers": number_descriptor(spec),
        "scales": SCALES,
        "batch": BATCH,
        "softmax_scale": "fp32",
        "decode_limit": "i32",
    }
    constants = {
        "ROWS": rows,
        "SPEC": spec,
        "STAGES": sizes.stages,
        "LOADER_REGISTERS": launcher.LOADER_REGISTERS,
    }
    if not spec.has_row_scales:
        constants["row_numbers"] = None
    return compile_for(
        90,
        hopper_decode_kernel,
        signature,
        constants,
        [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)],
        num_warps=4,
        maxnreg=sizes.registers,
    )


def number_descriptor(spec) -> str:
    box = [1, 2, numbers_of_row(spec), box_width(spec)]
    return f"tensordesc<fp32{box},{NVMMASharedLayout(0, 32, rank=4)!r}>"


def machine_code(compiled, folder) -> list[str]:
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(file)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [m[1] for line in lines if (m := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", line))]


def unwritten_reads(code: list[str]) -> list[str]:
    """Reads of e4m3 pairs out of registers that no conversion or shuffle of bytes wrote.

    ptxas 12.8 and 12.9 miscompile a pair that is both packed with another one and unpacked.
    """
    reads = []
    for place, text in enumerate(code):
        read = re.match(r"(?:@!?\w+ )?F2FP\.F16\.E[45]M[23]\.UNPACK_B (R\d+), (R\d+)", text)
        if read is None:
            continue
        writes = re.compile(rf"(?:@!?\w+ )?(?!ST)[A-Z0-9_.]+ {read[2]}\b(?!\.)")
        last = next((t for t in reversed(code[:place]) if writes.match(t)), "nothing")
        if not re.match(r"(?:@!?\w+ )?(F2FP|PRMT)", last):
            reads.append(f"{text} after {last}")
    return reads


CASES = [
    ("fp8_e4m3", (32, 8), 128, 1, 16, None, None),
    ("fp8_e4m3", (64, 8), 256, 2, 64, 1000, 30.0),
    ("fp8_e4m3", (32, 4), 64, 8, 256, None, None),
    ("auto", (32, 8), 128, 1, 16, None, None),
    ("fp8_per_token_head", (32, 8), 128, 1, 16, None, None),
    ("fp8_per_token_head", (64, 8), 256, 2, 64, 1000, 30.0),
    ("int8_per_token_head", (64, 8), 128, 1, 32, 1000, 30.0),
    ("int8_per_token_head", (32, 4), 64, 8, 256, None, None),
    ("int4_per_token_head", (32, 8), 128, 1, 16, None, None),
    ("int4_per_token_head", (64, 8), 128, 4, 64, 1000, 30.0),
    ("int4_per_token_head", (64, 8), 256, 2, 64, 1000, 30.0),
    ("int4_per_token_head", (32, 4), 64, 8, 256, None, None),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles_to_warpgroup_products(case, tmp_path) -> None:
    call = make_call(*case)
    code = machine_code(compile_call(call), tmp_path)
    kind = case[0][:3]
    assert any({"fp8": "QGMMA", "aut": "HGMMA", "int": "IGMMA"}[kind] in text for text in code)
    assert any("UTMALDG.3D" in text for text in code)
    assert any("UTMALDG.4D" in text for text in code) == call.layout.format.has_page_scales
    assert not unwritten_reads(code)


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a == 90])
def test_the_merge_compiles_to_wide_accesses(architecture) -> None:
    call = make_call("fp8_e4m3", (40, 8), 128, 1, 16, None, None)
    out, lse = call.new_outputs()
    arguments = paged_arguments(call, out, lse)
    spec = replace(arguments.spec, block_m=8, block_n=128)
    heads, workers, num_warps = launcher.merge_sizes(spec, 128, 33)
    constants = {
        "ROWS": 5,
        "HEADS": heads,
        "WORKERS": workers,
        "SPEC": spec,
        "OUTPUT": arguments.output_spec,
    }
    signature = {
        "output": Output("*u8", "*fp32", "*fp32"),
        "partials": PARTIALS,
        "scales": SCALES,
        "sinks": "*bf16",
        "batch": BATCH,
        "num_workers": "i32",
        "decode_limit": "i32",
    }
    divisible = [(0, 0), (0, 1), (1, 0), (1, 1)]
    compiled = compile_for(
        architecture, hopper_merge_kernel, signature, constants, divisible, num_warps=num_warps
    )
    assert "ld.global.v4.b32" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": PageLayout(4, 256, 0, "NHD", FP8)}, "head_dim"),
        ({"layout": PageLayout(8, 124, 124, "NHD", INT8, "inline")}, "scale_placement inline"),
        ({"prob_scale": torch.ones(())}, "prob_scale"),
        ({"query": torch.zeros(1, 32, 128)}, "query of torch.float32"),
        ({"kv_cache": torch.zeros(0, 32768).to(E4M3)}, "at least one block"),
        ({"kv_cache": torch.zeros(1, 8 * 2048).to(E4M3)}, "block_size 8"),
        ({"kv_cache": torch.zeros(1 << 16).to(E4M3).as_strided((2, 32768), (32760, 1))}, "16"),
        ({"max_seqlen_q": 0}, "max_seqlen_q"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_served_is_named(changes, reason, monkeypatch) -> None:
    call = make_call("fp8_e4m3", (32, 8), 128, 1, 16, None, None)
    assert "device cpu" in launcher.unsupported(call)
    monkeypatch.setattr(launcher, "_is_hopper", lambda call: True)
    assert launcher.unsupported(call) is None
    assert reason in launcher.unsupported(replace(call, **changes))
