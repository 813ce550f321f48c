"""The Triton kernel on a GPU: bit-equal with the reference, natively and by integers."""

from __future__ import annotations

import pytest
import torch

from quantattn import ops
from quantattn.reference import dynamic_quant_fp8 as reference
from tests import fp8_oracle

pytestmark = pytest.mark.gpu

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
NATIVE = pytest.mark.parametrize("native", [False, True], ids=["integers", "native"])


def assert_bit_equal(x, device_x, granularity, dtype, native) -> None:
    from quantattn.kernels import dynamic_quant_fp8 as kernel
    from quantattn.kernels._tiles import is_native

    if native and not is_native(device_x.device):
        pytest.skip("the device has no FP8")
    codes, scales = kernel.dynamic_quant_fp8(device_x, granularity, dtype, native=native)
    want_codes, want_scales = reference.dynamic_quant_fp8(x, granularity, dtype)
    assert codes.is_contiguous()
    assert torch.equal(scales.cpu(), want_scales)
    assert torch.equal(codes.cpu().view(torch.uint8), want_codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@NATIVE
@pytest.mark.parametrize("width", [8, 13, 4099])
@pytest.mark.parametrize("source", ["bf16", "fp16", "fp32"])
def test_hard_numbers_are_bit_equal_with_the_reference(dtype, native, width, source) -> None:
    x = {
        "bf16": fp8_oracle.every_bf16(),
        "fp16": fp8_oracle.every_bf16().view(torch.float16),
        "fp32": fp8_oracle.hard_float32(dtype),
    }[source]
    x = x[torch.randperm(len(x), generator=torch.manual_seed(1))]
    x = x[: len(x) // width * width].view(-1, width)
    assert_bit_equal(x, x.cuda(), "token", dtype, native)
    finite = x.nan_to_num(0.37, 1.5, -2.5) if source != "fp32" else x.nan_to_num()
    assert_bit_equal(finite, finite.cuda(), "token", dtype, native)


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_rows_are_bit_equal_with_the_reference(dtype) -> None:
    x = torch.randn(2048, 64) * torch.logspace(-40, -25, 2048)[:, None]
    x[:, 0] = x.abs().amax(1) * torch.linspace(1, 2, 2048)
    x[:, 1:33] = x[:, :1] * fp8_oracle.decode(torch.arange(88, 120).byte(), dtype).float() / 448
    assert_bit_equal(x, x.cuda(), "token", dtype, True)


@NATIVE
@pytest.mark.parametrize("granularity", ["token", "token_head"])
@pytest.mark.parametrize("rows", [1, 15, 17, 533])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_slices_of_a_packed_projection(native, granularity, rows, head_dim) -> None:
    packed = torch.randn(rows, 3 * 8 * head_dim).bfloat16()
    places = slice(8 * head_dim, 16 * head_dim)
    x = packed[:, places].unflatten(1, (8, head_dim))
    device_x = packed.cuda()[:, places].unflatten(1, (8, head_dim))
    assert_bit_equal(x, device_x, granularity, torch.float8_e4m3fn, native)
    x, device_x = x.transpose(0, 1), device_x.transpose(0, 1)
    assert_bit_equal(x, device_x, granularity, torch.float8_e4m3fn, native)


@pytest.mark.parametrize(
    ("source", "dtype"), list(zip([torch.bfloat16, torch.float32], DTYPES, strict=True))
)
@pytest.mark.parametrize("width", [1, 5, 1000, 2049, 5120, 7168, 16_384, 28_672, 70_000])
def test_rows_of_any_width(width, source, dtype) -> None:
    x = torch.randn(5, width).to(source)
    assert_bit_equal(x, x.cuda(), "token", dtype, True)


def test_zero_rows_and_rows_without_tokens() -> None:
    codes, scales = ops.dynamic_quant_fp8(torch.zeros(4, 13, device="cuda"))
    assert not codes.view(torch.uint8).any()
    assert (scales == 1.0).all()
    codes, scales = ops.dynamic_quant_fp8(torch.zeros(0, 13, device="cuda"))
    assert (codes.shape, scales.shape) == ((0, 13), (0,))


def test_more_than_two_to_the_31_elements() -> None:
    rows = 2**31 // 4096 + 3
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda")
    x[-1], x[-1, 7] = 3.0, 6.0
    codes, scales = ops.dynamic_quant_fp8(x)
    assert torch.equal(codes[-1].float() * scales[-1], x[-1].float())
    assert scales[-1] == torch.tensor(6.0) / 448.0
    assert not codes[-2].view(torch.uint8).any()
