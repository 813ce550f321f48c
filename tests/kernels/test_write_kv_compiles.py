"""The kernel of write_kv compiles for each architecture without a GPU, without spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from quantattn.formats import parse_kv_cache_dtype
from quantattn.kernels import _write_rows as kernel
from quantattn.kernels._row_places import row_places
from quantattn.layout import PageLayout
from tests.kernels.compiling import ARCHITECTURES, compile_for, fp8_conversions

HOPPER = [
    ("auto", "NHD", "page", False),
    ("fp8_e4m3", "HND", "page", False),
    ("fp8_e5m2", "NHD", "page", True),
    ("fp8_per_token_head", "NHD", "page", False),
    ("int8_per_token_head", "HND", "page", False),
    ("int4_per_token_head", "NHD", "page", False),
    ("int4_per_token_head", "HND", "inline", False),
]
OTHERS = [
    (architecture, name, "NHD", "page", False)
    for architecture in [75, *ARCHITECTURES]
    for name in ("fp8_e4m3", "int4_per_token_head")
    if architecture != 90
] + [(89, "fp8_per_token_head", "NHD", "page", False)]


def compiled_kernel(
    architecture: int,
    name: str,
    order: str = "NHD",
    placement: str = "page",
    per_head: bool = False,
    *,
    source: str = "bf16",
    tokens: int = 65_536,
    heads: int = 8,
    dims: tuple[int, int] = (128, 128),
):
    fmt = parse_kv_cache_dtype(name)
    layout = PageLayout(heads, *dims, order, fmt, placement)
    k_places, v_places = row_places(layout, 16)
    constants = {
        "K_PLACES": k_places,
        "V_PLACES": v_places,
        "BLOCK_SIZE": 16,
        "NUM_KV_HEADS": heads,
        "HEAD_DIM": dims[0],
        "HEAD_DIM_V": dims[1],
        "CODE_WIDTH": fmt.code_width(dims[0]),
        "CODE_WIDTH_V": fmt.code_width(dims[1]),
        "FORMAT": fmt.name,
        "IS_K_PER_HEAD": per_head,
        "IS_V_PER_HEAD": per_head,
        "NATIVE": architecture >= 89,
    }
    tile = kernel.choose_tile(tokens, layout, 4 if source == "fp32" else 2)
    num_warps = tile.pop("num_warps")
    signature = {
        "pages_ptr": "*u8" if fmt.is_quantized else "*bf16",
        "key_ptr": f"*{source}",
        "value_ptr": f"*{source}",
        "k_scale_ptr": "*fp32",
        "v_scale_ptr": "*fp32",
        "slot_mapping_ptr": "*i64",
        "num_tokens": "i32",
        "page_stride": "i32",
        "key_strides": ("i32", "i32"),
        "value_strides": ("i32", "i32"),
        "num_pages": "i32",
    }
    divisible = [(place,) for place in (0, 1, 2, 3, 4, 5, 7)]
    divisible += [(side, stride) for side in (8, 9) for stride in (0, 1)]
    return compile_for(
        architecture,
        kernel._write_rows_kernel,
        signature,
        {**constants, **tile},
        divisible,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )


@pytest.mark.parametrize(
    ("architecture", "name", "order", "placement", "per_head"),
    [(90, *case) for case in HOPPER] + OTHERS,
)
def test_compiles_to_wide_accesses(architecture, name, order, placement, per_head) -> None:
    compiled = compiled_kernel(architecture, name, order, placement, per_head)
    ptx = compiled.asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx or (name, placement) == ("int4_per_token_head", "inline")
    assert ("div.rn.f32" in ptx) is (name != "auto")
    if "int4" not in name:
        assert ("fma.rn.f32" in ptx) is (name != "auto" and architecture >= 89)
    e4m3, e5m2 = {"e4m3x2.f32"}, {"e5m2x2.f32"}
    wanted = {"fp8_e4m3": e4m3, "fp8_e5m2": e5m2, "fp8_per_token_head": e4m3}
    assert fp8_conversions(compiled) == (wanted.get(name, set()) if architecture >= 89 else set())


@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_per_token_head"])
@pytest.mark.parametrize(
    ("source", "tokens", "heads", "dims"),
    [
        ("bf16", 1, 8, (128, 128)),
        ("bf16", 1000, 8, (256, 256)),
        ("bf16", 1000, 3, (192, 128)),
        ("fp32", 1, 8, (128, 128)),
        ("fp32", 1000, 1, (128, 128)),
        ("fp32", 10_000, 8, (64, 192)),
    ],
)
def test_rows_in_parts_are_reduced_by_their_own_threads(name, source, tokens, heads, dims) -> None:
    # `compile_for` refuses what would be reduced wrongly.
    compiled_kernel(90, name, source=source, tokens=tokens, heads=heads, dims=dims)
