"""Paged FP8 decode: GB/s of keys and values, beside the device copy and FlashAttention-3.

    python -m benchmarks.decode [--plot FILE.svg] [--json FILE]

Each call of a case reads other random blocks, so that the L2 cache is cold. The query is bf16; that
of FlashAttention-3 (vLLM's build, where it can be imported) is FP8. Both run in the same process,
taking turns.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.report import Report, Speed, milliseconds, run_benchmark
from quantattn import ops

BLOCK = 16
SHAPES = (
    (128, 8192),
    (64, 8192),
    (16, 8192),
    (1, 131_072),
    (128, 1024),
    (16, 1024),
    (1, 8192),
    (1, 1024),
)
HEADS = ((64, 8), (40, 8), (28, 4), (16, 16))
COLD = 400_000_000
"""Bytes that are read before a block is read again."""
POOL = 3 << 30
"""Most bytes of pages."""


@dataclass
class Case:
    """Sequences of one length, and several tables of random blocks for them."""

    num_seqs: int
    num_keys: int
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128

    def __post_init__(self) -> None:
        blocks = self.num_seqs * self.num_keys // BLOCK
        size = 2 * BLOCK * self.heads[1] * self.head_dim
        self.moved = blocks * size
        calls = max(2, min(160, -(-COLD // self.moved)))
        pool = max(blocks, min(calls * blocks, POOL // size))
        self.pages = torch.empty(pool, size, dtype=torch.float8_e4m3fn, device="cuda")
        for some in self.pages.split(1 << 14):
            some.copy_(torch.randn(some.shape, device="cuda"))
        self.tables = [
            torch.randperm(pool, device="cuda")[:blocks].int().view(self.num_seqs, -1)
            for _ in range(calls)
        ]
        shape = (self.num_seqs, self.heads[0], self.head_dim)
        self.query = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.starts = torch.arange(self.num_seqs + 1, dtype=torch.int32, device="cuda")
        self.lengths = torch.full_like(self.starts[1:], self.num_keys)
        self.scale = torch.full((), 0.7, device="cuda")

    def name(self) -> str:
        heads = f"{self.heads[0]}/{self.heads[1]} heads of {self.head_dim}"
        return f"{heads}, {self.num_seqs} sequences"

    def ours(self, out_scale: Tensor | None = None) -> None:
        for table in self.tables:
            ops.paged_attention(
                self.query,
                self.pages,
                cu_seqlens_q=self.starts,
                seq_lens=self.lengths,
                block_table=table,
                max_seqlen_q=1,
                num_kv_heads=self.heads[1],
                kv_cache_dtype="fp8",
                k_scale=self.scale,
                v_scale=self.scale,
                out_scale=out_scale,
            )

    def flash_attention(self) -> Callable[[], None] | None:
        with contextlib.suppress(ImportError):
            importlib.import_module("vllm.vllm_flash_attn._vllm_fa3_C")
        kernel = getattr(torch.ops._vllm_fa3_C, "fwd", None)
        if kernel is None:
            return None
        pages = self.pages.unflatten(1, (2, BLOCK, self.heads[1], self.head_dim))
        rows = (self.query.to(torch.float8_e4m3fn), pages[:, 0], pages[:, 1], None, None, None)
        out, scale = torch.empty_like(self.query), self.scale.expand(self.num_seqs, self.heads[1])
        batch = (self.starts, None, None, None, self.lengths, 1, self.num_keys)
        scales = (None, None, None, None, None, scale, scale, scale, self.head_dim**-0.5)
        options = (True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None)

        def run() -> None:
            for table in self.tables:
                kernel(*rows, out, *batch, table, *scales, *options)

        return run


def add(report: Report, case: Case, name: str, runs: list[Callable[[], None]]) -> None:
    times = [time / len(case.tables) for time in milliseconds(runs)]
    row = Speed(name, case.num_keys, "keys", case.moved, times[0], *times[1:] or [None])
    report.speeds.append(row)
    print(report.line(row), flush=True)


def measure(report: Report) -> None:
    cases = [
        *((*shape, (32, 8), 128) for shape in SHAPES),
        *((64, 8192, heads, 128) for heads in HEADS),
        *((64, 8192, (32, 8), head_dim) for head_dim in (64, 256)),
    ]
    for arguments in cases:
        case = Case(*arguments)
        peer = case.flash_attention()
        add(report, case, case.name(), [case.ours] if peer is None else [case.ours, peer])
        if arguments[:2] == SHAPES[0]:
            fused = f"{case.name()}, FP8 output"
            add(report, case, fused, [lambda case=case: case.ours(case.scale)])


if __name__ == "__main__":
    run_benchmark(__doc__, "FlashAttention-3", measure)
