"""write_kv: the bytes it writes, and the bytes it must leave alone."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
import torch

from quantattn.cache_writes import holds_entries
from quantattn.errors import FormatError, ScaleError
from quantattn.ops import write_kv
from quantattn.testing import POISON, poisoned_pages
from tests import fp8_oracle
from tests.ops.oracles import FP8, per_head, read_rows

HEADS, DIM, DIM_V, SIZE = 2, 6, 4, 4
PAGE = SIZE * HEADS * (DIM + DIM_V)
ORDERS = ["NHD", "HND"]
PER_TENSOR = (torch.tensor(0.5), torch.tensor(2.0))
PER_HEAD = (torch.tensor([0.3, 0.7]), torch.tensor([1.9, 0.11]))


def rows_of(pages, slots, side, order):
    width, start = (DIM, 0) if side == 0 else (DIM_V, SIZE * HEADS * DIM)
    return read_rows(pages, slots, width, HEADS, start, order, SIZE)


def write(key, value, pages, slots, scales, kv_cache_dtype="fp8", layout="NHD") -> None:
    write_kv(
        key,
        value,
        pages,
        torch.tensor(slots),
        k_scale=scales[0],
        v_scale=scales[1],
        kv_cache_dtype=kv_cache_dtype,
        layout=layout,
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("scales", [PER_TENSOR, PER_HEAD], ids=["per tensor", "per head"])
@pytest.mark.parametrize("as_bytes", [False, True], ids=["fp8 pages", "uint8 pages"])
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_are_the_quotients_and_nothing_else_changes(
    order, kv_cache_dtype, scales, as_bytes, source
) -> None:
    dtype = FP8[kv_cache_dtype]
    pages = poisoned_pages(5, PAGE, torch.uint8 if as_bytes else dtype)
    slots = [17, 0, 6]
    new = [torch.randn(3, HEADS, width).mul(3).to(source) for width in (DIM, DIM_V)]
    write(*new, pages, slots, scales, kv_cache_dtype, order)
    for side in range(2):
        scale = np.array(per_head(scales[side], HEADS), np.float32)[:, None]
        quotient = fp8_oracle.quotient(new[side].float().numpy(), scale)
        stored = rows_of(pages, slots, side, order).view(torch.uint8).numpy()
        np.testing.assert_array_equal(stored, fp8_oracle.encode(quotient, dtype))
    everything = pages.untyped_storage()
    poison = sum(byte == POISON for byte in everything)
    assert poison == len(everything) - 3 * HEADS * (DIM + DIM_V)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_an_unquantized_cache_converts_and_ignores_scales(order, stored) -> None:
    key, value = torch.randn(2, HEADS, DIM).bfloat16(), torch.randn(2, HEADS, DIM_V).bfloat16()
    with_scales, without = (poisoned_pages(3, PAGE, stored) for _ in range(2))
    write(key, value, with_scales, [5, 9], PER_HEAD, "auto", order)
    write(key, value, without, [5, 9], (None, None), "auto", order)
    assert torch.equal(with_scales.view(torch.uint8), without.view(torch.uint8))
    assert torch.equal(rows_of(without, [5, 9], 0, order), key.to(stored))
    assert torch.equal(rows_of(without, [5, 9], 1, order), value.to(stored))


def test_a_value_of_another_model_dtype_is_converted_not_reinterpreted() -> None:
    pages = torch.zeros(1, 2, dtype=torch.float16)
    new = torch.full((1, 1, 1), 0.1621, dtype=torch.bfloat16)
    write(new, new, pages, [0], (None, None), "auto")
    assert pages[0, 0].item() == pytest.approx(0.1621, rel=1e-2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "slots", [[0, 1, -1, -1], [-1, 0, -1, 1], [-1, -1, -1, -1], [-5, -1, 1, 0]]
)
def test_padding_touches_nothing(order, slots) -> None:
    pages = poisoned_pages(2, PAGE, torch.float8_e4m3fn)
    key, value = torch.randn(4, HEADS, DIM), torch.randn(4, HEADS, DIM_V)
    write(key, value, pages, slots, PER_TENSOR, layout=order)
    for slot in range(2 * SIZE):
        stored = rows_of(pages, [slot], 0, order).view(torch.uint8)
        if slot in slots:
            expected = fp8_oracle.encode(key[slots.index(slot)].double().numpy() / 0.5, FP8["fp8"])
            np.testing.assert_array_equal(stored[0].numpy(), expected)
        else:
            assert (stored == POISON).all()


def test_no_tokens_write_nothing_and_note_nothing() -> None:
    pages = poisoned_pages(2, PAGE, torch.float8_e4m3fn)
    scales = (torch.tensor(0.5), torch.tensor(0.25))
    slots = torch.zeros(0, dtype=torch.int64)
    write_kv(
        torch.randn(0, HEADS, DIM),
        torch.randn(0, HEADS, DIM_V),
        pages,
        slots,
        k_scale=scales[0],
        v_scale=scales[1],
        kv_cache_dtype="fp8",
    )
    assert (pages.view(torch.uint8) == POISON).all()
    assert not holds_entries(scales[0])


def test_keys_may_be_slices_of_a_packed_projection() -> None:
    packed = torch.randn(3, HEADS * (DIM + DIM_V) + 5)
    key = packed[:, : HEADS * DIM].unflatten(1, (HEADS, DIM))
    value = packed[:, HEADS * DIM : -5].unflatten(1, (HEADS, DIM_V))
    strided, contiguous = (poisoned_pages(2, PAGE, torch.float8_e4m3fn) for _ in range(2))
    write(key, value, strided, [3, 4, 0], PER_HEAD)
    write(key.contiguous(), value.contiguous(), contiguous, [3, 4, 0], PER_HEAD)
    assert torch.equal(strided.view(torch.uint8), contiguous.view(torch.uint8))


def test_e5m2_is_stored_as_e5m2() -> None:
    pages = torch.zeros(1, 10, dtype=torch.float8_e5m2)
    values = torch.tensor([1.0, 2.0, 3.5, 0.25, 1000.0]).view(1, 1, 5)
    one = torch.tensor(1.0)
    write(values, values, pages, [0], (one, one), "fp8_e5m2")
    assert pages[0, :5].float().tolist() == [1.0, 2.0, 3.5, 0.25, 1024.0]


def test_a_scale_from_a_file_reaches_the_bytes() -> None:
    pages = torch.zeros(1, 2, dtype=torch.float8_e4m3fn)
    scale = torch.tensor(0.04)
    write(torch.ones(1, 1, 1), torch.ones(1, 1, 1), pages, [0], (scale, torch.tensor(1.0)))
    assert pages[0].float().tolist() == [24.0, 1.0]


def test_blocks_beyond_two_to_the_31_elements_are_addressed() -> None:
    stride = 2**28
    storage = torch.empty(9 * stride, dtype=torch.uint8)  # virtual memory: untouched pages are free
    pages = storage.as_strided((9, PAGE), (stride, 1))
    slot = 8 * SIZE + 3
    write(torch.ones(1, HEADS, DIM), torch.ones(1, HEADS, DIM_V), pages, [slot], PER_TENSOR)
    assert (rows_of(pages, [slot], 0, "NHD").view(FP8["fp8"]).float() == 2.0).all()


def test_writing_notes_both_scales_while_the_pages_live() -> None:
    scales = (torch.tensor(0.5), torch.tensor(0.25))
    pages = torch.zeros(2, PAGE, dtype=torch.float8_e4m3fn)
    key, value = torch.randn(1, HEADS, DIM), torch.randn(1, HEADS, DIM_V)
    write(key, value, pages, [0], scales)
    assert holds_entries(scales[0])
    assert holds_entries(scales[1])
    del pages
    assert not holds_entries(scales[0])


def test_padding_takes_no_write_of_another_thread_back() -> None:
    pages, lost, done = torch.zeros(2, PAGE), [], threading.Event()

    def fill(number: int, slots: list[int]) -> None:
        rows = [torch.full((len(slots), HEADS, width), float(number)) for width in (DIM, DIM_V)]
        write(*rows, pages, slots, (None, None), "auto")

    def pad() -> None:
        while not done.is_set():
            fill(0, [-1, -2])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=pad) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 1000):
            fill(number, [0])
            fill(number, [5])
            if not (rows_of(pages, [0], 0, "NHD") == number).all():
                lost.append(number)
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert lost == []


def test_pages_are_not_tied_to_the_graph_of_what_they_store() -> None:
    pages = torch.zeros(2, PAGE)
    key, value = torch.randn(1, HEADS, DIM, requires_grad=True), torch.randn(1, HEADS, DIM_V)
    write(key * 2, value, pages, [0], (None, None), "auto")
    assert not pages.requires_grad
    assert torch.equal(rows_of(pages, [0], 0, "NHD"), (key * 2).detach())


def test_an_unquantized_write_notes_nothing() -> None:
    scales = (torch.tensor(0.5), torch.tensor(0.25))
    pages = torch.zeros(2, PAGE)
    write(torch.randn(1, HEADS, DIM), torch.randn(1, HEADS, DIM_V), pages, [0], scales, "auto")
    assert not holds_entries(scales[0])


GOOD = {
    "key": torch.zeros(3, HEADS, DIM),
    "value": torch.zeros(3, HEADS, DIM_V),
    "kv_cache": torch.zeros(2, PAGE, dtype=torch.float8_e4m3fn),
    "slot_mapping": torch.zeros(3, dtype=torch.int64),
    "k_scale": torch.tensor(0.5),
    "v_scale": torch.tensor(0.25),
    "kv_cache_dtype": "fp8",
}


@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"),
    [
        ("key", torch.zeros(3, HEADS * DIM), FormatError, r"key: got shape \[3, 12\]"),
        ("key", torch.zeros(3, HEADS, DIM).double(), FormatError, r"key: got dtype .*float64"),
        ("value", torch.zeros(2, HEADS, DIM_V), FormatError, r"value: got shape \[2, 2, 4\]"),
        ("value", torch.zeros(3, HEADS, DIM_V).half(), FormatError, r"value: got dtype .*float16"),
        ("value", torch.zeros(3, HEADS, DIM_V, device="meta"), FormatError, "value is on meta"),
        ("value", torch.zeros(3, HEADS, 0), FormatError, "value: got head_dim_v 0.* write_latent"),
        ("kv_cache", torch.zeros(2, PAGE), FormatError, r"kv_cache: got dtype torch.float32"),
        ("kv_cache", GOOD["kv_cache"].view(torch.float8_e5m2), FormatError, "float8_e5m2"),
        ("kv_cache", GOOD["kv_cache"][:, :-1], FormatError, "no multiple of the 20"),
        ("kv_cache", torch.zeros(PAGE, 2, dtype=torch.uint8).t(), FormatError, "strides"),
        ("kv_cache", torch.zeros(1, PAGE, dtype=torch.uint8).expand(2, -1), FormatError, "overlap"),
        (
            "kv_cache",
            torch.zeros(2, 2, PAGE, dtype=torch.uint8),
            FormatError,
            "kv_cache: got shape",
        ),
        ("slot_mapping", torch.zeros(2, dtype=torch.int64), FormatError, r"slot_mapping: .*\[2\]"),
        ("slot_mapping", torch.zeros(3, dtype=torch.int32), FormatError, r"slot_mapping: .*int32"),
        ("k_scale", None, ScaleError, "k_scale: got None"),
        ("v_scale", None, ScaleError, "v_scale: got None"),
        ("k_scale", torch.ones(3), ScaleError, r"k_scale: got shape \[3\], expected \[2\]"),
        ("v_scale", torch.tensor(0.5).half(), ScaleError, r"v_scale: got dtype torch.float16"),
        ("v_scale", torch.tensor(0.5, device="meta"), ScaleError, "v_scale is on meta, .* on cpu"),
        ("kv_cache_dtype", "int8_per_token_head", FormatError, "pad both to a positive multiple"),
        ("scale_placement", "row", FormatError, "scale_placement: got 'row'"),
        ("kv_cache_dtype", "fp4", FormatError, "'fp4'"),
        ("layout", "DHN", FormatError, "layout: got 'DHN'"),
    ],
)
def test_wrong_arguments_are_refused_by_name(name, wrong, error, message) -> None:
    with pytest.raises(error, match=message):
        write_kv(**{**GOOD, name: wrong})
