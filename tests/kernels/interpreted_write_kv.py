"""The kernels in Triton's interpreter, on the CPU; test_interpreted.py runs this in a process."""

from __future__ import annotations

import pytest
import torch

from quantattn.errors import FormatError
from quantattn.formats import parse_kv_cache_dtype
from quantattn.kernels import _write_rows
from quantattn.kernels.write_kv import write_kv
from quantattn.kernels.write_latent import write_latent
from quantattn.layout import PageLayout
from quantattn.reference.write_kv import write_kv as reference
from quantattn.reference.write_latent import write_latent as reference_latent
from quantattn.testing import poisoned_pages
from tests import fp8_oracle
from tests.ops import page_oracle, row_cases

# numpy, which interprets, says where float32 overflows or meets a NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

SCALES = {
    "per tensor": (torch.tensor(0.37), torch.tensor([1.9])),
    "per head": (torch.tensor([0.3, 0.7, 0.05]), torch.tensor([1.9, 0.11, 0.4])),
    "mixed": (torch.tensor(0.37), torch.tensor([1.9, 0.11, 0.4])),
}
ORDERED = pytest.mark.parametrize("order", page_oracle.ORDERS)
PLACED = pytest.mark.parametrize("placement", page_oracle.PLACEMENTS)
SCALED = pytest.mark.parametrize("name", page_oracle.FORMATS)


def assert_same_bytes(
    key, value, slots, scales, kv_cache_dtype, order, dtype=torch.uint8, placement="page"
) -> None:
    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    layout = PageLayout(key.shape[1], key.shape[2], value.shape[2], order, fmt, placement)
    pages = [poisoned_pages(5, layout.page_size(4), dtype) for _ in range(2)]
    write_kv(key, value, pages[0], slots, *scales, fmt.name, order, placement)
    reference(key, value, pages[1], slots, *scales, fmt.name, order, placement)
    actual, expected = (bytes(p.untyped_storage()) for p in pages)
    assert actual == expected


@ORDERED
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_fp8_pages(order, kv_cache_dtype, scales, source) -> None:
    key, value = (torch.randn(5, 3, width).mul(3).to(source) for width in (24, 10))
    slots = torch.tensor([17, -1, 0, 6, -3])
    assert_same_bytes(key, value, slots, SCALES[scales], kv_cache_dtype, order)


@ORDERED
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_unquantized_pages(order, source, stored) -> None:
    key, value = (torch.randn(5, 3, width).to(source) for width in (24, 10))
    slots = torch.tensor([17, -1, 0, 6, -3])
    assert_same_bytes(key, value, slots, (None, None), "auto", order, stored)


@ORDERED
def test_slices_of_a_packed_projection(order) -> None:
    packed = torch.randn(7, 2 * 3 * 16 + 3 * 8)
    key = packed[:, 48:96].unflatten(1, (3, 16))
    value = packed[:, 96:].unflatten(1, (3, 8))
    slots = torch.tensor([3, 19, 18, -1, 4, 5, 12])
    assert_same_bytes(key, value, slots, SCALES["per head"], "fp8", order)
    strided = torch.randn(7, 16, 3).mT
    assert_same_bytes(strided, strided, slots, SCALES["mixed"], "fp8", order)


def test_strided_slots_and_scales() -> None:
    key, value = (torch.randn(3, 3, width) for width in (16, 8))
    slots = torch.tensor([3, 99, 19, 99, 4, 99])[::2]
    scales = torch.tensor([[0.3, 1.9], [0.7, 0.11], [0.05, 0.4]]).unbind(1)
    assert_same_bytes(key, value, slots, scales, "fp8", "NHD")


def test_hard_numbers_and_more_columns_than_a_tile() -> None:
    hard = fp8_oracle.hard_float32(torch.float8_e4m3fn)
    width = 3000
    rows = hard[: len(hard) // width * width].reshape(-1, 1, width)[:18]
    slots = torch.arange(len(rows))
    one = (torch.tensor(1.0), torch.tensor(0.0123))
    assert_same_bytes(rows, rows, slots, one, "fp8", "NHD")


def test_latent_pages() -> None:
    latent, slots = torch.randn(5, 40), torch.tensor([17, -1, 0, 6, -3])
    scale = torch.tensor(0.37)
    pages = [poisoned_pages(5, 4 * 40, torch.uint8) for _ in range(2)]
    write_latent(latent, pages[0], slots, scale, "fp8_e4m3")
    reference_latent(latent, pages[1], slots, scale, "fp8_e4m3")
    assert bytes(pages[0].untyped_storage()) == bytes(pages[1].untyped_storage())


@SCALED
@PLACED
@ORDERED
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_pages_with_a_scale_for_each_row(name, placement, order, source) -> None:
    key, value = (torch.randn(5, 3, width).mul(3).to(source) for width in (24, 8))
    slots = torch.tensor([17, -1, 0, 6, -3])
    assert_same_bytes(key, value, slots, (None, None), name, order, placement=placement)


@SCALED
@pytest.mark.parametrize("widths", [(128, 128), (192, 96), (80, 64), (256, 8)])
def test_scaled_rows_of_any_width(name, widths) -> None:
    key, value = (torch.randn(3, 2, width) for width in widths)
    slots = torch.tensor([3, 17, 8])
    assert_same_bytes(key, value, slots, (None, None), name, "NHD", placement="inline")


@SCALED
@pytest.mark.parametrize(
    "rows",
    [row_cases.hard_rows(64), row_cases.boundary_rows(64, 10), row_cases.tie_rows(64, 20)],
    ids=["hard", "boundary", "tie"],
)
def test_hard_rows(name, rows, monkeypatch) -> None:
    monkeypatch.setattr(_write_rows, "FEW_TOKENS", 0)
    both = torch.cat([rows, rows.flip(0)])
    for some in both[: len(both) // 4 * 4].view(-1, 4, 64).split(20):
        slots = torch.randperm(20)[: len(some)]
        assert_same_bytes(some, some.flip(2), slots, (None, None), name, "HND")


@SCALED
@pytest.mark.parametrize("tokens", [0, 1, 9, 20, 300])
def test_any_count_of_tokens_with_scales(name, tokens, monkeypatch) -> None:
    for kind, limit in (("FEW", 8), ("SOME", 16)):
        monkeypatch.setattr(_write_rows, f"{kind}_TOKENS", limit)
    key, value = torch.randn(2, tokens, 5, 16).unbind(0)
    slots = torch.full((tokens,), -1)
    places = torch.randperm(tokens)[:15]
    slots[places] = torch.randperm(20)[: len(places)]
    assert_same_bytes(key, value, slots, (None, None), name, "NHD")


@SCALED
def test_strided_rows_with_scales(name) -> None:
    packed = torch.randn(7, 2 * 3 * 16 + 3 * 8)
    key, value = packed[:, 48:96].unflatten(1, (3, 16)), packed[:, 96:].unflatten(1, (3, 8))
    slots = torch.tensor([3, 19, 18, -1, 4, 5, 12])
    assert_same_bytes(key, value, slots, (None, None), name, "HND")
    transposed = torch.randn(7, 16, 3).mT
    assert_same_bytes(transposed, transposed, slots, (None, None), name, "NHD")


def test_pages_off_whole_words_are_refused() -> None:
    fmt = parse_kv_cache_dtype("int8_per_token_head")
    pages = torch.zeros(2, PageLayout(1, 8, 8, format=fmt).page_size(4) + 2, dtype=torch.uint8)
    key, slots = torch.randn(1, 1, 8), torch.tensor([0])
    with pytest.raises(FormatError, match="multiple of 4"):
        write_kv(key, key, pages[:, :-2], slots, None, None, fmt.name, "NHD")


@pytest.mark.parametrize("widths", [(128, 128), (64, 192), (256, 8), (96, 80)])
@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 1000, 10_000])
@pytest.mark.parametrize("itemsize", [2, 4])
@SCALED
def test_a_row_in_parts_leaves_no_thread_of_the_warp(name, widths, heads, tokens, itemsize) -> None:
    """Triton 3.6 takes a row's extremes from wrong threads if other rows lie between its parts."""
    fmt = parse_kv_cache_dtype(name)
    tile = _write_rows.choose_tile(tokens, PageLayout(heads, *widths, format=fmt), itemsize)
    columns = 1 << (min(widths) - 1).bit_length()
    held = 16 // itemsize if fmt.is_rotated else 16
    threads = columns // tile["PARTS"] // held
    rows = tile["BLOCK_TOKENS"] * tile["BLOCK_HEADS"]
    assert tile["PARTS"] == 1 or threads * rows >= 32
