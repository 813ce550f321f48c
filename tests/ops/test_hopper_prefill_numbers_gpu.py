"""The Hopper prefill whose products are of 16-bit numbers on a GPU, against attention in float64.

Over pages of every format that it serves, and over rows one after another. Slots that no key was
written to are NaN, ids behind the end of a sequence's blocks are garbage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from quantattn.formats import parse_kv_cache_dtype
from quantattn.kernels._attention_call import Call
from quantattn.layout import PageLayout
from quantattn.ops import static_quant_fp8
from tests.ops.on_hopper import on_hopper
from tests.ops.page_oracle import rotation
from tests.ops.prefill_batches import KEYS, QUERIES, Case, attend, run

pytestmark = on_hopper

BOUND = 4e-3
E4M3 = torch.float8_e4m3fn
STORED = {E4M3: torch.bfloat16}
"""Dtypes of a model whose query has been quantized."""
CODES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_per_token_head": torch.float8_e4m3fn,
    "int8_per_token_head": torch.int8,
    "int4_per_token_head": torch.uint8,
}
ROW_FORMATS = [name for name in CODES if "token_head" in name]


@dataclass
class Numbers(Case):
    """A batch whose query has a dtype, and whose keys and values have a format."""

    name: str = "fp8_e4m3"
    dtype: torch.dtype = torch.bfloat16
    placement: str = "page"

    def __post_init__(self) -> None:
        super().__post_init__()
        query = torch.randn(self.query.shape, device="cuda")
        query[sum(self.query_lens) :] = torch.nan
        self.query = query.to(self.dtype)
        self.stored = {}
        for side, first in (("key", 0.0), ("value", 0.3)):
            rows = torch.randn(getattr(self, side).shape, device="cuda") + first
            setattr(self, side, self._store(side, rows))

    def _store(self, side: str, rows: Tensor) -> Tensor:
        """Keep rows in the format, with scales of their own where it has them; what they mean."""
        keys = sum(self.key_lens)
        rows[keys:] = torch.nan
        dtype, scales = CODES.get(self.name, STORED.get(self.dtype, self.dtype)), None
        if self.name == "int4_per_token_head":
            codes, scales, rows = self._int4_rows(rows)
        elif "token_head" in self.name:
            scales = torch.exp(torch.randn(rows.shape[:2], device="cuda"))
            unit = rows[:keys].abs().max() / (127 if dtype == torch.int8 else 448)
            codes = (rows / unit).nan_to_num(127).to(dtype)
            scales *= unit
            rows = codes.float() * scales[..., None]
        else:
            codes = rows = rows.to(dtype)
        self.stored[side] = codes, scales
        return rows

    @staticmethod
    def _int4_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales with offsets, and what they mean, of rows of this shape.

        A rotated query is rounded to 11 bits, by which scores of long keys err more: lengths differ
        less than elsewhere.
        """
        codes = torch.randint(0, 256, (*rows.shape[:2], rows.shape[2] // 2), device="cuda").byte()
        numbers = torch.exp(torch.randn(*rows.shape[:2], 2, device="cuda") / 2) / 4.6
        numbers[..., 1] = -numbers[..., 0] * (7.5 + torch.randn(rows.shape[:2], device="cuda"))
        halves = torch.stack([codes % 16, codes // 16], -1).flatten(-2).double()
        scale, offset = numbers.double().split(1, -1)
        turned = torch.from_numpy(rotation(rows.shape[2])).cuda()
        meant = (halves * scale + offset) @ turned.T
        return codes, numbers, torch.where(rows.isnan(), rows.double(), meant)

    def call(self, **options) -> Call:
        plain = {"prob_scale": None, "out_dtype": STORED.get(self.dtype, self.dtype)}
        if self.dtype != E4M3:
            plain["q_scale"] = None
        if not self.name.startswith("fp8_e"):
            plain |= {"k_scale": None, "v_scale": None}
        return super().call(**{**plain, **options})

    def pages(self) -> dict[str, object]:
        size, heads = self.block_size, self.heads[1]
        layout = PageLayout(
            heads, *self.head_dims, self.order, parse_kv_cache_dtype(self.name), self.placement
        )
        blocks = [-(-n // size) for n in self.key_lens]
        order = torch.randperm(sum(blocks) + 3, dtype=torch.int32, device="cuda")
        table = torch.full((len(blocks), max(blocks) + 2), 2**30, dtype=torch.int32, device="cuda")
        storage = layout.format.storage_dtype or self.key.dtype
        bits, nan = (torch.int16, -1) if storage.itemsize == 2 else (torch.uint8, 255)
        shape = len(order), layout.page_size(size)
        pages = torch.full(shape, nan, dtype=bits, device="cuda").view(storage)
        codes = pages.view(torch.uint8) if layout.format.is_quantized else pages
        views = layout.key_view(codes), layout.value_view(codes)
        scale_views = layout.scale_views(pages) or (None, None)
        first = first_block = 0
        for row, count, length in zip(table, blocks, self.key_lens, strict=True):
            row[:count] = order[first_block : first_block + count]
            token = torch.arange(length, device="cuda")
            where = row[token // size].long(), token % size
            for side, view, scale_view in zip(("key", "value"), views, scale_views, strict=True):
                stored, scales = (
                    x[first : first + length] if x is not None else None for x in self.stored[side]
                )
                view[where] = stored.view(codes.dtype)
                if scales is not None:
                    scale_view[where] = scales
            first_block += count
            first += length
        lengths = torch.tensor(self.key_lens, dtype=torch.int32, device="cuda")
        return {"kv_cache": pages, "layout": layout, "seq_lens": lengths, "block_table": table}


def compare(case: Numbers, call: Call, bound: float = BOUND) -> None:
    """Compare each sequence, and all of them."""
    out, lse = run(call)
    one = torch.ones((), device="cuda")
    names = ("q_scale", "k_scale", "v_scale")
    scales = {name: one if getattr(call, name) is None else getattr(call, name) for name in names}
    want, want_lse = attend(case, replace(call, **scales))
    assert torch.isfinite(out.float()).all()
    for start, count in zip(case.ends(case.query_lens).tolist(), case.query_lens, strict=False):
        rows = slice(start, start + count)
        error = (out[rows].double() - want[rows]).norm()
        assert error <= bound * want[rows].norm(), (start, count, error / want[rows].norm())
    print(f"error {((out.double() - want).norm() / want.norm()).item():.2e}")
    assert not out[sum(case.query_lens) :].any()
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "dtype", "block_size", "order"),
    [
        ("auto", torch.bfloat16, 16, "NHD"),
        ("auto", torch.float16, 64, "HND"),
        ("fp8_e4m3", torch.bfloat16, 16, "NHD"),
        ("fp8_e4m3", torch.float16, 256, "HND"),
        ("fp8_e5m2", torch.bfloat16, 64, "NHD"),
        ("fp8_per_token_head", torch.bfloat16, 16, "HND"),
        ("int8_per_token_head", torch.float16, 32, "NHD"),
        ("int8_per_token_head", torch.bfloat16, 128, "HND"),
        ("int4_per_token_head", torch.bfloat16, 16, "NHD"),
        ("int4_per_token_head", torch.float16, 64, "HND"),
        *[(name, E4M3, 32, "NHD") for name in ("auto", *CODES)],
    ],
    ids=str,
)
def test_any_format(name, dtype, block_size, order) -> None:
    case = Numbers(
        QUERIES, KEYS, block_size=block_size, order=order, padding=5, name=name, dtype=dtype
    )
    compare(case, case.call())


@pytest.mark.parametrize(
    ("name", "heads"), [("auto", (7, 1)), ("fp8_e4m3", (40, 8)), ("fp8_e5m2", (3, 3))], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_rows_one_after_another(name, heads, dtype) -> None:
    case = Numbers(QUERIES, KEYS, heads=heads, padding=5, name=name, dtype=dtype)
    compare(case, case.call())


@pytest.mark.parametrize("name", ROW_FORMATS)
@pytest.mark.parametrize(
    ("block_size", "order", "heads", "head_dims", "dtype"),
    [
        (16, "NHD", (8, 2), (128, 128), torch.bfloat16),
        (64, "HND", (6, 3), (96, 192), torch.float16),
        (32, "NHD", (4, 1), (64, 128), E4M3),
        (256, "NHD", (8, 4), (256, 96), torch.bfloat16),
    ],
    ids=str,
)
def test_scales_behind_their_rows(name, block_size, order, heads, head_dims, dtype) -> None:
    case = Numbers(
        QUERIES,
        KEYS,
        heads,
        head_dims,
        block_size,
        order,
        name=name,
        dtype=dtype,
        placement="inline",
    )
    compare(case, case.call(sliding_window=700 if block_size == 16 else None))


@pytest.mark.parametrize(
    ("name", "head_dims"),
    [
        *[(name, (n, n)) for name in ("auto", "fp8_e4m3") for n in (64, 96, 256)],
        *[(name, (192, 128)) for name in ("auto", "fp8_e4m3")],
        ("fp8_e4m3", (64, 256)),
        ("fp8_per_token_head", (64, 64)),
        ("int8_per_token_head", (256, 256)),
        ("int8_per_token_head", (96, 192)),
        *[("int4_per_token_head", dims) for dims in ((64, 64), (96, 256), (192, 128), (256, 96))],
    ],
    ids=str,
)
def test_any_width(name, head_dims) -> None:
    case = Numbers(QUERIES, KEYS, head_dims=head_dims, block_size=32, name=name)
    compare(case, case.call())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fp8_e4m3", {"causal": False}),
        ("fp8_e4m3", {"sliding_window": 200}),
        ("fp8_e4m3", {"sliding_window": 300, "causal": False}),
        ("fp8_e4m3", {"logits_soft_cap": 3.0}),
        ("fp8_e4m3", {"softmax_scale": 0.0}),
        ("fp8_e4m3", {"softmax_scale": 0.5}),
        ("auto", {"sliding_window": 200}),
        ("int8_per_token_head", {"sliding_window": 200, "logits_soft_cap": 3.0}),
        ("int4_per_token_head", {"sliding_window": 200, "logits_soft_cap": 3.0}),
        ("int4_per_token_head", {"causal": False, "softmax_scale": 0.0}),
    ],
    ids=str,
)
def test_any_mask_and_score(name, options) -> None:
    case = Numbers(QUERIES, KEYS, block_size=16, name=name)
    compare(case, case.call(**options))


@pytest.mark.parametrize("name", ["auto", "fp8_e4m3", "int8_per_token_head", "int4_per_token_head"])
def test_a_chunk_of_a_long_sequence(name) -> None:
    case = Numbers([130, 65], [131_072, 70_001], heads=(4, 1), block_size=64, name=name)
    compare(case, case.call())


@pytest.mark.parametrize("name", ["auto", "fp8_e4m3"])
def test_values_with_an_offset_over_a_flat_softmax(name) -> None:
    case = Numbers([70], [131_072], heads=(2, 1), name=name)
    case.query /= 64
    case.value = (case.value.float() / 4 + 8).to(case.value.dtype)
    compare(case, case.call())


@pytest.mark.parametrize("name", ["auto", "fp8_e5m2"])
def test_a_key_that_stands_out(name) -> None:
    case = Numbers([300], [9000], heads=(4, 2), name=name)
    rows = case.key.float()
    rows[4000] *= 40
    case.key = rows.clamp(-448, 448).to(case.key.dtype)
    compare(case, case.call())


def test_query_rows_of_any_range() -> None:
    case = Numbers([300], [500], heads=(4, 2))
    powers = torch.logspace(-30, 20, 300, base=2, device="cuda")
    case.query = (case.query.float() * powers[:, None, None]).bfloat16()
    case.query[7] = 0
    compare(case, case.call(softmax_scale=2.0**-18))


@pytest.mark.parametrize(("name", "width"), [("fp8_e4m3", 64), ("auto", 96), ("auto", 256)])
def test_a_quantized_query_of_any_width(name, width) -> None:
    case = Numbers(QUERIES, KEYS, head_dims=(width, width), block_size=32, name=name, dtype=E4M3)
    compare(case, case.call())


def test_sinks_join_the_denominator_once() -> None:
    case = Numbers(QUERIES, KEYS)
    sinks = 3 * torch.randn(8, device="cuda").bfloat16()
    compare(case, case.call(sinks=sinks))


@pytest.mark.parametrize("name", ["auto", "fp8_e4m3", "int8_per_token_head", "int4_per_token_head"])
def test_a_fused_output_is_the_quantized_one(name) -> None:
    case = Numbers(QUERIES, KEYS, padding=2, block_size=16, name=name)
    scale = torch.rand((), device="cuda") / 50 + 0.002
    fused, _ = run(case.call(out_scale=scale, out_dtype=torch.bfloat16, round_through=True))
    unfused, _ = run(case.call())
    codes = static_quant_fp8(unfused.flatten(1), scale).view(torch.uint8)
    assert torch.equal(fused.flatten(1).view(torch.uint8), codes)


def test_repeated_launches_agree() -> None:
    case = Numbers(QUERIES, KEYS, heads=(32, 8))
    call = case.call()
    first = run(call)
    for _ in range(200):
        for once, again in zip(first, run(call), strict=True):
            assert torch.equal(once, again)
