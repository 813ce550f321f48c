"""Planning and post-processing of many layers, and the CPU cost of one layer call.

    python benchmarks/many_layers.py [--layers 1000 10000] [--device cpu]

Prints, for each number of layers, the time of a load's plan, of its commit and of
process_weights_after_loading, the time a layer, and on a GPU how often the host waited for the
device.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

from quantattn import (
    AttentionMetadata,
    PagedKVCache,
    QuantAttention,
    ops,
    process_weights_after_loading,
)
from quantattn.loaders.checkpoint_scales import UNDECLARED
from quantattn.loaders.collect import ScaleKey, collect_scales
from quantattn.loaders.names import parse_name
from quantattn.loaders.plan import plan_scales
from quantattn.scale_buffers import commit_scales


def decoder(layers: int, device: str) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList()
    for _ in range(layers):
        block = nn.Module()
        block.self_attn = QuantAttention(8, 64, num_kv_heads=2, scale_granularity="head")
        model.layers.append(block)
    return model.to(device)


def keys(layers: int) -> list[ScaleKey]:
    value = torch.tensor([0.5, 0.25], dtype=torch.bfloat16).view(2, 1, 1)
    names = (f"layers.{n}.self_attn.{role}_scale" for n in range(layers) for role in "kv")
    return [ScaleKey(parse_name(name), None, lambda: value) for name in names]


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def synchronisations(run: Callable[[], object], device: str) -> str:
    """How often CUDA's debug mode saw the host wait."""
    if device == "cpu":
        return "-"
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    torch.cuda.set_sync_debug_mode("default")
    return str(sum("synchronizing" in str(w.message) for w in seen))


def measure_layers(layers: int, device: str) -> None:
    model = decoder(layers, device)
    held = {}

    def plan() -> None:
        held["plan"] = plan_scales(model, collect_scales(keys(layers), UNDECLARED))

    planned = seconds(plan)
    committed = seconds(lambda: commit_scales(held["plan"].updates, replace=True))
    processed = statistics.median(
        seconds(lambda: process_weights_after_loading(model)) for _ in range(5)
    )
    waits = synchronisations(lambda: process_weights_after_loading(model), device)
    print(
        f"{layers:>7} layers: plan {planned * 1e3:8.1f} ms ({planned / layers * 1e6:5.1f} us each),"
        f" commit {committed * 1e3:7.1f} ms, post-process {processed * 1e3:7.1f} ms"
        f" ({processed / layers * 1e6:5.1f} us each), synchronisations {waits}"
    )


def measure_call(device: str) -> None:
    """One decode token through a tiny layer, so that the arithmetic is next to nothing."""
    layer = QuantAttention(1, 8, kv_cache_dtype="fp8").to(device)
    cache = PagedKVCache(1, 1, 16, 1, 8, kv_cache_dtype="fp8", dtype=torch.float32, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    metadata = AttentionMetadata.from_lengths([1], [1], table, 16, device=device)
    q, k, v = torch.randn(3, 1, 1, 8, device=device)
    pages = cache.layer(0)
    scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale, "kv_cache_dtype": "fp8"}

    def operations() -> None:
        ops.write_kv(k, v, pages, metadata.slot_mapping, **scales)
        ops.paged_attention(
            q,
            pages,
            cu_seqlens_q=metadata.cu_seqlens_q,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table,
            max_seqlen_q=1,
            num_kv_heads=1,
            **scales,
        )

    runs = {
        "one layer call": lambda: layer(q, k, v, pages, metadata),
        "its two operations alone": operations,
    }
    for run in runs.values():
        for _ in range(200):
            run()
    times = {title: sorted(seconds(run) for _ in range(2000)) for title, run in runs.items()}
    for title, seen in times.items():
        print(
            f"{title} ({device}, host time): median {seen[1000] * 1e6:.1f} us,"
            f" 10 % {seen[200] * 1e6:.1f} us, 90 % {seen[1800] * 1e6:.1f} us"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
    if arguments.device != "cpu":
        print(torch.cuda.get_device_name())
    for layers in arguments.layers:
        measure_layers(layers, arguments.device)
    measure_call(arguments.device)


if __name__ == "__main__":
    main()
