"""The kernel of rope_write_kv compiles for each architecture without a GPU, without spills."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from quantattn.formats import parse_kv_cache_dtype
from quantattn.kernels import rope_write_kv as kernel
from quantattn.kernels._row_places import RowPlaces, row_places
from quantattn.layout import PageLayout
from tests.kernels.compiling import ARCHITECTURES, compile_for, fp8_conversions

POINTERS = {
    "out_ptr": "*u8",
    "pages_ptr": "*u8",
    "query_ptr": "*bf16",
    "key_ptr": "*bf16",
    "value_ptr": "*bf16",
    "table_ptr": "*bf16",
    "q_scale_ptr": "*fp32",
    "k_scale_ptr": "*fp32",
    "v_scale_ptr": "*fp32",
    "slot_mapping_ptr": "*i64",
    "positions_ptr": "*i64",
}
NUMBERS = {
    "num_tokens": "i32",
    "max_positions": "i32",
    "page_stride": "i32",
    "table_stride": "i32",
    "query_strides": ("i32", "i32"),
    "key_strides": ("i32", "i32"),
    "value_strides": ("i32", "i32"),
    "num_pages": "i32",
}
DIVISIBLE = [(place,) for place in (*range(11), 13, 14)]
DIVISIBLE += [(rows, stride) for rows in (15, 16, 17) for stride in (0, 1)]


def compiled_kernel(architecture: int, name: str, interleaved: bool):
    fmt = parse_kv_cache_dtype(name)
    layout = PageLayout(8, 128, 128, "NHD", fmt)
    k_places, v_places = row_places(layout, 16)
    tile = kernel.choose_rope_tile(65_536, layout, 2)
    num_warps = tile.pop("num_warps")
    constants = {
        "Q_PLACES": RowPlaces(0, 0, 128),
        "K_PLACES": k_places,
        "V_PLACES": v_places,
        "BLOCK_SIZE": 16,
        "NUM_HEADS": 32,
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": 128,
        "HEAD_DIM_V": 128,
        "CODE_WIDTH": fmt.code_width(128),
        "CODE_WIDTH_V": fmt.code_width(128),
        "ROTARY_DIM": 128,
        "IS_INTERLEAVED": interleaved,
        "Q_FORMAT": "fp8_e4m3",
        "FORMAT": fmt.name,
        "IS_Q_PER_HEAD": True,
        "IS_K_PER_HEAD": False,
        "IS_V_PER_HEAD": False,
        "NATIVE": architecture >= 89,
    }
    return compile_for(
        architecture,
        kernel._rope_write_kv_kernel,
        {**POINTERS, **NUMBERS},
        {**constants, **tile},
        DIVISIBLE,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )


@pytest.mark.parametrize(
    ("architecture", "name", "interleaved"),
    [(architecture, "fp8_e4m3", False) for architecture in [75, *ARCHITECTURES]]
    + [(90, "fp8_e5m2", True), (90, "int4_per_token_head", False)],
)
def test_compiles_to_wide_accesses_and_one_rounding(architecture, name, interleaved) -> None:
    compiled = compiled_kernel(architecture, name, interleaved)
    ptx = compiled.asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    # Slots and scales are 8 and 4 bytes; no row goes by less than 4.
    assert not re.search(r"(ld|st)\.global\.(b8|b16)\b", ptx)
    # Queries become e4m3 whatever the pages hold.
    wanted = {"e4m3x2.f32"} | ({"e5m2x2.f32"} if name == "fp8_e5m2" else set())
    assert fp8_conversions(compiled) == (wanted if architecture >= 89 else set())
