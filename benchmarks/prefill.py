"""Causal prefill: TFLOP/s, beside a matrix product, FlashAttention-3, cuDNN and vLLM's Triton.

    python -m benchmarks.prefill [--plot FILE.svg] [--json FILE]

Operations are those of the products of queries with the keys that they see, and of probabilities
with their values. Ours and the peers run in one process, taking turns. Where keys and values lie
in blocks, cuDNN reads the same as contiguous rows, and so does FlashAttention-3 with a bf16 query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from benchmarks import attention_peers as peers
from benchmarks.attention_peers import FP8, Inputs
from benchmarks.report import Limit, Report, product, run_benchmark
from quantattn import ops

HEADS, KV_HEADS = 32, 8
SHAPES = ((1, 16_384), (4, 4096), (16, 1024))
PRODUCT, FP8_PRODUCT = "bf16 product", "FP8 product"


@dataclass(frozen=True)
class Case:
    """Prompts of one length.

    Attributes:
        num_seqs: Prompts.
        length: Tokens of each.
        query: Dtype of the query; probabilities of an FP8 query are FP8 too.
        stored: Dtype of keys and values.
        block_size: Tokens a block, blocks in random order; None: rows lie one after another.
        head_dim: Width of queries, keys and values.
        quantizes_output: Whether the output is FP8, which is then timed beside one of bf16.
    """

    num_seqs: int
    length: int
    query: torch.dtype
    stored: torch.dtype
    block_size: int | None = None
    head_dim: int = 128
    quantizes_output: bool = False

    def name(self) -> str:
        kinds = {FP8: "FP8", torch.bfloat16: "bf16"}
        where = f"blocks of {self.block_size}" if self.block_size else "contiguous"
        kind = f"{kinds[self.query]} over {kinds[self.stored]}"
        if self.quantizes_output:
            kind += " to FP8"
        return f"{kind}, {where}, {self.head_dim} wide, {self.num_seqs * self.length} tokens"

    @property
    def operations(self) -> int:
        return 2 * self.num_seqs * self.length * self.length * HEADS * self.head_dim

    @property
    def is_fp8(self) -> bool:
        return self.query == FP8

    @cached_property
    def scale(self) -> Tensor:
        return torch.full((), 0.7, device="cuda")

    @cached_property
    def rows(self) -> Inputs:
        """Queries, keys and values one after another."""
        tokens = self.num_seqs * self.length
        shape = (tokens, HEADS + 2 * KV_HEADS, self.head_dim)
        drawn = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        query, key, value = drawn.split((HEADS, KV_HEADS, KV_HEADS), 1)
        query, key, value = (
            x.contiguous().to(dtype)
            for x, dtype in ((query, self.query), (key, self.stored), (value, self.stored))
        )
        starts = torch.arange(self.num_seqs + 1, dtype=torch.int32, device="cuda") * self.length
        scale = self.scale if self.stored == FP8 else None
        longest = (self.length, self.length)
        return Inputs(query, key, value, starts, longest, key_starts=starts, scale=scale)

    @cached_property
    def table(self) -> Tensor:
        blocks = self.num_seqs * self.length // self.block_size
        return torch.randperm(blocks, device="cuda").int().view(self.num_seqs, -1)

    @cached_property
    def pages(self) -> Tensor:
        """The same keys and values in blocks, those of K before those of V."""
        sides = (x.view(self.table.numel(), -1) for x in (self.rows.key, self.rows.value))
        in_order = torch.cat(list(sides), 1).view(torch.uint8)
        pages = torch.empty_like(in_order)
        pages[self.table.flatten()] = in_order
        return pages.view(self.stored)

    @cached_property
    def blocks(self) -> Inputs:
        """The same keys and values as peers take blocks of them."""
        key, value = self.pages.unflatten(1, (2, self.block_size, KV_HEADS, -1)).unbind(1)
        lengths = torch.full_like(self.rows.starts[1:], self.length)
        return replace(self.rows, key=key, value=value, key_starts=None, lengths=lengths)

    def ours(self) -> Callable[[], Tensor]:
        scales: dict[str, Tensor] = {}
        if self.stored == FP8:
            scales |= {"k_scale": self.scale, "v_scale": self.scale}
        if self.is_fp8:
            scales |= {"q_scale": self.scale, "prob_scale": torch.full_like(self.scale, 1 / 256)}
        if self.quantizes_output:
            scales["out_scale"] = self.scale / 16
        rows = self.rows
        if self.block_size is None:
            return lambda: ops.varlen_attention(
                rows.query,
                rows.key,
                rows.value,
                cu_seqlens_q=rows.starts,
                cu_seqlens_k=rows.starts,
                max_seqlen_q=self.length,
                max_seqlen_k=self.length,
                **scales,
            )
        return lambda: ops.paged_attention(
            rows.query,
            self.pages,
            cu_seqlens_q=rows.starts,
            seq_lens=self.blocks.lengths,
            block_table=self.table,
            max_seqlen_q=self.length,
            num_kv_heads=KV_HEADS,
            kv_cache_dtype="fp8" if self.stored == FP8 else "auto",
            **scales,
        )

    def beside(self) -> dict[str, Callable[[], object] | None]:
        """The peers that attend over such rows, by name."""
        if self.quantizes_output:
            return {"bf16 output": replace(self, quantizes_output=False).ours()}
        rows, found = self.rows, {}
        if self.stored != self.query:
            key, value = (x.bfloat16() for x in (rows.key, rows.value))
            rows = replace(rows, key=key, value=value, scale=None)
        paged = self.block_size is not None and self.stored == self.query
        flash = peers.flash_attention(self.blocks if paged else rows)
        found["FA3"] = flash and (lambda: flash(self.table if paged else None))
        found["cuDNN"] = (peers.cudnn_fp8 if self.is_fp8 else peers.cudnn_16_bit)(rows)
        if self.block_size is not None:
            triton = peers.vllm_triton(self.blocks)
            found["vLLM"] = triton and (lambda: triton(self.table))
        return found


def cases() -> list[Case]:
    bf16, whole = torch.bfloat16, (None, 16, 64)
    kinds = (((FP8, FP8), whole), ((bf16, FP8), whole[1:]), ((bf16, bf16), whole[:2]))
    found = [
        Case(*shape, *dtypes, block_size)
        for dtypes, block_sizes in kinds
        for block_size in block_sizes
        for shape in SHAPES
    ]
    for head_dim in (64, 256):
        found += [Case(*shape, FP8, FP8, None, head_dim) for shape in SHAPES]
        found += [Case(*shape, bf16, FP8, 16, head_dim) for shape in SHAPES]
    found += [Case(*shape, FP8, FP8, quantizes_output=True) for shape in SHAPES]
    return [*found, Case(1, 65_536, FP8, FP8)]


def add(report: Report, case: Case) -> None:
    limit = FP8_PRODUCT if case.is_fp8 else PRODUCT
    what = (case.name(), case.length, "a prompt", case.operations)
    report.add(*what, case.ours(), case.beside(), limit=limit)


def measure(report: Report) -> None:
    for case in cases():
        add(report, case)


def limits() -> list[Limit]:
    return [product(PRODUCT, torch.bfloat16), product(FP8_PRODUCT, FP8)]


if __name__ == "__main__":
    run_benchmark(__doc__, measure, limits)
