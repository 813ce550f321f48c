"""FP8 quantization, KV writes and RoPE with them: GB/s, as a part of the device copy, beside vLLM.

    python -m benchmarks.quantize_and_write [--plot FILE.svg] [--json FILE]

Also how far keys and values read back from int4 pages are from those written. vLLM's kernels run in
the same process, taking turns with ours, where `vllm` can be imported; for RoPE those are three.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks import vllm_peer
from benchmarks.report import Report, run_benchmark
from quantattn import PagedKVCache, ops
from quantattn.arithmetic import dequantize_rows
from quantattn.rotation import rotate_back

SIZES = (1, 64, 1024, 8192, 65_536)
EVERY_SIZE = tuple(1 << exponent for exponent in range(17))
COLUMNS = 5120
HEADS, DIM, BLOCK = 8, 128, 16
QUERY_HEADS = COLUMNS // DIM
STATIC = f"static FP8, {COLUMNS} columns"
FP8 = torch.float8_e4m3fn
INT4 = "int4_per_token_head"
FORMATS = ("fp8", "int8_per_token_head", "fp8_per_token_head", INT4)
INPUTS = ("normal", "heavy-tailed (t, 3)", "outlier channels")


def quantize(report: Report) -> None:
    scale = torch.tensor(0.37, device="cuda")
    for rows in EVERY_SIZE:
        x = torch.randn(rows, COLUMNS, device="cuda", dtype=torch.bfloat16)
        peer = vllm_peer.static_quant(torch.empty_like(x, dtype=FP8), x, scale)
        ours = partial(ops.static_quant_fp8, x, scale)
        report.add(STATIC, rows, "rows", x.numel() * 3, ours, {"vLLM": peer})
    ratios = [row.peers["vLLM"] / row.ours for row in report.speeds if row.peers]
    if ratios:
        print(f"{STATIC}: at its least, vLLM's time is {min(ratios):.3f} of ours")


def quantize_dynamically(report: Report) -> None:
    for granularity, peer_of, groups in (
        ("token", vllm_peer.dynamic_quant, 1),
        ("token_head", vllm_peer.group_quant, QUERY_HEADS),
    ):
        for rows in SIZES:
            x = torch.randn(rows, QUERY_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
            peer = peer_of(torch.empty_like(x, dtype=FP8).flatten(1), x.flatten(1), groups)
            report.add(
                f"dynamic FP8 by {granularity}, {QUERY_HEADS} x {DIM}",
                rows,
                "rows",
                x.numel() * 3 + rows * groups * 4,
                partial(ops.dynamic_quant_fp8, x, granularity=granularity),
                {"vLLM": peer},
            )


def new_cache(tokens: int, name: str) -> PagedKVCache:
    """Pages for twice the tokens, so that slots do not lie in order."""
    blocks = 2 * -(-tokens // BLOCK)
    return PagedKVCache(1, blocks, BLOCK, HEADS, DIM, kv_cache_dtype=name, device="cuda")


def random_slots(tokens: int) -> Tensor:
    return torch.randperm(2 * -(-tokens // BLOCK) * BLOCK, device="cuda")[:tokens]


def write(report: Report) -> None:
    scale = torch.tensor(0.5, device="cuda")
    for name in FORMATS:
        scales = dict.fromkeys(("k_scale", "v_scale"), scale if name == "fp8" else None)
        for tokens in SIZES:
            key, value = torch.randn(2, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
            cache, slots = new_cache(tokens, name), random_slots(tokens)
            new, size = (key, value, slots), (cache.num_blocks, BLOCK)
            if name == "fp8":
                peer = vllm_peer.write_fp8(*new, *size, scale)
            else:
                peer = vllm_peer.write_rows(*new, name, *size)
            report.add(
                f"write_kv {name}",
                tokens,
                "tokens",
                key.nbytes + value.nbytes + tokens * cache.page_layout.token_size,
                partial(
                    ops.write_kv, key, value, cache.layer(0), slots, **scales, kv_cache_dtype=name
                ),
                {"vLLM": peer},
            )


def rope_write(report: Report) -> None:
    scale, q_scale = torch.tensor([0.5, 0.37], device="cuda")
    table = torch.randn(4096, DIM, device="cuda", dtype=torch.bfloat16)
    for tokens in SIZES:
        shape = (tokens, QUERY_HEADS, DIM)
        query = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        key, value = torch.randn(2, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        positions = torch.arange(tokens, device="cuda") % len(table)
        cache, slots = new_cache(tokens, "fp8"), random_slots(tokens)
        turn = vllm_peer.rope(positions, query.clone(), key.clone(), table)
        store = vllm_peer.write_fp8(key, value, slots, cache.num_blocks, BLOCK, scale)
        code = vllm_peer.static_quant(torch.empty_like(query, dtype=FP8), query, q_scale)
        report.add(
            f"rope_write_kv fp8, {QUERY_HEADS} query heads, coded",
            tokens,
            "tokens",
            tokens * (QUERY_HEADS + 2 * HEADS) * DIM * 3,
            partial(
                ops.rope_write_kv,
                query,
                key,
                value,
                cache.layer(0),
                slots,
                positions=positions,
                cos_sin_cache=table,
                k_scale=scale,
                v_scale=scale,
                kv_cache_dtype="fp8",
                q_scale=q_scale,
            ),
            {"vLLM": vllm_peer.one_after_another(turn, store, code)},
        )


def drawn(kind: str) -> Tensor:
    """Keys and values `[2, tokens, heads, width]`, bf16."""
    shape = (2, 4096, HEADS, DIM)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator)
    if kind == "heavy-tailed (t, 3)":
        squares = sum(torch.randn(shape, generator=generator).square() for _ in range(3))
        x = x / (squares / 3).sqrt()
    if kind == "outlier channels":
        x[..., torch.randperm(DIM, generator=generator)[:4]] *= 30.0
    return x.bfloat16().cuda()


def int4_round_trip(key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """What our int4 pages hold of keys and values, float32, rotated back."""
    tokens = key.shape[0]
    cache = new_cache(tokens, INT4)
    pages, layout = cache.layer(0), cache.page_layout
    slots = torch.arange(tokens, device=key.device)
    ops.write_kv(key, value, pages, slots, k_scale=None, v_scale=None, kv_cache_dtype=INT4)
    sides = zip((layout.key_view, layout.value_view), layout.scale_views(pages), strict=True)
    return tuple(
        rotate_back(dequantize_rows(view(pages), scales, cache.format)).flatten(0, 1)[:tokens]
        for view, scales in sides
    )


def int4_errors(report: Report) -> None:
    for kind in INPUTS:
        written = drawn(kind)
        ours, theirs = int4_round_trip(*written), vllm_peer.int4_round_trip(*written, BLOCK)
        for side, number in (("K", 0), ("V", 1)):
            report.add_error(
                f"int4 {side}, {kind}",
                relative_error(ours[number], written[number]),
                {"vLLM": theirs and relative_error(theirs[number], written[number])},
            )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def measure(report: Report) -> None:
    quantize(report)
    quantize_dynamically(report)
    write(report)
    rope_write(report)
    int4_errors(report)


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
