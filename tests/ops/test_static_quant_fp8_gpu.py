"""The Triton kernel on a GPU: bit-equal with the reference, natively and by integers."""

from __future__ import annotations

import pytest
import torch

from quantattn import ops
from quantattn.arithmetic import quantize_fp8
from quantattn.reference import static_quant_fp8 as reference
from tests import fp8_oracle

pytestmark = pytest.mark.gpu

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


def kernel_codes(x, scale, dtype, native):
    from quantattn.kernels import static_quant_fp8 as kernel
    from quantattn.kernels._tiles import is_native

    if native and not is_native(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("the device has no FP8")
    out = kernel.static_quant_fp8(x, scale, dtype, native=native)
    assert out.is_contiguous()
    return out.view(torch.uint8).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("native", [False, True], ids=["integers", "native"])
@pytest.mark.parametrize("scale", [1.0, 0.0123, 37.7])
@pytest.mark.parametrize("source", ["bf16", "fp16", "fp32"])
def test_hard_numbers_are_bit_equal_with_the_reference(dtype, native, scale, source) -> None:
    x = {
        "bf16": fp8_oracle.every_bf16(),
        "fp16": fp8_oracle.every_bf16().view(torch.float16),
        "fp32": fp8_oracle.hard_float32(dtype),
    }[source]
    factor = torch.tensor(scale)
    expected = reference.static_quant_fp8(x, factor, dtype).view(torch.uint8)
    actual = kernel_codes(x.cuda(), factor.cuda(), dtype, native)
    assert torch.equal(actual, expected), x[actual != expected][:8]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_scale_begins_codes_where_ieee_division_does(dtype) -> None:
    """All mantissas of a scale, with every boundary between codes and its float32 neighbours."""
    mantissas = torch.arange(2**23, dtype=torch.int32, device="cuda")
    for exponent in (-126, -70, 0, 127):
        scale = (mantissas | ((127 + exponent) << 23)).view(torch.float32)
        for boundary in range(17, 32):
            near = (scale.double() * boundary / 32).float().view(torch.int32)
            x = torch.stack([near + step for step in (-1, 0, 1)]).view(torch.float32)
            expected = quantize_fp8(x, scale, dtype).view(torch.uint8)
            actual = ops.static_quant_fp8(x, scale, dtype=dtype).view(torch.uint8)
            assert torch.equal(actual, expected), (exponent, boundary)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_just_above_a_tie_do_not_fall_to_it(dtype) -> None:
    x = torch.tensor([400.199585, 272.156555, 136.002075, -400.199585], device="cuda")
    codes = ops.static_quant_fp8(x, torch.tensor(1.0, device="cuda"), dtype=dtype)
    expected = [416.0, 288.0, 144.0, -416.0]
    if dtype == torch.float8_e5m2:
        expected = [384.0, 256.0, 128.0, -384.0]
    assert codes.float().tolist() == expected


@pytest.mark.parametrize("native", [False, True], ids=["integers", "native"])
@pytest.mark.parametrize("num_groups", [1, 8, 2, 32])
@pytest.mark.parametrize("rows", [1, 15, 17, 533])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_slices_of_a_packed_projection_and_groups(native, num_groups, rows, head_dim) -> None:
    assert_same_slice(native, num_groups, rows, head_dim, torch.bfloat16, torch.float8_e4m3fn)


@pytest.mark.parametrize("native", [False, True], ids=["integers", "native"])
@pytest.mark.parametrize("source", [torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_groups", [1, 8])
def test_slices_of_every_dtype(native, source, dtype, num_groups) -> None:
    assert_same_slice(native, num_groups, 17, 96, source, dtype)


def assert_same_slice(native, num_groups, rows, head_dim, source, dtype) -> None:
    packed = torch.randn(rows, 3 * 8 * head_dim).to(source)
    scale = torch.linspace(0.01, 0.4, num_groups)
    device_slice = packed.cuda()[:, 8 * head_dim : 16 * head_dim].unflatten(1, (8, head_dim))
    host_slice = packed[:, 8 * head_dim : 16 * head_dim].unflatten(1, (8, head_dim))
    expected = reference.static_quant_fp8(host_slice, scale, dtype)
    actual = kernel_codes(device_slice, scale.cuda(), dtype, native)
    assert torch.equal(actual, expected.view(torch.uint8))


@pytest.mark.parametrize(
    "shape", [(), (0, 4), (1,), (3, 5), (2, 3, 4, 5), (15,), (16,), (17,), (4097,), (129, 32)]
)
def test_any_shape_through_the_public_operation(shape) -> None:
    x = torch.randn(shape)
    actual = ops.static_quant_fp8(x.cuda().mT if x.ndim > 1 else x.cuda(), torch.tensor(0.3).cuda())
    expected = ops.static_quant_fp8(x.mT if x.ndim > 1 else x, torch.tensor(0.3))
    assert torch.equal(actual.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_more_than_two_to_the_31_elements() -> None:
    rows = 2**31 // 4096 + 3
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3.0
    out = ops.static_quant_fp8(x, torch.tensor(0.5, device="cuda"))
    assert (out[-1].float() == 6.0).all()
    assert not out[-2].view(torch.uint8).any()


def test_capture_and_replay_read_the_scale_anew() -> None:
    x, scale = torch.randn(33, 256, device="cuda"), torch.tensor(0.5, device="cuda")
    ops.static_quant_fp8(x, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.static_quant_fp8(x, scale)
    scale.fill_(0.125)
    graph.replay()
    expected = ops.static_quant_fp8(x.cpu(), torch.tensor(0.125))
    assert torch.equal(out.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_a_scale_on_the_host_is_refused_naming_both_devices() -> None:
    with pytest.raises(ValueError, match=r"scale is on cpu, but .* on cuda:0"):
        ops.static_quant_fp8(torch.randn(2, 2, device="cuda"), torch.tensor(0.5))
