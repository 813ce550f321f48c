"""The attention kernels for every device compile for each architecture without a GPU, no spills."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from quantattn.kernels import _partials, _prefill, _split_decode
from quantattn.kernels._attend_rows import Batch, Output, Query, Scale, Scales
from quantattn.kernels._attend_spec import Side
from quantattn.kernels._attention_arguments import TRITON_DTYPES, paged_arguments
from tests.kernels.compiling import ARCHITECTURES, compile_for, fp8_conversions
from tests.ops.paged_cases import draw

KERNELS = {
    "decode": _split_decode.decode_kernel,
    "merge": _split_decode.merge_kernel,
    "prefill": _prefill.prefill_kernel,
}
PRODUCTS = {90: "wgmma.mma_async", 100: "tcgen05.mma"}


def compile_kernel(architecture: int, kernel: str, name: str, dims: tuple[int, int] = (128, 128)):
    """Compile for a bf16 query, quantized output, 32 query heads, 8 KV heads."""
    case = draw(name, ([1], [1]), num_heads=32, num_kv_heads=8, dims=dims)
    call = case.call(out_scale=torch.tensor(0.5))
    arguments = paged_arguments(call, *call.new_outputs())
    spec = replace(arguments.spec, native=architecture >= 89)
    if name == "auto":
        spec = replace(spec, compute=TRITON_DTYPES[torch.bfloat16])
    is_hopper = architecture == 90
    sizes = _split_decode.tile_sizes(spec, 1, is_hopper=is_hopper)
    if kernel == "prefill":
        sizes = _prefill.tile_sizes(spec, is_hopper=is_hopper)
    spec = replace(spec, block_m=sizes.block_m, block_n=sizes.block_n)
    stored = Side("*bf16" if name == "auto" else "*u8", "i32", "*fp32", "i32")
    types = {
        "output": Output("*u8", "*fp32", "*fp32"),
        "partials": _partials.Partials("*fp32", "*fp32"),
        "query": Query("*bf16", "i32", "i32"),
        "keys": stored,
        "values": stored,
        "scales": Scales(*[Scale("*fp32", "i32")] * 4),
        "sinks": "*fp32",
        "batch": Batch("*i32", "*i32", "*i32", *["i32"] * 4),
        "softmax_scale": "fp32",
        "num_workers": "i32",
        "decode_limit": "i32",
    }
    jit = KERNELS[kernel]
    signature = {argument: types[argument] for argument in jit.arg_names if argument in types}
    constants = {"SPEC": spec, "OUTPUT": arguments.output_spec}
    constants = {argument: constants[argument] for argument in jit.arg_names[len(signature) :]}
    wide = [jit.arg_names.index(a) for a in ("query", "keys", "values") if a in signature]
    divisible = [(place, part) for place in wide for part in range(len(types["query"]))]
    options = {"num_warps": sizes.num_warps, "num_stages": sizes.num_stages}
    options = {"num_warps": 1} if kernel == "merge" else options
    return compile_for(architecture, jit, signature, constants, divisible, **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_for_each_architecture_and_rounds_once(architecture, kernel) -> None:
    compiled = compile_kernel(architecture, kernel, "fp8_e4m3")
    ptx = compiled.asm["ptx"]
    is_native = architecture >= 89 and kernel != "decode"
    assert fp8_conversions(compiled) == ({"e4m3x2.f32"} if is_native else set())
    if kernel != "merge":
        assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10", ptx)
    if kernel == "prefill":
        assert PRODUCTS.get(architecture, "mma.sync") in ptx


@pytest.mark.parametrize("name", ["auto", "int8_per_token_head", "int4_per_token_head"])
def test_decode_compiles_for_each_format(name) -> None:
    assert "mma.sync" in compile_kernel(80, "decode", name).asm["ptx"]


def test_no_product_on_hopper_has_16_columns() -> None:
    # ptxas 12.8 gave those wrong places in shared memory, see SideSpec.columns.
    ptx = compile_kernel(90, "prefill", "fp8_e4m3", dims=(24, 16)).asm["ptx"]
    assert "m64n64k16" in ptx
    assert "m64n16k16" not in ptx
