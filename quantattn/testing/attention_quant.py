"""The model that the fusions are tested on: layers of attention and static quantization."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quantattn.attention import QuantAttention
from quantattn.formats import FP8_E4M3_MAX
from quantattn.ops import static_quant_fp8
from quantattn.testing.batches import PagedBatch

__all__ = ["AttentionQuant"]


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    return _codes(_in_groups(x, scale) / _per_group(scale), x)


def _divide_float32(x: Tensor, scale: Tensor) -> Tensor:
    return _codes(_in_groups(x, scale).float() / _per_group(scale), x)


def _multiply(x: Tensor, scale: Tensor) -> Tensor:
    return _codes(_in_groups(x, scale) * _per_group(1.0 / scale), x)


def _multiply_float32(x: Tensor, scale: Tensor) -> Tensor:
    return _codes(_in_groups(x, scale).float() * _per_group(scale.reciprocal()), x)


def _torchao(x: Tensor, scale: Tensor) -> Tensor:
    """What torchao's `_quantize_affine_float8` does, blocks of columns included."""
    if scale.numel() > 1:
        columns = x.shape[1] // scale.numel()
        scale = scale.view(1, -1).repeat_interleave(x.shape[0], dim=0)
        scale = scale.repeat_interleave(columns, dim=1)
    return _codes(x.to(torch.float32) / scale, x)


def _in_groups(x: Tensor, scale: Tensor) -> Tensor:
    return x.unflatten(1, (scale.numel(), -1)) if scale.numel() > 1 else x


def _per_group(scale: Tensor) -> Tensor:
    return scale[:, None] if scale.numel() > 1 else scale


def _codes(quotient: Tensor, x: Tensor) -> Tensor:
    return quotient.clamp(-FP8_E4M3_MAX, FP8_E4M3_MAX).to(torch.float8_e4m3fn).view(x.shape)


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "op": static_quant_fp8,
    "divide": _divide,
    "divide_float32": _divide_float32,
    "multiply": _multiply,
    "multiply_float32": _multiply_float32,
    "torchao": _torchao,
}
"""Ways to quantize `[num_tokens, columns]` to e4m3, all of which are fused."""


class AttentionQuant(nn.Module):
    """Layers of attention, each followed by a static e4m3 quantization of its output.

    Every scale is another number and none is 1.

    Args:
        num_layers: Layers.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Width of a head.
        kv_cache_dtype: Format of the pages, which every layer shares.
        scale_granularity: `tensor` or `head`, of the k and v scales.
        out_scale: Scales of the output, float32 `[]` or one a group of columns.
        quantize: One of `SPELLINGS`, or any function of `[num_tokens, columns]` and the scale.

    Example:
        >>> from quantattn.testing import make_batch
        >>> batch = make_batch([2], [5], num_heads=4, num_kv_heads=2, head_dim=8)
        >>> model = AttentionQuant(1, 4, 2, 8, out_scale=torch.tensor(0.125))
        >>> model(batch).dtype
        torch.float8_e4m3fn
    """

    out_scale: Tensor

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        out_scale: Tensor,
        kv_cache_dtype: str = "auto",
        scale_granularity: str = "tensor",
        quantize: Callable[[Tensor, Tensor], Tensor] = static_quant_fp8,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            QuantAttention(
                num_heads,
                head_dim,
                num_kv_heads=num_kv_heads,
                kv_cache_dtype=kv_cache_dtype,
                scale_granularity=scale_granularity,
                layer_name=f"layers.{index}",
            )
            for index in range(num_layers)
        )
        count = num_kv_heads if scale_granularity == "head" else 1
        for number, layer in enumerate(self.layers, 2):
            assert isinstance(layer, QuantAttention)
            steps = torch.arange(1, count + 1) / count
            layer.set_scale("k", (0.011 * number * steps).squeeze())
            layer.set_scale("v", (0.007 * number * steps).squeeze())
        self.register_buffer("out_scale", out_scale)
        self.quantize = quantize

    def forward(self, batch: PagedBatch) -> Tensor:
        """Attend from the batch's queries to its pages, layer after layer.

        Returns:
            Codes of the last layer, `[num_tokens, num_heads * head_dim]`, e4m3.
        """
        query = batch.query
        for layer in self.layers:
            out = layer(query, None, None, batch.pages, batch.metadata)
            codes = self.quantize(out.flatten(1), self.out_scale)
            query = (codes.float() / FP8_E4M3_MAX).to(query.dtype).view(query.shape)
        return codes
