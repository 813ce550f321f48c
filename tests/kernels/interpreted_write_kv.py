"""The kernel in Triton's interpreter, on the CPU; test_interpreted.py runs this in a process."""

from __future__ import annotations

import pytest
import torch

from quantattn.formats import parse_kv_cache_dtype
from quantattn.kernels.write_kv import write_kv
from quantattn.kernels.write_latent import write_latent
from quantattn.layout import PageLayout
from quantattn.reference.write_kv import write_kv as reference
from quantattn.reference.write_latent import write_latent as reference_latent
from quantattn.testing import poisoned_pages
from tests import fp8_oracle

# numpy, which interprets, says where float32 division overflows or meets a signalling NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

SCALES = {
    "per tensor": (torch.tensor(0.37), torch.tensor([1.9])),
    "per head": (torch.tensor([0.3, 0.7, 0.05]), torch.tensor([1.9, 0.11, 0.4])),
    "mixed": (torch.tensor(0.37), torch.tensor([1.9, 0.11, 0.4])),
}


def assert_same_bytes(key, value, slots, scales, kv_cache_dtype, order, dtype=torch.uint8) -> None:
    layout = PageLayout(key.shape[1], key.shape[2], value.shape[2], order)
    pages = [poisoned_pages(5, layout.page_size(4), dtype) for _ in range(2)]
    name = parse_kv_cache_dtype(kv_cache_dtype).name
    write_kv(key, value, pages[0], slots, *scales, name, order)
    reference(key, value, pages[1], slots, *scales, name, order)
    actual, expected = (bytes(p.untyped_storage()) for p in pages)
    assert actual == expected


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_fp8_pages(order, kv_cache_dtype, scales, source) -> None:
    key, value = (torch.randn(5, 3, width).mul(3).to(source) for width in (24, 10))
    slots = torch.tensor([17, -1, 0, 6, -3])
    assert_same_bytes(key, value, slots, SCALES[scales], kv_cache_dtype, order)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_unquantized_pages(order, source, stored) -> None:
    key, value = (torch.randn(5, 3, width).to(source) for width in (24, 10))
    slots = torch.tensor([17, -1, 0, 6, -3])
    assert_same_bytes(key, value, slots, (None, None), "auto", order, stored)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_slices_of_a_packed_projection(order) -> None:
    packed = torch.randn(7, 2 * 3 * 16 + 3 * 8)
    key = packed[:, 48:96].unflatten(1, (3, 16))
    value = packed[:, 96:].unflatten(1, (3, 8))
    slots = torch.tensor([3, 19, 18, -1, 4, 5, 12])
    assert_same_bytes(key, value, slots, SCALES["per head"], "fp8", order)
    strided = torch.randn(7, 16, 3).mT
    assert_same_bytes(strided, strided, slots, SCALES["mixed"], "fp8", order)


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
