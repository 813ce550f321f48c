"""Paged decode in every cache format, and over latent rows (MLA), beside limits and peers.

    python -m benchmarks.decode [--plot FILE.svg] [--json FILE]

Each call of a case reads other random blocks, so that the L2 cache is cold. The query is bf16; that
of FlashAttention-3 has the dtype of the pages. GB/s are of keys and values with their scales; where
the products of MLA take longer than its bytes, TFLOP/s. All run in one process, taking turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks import attention_peers as peers
from benchmarks.attention_peers import Inputs
from benchmarks.report import (
    COPY,
    UNITS,
    Limit,
    Report,
    Run,
    device_copy,
    product,
    run_benchmark,
)
from quantattn import ops
from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout

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
FORMATS = (
    "fp8_e5m2",
    "auto",
    "fp8_per_token_head",
    "int8_per_token_head",
    "int4_per_token_head",
)
FORMAT_SHAPES = ((128, 8192), (16, 8192), (1, 131_072))
LATENT, ROPE = 512, 64
LATENT_HEADS = (128, 64, 32, 16)
PRODUCT = "bf16 product"
COLD = 400_000_000
"""Bytes that are read before a block is read again."""
POOL = 3 << 30
"""Most bytes of pages."""


@dataclass
class Pool:
    """Pages of numbers, and several tables of random ones for sequences of one length."""

    num_seqs: int
    num_keys: int
    kv_cache_dtype: str
    layout: PageLayout

    def __post_init__(self) -> None:
        dtype = self.layout.format.storage_dtype or torch.bfloat16
        columns = self.layout.page_size(BLOCK)
        size, blocks = columns * dtype.itemsize, self.num_seqs * self.num_keys // BLOCK
        self.moved = blocks * size
        calls = max(2, min(160, -(-COLD // self.moved)))
        pool = max(blocks, min(calls * blocks, POOL // size))
        self.pages = torch.empty(pool, columns, dtype=dtype, device="cuda")
        for some in self.pages.split(1 << 14):
            numbers = torch.randn(some.shape, device="cuda", dtype=torch.bfloat16)
            some.copy_(numbers.mul_(40) if some.dtype in (torch.int8, torch.uint8) else numbers)
        for scales in self.layout.scale_views(self.pages):
            scales.uniform_(0.01, 0.02)
        self.tables = [
            torch.randperm(pool, device="cuda")[:blocks].int().view(self.num_seqs, -1)
            for _ in range(calls)
        ]
        self.starts = torch.arange(self.num_seqs + 1, dtype=torch.int32, device="cuda")
        self.lengths = torch.full_like(self.starts[1:], self.num_keys)
        self.scale = torch.full((), 0.7, device="cuda")

    def for_each_table(self, attend: Callable[[Tensor], object]) -> Run:
        def run() -> None:
            for table in self.tables:
                attend(table)

        return run


@dataclass
class Case:
    """Decode of sequences of one length."""

    num_seqs: int
    num_keys: int
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    kv_cache_dtype: str = "fp8"

    def __post_init__(self) -> None:
        fmt = parse_kv_cache_dtype(self.kv_cache_dtype)
        self.layout = PageLayout(self.heads[1], self.head_dim, self.head_dim, format=fmt)
        self.pool = Pool(self.num_seqs, self.num_keys, self.kv_cache_dtype, self.layout)
        shape = (self.num_seqs, self.heads[0], self.head_dim)
        self.query = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def name(self) -> str:
        heads = f"{self.heads[0]}/{self.heads[1]} heads of {self.head_dim}"
        return f"{self.kv_cache_dtype}, {heads}, {self.num_seqs} sequences"

    def attend(self, table: Tensor, out_scale: Tensor | None = None) -> None:
        ops.paged_attention(
            self.query,
            self.pool.pages,
            cu_seqlens_q=self.pool.starts,
            seq_lens=self.pool.lengths,
            block_table=table,
            max_seqlen_q=1,
            num_kv_heads=self.heads[1],
            kv_cache_dtype=self.kv_cache_dtype,
            k_scale=self.pool.scale,
            v_scale=self.pool.scale,
            out_scale=out_scale,
        )

    def ours(self, out_scale: Tensor | None = None) -> Run:
        return self.pool.for_each_table(partial(self.attend, out_scale=out_scale))

    def beside(self) -> dict[str, Run | None]:
        """The peers that attend over such pages, by name."""
        if self.layout.format.has_page_scales:
            return {"vLLM": self._row_peer()}
        key, value = self.layout.key_view(self.pool.pages), self.layout.value_view(self.pool.pages)
        is_fp8, longest = self.kv_cache_dtype != "auto", (1, self.num_keys)
        rows = (self.query, key, value, self.pool.starts, longest, self.pool.lengths)
        inputs = Inputs(*rows, scale=self.pool.scale if is_fp8 else None)
        found = {"vLLM": self._over_tables(peers.vllm_triton(inputs))}
        if self.kv_cache_dtype != "fp8_e5m2":
            found["FA3"] = self._over_tables(peers.flash_attention(inputs))
            found["FlashInfer"] = peers.flashinfer_decode(inputs, self.pool.tables)
        return found

    def _row_peer(self) -> Run | None:
        """vLLM's kernel over pages of its layout, of the same size, made of the same bytes."""
        heads, width = self.heads[1], self.layout.format.code_width(self.head_dim)
        shape = (len(self.pool.pages), heads, BLOCK, 2 * (width + 4))
        bytes_ = torch.randint(-100, 100, shape, dtype=torch.int8, device="cuda").transpose(1, 2)
        codes = bytes_.view(self.layout.format.storage_dtype).split(width + 4, -1)
        numbers = bytes_.view(torch.float32)
        scales = numbers[..., width // 4], numbers[..., width // 2 + 1]
        for x in scales:
            x.uniform_(0.01, 0.02)
        rows = (self.query, *codes, self.pool.starts, (1, self.num_keys), self.pool.lengths)
        return self._over_tables(peers.vllm_triton(Inputs(*rows), self.kv_cache_dtype, scales))

    def _over_tables(self, attend: Callable[[Tensor], object] | None) -> Run | None:
        return attend and self.pool.for_each_table(attend)


@dataclass
class LatentCase:
    """MLA decode of sequences of one length."""

    num_heads: int
    kv_cache_dtype: str
    num_seqs: int = 64
    num_keys: int = 8192

    def __post_init__(self) -> None:
        fmt = parse_kv_cache_dtype(self.kv_cache_dtype)
        layout = PageLayout(1, LATENT + ROPE, 0, format=fmt)
        self.pool = Pool(self.num_seqs, self.num_keys, self.kv_cache_dtype, layout)
        shape = (self.num_seqs, self.num_heads, LATENT + ROPE)
        self.query = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def name(self) -> str:
        heads = f"{self.num_heads} heads of {LATENT} + {ROPE}"
        return f"MLA {self.kv_cache_dtype}, {heads}, {self.num_seqs} sequences"

    @property
    def operations(self) -> int:
        rows = self.num_seqs * self.num_keys * self.num_heads
        return 2 * rows * (LATENT + ROPE + LATENT)

    def attend(self, table: Tensor) -> None:
        ops.mla_attention(
            self.query,
            self.pool.pages,
            cu_seqlens_q=self.pool.starts,
            seq_lens=self.pool.lengths,
            block_table=table,
            max_seqlen_q=1,
            latent_dim=LATENT,
            rope_dim=ROPE,
            kv_cache_dtype=self.kv_cache_dtype,
            softmax_scale=(128 + ROPE) ** -0.5,
            scale=self.pool.scale,
        )


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        yield Case(*shape)
    for heads in HEADS:
        yield Case(64, 8192, heads)
    for head_dim in (64, 256):
        yield Case(64, 8192, head_dim=head_dim)
    for name in FORMATS:
        for shape in FORMAT_SHAPES:
            yield Case(*shape, kv_cache_dtype=name)


def add(report: Report, case: Case, name: str, ours: Run, beside: dict[str, Run | None]) -> None:
    calls, moved = len(case.pool.tables), case.pool.moved
    report.add(name, case.num_keys, "keys", moved, ours, beside, repeats=calls)


def add_latent(report: Report, case: LatentCase) -> None:
    work = {COPY: case.pool.moved, PRODUCT: case.operations}
    slowest = max(report.limits, key=lambda x: work[x.name] / x.rate / UNITS[x.unit]).name
    ours, calls = case.pool.for_each_table(case.attend), len(case.pool.tables)
    size = case.num_keys
    report.add(case.name(), size, "keys", work[slowest], ours, {}, limit=slowest, repeats=calls)


def measure(report: Report) -> None:
    for case in cases():
        add(report, case, case.name(), case.ours(), case.beside())
        if (case.num_seqs, case.num_keys, case.kv_cache_dtype) == (*SHAPES[0], "fp8"):
            add(report, case, f"{case.name()}, FP8 output", case.ours(case.pool.scale), {})
    for name in ("fp8", "auto"):
        for num_heads in LATENT_HEADS:
            add_latent(report, LatentCase(num_heads, name))


def limits() -> list[Limit]:
    return [device_copy(), product(PRODUCT, torch.bfloat16)]


if __name__ == "__main__":
    run_benchmark(__doc__, measure, limits)
