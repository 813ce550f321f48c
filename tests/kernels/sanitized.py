"""Runs every kernel at odd shapes, for compute-sanitizer, which test_sanitizer_gpu.py starts.

    compute-sanitizer --tool memcheck python -m tests.kernels.sanitized [case ...]

Inputs come from the host, so that initcheck knows that their bytes were written; what a kernel must
fill starts uninitialised. Prints the kernels that ran. `CASES` is the table: a new kernel needs a
call there, at shapes that leave its tiles partly filled.
"""

from __future__ import annotations

import faulthandler
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from quantattn import ops
from quantattn.formats import parse_kv_cache_dtype
from quantattn.kernels._write_rows import FEW_TOKENS, SOME_TOKENS
from quantattn.kernels.static_quant_fp8 import static_quant_fp8 as quantize_kernel
from quantattn.kernels.write_kv import write_kv as write_kernel
from quantattn.layout import PageLayout
from quantattn.testing import make_batch
from tests.kernels import faulty
from tests.ops.page_oracle import FORMATS, ORDERS, PLACEMENTS

SECONDS = 600
WAYS = (False, True)  # FP8 by integers, and by the device's own conversion
NO_SCALES = (None, None)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).cuda()


def given(*numbers: float | list[int], dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).cuda()


def slots() -> Tensor:
    """Five tokens in three pages of four, one of them padding."""
    return given(6, -1, 0, 11, 3)


def unwritten_pages(name: str, order: str, placement: str = "page", count: int = 3) -> Tensor:
    """Pages of four tokens, three heads, and widths 24 and 16."""
    fmt = parse_kv_cache_dtype(name)
    size = PageLayout(3, 24, 16, order, fmt, placement).page_size(4)
    return torch.empty(count, size, dtype=fmt.storage_dtype or torch.bfloat16, device="cuda")


def static_quant_fp8() -> None:
    for native in WAYS:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            quantize_kernel(drawn(3, 13), given(0.37), dtype, native=native)
            quantize_kernel(drawn(5, 40)[:, 3:28], given(0.37), dtype, native=native)
            groups = given(0.3, 0.7, 0.1)
            quantize_kernel(drawn(7, 3, 9, dtype=torch.bfloat16), groups, dtype, native=native)


def dynamic_quant_fp8() -> None:
    ops.dynamic_quant_fp8(drawn(3, 13))
    ops.dynamic_quant_fp8(drawn(5, 5001, dtype=torch.bfloat16)[:, 7:])
    ops.dynamic_quant_fp8(drawn(5, 3, 24), granularity="token_head", dtype=torch.float8_e5m2)


def write_kv() -> None:
    for native, order in zip(WAYS, ORDERS, strict=True):
        for name in ("auto", "fp8_e4m3", "fp8_e5m2"):
            key, value = (drawn(5, 3, width, dtype=torch.float16) for width in (24, 16))
            scales = given(0.3, 0.7, 0.1), given(1.9)
            pages = unwritten_pages(name, order)
            write_kernel(key, value, pages, slots(), *scales, name, order, native=native)


def write_kv_with_a_scale_for_each_row() -> None:
    for native, order, placement in zip(WAYS, ORDERS, PLACEMENTS, strict=True):
        for name in FORMATS:
            new = drawn(5, 3, 24), drawn(5, 3, 16)
            pages = unwritten_pages(name, order, placement)
            how = (name, order, placement)
            write_kernel(*new, pages, slots(), *NO_SCALES, *how, native=native)


def write_kv_of_many_tokens() -> None:
    """Of as many as make a program take more of them."""
    for fewer, name in (
        (FEW_TOKENS, "fp8_e4m3"),
        (FEW_TOKENS, "int8_per_token_head"),
        (SOME_TOKENS, "int4_per_token_head"),
    ):
        tokens = fewer + 77
        places = torch.randperm(tokens)
        places[::5] = -1
        scales = (given(0.3), given(0.7)) if name == "fp8_e4m3" else NO_SCALES
        pages = unwritten_pages(name, "NHD", count=tokens // 4 + 1)
        key, value = (drawn(tokens, 3, width, dtype=torch.bfloat16) for width in (24, 16))
        write_kernel(key, value, pages, places.cuda(), *scales, name, "NHD")


def rope_write_kv() -> None:
    for name in ("auto", "fp8_e4m3", *FORMATS):
        scaled = name == "fp8_e4m3"
        ops.rope_write_kv(
            *(drawn(5, heads, width) for heads, width in ((6, 24), (3, 24), (3, 16))),
            unwritten_pages(name, "HND"),
            slots(),
            positions=given(3, 99, 0, 6, 1),
            cos_sin_cache=drawn(7, 16),
            k_scale=given(0.3) if scaled else None,
            v_scale=given(0.7) if scaled else None,
            kv_cache_dtype=name,
            layout="HND",
            interleaved=scaled,
            q_scale=None if name == "auto" else given(0.2),
        )


def write_latent() -> None:
    pages = torch.empty(3, 4 * 40, dtype=torch.float8_e4m3fn, device="cuda")
    ops.write_latent(drawn(5, 40), pages, slots(), scale=given(0.37), kv_cache_dtype="fp8")


def merge_attention_states() -> None:
    sides = [drawn(3, 5, 24, dtype=torch.bfloat16), drawn(3, 5)] * 2
    ops.merge_attention_states(*sides)
    ops.merge_attention_states(*sides, out_scale=given(0.37))


def paged_attention() -> None:
    for query_lens in ([1, 2, 1], [5, 1, 33]):
        for name in ("auto", "fp8_e4m3", "fp8_e5m2", *FORMATS):
            attend_pages(query_lens, name, head_dim=24)
        for name in ("fp8_e4m3", *FORMATS):
            attend_pages(query_lens, name, head_dim=128)


def attend_pages(query_lens: list[int], name: str, head_dim: int) -> None:
    scales = dict.fromkeys(("k_scale", "v_scale"), torch.tensor(0.3))
    if name not in ("fp8_e4m3", "fp8_e5m2"):
        scales = dict.fromkeys(scales)
    sizes = {"num_heads": 6, "num_kv_heads": 2, "head_dim": head_dim, "kv_cache_dtype": name}
    batch = make_batch(query_lens, [37, 2, 40], **sizes, **scales)
    metadata = batch.metadata.to("cuda")
    ops.paged_attention(
        batch.query.cuda(),
        batch.pages.contiguous().cuda(),
        cu_seqlens_q=metadata.cu_seqlens_q,
        seq_lens=metadata.seq_lens,
        block_table=metadata.block_table,
        max_seqlen_q=metadata.max_seqlen_q,
        num_kv_heads=2,
        kv_cache_dtype=name,
        **{side: scale if scale is None else scale.cuda() for side, scale in scales.items()},
    )


def mla_attention() -> None:
    for dtype, heads in ((torch.float8_e4m3fn, 30), (torch.float8_e4m3fn, 5), (torch.bfloat16, 6)):
        is_fp8 = dtype == torch.float8_e4m3fn
        ops.mla_attention(
            drawn(8, heads, 576, dtype=torch.bfloat16),
            drawn(5, 16 * 576).to(dtype),
            cu_seqlens_q=given(0, 1, 1, 4, 7, dtype=torch.int32),
            seq_lens=given(37, 0, 2, 17, dtype=torch.int32),
            block_table=given([4, 0, 3], [9, 9, 9], [1, 9, 9], [2, 1, 9], dtype=torch.int32),
            max_seqlen_q=3,
            latent_dim=512,
            rope_dim=64,
            kv_cache_dtype="fp8" if is_fp8 else "auto",
            scale=given(0.37) if is_fp8 else None,
            softmax_scale=0.07,
        )


def varlen_attention() -> None:
    for dtype in (torch.bfloat16, torch.float8_e5m2):
        ops.varlen_attention(
            drawn(9, 6, 24, dtype=torch.bfloat16),
            *(drawn(45, 2, width).to(dtype) for width in (24, 16)),
            cu_seqlens_q=given(0, 1, 9, dtype=torch.int32),
            cu_seqlens_k=given(0, 37, 45, dtype=torch.int32),
            max_seqlen_q=8,
            max_seqlen_k=37,
            k_scale=given(0.3) if dtype == torch.float8_e5m2 else None,
            v_scale=given(0.7) if dtype == torch.float8_e5m2 else None,
        )


def prefill_rows() -> dict[str, Any]:
    """Two sequences of one and of 75 tokens, and padding, for `varlen_attention`."""
    return {
        "cu_seqlens_q": given(0, 1, 76, dtype=torch.int32),
        "cu_seqlens_k": given(0, 37, 145, dtype=torch.int32),
        "max_seqlen_q": 75,
        "max_seqlen_k": 108,
    }


def prefill_pages() -> dict[str, Any]:
    """The same queries over nine pages of 16 tokens, for `paged_attention`."""
    return {
        "cu_seqlens_q": given(0, 1, 76, dtype=torch.int32),
        "seq_lens": given(3, 108, dtype=torch.int32),
        "block_table": given(0, 1, 1, 1, 1, 1, 1, 8, 7, 6, 5, 4, 3, 2).int().view(2, 7),
        "max_seqlen_q": 75,
        "num_kv_heads": 2,
    }


def outputs() -> Iterator[dict[str, Any]]:
    """Each way to write an output, one after another, without end."""
    return itertools.cycle(
        (
            {},
            {"return_lse": True},
            {"out_scale": given(0.013)[0]},
            {"out_scale": given(0.013, 0.02, 0.017), "round_through": True, "return_lse": True},
        )
    )


def attention_in_fp8() -> None:
    """Query, keys, values and probabilities are e4m3, which the prefill for Hopper serves."""
    e4m3 = torch.float8_e4m3fn
    numbers = {"q_scale": 0.3, "k_scale": 0.7, "v_scale": 0.2, "prob_scale": 0.004}
    scales = {name: given(number)[0] for name, number in numbers.items()}
    rows, pages = outputs(), outputs()
    next(pages)
    for width, options in (
        (64, {}),
        (128, {"sliding_window": 50}),
        (96, {"causal": False, "sinks": drawn(6)}),
        (256, {"logits_soft_cap": 20.0}),
    ):
        query = drawn(85, 6, width).to(e4m3)
        ops.varlen_attention(
            query,
            *drawn(2, 145, 2, width).to(e4m3),
            **prefill_rows(),
            **options,
            **scales,
            **next(rows),
        )
        ops.paged_attention(
            query,
            drawn(9, 2 * 16 * 2 * width).to(e4m3),
            **prefill_pages(),
            kv_cache_dtype="fp8",
            **options,
            **scales,
            **next(pages),
        )


def attention_in_16_bits() -> None:
    """Keys and values of several formats become operands of the prefill for Hopper."""
    ways = outputs()
    for name, width, placement, dtype in (
        ("auto", 128, "page", torch.bfloat16),
        ("fp8", 128, "page", torch.bfloat16),
        ("int8_per_token_head", 64, "page", torch.bfloat16),
        ("fp8_per_token_head", 128, "page", torch.bfloat16),
        ("fp8_e5m2", 256, "page", torch.bfloat16),
        ("int4_per_token_head", 96, "inline", torch.float8_e4m3fn),
    ):
        layout = PageLayout(2, width, width, "NHD", parse_kv_cache_dtype(name), placement)
        storage = layout.format.storage_dtype or torch.bfloat16
        pages = (20 * drawn(9, layout.page_size(16)).abs()).to(storage)
        has_scales = name in ("fp8", "fp8_e5m2")
        ops.paged_attention(
            drawn(85, 6, width).to(dtype),
            pages,
            **prefill_pages(),
            kv_cache_dtype=name,
            scale_placement=placement,
            q_scale=given(0.6)[0] if dtype == torch.float8_e4m3fn else None,
            k_scale=given(0.3)[0] if has_scales else None,
            v_scale=given(0.7)[0] if has_scales else None,
            **next(ways),
        )
    query, keys = drawn(85, 6, 256).bfloat16(), drawn(2, 145, 2, 256).bfloat16()
    ops.varlen_attention(query, *keys, **prefill_rows(), **next(ways))


KERNELS = (
    static_quant_fp8,
    dynamic_quant_fp8,
    write_kv,
    write_kv_with_a_scale_for_each_row,
    write_kv_of_many_tokens,
    rope_write_kv,
    write_latent,
    merge_attention_states,
    paged_attention,
    mla_attention,
    varlen_attention,
    attention_in_fp8,
    attention_in_16_bits,
)
FAULTS = (faulty.reads_uninitialised, faulty.races_in_shared_memory, faulty.writes_out_of_bounds)
CASES = {case.__name__: case for case in (*KERNELS, *FAULTS)}


def main(names: list[str]) -> None:
    # Before the test that started this process is ended, and leaves it behind.
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    ran: set[str] = set()
    triton.knobs.runtime.launch_enter_hook.add(lambda launch: ran.add(launch.get()["name"]))
    for name in names or [case.__name__ for case in KERNELS]:
        print(name, flush=True)
        CASES[name]()
        torch.cuda.synchronize()
    print("ran:", *sorted(ran))


if __name__ == "__main__":
    main(sys.argv[1:])
