"""write_kv and write_latent on a GPU: the bytes of the CPU path, by both ways to round."""

from __future__ import annotations

import pytest
import torch

from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout
from quantattn.reference.write_kv import write_kv as reference
from quantattn.reference.write_latent import write_latent as reference_latent
from quantattn.testing import poisoned_pages
from tests import fp8_oracle
from tests.ops import page_oracle, row_cases

pytestmark = pytest.mark.gpu

HEADS = 3
SCALES = {
    "per tensor": (torch.tensor(0.37), torch.tensor([1.9])),
    "per head": (torch.tensor([0.3, 0.7, 0.05]), torch.tensor([1.9, 0.11, 0.4])),
    "none": (None, None),
}


def on_gpu(*tensors):
    return [None if tensor is None else tensor.cuda() for tensor in tensors]


def assert_same_bytes(
    key, value, slots, scales, kv_cache_dtype, order, dtype, native, placement="page"
) -> None:
    from quantattn.kernels.write_kv import write_kv

    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    layout = PageLayout(key.shape[1], key.shape[2], value.shape[2], order, fmt, placement)
    blocks = int(slots.max()) // 16 + 2
    expected, actual = pages_on_both(blocks, layout.page_size(16), dtype)
    reference(key, value, expected, slots, *scales, kv_cache_dtype, order, placement)
    inputs = on_gpu(key, value, slots, *scales)
    key, value, slots, *scales = inputs
    write_kv(key, value, actual, slots, *scales, kv_cache_dtype, order, placement, native=native)
    assert_equal_storage(actual, expected)


def pages_on_both(num_blocks: int, page_size: int, dtype: torch.dtype):
    """Poisoned pages with gaps between them, on the CPU and on the GPU."""
    pages = poisoned_pages(num_blocks, page_size, dtype)
    bytes_ = torch.tensor(list(pages.untyped_storage()[:1]), dtype=torch.uint8, device="cuda")
    storage = bytes_.repeat(pages.untyped_storage().nbytes()).view(dtype)
    return pages, storage.as_strided(pages.shape, pages.stride())


def assert_equal_storage(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """All bytes are equal, those of the gaps too."""
    found, wanted = (
        torch.empty(0, dtype=torch.uint8, device=pages.device).set_(pages.untyped_storage())
        for pages in (actual, expected)
    )
    assert torch.equal(found.cpu(), wanted)


def slots_for(tokens: int) -> torch.Tensor:
    slots = torch.randperm(2 * tokens + 5)[:tokens]
    slots[tokens // 2 + 1 :: 7] = -1
    return slots


# Each case compiles a kernel, so what is independent is not crossed.
FP8_CASES = [
    ("NHD", (128, 128), torch.bfloat16, "per tensor", "fp8_e4m3", 533, True),
    ("NHD", (128, 128), torch.bfloat16, "per tensor", "fp8_e4m3", 1, True),
    ("NHD", (128, 128), torch.bfloat16, "per tensor", "fp8_e4m3", 533, False),
    ("HND", (128, 128), torch.bfloat16, "per head", "fp8_e5m2", 533, True),
    ("HND", (64, 64), torch.bfloat16, "per head", "fp8_e5m2", 77, False),
    ("NHD", (96, 80), torch.float16, "per head", "fp8_e4m3", 533, True),
    ("HND", (24, 10), torch.float32, "per tensor", "fp8_e4m3", 77, True),
    ("HND", (192, 128), torch.float32, "per head", "fp8_e5m2", 533, True),
    ("NHD", (256, 256), torch.float16, "per tensor", "fp8_e5m2", 77, True),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize(
    ("order", "widths", "source", "scales", "kv_cache_dtype", "tokens", "native"), FP8_CASES
)
def test_fp8_pages(order, widths, source, scales, kv_cache_dtype, tokens, native) -> None:
    key, value = (torch.randn(tokens, HEADS, w).mul(3).to(source) for w in widths)
    arguments = (SCALES[scales], kv_cache_dtype, order, torch.uint8, native)
    assert_same_bytes(key, value, slots_for(tokens), *arguments)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_unquantized_pages(source, stored) -> None:
    key, value = (torch.randn(77, HEADS, w).to(source) for w in (96, 128))
    order = "NHD" if source == stored else "HND"
    arguments = (SCALES["none"], "auto", order, stored, None)
    assert_same_bytes(key, value, slots_for(77), *arguments)


@pytest.mark.parametrize("native", [False, True], ids=["integers", "native"])
def test_hard_numbers(native) -> None:
    hard = fp8_oracle.hard_float32(torch.float8_e4m3fn)
    rows = hard[: len(hard) // 384 * 384].view(-1, HEADS, 128)
    one = (torch.tensor(1.0), torch.tensor(0.0123))
    slots = torch.randperm(len(rows))
    assert_same_bytes(rows, rows, slots, one, "fp8_e4m3", "NHD", torch.uint8, native)


ROW_CASES = [
    ("NHD", "page", (128, 128), torch.bfloat16, 533, True),
    ("HND", "inline", (128, 128), torch.bfloat16, 533, True),
    ("NHD", "page", (128, 128), torch.bfloat16, 1, True),
    ("NHD", "page", (128, 128), torch.bfloat16, 65, True),
    ("NHD", "page", (128, 128), torch.float32, 533, True),
    ("HND", "inline", (256, 256), torch.bfloat16, 533, True),
    ("NHD", "page", (192, 128), torch.float16, 533, True),
    ("HND", "page", (64, 64), torch.float32, 17, True),
    ("HND", "page", (96, 80), torch.float16, 533, False),
    ("NHD", "inline", (64, 192), torch.float32, 70, True),
    ("NHD", "page", (256, 8), torch.float16, 533, True),
    ("HND", "inline", (24, 8), torch.float32, 3, False),
]
SCALED = pytest.mark.parametrize("name", page_oracle.FORMATS)


@SCALED
@pytest.mark.parametrize(("order", "placement", "widths", "source", "tokens", "native"), ROW_CASES)
def test_pages_with_a_scale_for_each_row(
    name, order, placement, widths, source, tokens, native
) -> None:
    key, value = (torch.randn(tokens, HEADS, w).mul(3).to(source) for w in widths)
    arguments = (SCALES["none"], name, order, torch.uint8, native, placement)
    assert_same_bytes(key, value, slots_for(tokens), *arguments)


@pytest.mark.parametrize("heads", [1, 2])
def test_few_rows_of_int4_leave_a_warp_to_parts_of_a_row(heads) -> None:
    key, value = torch.randn(2, 5, heads, 128).mul(3).bfloat16().unbind(0)
    arguments = (SCALES["none"], "int4_per_token_head", "NHD", torch.uint8, True)
    assert_same_bytes(key, value, torch.randperm(5), *arguments)


@pytest.mark.parametrize("native", [False, True], ids=["integers", "native"])
def test_int4_codes_beside_ties(native) -> None:
    key, value = row_cases.tie_rows(64, 2000).view(2, -1, 2, 64).unbind(0)
    arguments = (SCALES["none"], "int4_per_token_head", "NHD", torch.uint8, native)
    assert_same_bytes(key, value, torch.randperm(len(key)), *arguments)


@SCALED
@pytest.mark.parametrize("native", [False, True], ids=["integers", "native"])
def test_hard_rows(native, name) -> None:
    key = row_cases.boundary_rows(128, 20_000)[:, None]
    hard = row_cases.hard_rows(128)
    value = hard.repeat(len(key) // len(hard) + 1, 1)[: len(key), None]
    arguments = (SCALES["none"], name, "NHD", torch.uint8, native)
    assert_same_bytes(key, value, torch.randperm(len(key)), *arguments)


@SCALED
def test_slices_of_a_packed_projection_with_a_scale_for_each_row(name) -> None:
    from quantattn.ops import write_kv

    packed = torch.randn(65, 2 * HEADS * 128 + HEADS * 64).bfloat16()
    slots = slots_for(65)
    fmt = parse_kv_cache_dtype(name)
    layout = PageLayout(HEADS, 128, 64, "HND", fmt, "inline")
    expected, actual = pages_on_both(12, layout.page_size(16), torch.uint8)
    for pages in (expected, actual):
        new = packed.to(pages.device)
        write_kv(
            new[:, HEADS * 128 : 2 * HEADS * 128].unflatten(1, (HEADS, 128)),
            new[:, 2 * HEADS * 128 :].unflatten(1, (HEADS, 64)),
            pages,
            slots.to(pages.device),
            k_scale=None,
            v_scale=None,
            kv_cache_dtype=name,
            layout="HND",
            scale_placement="inline",
        )
    assert_equal_storage(actual, expected)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_slices_of_a_packed_projection(order) -> None:
    packed = torch.randn(65, 2 * HEADS * 128 + HEADS * 64).bfloat16().cuda()
    key = packed[:, HEADS * 128 : 2 * HEADS * 128].unflatten(1, (HEADS, 128))
    value = packed[:, 2 * HEADS * 128 :].unflatten(1, (HEADS, 64))
    arguments = (SCALES["per head"], "fp8_e4m3", order, torch.uint8, None)
    assert_same_bytes(key.cpu(), value.cpu(), slots_for(65), *arguments)
    from quantattn.ops import write_kv

    layout = PageLayout(HEADS, 128, 64, order)
    slots = slots_for(65)
    expected, actual = pages_on_both(12, layout.page_size(16), torch.float8_e4m3fn)
    reference(key.cpu(), value.cpu(), expected, slots, *SCALES["per head"], "fp8_e4m3", order)
    scales = dict(zip(("k_scale", "v_scale"), on_gpu(*SCALES["per head"]), strict=True))
    write_kv(key, value, actual, slots.cuda(), **scales, kv_cache_dtype="fp8", layout=order)
    assert_equal_storage(actual, expected)


def test_latent_pages() -> None:
    from quantattn.ops import write_latent

    latent, slots, scale = torch.randn(65, 576).bfloat16(), slots_for(65), torch.tensor(0.37)
    expected, actual = pages_on_both(12, 16 * 576, torch.float8_e4m3fn)
    reference_latent(latent, expected, slots, scale, "fp8_e4m3")
    write_latent(latent.cuda(), actual, slots.cuda(), scale=scale.cuda(), kv_cache_dtype="fp8")
    assert_equal_storage(actual, expected)


def test_addresses_beyond_two_to_the_31() -> None:
    """E22: int32 slots times strides passed 2**31."""
    from quantattn.ops import write_kv

    pages = torch.zeros(40_000, 16 * 2 * 8 * 128 * 2, dtype=torch.uint8, device="cuda")
    slot = torch.tensor([39_999 * 32 + 31], device="cuda")
    key, value = torch.full((2, 1, 8, 128), 3.0, device="cuda").unbind(0)
    half, two = torch.tensor(0.5, device="cuda"), torch.tensor(2.0, device="cuda")
    write_kv(key, value, pages, slot, k_scale=half, v_scale=two, kv_cache_dtype="fp8")
    layout = PageLayout(8, 128, 128)
    stored = pages.view(torch.float8_e4m3fn)
    assert (layout.key_view(stored)[-1, -1].float() == 6.0).all()
    assert (layout.value_view(stored)[-1, -1].float() == 1.5).all()
    assert int(pages.count_nonzero()) == 2 * 8 * 128


def test_row_scales_at_addresses_beyond_two_to_the_31() -> None:
    from quantattn.ops import write_kv

    layout = PageLayout(8, 128, 128, format=parse_kv_cache_dtype("int8_per_token_head"))
    pages = torch.zeros(80_000, layout.page_size(16), dtype=torch.uint8, device="cuda")
    slot = torch.tensor([79_999 * 16 + 15], device="cuda")
    key, value = torch.full((2, 1, 8, 128), 3.0, device="cuda").unbind(0)
    write_kv(
        key, value, pages, slot, k_scale=None, v_scale=None, kv_cache_dtype="int8_per_token_head"
    )
    assert (layout.key_view(pages)[-1, -1] == 127).all()
    assert (layout.value_scale_view(pages)[-1, -1] == torch.tensor(3.0) / 127).all()
    assert int(pages.count_nonzero()) == 2 * 8 * (128 + 4)


def test_a_captured_write_replays_with_other_slots_and_scales() -> None:
    from quantattn.ops import write_kv

    layout = PageLayout(HEADS, 64, 64)
    pages = torch.zeros(8, layout.page_size(16), dtype=torch.float8_e4m3fn, device="cuda")
    key, value = torch.randn(2, 5, HEADS, 64, device="cuda").unbind(0)
    slots = torch.arange(5, device="cuda")
    scales = {n: torch.tensor(s, device="cuda") for n, s in (("k_scale", 0.3), ("v_scale", 0.7))}

    def write() -> None:
        write_kv(key, value, pages, slots, **scales, kv_cache_dtype="fp8")

    write()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write()
    pages.view(torch.uint8).zero_()
    slots.copy_(torch.tensor([100, -1, 17, 3, 64]))
    scales["k_scale"].fill_(0.011)
    graph.replay()
    expected = torch.zeros(8, layout.page_size(16), dtype=torch.float8_e4m3fn)
    host = [t.cpu() for t in (key, value)]
    host_scales = [scales["k_scale"].cpu(), scales["v_scale"].cpu()]
    reference(*host, expected, slots.cpu(), *host_scales, "fp8_e4m3", "NHD")
    assert torch.equal(pages.cpu().view(torch.uint8), expected.view(torch.uint8))
