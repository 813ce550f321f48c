"""Fused and unfused runs of the pattern model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from quantattn.fusion import FusionOptions
from quantattn.testing import AttentionQuant, GraphRecorder, PagedBatch, count_ops, make_batch

DEFAULT = FusionOptions()
HEADS = {"40/8": (40, 8), "64/8": (64, 8), "32/8": (32, 8)}


def lengths(mode: str, batch: int) -> tuple[list[int], list[int]]:
    """Query and sequence lengths, odd ones: the last sequences end in the middle of a block.

    A `prompt` is one sequence, all of which is new.
    """
    if mode == "prompt":
        return [batch], [batch]
    seqs = [1 + 7 * i % 23 for i in range(batch)]
    if mode == "decode":
        return [1] * batch, seqs
    prefill = batch if mode == "prefill" else batch // 2
    return [*seqs[:prefill], *[1] * (batch - prefill)], seqs


def make_run(
    heads: str,
    batch: int,
    *,
    mode: str = "decode",
    num_layers: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    padding: int = 0,
    device: str = "cpu",
    **options,
) -> tuple[AttentionQuant, PagedBatch]:
    """The model, and a batch whose pages its first layer can read."""
    num_heads, num_kv_heads = HEADS[heads]
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    model = AttentionQuant(num_layers, **shape, **options).to(device)
    first = model.layers[0]
    run = make_batch(
        *lengths(mode, batch),
        **shape,
        dtype=dtype,
        kv_cache_dtype=first.cache_format.name,
        k_scale=first.k_scale.cpu(),
        v_scale=first.v_scale.cpu(),
        padding=padding,
    )
    moved = {name: getattr(run, name).to(device) for name in vars(run)}
    return model, replace(run, **moved)


@torch.no_grad()
def run_compiled(
    function: Callable[..., torch.Tensor],
    *arguments,
    options: FusionOptions | None = DEFAULT,
) -> tuple[torch.Tensor, GraphRecorder]:
    """What the compiled function gives, and its one graph."""
    torch.compiler.reset()
    recorder = GraphRecorder(options)
    out = torch.compile(function, backend=recorder, fullgraph=True)(*arguments)
    assert len(recorder.after) == 1
    return out, recorder


def ops_lost(recorder: GraphRecorder) -> dict[str, int]:
    """How many calls of each operator the fusions took away; negative: added."""
    before, after = count_ops(recorder.before[0]), count_ops(recorder.after[0])
    before.subtract(after)
    return {name: count for name, count in before.items() if count}
