"""The kernel in Triton's interpreter, on the CPU; test_interpreted.py runs this in a process."""

from __future__ import annotations

import pytest
import torch

from quantattn.formats import parse_kv_cache_dtype
from quantattn.kernels.rope_write_kv import rope_write_kv
from quantattn.layout import PageLayout
from quantattn.reference.rope_write_kv import rope_write_kv as reference
from quantattn.testing import poisoned_pages
from tests.ops import page_oracle
from tests.ops.rope_oracle import make_table

# numpy, which interprets, says where it meets a signalling NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

FORMATS = ["auto", "fp8_e4m3", "fp8_e5m2", *page_oracle.FORMATS]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SLOTS = torch.tensor([17, -1, 0, 6, -3])
POSITIONS = torch.tensor([7, 0, 30, 7, 12])
# Scales a head lie two apart.
K_SCALE, V_SCALE = torch.tensor([0.3, 9.0, 0.7, 9.0, 0.05])[::2], torch.tensor(1.9)
Q_SCALES = [None, torch.tensor(0.013), torch.tensor([0.011, 9.0, 0.031, 9.0, 0.007])[::2]]


def new_rows(tokens: int, widths: tuple[int, int], dtype: torch.dtype):
    shapes = ((6, widths[0]), (3, widths[0]), (3, widths[1]))
    return [torch.randn(tokens, *shape).mul(3).to(dtype) for shape in shapes]


def assert_same_bytes(
    rows,
    table,
    *,
    name="fp8_e4m3",
    order="NHD",
    placement="page",
    slots=SLOTS,
    positions=POSITIONS,
    interleaved=False,
    q_scale=None,
    stored=torch.float16,
) -> torch.Tensor:
    fmt = parse_kv_cache_dtype(name)
    _, num_kv_heads, head_dim = rows[1].shape
    layout = PageLayout(num_kv_heads, head_dim, rows[2].shape[2], order, fmt, placement)
    dtype = torch.uint8 if fmt.is_quantized else stored
    pages = [poisoned_pages(5, layout.page_size(4), dtype) for _ in range(2)]
    tail = (K_SCALE, V_SCALE, name, order, placement, positions, table, interleaved, q_scale)
    actual = rope_write_kv(*rows, pages[0], slots, *tail)
    expected = reference(*rows, pages[1], slots, *tail)
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    assert bytes(pages[0].untyped_storage()) == bytes(pages[1].untyped_storage())
    return actual


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("order", "placement", "dtype"),
    [
        ("NHD", "page", torch.float32),
        ("HND", "inline", torch.float16),
        ("HND", "page", torch.bfloat16),
        ("NHD", "inline", torch.bfloat16),
    ],
)
def test_pages_of_every_format(name, order, placement, dtype) -> None:
    rows, table = new_rows(5, (24, 16), dtype), make_table(31, 24, torch.float32)
    place = {"order": order, "placement": placement}
    assert_same_bytes(rows, table, name=name, **place, stored=torch.bfloat16)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("widths", "rotary_dim"), [((32, 32), 32), ((32, 8), 20), ((24, 24), 24), ((80, 64), 2)]
)
@pytest.mark.parametrize(("dtype", "q_scale"), list(zip(DTYPES, Q_SCALES, strict=True)))
def test_queries_of_every_rotation(interleaved, widths, rotary_dim, dtype, q_scale) -> None:
    rows, table = new_rows(5, widths, dtype), make_table(31, rotary_dim, dtype)
    assert_same_bytes(rows, table, interleaved=interleaved, q_scale=q_scale)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_zeros_keep_their_signs_where_nothing_turns(interleaved) -> None:
    rows = [torch.tensor([0.0, -0.0, 1.0, -1.0]).repeat(5, heads, 6) for heads in (6, 3, 3)]
    rows[0] = rows[0].flip(-1)[:, :, torch.randperm(24)]
    table = make_table(31, 24, torch.float32)
    positions = torch.zeros(5, dtype=torch.int64)
    options = {"name": "auto", "stored": torch.float32, "interleaved": interleaved}
    assert_same_bytes(rows, table, positions=positions, **options)


@pytest.mark.parametrize("name", ["fp8_e4m3", "int4_per_token_head"])
def test_positions_outside_the_table(name) -> None:
    rows, table = new_rows(5, (24, 16), torch.bfloat16), make_table(31, 16, torch.float32)
    positions = torch.tensor([31, 2**40, -1, 30, -(2**62)])
    out = assert_same_bytes(rows, table, name=name, positions=positions, q_scale=Q_SCALES[1])
    assert (out.view(torch.uint8)[[0, 2], :, :16] == 0x7F).all()


@pytest.mark.parametrize("tokens", [0, 1, 259])
def test_any_count_of_tokens(tokens) -> None:
    rows, table = new_rows(tokens, (16, 8), torch.float16), make_table(31, 16, torch.float16)
    slots = torch.full((tokens,), -1)
    slots[:7:3] = torch.tensor([12, 3, 19])[: len(slots[:7:3])]
    positions = torch.arange(tokens) % 31
    assert_same_bytes(rows, table, slots=slots, positions=positions, q_scale=Q_SCALES[2])


def test_slices_of_a_packed_projection_and_a_strided_table() -> None:
    packed = torch.randn(5, 6 * 16 + 3 * 16 + 3 * 8 + 5)[:, 5:].split([96, 48, 24], dim=1)
    rows = [x.unflatten(1, (-1, w)) for x, w in zip(packed, (16, 16, 8), strict=True)]
    assert_same_bytes(rows, make_table(62, 32, torch.float32)[::2, ::2])
    transposed = [torch.randn(5, 16, heads).mT for heads in (6, 3, 3)]
    assert_same_bytes(transposed, make_table(31, 16, torch.float32), q_scale=Q_SCALES[2])


def test_a_cache_without_pages_is_not_written() -> None:
    rows, table = new_rows(2, (16, 8), torch.float32), make_table(31, 16, torch.float32)
    layout = PageLayout(3, 16, 8)
    pages = torch.full((3, layout.page_size(4)), 7.0)
    tail = (None, None, "auto", "NHD", "page", POSITIONS[:2], table, False, None)
    slots = torch.tensor([-1, 0])
    query = rope_write_kv(*rows, pages[1:1], slots, *tail)
    assert torch.equal(query, reference(*rows, pages[1:1], slots, *tail))
    assert (pages == 7.0).all()
