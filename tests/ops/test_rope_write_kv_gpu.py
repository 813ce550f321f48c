"""rope_write_kv on a GPU: the bits of the CPU path, by both ways to round, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout
from quantattn.ops import rope_write_kv
from quantattn.reference.rope_write_kv import rope_write_kv as reference
from tests.ops.rope_oracle import make_table
from tests.ops.test_write_kv_gpu import assert_equal_storage, on_gpu, pages_on_both

pytestmark = pytest.mark.gpu

KV_HEADS, MAX_POSITIONS = 3, 4096
SCALES = (torch.tensor([0.3, 0.7, 0.05]), torch.tensor(1.9))
PER_TENSOR, PER_HEAD = torch.tensor(0.013), torch.tensor([0.011, 0.031, 0.007])

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Each combination compiles a kernel, so what is independent is not crossed.
# Format, order, placement, heads, widths, rotary_dim, interleaved, dtype, table's dtype, q_scale.
CASES = [
    ("auto", "NHD", "page", 6, (128, 128), 128, False, BF16, BF16, None),
    ("auto", "HND", "page", 3, (64, 80), 32, True, FP32, FP32, PER_HEAD),
    ("fp8_e4m3", "NHD", "page", 24, (128, 128), 128, False, BF16, FP32, PER_HEAD),
    ("fp8_e4m3", "HND", "page", 6, (96, 80), 96, True, FP16, FP16, PER_TENSOR),
    ("fp8_e5m2", "HND", "page", 6, (24, 10), 14, False, FP32, FP32, None),
    ("fp8_per_token_head", "NHD", "inline", 6, (128, 64), 64, False, FP16, FP32, None),
    ("int8_per_token_head", "HND", "page", 12, (128, 128), 128, True, BF16, BF16, PER_TENSOR),
    ("int4_per_token_head", "NHD", "page", 6, (128, 128), 128, False, BF16, FP32, PER_HEAD),
    ("int4_per_token_head", "HND", "inline", 3, (96, 128), 40, False, FP32, BF16, None),
]


def new_rows(tokens: int, heads: int, widths: tuple[int, int], dtype: torch.dtype):
    shapes = ((heads, widths[0]), (KV_HEADS, widths[0]), (KV_HEADS, widths[1]))
    return [torch.randn(tokens, *shape).mul(3).to(dtype) for shape in shapes]


def index_for(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots, some of them padding, and positions."""
    slots = torch.randperm(2 * tokens + 5)[:tokens]
    slots[tokens // 2 + 1 :: 7] = -1
    return slots, torch.randint(MAX_POSITIONS, (tokens,))


def assert_same_bytes(
    rows, slots, positions, table, name, order, placement, interleaved, q_scale, native
):
    from quantattn.kernels.rope_write_kv import rope_write_kv as kernel

    fmt = parse_kv_cache_dtype(name)
    layout = PageLayout(*rows[1].shape[1:], rows[2].shape[2], order, fmt, placement)
    dtype = torch.uint8 if fmt.is_quantized else torch.float16
    blocks = len(slots) // 8 + 2
    expected, actual = pages_on_both(blocks, layout.page_size(16), dtype)
    place = (name, order, placement)
    tail = (*SCALES, *place, positions, table, interleaved, q_scale)
    out = reference(*(x.cpu() for x in rows), expected, slots, *tail)
    *rows, slots, positions, table, q_scale = on_gpu(*rows, slots, positions, table, q_scale)
    tail = (*on_gpu(*SCALES), *place, positions, table, interleaved, q_scale)
    codes = kernel(*rows, actual, slots, *tail, native=native)
    assert torch.equal(codes.cpu().view(torch.uint8), out.view(torch.uint8))
    assert_equal_storage(actual, expected)


def assert_same_case(case, tokens: int, native: bool | None) -> None:
    name, order, placement, heads, widths, rotary_dim, interleaved, dtype, table_dtype, q_scale = (
        case
    )
    rows = new_rows(tokens, heads, widths, dtype)
    table = make_table(MAX_POSITIONS, rotary_dim, table_dtype)
    place = (name, order, placement, interleaved)
    assert_same_bytes(rows, *index_for(tokens), table, *place, q_scale, native)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:7])))
def test_the_bits_of_the_cpu_path(case) -> None:
    assert_same_case(case, 533, native=None)


@pytest.mark.parametrize("case", CASES[2:4], ids=lambda case: "-".join(map(str, case[:7])))
@pytest.mark.parametrize(("tokens", "native"), [(1, None), (65, False)])
def test_few_tokens_and_integers_that_round(case, tokens, native) -> None:
    assert_same_case(case, tokens, native)


def test_slices_of_a_packed_projection() -> None:
    packed = torch.randn(65, 6 * 128 + 3 * 128 + 3 * 64, device="cuda").bfloat16()
    parts = zip(packed.split([768, 384, 192], dim=1), (128, 128, 64), strict=True)
    rows = [part.unflatten(1, (-1, width)) for part, width in parts]
    table = make_table(MAX_POSITIONS, 128, torch.bfloat16)
    place = ("fp8_e4m3", "NHD", "page", False)
    assert_same_bytes(rows, *index_for(65), table, *place, PER_TENSOR, None)


def test_positions_outside_the_table_read_nothing_wild() -> None:
    rows, table = new_rows(5, 6, (64, 64), torch.bfloat16), make_table(31, 64, torch.float32)
    positions = torch.tensor([31, 2**40, -1, 30, -(2**62)])
    slots = torch.tensor([17, -1, 0, 6, -3])
    place = ("fp8_e4m3", "NHD", "page", False)
    assert_same_bytes(rows, slots, positions, table, *place, PER_HEAD, None)


def test_addresses_beyond_two_to_the_31() -> None:
    layout = PageLayout(8, 128, 128)
    pages = torch.zeros(40_000, 2 * layout.page_size(16), dtype=torch.uint8, device="cuda")
    new = {"device": "cuda", "dtype": torch.bfloat16}
    query, key, value = (torch.full((1, h, 128), 3.0, **new) for h in (32, 8, 8))
    slot = torch.tensor([39_999 * 32 + 31], device="cuda")
    half, two = torch.tensor(0.5, device="cuda"), torch.tensor(2.0, device="cuda")
    out = rope_write_kv(
        query,
        key,
        value,
        pages,
        slot,
        positions=slot - slot,
        cos_sin_cache=make_table(4, 128, torch.float32).cuda(),
        k_scale=half,
        v_scale=two,
        kv_cache_dtype="fp8",
    )
    assert torch.equal(out, query)
    stored = pages.view(torch.float8_e4m3fn)
    assert (layout.key_view(stored)[-1, -1].float() == 6.0).all()
    assert (layout.value_view(stored)[-1, -1].float() == 1.5).all()
    assert int(pages.count_nonzero()) == 2 * 8 * 128


def test_a_captured_launch_replays_with_other_tokens() -> None:
    layout = PageLayout(KV_HEADS, 64, 64)
    expected, pages = pages_on_both(8, layout.page_size(16), torch.float8_e4m3fn)
    rows = new_rows(5, 6, (64, 64), torch.bfloat16)
    table = make_table(MAX_POSITIONS, 64, torch.bfloat16)
    *inputs, angles, k_scale, v_scale, q_scale = on_gpu(*rows, table, *SCALES, PER_HEAD)
    slots, positions = torch.full((5,), -1, device="cuda"), torch.arange(5, device="cuda")

    def run() -> torch.Tensor:
        return rope_write_kv(
            *inputs,
            pages,
            slots,
            positions=positions,
            cos_sin_cache=angles,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_cache_dtype="fp8",
            q_scale=q_scale,
        )

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    slots.copy_(torch.tensor([100, -1, 17, 3, 64]))
    positions.copy_(torch.tensor([4000, 1, 0, 77, 4095]))
    k_scale.mul_(1.5)
    graph.replay()
    scales = (k_scale.cpu(), SCALES[1], "fp8_e4m3", "NHD", "page")
    tail = (*scales, positions.cpu(), table, False, PER_HEAD)
    codes = reference(*rows, expected, slots.cpu(), *tail)
    assert torch.equal(out.cpu().view(torch.uint8), codes.view(torch.uint8))
    assert_equal_storage(pages, expected)
