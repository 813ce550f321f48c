"""One call of attention after all checks: what the kernels for it have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quantattn.kernels._devices import is_hopper
from quantattn.layout import PageLayout

__all__ = ["AttentionCall", "Call", "LatentCall", "PackedCall"]

DECODE_TOKENS = 8
NARROW_ROWS, WIDE_ROWS = 16, 128


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments that the attention operations share, known to fit each other.

    Attributes:
        query: `[num_tokens, num_heads, head_dim]`, any strides.
        cu_seqlens_q: `[num_seqs + 1]`, int32.
        max_seqlen_q: Longest query, tokens.
        k_scale: float32 `[]`, `[1]` or `[num_kv_heads]`; None where the layer has none.
        v_scale: As `k_scale`.
        q_scale: As `k_scale`, for an e4m3 query; None for others.
        prob_scale: As `k_scale`; None: probabilities are not quantized.
        softmax_scale: Multiplier of the logits.
        causal: Whether a row sees no key behind its own position.
        sliding_window: Keys that a row sees; None: all.
        logits_soft_cap: Cap of the logits; None: none.
        sinks: `[num_heads]`, a model dtype; None: none.
        out_scale: float32 `[]`, `[1]` or `[num_groups]`, to quantize the output; None: it is not.
        round_through: Whether a quantized output passes through `out_dtype`.
        out_dtype: The model's dtype.
        return_lse: Whether the LSE is asked for.
    """

    query: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    k_scale: Tensor | None
    v_scale: Tensor | None
    q_scale: Tensor | None
    prob_scale: Tensor | None
    softmax_scale: float
    causal: bool
    sliding_window: int | None
    logits_soft_cap: float | None
    sinks: Tensor | None
    out_scale: Tensor | None
    round_through: bool
    out_dtype: torch.dtype
    return_lse: bool

    @property
    def num_seqs(self) -> int:
        """Sequences of the batch."""
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        raise NotImplementedError

    @property
    def head_dim_v(self) -> int:
        """Width of a value."""
        raise NotImplementedError

    @cached_property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.query.shape[1] // self.num_kv_heads

    def new_outputs(self) -> tuple[Tensor, Tensor]:
        """Uninitialized output `[num_tokens, num_heads, head_dim_v]` and LSE, float32.

        The LSE `[num_tokens, num_heads]` is `[0]` where it is not asked for.
        """
        rows = self.query.shape[:2]
        dtype = self.out_dtype if self.out_scale is None else torch.float8_e4m3fn
        out = self.query.new_empty((*rows, self.head_dim_v), dtype=dtype)
        lse = self.query.new_empty(rows if self.return_lse else (0,), dtype=torch.float32)
        return out, lse


@dataclass(frozen=True, kw_only=True)
class AttentionCall(Call):
    """Arguments of `quantattn.ops.paged_attention`.

    Attributes:
        kv_cache: `[num_blocks, page_size]`, unit stride inside a page.
        layout: How a page is laid out, its format included.
        seq_lens: `[num_seqs]`, int32.
        block_table: `[num_seqs, max_blocks]`, int32.
    """

    kv_cache: Tensor
    layout: PageLayout
    seq_lens: Tensor
    block_table: Tensor

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.layout.num_kv_heads

    @property
    def head_dim_v(self) -> int:
        """Width of a value."""
        return self.layout.head_dim_v

    @cached_property
    def decode_limit(self) -> int:
        """Longest query, tokens, that the decode kernel takes; the prefill kernel takes others.

        Decode holds all rows of a KV head in one tile. In a batch that prefills too, only queries
        whose rows fit the narrowest tile count as decode, so that it stays narrow.
        """
        narrow = max(1, NARROW_ROWS // self.group_size)
        longest = self.max_seqlen_q if self.max_seqlen_q <= DECODE_TOKENS else narrow
        return min(longest, DECODE_TOKENS, WIDE_ROWS // self.group_size)


@dataclass(frozen=True, kw_only=True)
class PackedCall(Call):
    """Arguments of `quantattn.ops.varlen_attention`.

    Attributes:
        key: `[num_keys, num_kv_heads, head_dim]`, any strides.
        value: `[num_keys, num_kv_heads, head_dim_v]`, dtype of `key`, any strides.
        cu_seqlens_k: `[num_seqs + 1]`, int32.
    """

    key: Tensor
    value: Tensor
    cu_seqlens_k: Tensor

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.key.shape[1]

    @property
    def head_dim_v(self) -> int:
        """Width of a value."""
        return self.value.shape[2]


@dataclass(frozen=True, kw_only=True)
class LatentCall(Call):
    """Arguments of `quantattn.ops.mla_attention`.

    All query heads read the same rows. Kernels take as many heads as fill a tile, each group of
    them as if it had a KV head of its own.

    Attributes:
        kv_cache: `[num_blocks, page_size]`, unit stride inside a page.
        layout: How a page is laid out: one head of keys, no values.
        latent_dim: Width of a value, which is the first part of a key.
        seq_lens: `[num_seqs]`, int32.
        block_table: `[num_seqs, max_blocks]`, int32.
        tile_rows: Query rows that a tile has room for, if they are not float32.
    """

    kv_cache: Tensor
    layout: PageLayout
    latent_dim: int
    seq_lens: Tensor
    block_table: Tensor
    tile_rows: int = 32

    @property
    def num_kv_heads(self) -> int:
        """Groups of query heads, equally large."""
        num_heads = self.query.shape[1]
        rows = 16 if self.product_dtype == torch.float32 else self.tile_rows
        heads = max(1, rows // max(1, self.decode_limit))
        counts = range(-(-num_heads // heads), num_heads + 1)
        return next(count for count in counts if num_heads % count == 0)

    @property
    def head_dim_v(self) -> int:
        """Width of a value."""
        return self.latent_dim

    @property
    def product_dtype(self) -> torch.dtype:
        """Dtype of the products' operands: the query's, where it holds the stored numbers exactly.

        On Hopper a tile of query rows stays in shared memory only if it is used as it was loaded.
        """
        dtype = self.query.dtype
        fits = self.layout.format.is_quantized or self.kv_cache.dtype == dtype
        # Triton's interpreter, which takes tensors of the CPU, multiplies bf16 as integers.
        is_interpreted = self.query.device.type == "cpu" and dtype == torch.bfloat16
        return dtype if fits and not is_interpreted else torch.float32

    @property
    def is_hopper(self) -> bool:
        """Whether the tensors are on a Hopper GPU."""
        return is_hopper(self.query.device)

    @property
    def decode_limit(self) -> int:
        """Longest query, tokens, that the decode kernel takes; the prefill kernel takes others."""
        return self.max_seqlen_q if self.max_seqlen_q <= DECODE_TOKENS else 1
