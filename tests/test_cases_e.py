"""Faults that users of other engines met in writing, conversion and layout, one test a fault.

Each runs on the CPU and on a GPU, and through the kernels in Triton's interpreter by
tests/kernels/interpreted_cases_e.py. What is compared is every byte within reach.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quantattn import PagedKVCache, forget_page_scales, ops
from quantattn.errors import FormatError
from quantattn.host_blocks import load_blocks, save_blocks
from quantattn.loaders import load_checkpoint
from quantattn.ops import _library
from tests import fp8_oracle
from tests.loaders import toy
from tests.ops import page_oracle
from tests.ops.page_oracle import Pages

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INT8 = "int8_per_token_head"
POISON = 0xFF
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SCALED = pytest.mark.parametrize("name", page_oracle.FORMATS)
STORED = pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", *page_oracle.FORMATS])
FACTORS = (0.37, 1.9)
PLACED = pytest.mark.parametrize("placement", page_oracle.PLACEMENTS)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


def poisoned(device: str, *shape: int) -> Tensor:
    return torch.full(shape, POISON, dtype=torch.uint8, device=device)


def write(key, value, pages: Tensor, slots, where: Pages, scales=(None, None)) -> None:
    """write_kv of tensors from the host into pages of any device."""
    given = [key, value, torch.as_tensor(slots), *scales]
    key, value, slots, k_scale, v_scale = (
        None if tensor is None else tensor.to(pages.device) for tensor in given
    )
    ops.write_kv(
        key,
        value,
        pages,
        slots,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_cache_dtype=where.name,
        layout=where.order,
        scale_placement=where.placement,
    )


def one_token(x: Tensor, factors: tuple[float, float], device: str, name: str) -> list[int]:
    """Bytes of a page of one token, its key and its value `x` times a factor and coded by it."""
    page = poisoned(device, 1, 2 * len(x))
    scales = [torch.tensor(factor) for factor in factors]
    key, value = (x.view(1, 1, -1) * scale for scale in scales)
    write(key, value, page, [0], Pages(name, (len(x), len(x)), 1, 1), scales)
    return page.flatten().tolist()


def static_codes(x: Tensor, factor: float, device: str, dtype: torch.dtype) -> list[int]:
    """Codes of `x` times a factor, which is the scale too."""
    scale = torch.tensor(factor, device=device)
    codes = ops.static_quant_fp8(x.to(device) * factor, scale, dtype=dtype)
    return codes.view(torch.uint8).tolist()


def rows(tokens: int, heads: int, dims: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Keys and values, the largest number of each row another one."""
    louder = torch.arange(1.0, tokens * heads + 1).view(tokens, heads, 1)
    return torch.randn(tokens, heads, dims[0]) * louder, torch.randn(
        tokens, heads, dims[1]
    ) / louder


def assert_bytes(buffer: Tensor, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(buffer.cpu().numpy(), expected)


def layout_of(where: Pages) -> dict:
    return {
        "num_kv_heads": where.heads,
        "head_dim": where.dims[0],
        "head_dim_v": where.dims[1],
        "kv_cache_dtype": where.name,
        "layout": where.order,
        "scale_placement": where.placement,
    }


def page_bytes(where: Pages) -> int:
    if where.name in page_oracle.FORMATS:
        return where.page_bytes
    return where.size * where.heads * sum(where.dims)


def fp8_dtype(where: Pages) -> torch.dtype:
    return E5M2 if where.name == "fp8_e5m2" else E4M3


def write_by_hand(pages: np.ndarray, where: Pages, key, value, slots, scales) -> None:
    """What `write_kv` must do; `scales` are those of a layer, for formats that use them."""
    if where.name in page_oracle.FORMATS:
        where.write_tokens(pages, key, value, slots)
        return
    for side, new in enumerate((key, value)):
        codes = fp8_oracle.encode(fp8_oracle.quotient(new.numpy(), scales[side]), fp8_dtype(where))
        for token, head in itertools.product(range(len(slots)), range(where.heads)):
            block, offset = divmod(slots[token], where.size)
            if block >= 0:
                start = where.code_place(side, offset, head)
                pages[block, start : start + where.dims[side]] = codes[token, head]


def read_by_hand(page: np.ndarray, where: Pages, side: int, head: int, scales) -> np.ndarray:
    """All rows of one side and head of a page, float64 `[size, width]`."""
    if where.name in page_oracle.FORMATS:
        return np.stack([where.read(page, side, offset, head) for offset in range(where.size)])
    starts = [where.code_place(side, offset, head) for offset in range(where.size)]
    codes = np.stack([page[start : start + where.dims[side]] for start in starts])
    return fp8_oracle.decode(torch.from_numpy(codes), fp8_dtype(where)).numpy() * scales[side]


@SCALED
def test_e01_a_sharing_layers_first_touch_keeps_what_its_target_wrote(device, name) -> None:
    where = Pages(name, (16, 16), 1, 4)
    buffer = poisoned(device, 2, where.page_bytes)
    PagedKVCache.borrow([buffer], **layout_of(where))
    expected = buffer.cpu().numpy().copy()
    key = torch.zeros(1, 1, 16)
    key[..., 5] = 0.635
    write(key, key, buffer, [6], where)
    PagedKVCache.borrow([buffer[:]], **layout_of(where))
    where.write_tokens(expected, key, key, [6])
    assert_bytes(buffer, expected)
    assert abs(where.read(buffer[1].cpu().numpy(), 0, 2, 0)).max() == pytest.approx(0.635)


@SCALED
@pytest.mark.parametrize(("order", "placement"), [("NHD", "page"), ("HND", "inline")])
def test_e01_memory_that_was_mapped_anew_is_set_again(device, name, order, placement) -> None:
    where = Pages(name, (16, 8), 2, 4, order, placement)
    buffer = poisoned(device, 3, where.page_bytes)
    for _ in range(2):
        cache = PagedKVCache.borrow([buffer], **layout_of(where))
        expected = np.full(buffer.shape, POISON, np.uint8)
        rows_of_pages = itertools.product(range(3), (0, 1), range(4), range(2))
        for block, side, offset, head in rows_of_pages:
            places = where.scale_places(side, offset, head)
            for place, number in zip(places, (1.0, 0.0), strict=False):
                expected[block, place : place + 4] = np.array([number], "f4").view(np.uint8)
        assert_bytes(buffer, expected)
        write(*rows(2, 2, where.dims), buffer, [6, 1], where)
        buffer.fill_(POISON)
        forget_page_scales(cache.layer(0))


@SCALED
@PLACED
def test_e02_scales_of_padded_pages_land_in_their_own_block(device, name, placement) -> None:
    where = Pages(name, (8, 8), 1, 4, placement=placement)
    buffer = poisoned(device, 3, where.page_bytes + 16)
    key, value = rows(12, 1, where.dims)
    slots = torch.randperm(12).tolist()
    expected = buffer.cpu().numpy().copy()
    where.write_tokens(expected, key, value, slots)
    write(key, value, buffer[:, : where.page_bytes], slots, where)
    assert_bytes(buffer, expected)


@SCALED
@pytest.mark.parametrize(
    ("order", "placement", "axis"),
    [
        pytest.param("NHD", "page", 0, id="stacked-NHD-page"),
        pytest.param("HND", "inline", 0, id="stacked-HND-inline"),
        pytest.param("HND", "page", 1, id="interleaved-HND-page"),
        pytest.param("NHD", "inline", 1, id="interleaved-NHD-inline"),
    ],
)
def test_e04_each_layer_of_one_buffer_has_its_own_scales(
    device, name, order, placement, axis
) -> None:
    where = Pages(name, (16, 8), 2, 4, order, placement)
    shape = (4, 3) if axis == 0 else (3, 4)
    buffer = poisoned(device, *shape, where.page_bytes)
    expected = buffer.cpu().numpy().copy()
    for layer in range(4):
        key, value = rows(5, 2, where.dims)
        slots = torch.randperm(12)[:5].tolist()
        plane = np.moveaxis(expected, axis, 0)[layer]
        where.write_tokens(plane, key, value, slots)
        write(key, value, buffer.select(axis, layer), slots, where)
    assert_bytes(buffer, expected)


def test_e04_an_offset_between_words_is_refused(device) -> None:
    where = Pages(INT8, (16, 8), 2, 4)
    buffer = poisoned(device, 2 * where.page_bytes + 4)
    pages = buffer[2:-2].view(2, -1)
    with pytest.raises(FormatError, match="multiple of 4"):
        write(*rows(1, 2, where.dims), pages, [0], where)
    assert_bytes(buffer, np.full(buffer.shape, POISON, np.uint8))


@PLACED
@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("fp8_per_token_head", 33_792), (INT8, 33_792), ("int4_per_token_head", 18_432)],
)
def test_e05_a_block_moves_with_its_scales(device, name, nbytes, placement) -> None:
    where = Pages(name, (128, 128), 8, 16, placement=placement)
    buffer = torch.randint(256, (5, where.page_bytes), dtype=torch.uint8).to(device)
    cache = PagedKVCache.borrow([buffer], **layout_of(where))
    pages = cache.layer(0)
    expected = pages.cpu().numpy().copy()
    key, value = rows(2, 8, where.dims)
    where.write_tokens(expected, key, value, [16, 31])
    write(key, value, pages, [16, 31], where)
    saved = cache.swap_out([1])
    cache.fork([1], into=[2])
    cache.copy_blocks([(1, 4)])
    pages[1] = 0x5A
    cache.swap_in(saved, [0])
    assert saved.nbytes == nbytes
    expected[[0, 2, 4]] = expected[1]
    expected[1] = 0x5A
    assert_bytes(pages, expected)


@SCALED
def test_e06_a_saved_block_brings_its_scales_to_another_pool(device, name, tmp_path: Path) -> None:
    where = Pages(name, (16, 8), 2, 4)
    first, fresh = (
        PagedKVCache.borrow([poisoned(device, count, where.page_bytes)], **layout_of(where))
        for count in (5, 9)
    )
    write(*rows(4, 2, where.dims), first.layer(0), range(12, 16), where)
    save_blocks(first.swap_out([3]), tmp_path / "block.safetensors")
    saved = load_blocks(tmp_path / "block.safetensors")
    fresh.swap_in(saved, [7])
    assert torch.equal(fresh.layer(0)[7], first.layer(0)[3])
    # Their pages are as large as those that were saved, but for the last ones.
    inline = replace(where, placement="inline")
    turned = replace(where, order="HND")
    other = "int8_per_token_head" if name == "fp8_per_token_head" else "fp8_per_token_head"
    for options, told in (
        (layout_of(inline), "scale_placement (saved 'page', this cache 'inline')"),
        (layout_of(turned), "layout (saved 'NHD', this cache 'HND')"),
        (layout_of(replace(where, name=other)), f"saved '{name}', this cache '{other}'"),
        ({**layout_of(where), "kv_cache_dtype": "auto"}, f"saved '{name}', this cache 'auto'"),
    ):
        pages = PagedKVCache(1, 9, 4, **options, device=device)
        before = pages.layer(0).clone()
        with pytest.raises(FormatError, match=re.escape(told)):
            pages.swap_in(saved, [7])
        assert torch.equal(pages.layer(0), before)


def test_e07_a_fingerprint_tells_dtypes_formats_and_scales_apart(device) -> None:
    def fingerprint(k_scale: float = 0.01, **options) -> str:
        cache = PagedKVCache(1, 3, 4, 2, 16, device=device, **options)
        return cache.fingerprint([tuple(torch.tensor([k_scale, 0.03], device=device))])

    found = [
        fingerprint(dtype=torch.float16),
        fingerprint(dtype=torch.bfloat16),
        fingerprint(kv_cache_dtype="fp8_e4m3"),
        fingerprint(kv_cache_dtype="fp8_e5m2"),
        fingerprint(kv_cache_dtype="fp8_per_token_head"),
        fingerprint(0.02, kv_cache_dtype="fp8_e4m3"),
    ]
    assert len(set(found)) == len(found)


@SCALED
def test_e08_pages_of_two_head_sizes_share_one_buffer(device, name) -> None:
    small, large = (Pages(name, (width, width), 1, 4) for width in (256, 512))
    buffer = poisoned(device, 6, large.page_bytes)
    expected = buffer.cpu().numpy().copy()
    for where, slots in ((small, [0, 3, 9, 11]), (large, [12, 19, 23])):
        key, value = rows(len(slots), 1, where.dims)
        where.write_tokens(expected, key, value, slots)
        write(key, value, buffer[:, : where.page_bytes], slots, where)
    assert_bytes(buffer, expected)


def test_e10_int8_rounds_to_nearest_even(device) -> None:
    row = torch.tensor([127.0, 0.6, -0.6, 1.9, -1.9, 126.7, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    codes = [127, 1, -1, 2, -2, 127, 0, 2, 2, 0, -2, -2]
    for unit in (1.0, 2.0**-7):
        where = Pages(INT8, (12, 12), 1, 1)
        buffer = poisoned(device, 1, where.page_bytes)
        write(row.view(1, 1, 12) * unit, row.flip(0).view(1, 1, 12), buffer, [0], where)
        stored = buffer.cpu()[0]
        assert stored[:12].view(torch.int8).tolist() == codes
        assert stored[12:24].view(torch.int8).tolist() == codes[::-1]
        assert stored[24:].view(torch.float32).tolist() == [unit, 1.0]


JUST_ABOVE_A_TIE = torch.tensor([400.199585, 272.156555, 136.002075])
ROUNDED_UP = [0x7D, 0x79, 0x71]  # 416, 288, 144


@pytest.mark.parametrize("factors", [(1.0, 0.25), (4.0, 1.0)])
def test_e12_float32_is_rounded_to_fp8_once(device, factors) -> None:
    x = torch.cat([JUST_ABOVE_A_TIE, -JUST_ABOVE_A_TIE])
    codes = [*ROUNDED_UP, *(code | 0x80 for code in ROUNDED_UP)]
    assert static_codes(x, factors[0], device, E4M3) == codes
    assert one_token(x, factors, device, "fp8_e4m3") == codes * 2


@pytest.mark.parametrize("factors", [(1.0, 0.25), (4.0, 1.0)])
def test_e12_rows_that_make_their_scale_are_rounded_once(device, factors) -> None:
    # The largest number makes the factor the scale.
    x = torch.cat([torch.tensor([448.0]), JUST_ABOVE_A_TIE, -JUST_ABOVE_A_TIE, torch.zeros(1)])
    codes = [0x7E, *ROUNDED_UP, *(code | 0x80 for code in ROUNDED_UP), 0]
    key, value = (x.view(1, 1, 8) * factor for factor in factors)
    found, scale = ops.dynamic_quant_fp8(value.view(1, 8).to(device))
    assert found.view(torch.uint8).tolist() == [codes]
    assert scale.tolist() == [factors[1]]
    where = Pages("fp8_per_token_head", (8, 8), 1, 1)
    page = poisoned(device, 1, where.page_bytes)
    write(key, value, page, [0], where)
    assert page[0].tolist() == codes * 2 + list(np.array(factors, "f4").tobytes())


@pytest.mark.parametrize(
    ("name", "numbers", "codes"),
    [
        ("fp8_e4m3", [448, 464, 465, 1000, -1000], [0x7E, 0x7E, 0x7E, 0x7E, 0xFE]),
        ("fp8_e5m2", [57344, 61440, 65536, -61440, -65536], [0x7B, 0x7B, 0x7B, 0xFB, 0xFB]),
    ],
)
def test_e13_conversion_saturates_and_keeps_nan(device, name, numbers, codes) -> None:
    x = torch.tensor([*numbers, torch.inf, -torch.inf, torch.nan])
    codes = [*codes, codes[0], codes[-1], 0x7F]
    assert static_codes(x, 0.5, device, E4M3 if name == "fp8_e4m3" else E5M2) == codes
    assert one_token(x, (0.5, 2.0), device, name) == codes * 2


def test_e13_rows_that_make_their_scale_saturate(device) -> None:
    x = torch.tensor([448, 464, 465, 1000, -1000, torch.inf, -torch.inf, torch.nan])
    scales = np.array([1000, 250], np.float32) / np.float32(448)
    codes = fp8_oracle.encode(fp8_oracle.quotient(x.numpy(), scales[0]), E4M3).tolist()
    assert codes[3:] == [0x7E, 0xFE, 0x7E, 0xFE, 0x7F]
    found, scale = ops.dynamic_quant_fp8(x.view(1, 8).to(device))
    assert found.view(torch.uint8).tolist() == [codes]
    assert scale.tolist() == scales[:1].tolist()
    key, value = x.view(1, 1, 8), x.view(1, 1, 8) / 4
    for name, most, both in (
        ("fp8_per_token_head", 448, codes),
        (INT8, 127, [57, 59, 59, 127, 129, 127, 129, 0]),
    ):
        where = Pages(name, (8, 8), 1, 1)
        page = poisoned(device, 1, where.page_bytes)
        write(key, value, page, [0], where)
        scales = np.array([1000, 250], np.float32) / np.float32(most)
        assert page[0].tolist() == both * 2 + list(scales.tobytes())


def test_e14_e5m2_pages_hold_e5m2_for_writer_and_reader(device) -> None:
    x = torch.tensor([1.0, 2.0, 3.5, 0.25, 1000.0])
    codes = one_token(x, (2.0, 0.5), device, "fp8_e5m2")
    assert codes == [0x3C, 0x40, 0x43, 0x34, 0x64] * 2
    int32 = {"dtype": torch.int32, "device": device}
    out = ops.paged_attention(
        torch.ones(1, 1, 5, device=device),
        torch.tensor([codes], dtype=torch.uint8, device=device),
        cu_seqlens_q=torch.tensor([0, 1], **int32),
        seq_lens=torch.tensor([1], **int32),
        block_table=torch.tensor([[0]], **int32),
        max_seqlen_q=1,
        num_kv_heads=1,
        kv_cache_dtype="fp8_e5m2",
        k_scale=torch.tensor(2.0, device=device),
        v_scale=torch.tensor(0.5, device=device),
    )
    assert out.flatten().tolist() == [0.5, 1.0, 1.75, 0.125, 512.0]


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": toy.KV_SCHEME},
        None,
    ],
    ids=["weights in int4", "scales for the cache", "unquantized"],
)
def test_e15_an_e5m2_cache_runs_at_one_and_says_which_scales_it_leaves(
    device, section, tmp_path: Path
) -> None:
    config = {**toy.CONFIG, "quantization_config": section}
    tensors = {"model.layers.0.self_attn.q_proj.weight": torch.ones(32, 32)}
    scales = {f"model.layers.{n}.self_attn.{r}_scale": 0.25 for n in (0, 1) for r in "kv"}
    declares_scales = section is not None and "kv_cache_scheme" in section
    folder = toy.save(tmp_path, tensors | scales if declares_scales else tensors, config)
    model = toy.Decoder(kv_cache_dtype="fp8_e5m2")
    report = load_checkpoint(model, folder, strict=declares_scales)
    assert {row.value for row in report.rows} == {model.attention(1).host_scale("k")} == {1.0}
    assert {problem.key for problem in report.ignored} == (
        set(scales) if declares_scales else set()
    )
    told = ("stores fp8_e5m2", "declared for fp8_e4m3: 1.0 is used")
    assert all(words in str(problem) for problem in report.ignored for words in told)
    assert report.warnings == ()

    attention, x = model.attention(1), torch.linspace(-70000.0, 3.0, 24)
    page = poisoned(device, 1, 2 * len(x))
    rows_of_one_token = (x.view(1, 1, -1), -x.view(1, 1, -1))
    where = Pages("fp8_e5m2", (len(x), len(x)), 1, 1)
    write(*rows_of_one_token, page, [0], where, (attention.k_scale, attention.v_scale))
    both = torch.cat((x, -x)).numpy()[None]
    assert_bytes(page, fp8_oracle.encode(fp8_oracle.quotient(both, 1.0), E5M2))


def test_e15_scales_of_undeclared_dtype_are_an_e5m2_caches_own(device, tmp_path: Path) -> None:
    factors = {"k": 0.25, "v": 3.0}
    scales = {
        f"model.layers.{n}.self_attn.{r}_scale": factors[r] * (n + 1) for n in (0, 1) for r in "kv"
    }
    model = toy.Decoder(kv_cache_dtype="fp8_e5m2")
    load_checkpoint(model, toy.save(tmp_path, scales, None))
    attention, x = model.attention(1), torch.linspace(-70000.0, 3.0, 24)
    page, where = poisoned(device, 1, 2 * len(x)), Pages("fp8_e5m2", (24, 24), 1, 1)
    new = x.view(1, 1, -1)
    write(new, -new, page, [0], where, (attention.k_scale, attention.v_scale))
    both = np.stack([fp8_oracle.quotient(x.numpy(), 0.5), fp8_oracle.quotient(-x.numpy(), 6.0)])
    assert_bytes(page, fp8_oracle.encode(both, E5M2).reshape(1, -1))


@pytest.fixture(params=["sm_75", "sm_80", "sm_86", "sm_89", "sm_90"])
def capability(request, monkeypatch) -> Iterator[tuple[int, int]]:
    """A compute capability that the library is told of every device."""
    driver = pytest.importorskip("triton").runtime.driver
    if torch.cuda.is_available():
        driver.active.get_current_target()  # compiles for the real device ever after
    found = divmod(int(request.param.removeprefix("sm_")), 10)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found)
    for module in ("_devices", "_tiles"):
        monkeypatch.setattr(f"quantattn.kernels.{module}.capability", lambda device: found)
    _library._multiplies.cache_clear()
    yield found
    _library._multiplies.cache_clear()


def kernels_on_the_cpu(monkeypatch, *names: str) -> None:
    """Send operations to what runs them on a GPU, be tensors where they are."""
    for name in names:
        module = import_module(f"quantattn.ops.{name}")
        run = module._cuda
        if name in _library.MULTIPLYING:
            run = _library.by_capability(run, getattr(module.reference, name))
        monkeypatch.setattr(torch.ops.quantattn, name, run)


def attend_to_block(block, query, pages, name, scales) -> torch.Tensor:
    """Attend with one token to the four of a block, of two KV heads of 16 and 8."""
    int32 = {"dtype": torch.int32, "device": query.device}
    return ops.paged_attention(
        query,
        pages,
        cu_seqlens_q=torch.tensor([0, 1], **int32),
        seq_lens=torch.tensor([4], **int32),
        block_table=torch.tensor([[block]], **int32),
        max_seqlen_q=1,
        num_kv_heads=2,
        head_dim_v=8,
        kv_cache_dtype=name,
        k_scale=scales[0],
        v_scale=scales[1],
    )


@STORED
def test_e16_every_format_is_written_and_read_at_every_capability(
    device, name, capability, monkeypatch
) -> None:
    from tests.kernels.recording import recorded_launches

    is_native, multiplies = capability >= (8, 9), capability >= (8, 0)
    if device == "cpu":
        kernels_on_the_cpu(monkeypatch, "write_kv", "paged_attention")
    # Elsewhere it is only seen what would be launched.
    runs = device == "cuda" or (IS_INTERPRETED and not is_native)
    where, slots = Pages(name, (16, 8), 2, 4), [7, 4, 6, 5]
    scales = [torch.tensor(factor, device=device) for factor in FACTORS]
    key, value = rows(4, 2, where.dims)
    pages = PagedKVCache(1, 2, 4, **layout_of(where), device=device).layer(0)
    pages.view(torch.uint8).fill_(POISON)
    expected = pages.view(torch.uint8).cpu().numpy().copy()

    with recorded_launches(run=runs) as launches:
        write(key, value, pages, slots, where, scales)
    assert [(launch.kernel, launch.is_native) for launch in launches] == [
        ("_write_rows_kernel", is_native)
    ]
    write_by_hand(expected, where, key, value, slots, FACTORS)
    if runs:
        assert_bytes(pages.view(torch.uint8), expected)
    pages.view(torch.uint8).copy_(torch.from_numpy(expected))

    query = torch.randn(1, 2, 16)
    with recorded_launches(run=runs) as launches:
        out = attend_to_block(1, query.to(device), pages, name, scales)
    assert [(launch.kernel, launch.is_native) for launch in launches] == (
        [("decode_kernel", is_native), ("merge_kernel", is_native)] if multiplies else []
    )
    for head in range(2) if runs or not multiplies else ():
        keys, values = (read_by_hand(expected[1], where, side, head, FACTORS) for side in (0, 1))
        weights = np.exp(keys @ query[0, head].double().numpy() / 4)
        found, wanted = out[0, head].cpu().double().numpy(), weights @ values / weights.sum()
        assert np.linalg.norm(found - wanted) < 4e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_e16_numbers_are_quantized_at_every_capability(
    device, dtype, capability, monkeypatch
) -> None:
    from tests.kernels.recording import recorded_launches

    is_native = capability >= (8, 9)
    if device == "cpu":
        kernels_on_the_cpu(monkeypatch, "static_quant_fp8", "dynamic_quant_fp8")
    runs = device == "cuda" or (IS_INTERPRETED and not is_native)
    x, factors = torch.randn(3, 2, 48), np.array([0.37, 0.019], np.float32)
    numbers, scales = x.to(device), torch.from_numpy(factors).to(device)
    with recorded_launches(run=runs) as launches:
        one = ops.static_quant_fp8(numbers, scales[0], dtype=dtype)
        each = ops.static_quant_fp8(numbers, scales, dtype=dtype)
        own, found = ops.dynamic_quant_fp8(numbers, granularity="token_head", dtype=dtype)
    assert [(launch.kernel, launch.is_native) for launch in launches] == [
        ("_quantize_flat_kernel", is_native),
        ("_quantize_runs_kernel", is_native),
        ("_quantize_rows_kernel", is_native),
    ]
    dynamic = x.abs().amax(2).numpy() / np.float32(torch.finfo(dtype).max)
    if runs:
        np.testing.assert_array_equal(found.cpu().numpy(), dynamic)
        by_scale = ((one, factors[:1]), (each, factors), (own, dynamic))
        for codes, scale in by_scale:
            expected = fp8_oracle.encode(fp8_oracle.quotient(x.numpy(), scale[..., None]), dtype)
            assert_bytes(codes.view(torch.uint8), expected)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("native", [False, True], ids=["integers", "native"])
def test_e16_conversion_by_integers_gives_the_native_codes(device, dtype, native) -> None:
    if device == "cpu" and (native or not IS_INTERPRETED):
        pytest.skip("the conversion of a GPU, or of the interpreter, which has no native one")
    from quantattn.kernels.static_quant_fp8 import static_quant_fp8 as kernel

    x = fp8_oracle.hard_float32(dtype)
    codes = kernel(x.to(device), torch.tensor(1.0).to(device), dtype, native=native)
    expected = fp8_oracle.encode(fp8_oracle.quotient(x.numpy(), 1.0), dtype)
    np.testing.assert_array_equal(codes.view(torch.uint8).cpu().numpy(), expected)


@pytest.mark.parametrize("x", [torch.randn(1, 13), torch.zeros(4, 13), torch.randn(1, 128)])
def test_e17_first_rows_short_rows_and_zero_rows(device, x) -> None:
    codes, scales = ops.dynamic_quant_fp8(x.to(device))
    amax = x.abs().amax(1).numpy()
    expected = np.where(amax > 0, amax / np.float32(448), np.float32(1))
    assert scales.tolist() == expected.tolist()
    by_hand = fp8_oracle.encode(fp8_oracle.quotient(x.numpy(), expected[:, None]), E4M3)
    np.testing.assert_array_equal(codes.view(torch.uint8).cpu().numpy(), by_hand)


@SCALED
@pytest.mark.parametrize(
    ("tokens", "width", "factor"), [(1, 24, 1.0), (4, 24, 0.0), (1, 128, 1.0), (3, 8, 0.3)]
)
def test_e17_first_rows_short_rows_and_zero_rows_of_pages(
    device, name, tokens, width, factor
) -> None:
    new = torch.randn(tokens, 1, width) * factor
    where = Pages(name, (width, width), 1, 4)
    buffer = poisoned(device, 1, where.page_bytes)
    expected = buffer.cpu().numpy().copy()
    where.write_tokens(expected, new, -new, range(tokens))
    write(new, -new, buffer, range(tokens), where)
    assert_bytes(buffer, expected)


def eager(act, pages: Tensor) -> None:
    act()


def compiled(act, pages: Tensor) -> None:
    torch.compile(act, fullgraph=True, backend="aot_eager")()


def captured(act, pages: Tensor) -> None:
    act()  # compiles the kernel, which a capture may not do
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    pages.fill_(POISON)
    graph.replay()


@STORED
@pytest.mark.parametrize("run", [eager, compiled, captured])
def test_e19_padding_leaves_the_last_slot_alone(device, name, run) -> None:
    if device == "cpu" and (run is captured or (IS_INTERPRETED and run is compiled)):
        pytest.skip("CUDA graphs need a GPU, and the interpreter's kernels are not compiled")
    where = Pages(name, (16, 8), 2, 4)
    pages = poisoned(device, 2, page_bytes(where))
    expected = pages.cpu().numpy().copy()
    key, value = rows(4, 2, where.dims)
    slots = [0, 1, -1, -1]
    write_by_hand(expected, where, key, value, slots, FACTORS)
    given = (key, value, torch.tensor(slots), *map(torch.tensor, FACTORS))
    key, value, slots, k_scale, v_scale = (tensor.to(device) for tensor in given)

    def act() -> None:
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        ops.write_kv(key, value, pages, slots, **scales, kv_cache_dtype=name)

    run(act, pages)
    assert_bytes(pages, expected)


def write_up_to(slot: int, device: str, operation: str) -> None:
    """Write tokens to slot 0 and to another slot of two pages of four tokens."""
    key, value = (new.to(device) for new in rows(2, 2, (16, 8)))
    pages = poisoned(device, 2, Pages(INT8, (16, 8), 2, 4).page_bytes)
    arguments = [key, value, pages, torch.tensor([0, slot], device=device)]
    options = {"k_scale": None, "v_scale": None, "kv_cache_dtype": INT8}
    if operation == "write_kv":
        ops.write_kv(*arguments, **options)
    else:
        angles = torch.ones(1, 16, device=device)
        first = torch.zeros(2, dtype=torch.int64, device=device)
        ops.rope_write_kv(key, *arguments, positions=first, cos_sin_cache=angles, **options)


WRITTEN_APART = """
import torch
from tests.test_cases_e import write_up_to
for slot in (7, {slot}):
    write_up_to(slot, "cuda", "{operation}")
    torch.cuda.synchronize()
    print("wrote", slot)
"""


@pytest.mark.parametrize("operation", ["write_kv", "rope_write_kv"])
@pytest.mark.parametrize("slot", [8, 2**40])
def test_e19_a_slot_behind_the_last_page_is_found_in_debug_mode(device, operation, slot) -> None:
    if device == "cpu":
        write_up_to(7, device, operation)
        with pytest.raises(Exception, match=r"a slot lies behind|out of bounds"):
            write_up_to(slot, device, operation)
        return
    # What fails on a GPU takes its process along.
    done = subprocess.run(
        [sys.executable, "-c", WRITTEN_APART.format(slot=slot, operation=operation)],
        env={**os.environ, "TRITON_DEBUG": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "wrote 7\n"
    assert "a slot lies behind the last page" in done.stderr


@STORED
def test_e22_addresses_beyond_two_to_the_31_are_reached(device, name) -> None:
    where = Pages(name, (16, 8), 2, 4)
    stride = 2**28
    # Memory of numpy's, since torch fills its own in these tests, and here would fill 2 GiB.
    storage = (
        torch.from_numpy(np.empty(9 * stride, np.uint8))
        if device == "cpu"
        else (torch.empty(9 * stride, dtype=torch.uint8, device=device))
    )
    pages = storage.as_strided((9, page_bytes(where)), (stride, 1))
    pages.fill_(POISON)
    expected = pages.cpu().numpy().copy()
    key, value = rows(4, 2, where.dims)
    slots, scales = range(32, 36), [torch.tensor(factor, device=device) for factor in FACTORS]
    write_by_hand(expected, where, key, value, slots, FACTORS)
    write(key, value, pages, slots, where, scales)
    assert_bytes(pages, expected)
    # Queries of zeros see all keys alike, so that each head gives the mean of its values.
    out = attend_to_block(8, torch.zeros(1, 2, 16, device=device), pages, name, scales)
    means = [read_by_hand(expected[8], where, 1, head, FACTORS).mean(0) for head in (0, 1)]
    np.testing.assert_allclose(out[0].cpu().numpy(), means, rtol=2e-3, atol=2e-3)
