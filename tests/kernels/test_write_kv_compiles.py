"""The kernel of write_kv compiles for each architecture without a GPU, without spills."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from quantattn.kernels import _write_rows as kernel
from tests.kernels.compiling import ARCHITECTURES, compile_for, spilled_bytes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("mantissa_bits", [None, 3, 2])
@pytest.mark.parametrize("is_hnd", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("is_per_head", [False, True], ids=["per tensor", "per head"])
def test_compiles_to_wide_accesses(
    architecture, mantissa_bits, is_hnd, is_per_head, tmp_path
) -> None:
    constants = {
        "BLOCK_SIZE": 16,
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": 128,
        "HEAD_DIM_V": 128,
        "IS_HND": is_hnd,
        "IS_K_PACKED": True,
        "IS_V_PACKED": True,
        "IS_K_PER_HEAD": is_per_head,
        "IS_V_PER_HEAD": is_per_head,
        "MANTISSA_BITS": mantissa_bits,
        "NATIVE": architecture >= 90,
        "BLOCK_TOKENS": 2,
        "BLOCK_COLUMNS": 1024,
    }
    signature = {
        "pages_ptr": "*bf16" if mantissa_bits is None else "*u8",
        "key_ptr": "*bf16",
        "value_ptr": "*bf16",
        "k_scale_ptr": "*fp32",
        "v_scale_ptr": "*fp32",
        "slot_mapping_ptr": "*i64",
        "num_tokens": "i32",
        "page_stride": "i32",
        "key_strides": ("i32", "i32"),
        "value_strides": ("i32", "i32"),
    }
    divisible = [(place,) for place in (0, 1, 2, 3, 4, 5, 7)]
    divisible += [(side, stride) for side in (8, 9) for stride in (0, 1)]
    compiled = compile_for(architecture, kernel._write_rows_kernel, signature, constants, divisible)
    ptx = compiled.asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert ("div.rn.f32" in ptx) is (mantissa_bits is not None)
    assert ("fma.rn.f32" in ptx) is (mantissa_bits is not None and architecture >= 90)
    native = set(re.findall(r"cvt\.rn\.satfinite\.(e\dm\d)x2\.f32", ptx))
    wanted = {None: set(), 3: {"e4m3"}, 2: {"e5m2"}}[mantissa_bits]
    assert native == (wanted if architecture >= 90 else set())
    assert spilled_bytes(ptx, tmp_path) == 0
