"""Static FP8 quantization and KV writes: GB/s, as a part of the device copy and beside vLLM.

    python benchmarks/quantize_and_write.py

Bytes are those that must move: each input read once, each output written once. Kernels are timed as
CUDA graph replays. vLLM's kernels are timed in the same run where `vllm` can be imported.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton.testing import do_bench, do_bench_cudagraph

from quantattn import PagedKVCache, ops

ROWS = (1, 64, 1024, 8192, 65_536)
COLUMNS = 5120
TOKENS = (1, 64, 1024, 8192, 65_536)
HEADS, DIM, BLOCK = 8, 128, 16


def milliseconds(run: Callable[[], object]) -> float:
    run()
    torch.cuda.synchronize()
    return do_bench_cudagraph(run, rep=60, return_mode="median")


def device_copy() -> float:
    """GB/s of a 4 GiB copy, bytes read and written."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    time = do_bench(lambda: target.copy_(source), warmup=20, rep=100, return_mode="median")
    return 2 * source.numel() / time / 1e6


def row(case: str, moved: int, copy: float, ours: float, peer: float | None) -> None:
    speed = moved / ours / 1e6
    beside = "-" if peer is None else f"{peer * 1e3:9.1f} us  {peer / ours:5.2f}x"
    print(
        f"{case:<44} {ours * 1e3:9.1f} us {speed:8.0f} GB/s  {speed / copy:5.2f} of copy"
        f"   vLLM {beside}",
        flush=True,
    )


def quantize(copy: float) -> None:
    peer = getattr(torch.ops._C, "static_scaled_fp8_quant", None)
    scale = torch.tensor(0.37, device="cuda")
    for rows in ROWS:
        x = torch.randn(rows, COLUMNS, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        ours = milliseconds(lambda x=x: ops.static_quant_fp8(x, scale))
        theirs = None
        if peer is not None:
            theirs = milliseconds(lambda x=x, out=out: peer(out, x, scale.view(1), None))
        row(f"static fp8 quant {rows} x {COLUMNS} bf16", x.numel() * 3, copy, ours, theirs)


def write(copy: float) -> None:
    try:
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
            triton_reshape_and_cache_flash as peer,
        )
    except ImportError:
        peer = None
    scales = {name: torch.tensor(0.5, device="cuda") for name in ("k_scale", "v_scale")}
    for tokens in TOKENS:
        key, value = torch.randn(2, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        blocks = tokens // BLOCK + 64
        cache = PagedKVCache(1, blocks, BLOCK, HEADS, DIM, kv_cache_dtype="fp8", device="cuda")
        pages = cache.layer(0)
        slots = torch.randperm(blocks * BLOCK, device="cuda")[:tokens]
        ours = milliseconds(
            lambda k=key, v=value, p=pages, s=slots: ops.write_kv(
                k, v, p, s, **scales, kv_cache_dtype="fp8"
            )
        )
        theirs = None
        if peer is not None:
            k_cache, v_cache = pages.view(blocks, 2, BLOCK, HEADS, DIM).unbind(1)
            arguments = (key, value, k_cache, v_cache, slots, "fp8", *scales.values())
            theirs = milliseconds(lambda a=arguments: peer(*a))
        row(f"write_kv fp8, {tokens} tokens", 6 * key.numel(), copy, ours, theirs)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    copy = device_copy()
    print(f"device copy: {copy:.0f} GB/s")
    quantize(copy)
    write(copy)


if __name__ == "__main__":
    main()
