"""Quantizing and writing are one launch: rotations, scales and queries need none of their own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest
import torch

pytest.importorskip("triton")

from quantattn import ops
from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout
from tests.kernels.recording import gpu_work_of, work_of
from tests.ops.rope_oracle import make_table

HEADS, KV_HEADS, WIDTHS = 6, 3, (64, 32)
FORMATS = pytest.mark.parametrize(
    "name",
    [
        "auto",
        "fp8_e4m3",
        "fp8_e5m2",
        "fp8_per_token_head",
        "int8_per_token_head",
        "int4_per_token_head",
    ],
)
Q_SCALES = {
    "plain queries": None,
    "a scale": torch.tensor(0.013),
    "a scale a head": torch.tensor([0.011, 0.031, 0.007]),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch) -> str:
    """Where tensors are; on the CPU the operations go to their kernels all the same."""
    if request.param == "cpu":
        for name in ("dynamic_quant_fp8", "rope_write_kv", "static_quant_fp8", "write_kv"):
            module = import_module(f"quantattn.ops.{name}")
            monkeypatch.setattr(torch.ops.quantattn, name, module._cuda)
    return request.param


def assert_one_launch(act: Callable[[], object], device: str, kernel: str) -> None:
    work = work_of(act) if device == "cpu" else gpu_work_of(act)
    assert work == [kernel]


def new_rows(tokens: int, device: str) -> list[torch.Tensor]:
    """Queries, keys and values: slices of one projection."""
    counts = (HEADS, KV_HEADS, KV_HEADS)
    widths = (WIDTHS[0], *WIDTHS)
    columns = [count * width for count, width in zip(counts, widths, strict=True)]
    packed = torch.randn(tokens, sum(columns), device=device).bfloat16().split(columns, 1)
    return [rows.unflatten(1, (-1, width)) for rows, width in zip(packed, widths, strict=True)]


def pages_for(name: str, placement: str, tokens: int, device: str) -> torch.Tensor:
    fmt = parse_kv_cache_dtype(name)
    size = PageLayout(KV_HEADS, *WIDTHS, "HND", fmt, placement).page_size(16)
    dtype = torch.uint8 if fmt.is_quantized else torch.bfloat16
    return torch.zeros(tokens // 16 + 1, size, dtype=dtype, device=device)


def options_for(name: str, placement: str, device: str) -> dict:
    scales = torch.tensor([0.3, 0.7, 0.05], device=device), torch.tensor(1.9, device=device)
    place = {"kv_cache_dtype": name, "layout": "HND", "scale_placement": placement}
    return {"k_scale": scales[0], "v_scale": scales[1], **place}


@FORMATS
@pytest.mark.parametrize(("tokens", "placement"), [(5, "inline"), (1024, "page")])
def test_a_write_is_one_launch_with_its_rotation_and_scales(
    device, name, tokens, placement
) -> None:
    _, key, value = new_rows(tokens, device)
    pages = pages_for(name, placement, tokens, device)
    slots = torch.arange(tokens, device=device)
    options = options_for(name, placement, device)
    assert_one_launch(
        lambda: ops.write_kv(key, value, pages, slots, **options), device, "_write_rows_kernel"
    )


@FORMATS
@pytest.mark.parametrize("q_scale", Q_SCALES)
def test_rope_a_write_and_the_queries_codes_are_one_launch(device, name, q_scale) -> None:
    tokens = 5 if q_scale == "a scale" else 1024
    rows = new_rows(tokens, device)
    pages = pages_for(name, "page", tokens, device)
    slots = torch.arange(tokens, device=device)
    scale = Q_SCALES[q_scale]
    options = options_for(name, "page", device) | {
        "positions": slots,
        "cos_sin_cache": make_table(tokens, 32, torch.float32).to(device),
        "q_scale": None if scale is None else scale.to(device),
    }
    assert_one_launch(
        lambda: ops.rope_write_kv(*rows, pages, slots, **options), device, "_rope_write_kv_kernel"
    )


@pytest.mark.parametrize("tokens", [5, 1024])
def test_a_quantization_is_one_launch(device, tokens) -> None:
    query = new_rows(tokens, device)[0]
    whole = query.contiguous()
    scale, scales = (Q_SCALES[name].to(device) for name in ("a scale", "a scale a head"))
    for act, kernel in (
        (lambda: ops.static_quant_fp8(whole, scale), "_quantize_flat_kernel"),
        (lambda: ops.static_quant_fp8(query, scales), "_quantize_runs_kernel"),
        (lambda: ops.dynamic_quant_fp8(query), "_quantize_rows_kernel"),
        (
            lambda: ops.dynamic_quant_fp8(query, granularity="token_head"),
            "_quantize_rows_kernel",
        ),
    ):
        assert_one_launch(act, device, kernel)
