"""Batches of packed keys and values for varlen_attention, and what they mean in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tests import fp8_oracle
from tests.ops import oracles

PER_TENSOR = (torch.tensor(0.03), torch.tensor(0.05))
PER_HEAD = (torch.tensor([0.03, 0.011]), torch.tensor([0.05, 0.017]))


@dataclass(frozen=True)
class Packed:
    """A batch; rows of padding and keys that belong to no sequence are NaN."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_lens: Sequence[int]
    key_lens: Sequence[int]
    scales: tuple[Tensor | None, Tensor | None]

    def arguments(self, **more: Any) -> dict[str, Any]:
        """What varlen_attention takes, some of it replaced."""
        return {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "cu_seqlens_q": _ends(self.query_lens),
            "cu_seqlens_k": _ends(self.key_lens),
            "max_seqlen_q": max(self.query_lens, default=0),
            "max_seqlen_k": max(self.key_lens, default=0),
            "k_scale": self.scales[0],
            "v_scale": self.scales[1],
            **more,
        }

    def expected(self, *, query: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Output and LSE in float64."""
        query = self.query.double() if query is None else query
        options.setdefault("softmax_scale", query.shape[2] ** -0.5)
        sides = zip((self.key, self.value), self.scales, strict=True)
        used = sum(self.key_lens)
        keys, values = (_meaning(side[:used], scale).split(self.key_lens) for side, scale in sides)
        sequences = list(zip(keys, values, strict=True))
        return oracles.attend(query, sequences, self.query_lens, oracles.Options(**options))


def pack(
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    dtype: str = "fp8",
    model_dtype: torch.dtype = torch.bfloat16,
    scales: tuple[Tensor, Tensor] = PER_TENSOR,
    padding: int = 0,
    spare_keys: int = 2,
) -> Packed:
    """Draw a batch of normal numbers; `dtype` is `auto`, `fp8` or `fp8_e5m2`."""
    query = torch.randn(sum(query_lens) + padding, num_heads, head_dim).to(model_dtype)
    query[sum(query_lens) :] = torch.nan
    sides = []
    for width, scale in zip((head_dim, head_dim_v), scales, strict=True):
        side = torch.randn(sum(key_lens) + spare_keys, num_kv_heads, width).to(model_dtype)
        if dtype != "auto":
            stored = oracles.FP8[dtype]
            scaled = side.double() / torch.tensor(oracles.per_head(scale, num_kv_heads))[:, None]
            codes = fp8_oracle.encode(scaled.numpy(), stored)
            side = torch.from_numpy(codes).view(torch.uint8).view(stored)
        side.view(torch.uint8)[sum(key_lens) :] = 0xFF
        sides.append(side)
    used = scales if dtype != "auto" else (None, None)
    return Packed(query, *sides, query_lens, key_lens, used)


def _ends(lens: Sequence[int]) -> Tensor:
    return torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32)


def _meaning(side: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return side.double()
    factor = torch.tensor(oracles.per_head(scale, side.shape[1]), dtype=torch.float64)
    return fp8_oracle.decode(side, side.dtype) * factor[:, None]
