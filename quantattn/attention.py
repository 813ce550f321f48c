"""QuantAttention: the base that a model's attention subclasses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantattn import ops
from quantattn.audit import Finding, audit
from quantattn.cache_writes import note_write
from quantattn.calibration import calibrate_scales
from quantattn.errors import FormatError
from quantattn.metadata import AttentionMetadata
from quantattn.quant_scales import QuantScales
from quantattn.registration import register_quant_scales
from quantattn.scales import DEFAULT_RANGES, ScaleGranularity

__all__ = ["QuantAttention"]


class QuantAttention(QuantScales):
    """Attention over a paged KV cache, with its scales as guarded buffers.

    Buffers, all float32: `q_scale`, `k_scale` and `v_scale` `[]` or `[num_kv_heads]`, and
    `prob_scale` `[]`, in the state dict; `q_range`, `k_range` and `v_range` `[]`, outside it. They
    follow `.to(device)` and keep dtype and bits under every cast.

    Args:
        num_heads: Query heads.
        head_dim: Dimension of a query and a key head.
        num_kv_heads: KV heads, a divisor of `num_heads`; default `num_heads`.
        head_dim_v: Dimension of a value head; default `head_dim`.
        softmax_scale: Multiplier of the logits; default `head_dim ** -0.5`.
        sliding_window: A token sees itself and the `sliding_window - 1` tokens before it; None: it
            sees all.
        logits_soft_cap: Logits become `cap * tanh(logits / cap)`; None: they stay.
        sinks: One extra logit a query head, `[num_heads]`, added to the softmax's denominator; a
            Parameter is trained and saved, a plain tensor becomes a saved buffer.
        kv_cache_dtype: `auto`, `fp8` (= `fp8_e4m3`), `fp8_e5m2`, `fp8_per_token_head`,
            `int8_per_token_head` or `int4_per_token_head`; these keep a scale a token and KV
            head in the page and ignore `k_scale` and `v_scale`.
        layout: `NHD` or `HND`: how the cache's pages are laid out.
        scale_placement: `page` or `inline`: where the scales of the formats per token and head lie.
        scale_granularity: `tensor` or `head`.
        quantize_query: Quantize the query to e4m3 with `q_scale` first.
        quantize_prob: Quantize the softmax's result to e4m3 with `prob_scale`.
        layer_name: Name in messages and reports; by convention the path in the model.
        kv_sharing_target: The layer whose cache this one reads; its k and v scale are used.
        q_range: amax of q is divided by this to calibrate `q_scale`.
        k_range: amax of k is divided by this to calibrate `k_scale`.
        v_range: amax of v is divided by this to calibrate `v_scale`.

    Raises:
        ScaleError: The head counts, the granularity or the sharing target do not fit.
        FormatError: The cache format is unknown.

    Example:
        >>> layer = QuantAttention(4, 32, num_kv_heads=2, kv_cache_dtype="fp8")
        >>> layer.set_scale("k", 0.0123)
        >>> layer.to(torch.bfloat16).k_scale.dtype
        torch.float32
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        head_dim_v: int | None = None,
        softmax_scale: float | None = None,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        sinks: Tensor | None = None,
        kv_cache_dtype: str = "auto",
        layout: str = "NHD",
        scale_placement: str = "page",
        scale_granularity: str | ScaleGranularity = "tensor",
        quantize_query: bool = False,
        quantize_prob: bool = False,
        layer_name: str = "",
        kv_sharing_target: QuantScales | None = None,
        q_range: float = DEFAULT_RANGES["q"],
        k_range: float = DEFAULT_RANGES["k"],
        v_range: float = DEFAULT_RANGES["v"],
    ) -> None:
        super().__init__()
        register_quant_scales(
            self,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            kv_cache_dtype=kv_cache_dtype,
            scale_granularity=scale_granularity,
            layer_name=layer_name,
            kv_sharing_target=kv_sharing_target,
            q_range=q_range,
            k_range=k_range,
            v_range=v_range,
        )
        self.num_heads = num_heads
        self.num_kv_heads = self.scale_shape.num_kv_heads
        self.head_dim = head_dim
        self.head_dim_v = head_dim if head_dim_v is None else head_dim_v
        self.softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.layout = layout
        self.scale_placement = scale_placement
        self.quantize_query = quantize_query
        self.quantize_prob = quantize_prob
        self.sinks: Tensor | None
        if isinstance(sinks, nn.Parameter):
            self.sinks = sinks
        else:
            self.register_buffer("sinks", sinks)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        out_scale: Tensor | None = None,
    ) -> Tensor:
        """Write new keys and values into their pages and attend over each sequence's pages.

        Args:
            query: `[num_tokens, num_heads, head_dim]`, or with the last two flattened.
            key: `[num_tokens, num_kv_heads, head_dim]`, or flattened; None to write nothing.
            value: `[num_tokens, num_kv_heads, head_dim_v]`, or flattened; None with `key`.
            kv_cache: One layer's pages `[num_blocks, page_size]`; written in place.
            metadata: What the batch looks like.
            out_scale: float32 scale of the output, `[]` or by groups of columns: the output is
                quantized to e4m3 with it.

        Returns:
            `[num_tokens, num_heads, head_dim_v]`, flattened if `query` was; query's dtype, or e4m3
            with `out_scale`. Padding rows are 0.

        Raises:
            FormatError: A shape, dtype, device or the cache format does not fit; or keys come to a
                layer that shares another's cache.
            ScaleError: A scale is on another device than the query, or `out_scale` does not fit.

        Example:
            >>> layer = QuantAttention(2, 8)
            >>> cache = PagedKVCache(1, 4, 16, 2, 8, dtype=torch.float32)
            >>> metadata = AttentionMetadata.from_lengths([3], [3], torch.zeros(1, 1).int(), 16)
            >>> q, k, v = torch.randn(3, 3, 2, 8)
            >>> layer(q, k, v, cache.layer(0), metadata).shape
            torch.Size([3, 2, 8])
        """
        self.mend_scales()
        if (key is None) != (value is None):
            raise FormatError("key, value: got only one of them, expected both or neither")
        is_flat = query.dim() == 2
        query = query.unflatten(-1, (self.num_heads, self.head_dim)) if is_flat else query
        k_scale, v_scale = self.effective_scale("k"), self.effective_scale("v")
        if key is not None and value is not None:
            self._write(key, value, kv_cache, metadata, k_scale, v_scale)
        dtype = query.dtype
        if self.quantize_query:
            query = ops.static_quant_fp8(query, self.q_scale)
        out = ops.paged_attention(
            query,
            kv_cache,
            cu_seqlens_q=metadata.cu_seqlens_q,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table,
            max_seqlen_q=metadata.max_seqlen_q,
            num_kv_heads=self.num_kv_heads,
            kv_cache_dtype=self.cache_format.name,
            k_scale=k_scale,
            v_scale=v_scale,
            q_scale=self.q_scale if self.quantize_query else None,
            prob_scale=self.prob_scale if self.quantize_prob else None,
            layout=self.layout,
            scale_placement=self.scale_placement,
            head_dim_v=self.head_dim_v,
            softmax_scale=self.softmax_scale,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
            out_scale=out_scale,
            out_dtype=dtype,
        )
        return out.flatten(1) if is_flat else out

    def _write(
        self,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        k_scale: Tensor,
        v_scale: Tensor,
    ) -> None:
        if self.kv_sharing_target is not None:
            raise FormatError(
                f"key, value: layer {self.layer_name!r} shares the cache of"
                f" {self.kv_sharing_target.layer_name!r} and writes nothing; pass None"
            )
        if key.dim() == 2:
            key = key.unflatten(-1, (self.num_kv_heads, self.head_dim))
            value = value.unflatten(-1, (self.num_kv_heads, self.head_dim_v))
        ops.write_kv(
            key,
            value,
            kv_cache,
            metadata.slot_mapping,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_cache_dtype=self.cache_format.name,
            layout=self.layout,
            scale_placement=self.scale_placement,
        )
        if k_scale is not self.k_scale and not torch.compiler.is_compiling():
            # What was written with is a product of these, which the cache must not outlive.
            note_write(self.k_scale, kv_cache)
            note_write(self.v_scale, kv_cache)

    def calibrate(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Set q, k and v scales from one batch, `scale = amax / range`, per tensor or per KV head.

        Synchronises with the device once. A role whose batch is empty or all zero keeps its scale.

        Args:
            query: `[num_tokens, num_heads, head_dim]`.
            key: `[num_tokens, num_kv_heads, head_dim]`.
            value: `[num_tokens, num_kv_heads, head_dim_v]`.

        Raises:
            ScaleError: The data is not finite, a live cache holds entries written with other
                scales, or a CUDA graph is being captured.

        Example:
            >>> layer = QuantAttention(2, 8)
            >>> layer.calibrate(
            ...     torch.randn(5, 2, 8), torch.full((5, 2, 8), 4.0), torch.randn(5, 2, 8)
            ... )
            >>> round(layer.host_scale("k"), 6)
            0.02
        """
        calibrate_scales(self, {"q": query, "k": key, "v": value})

    def audit(self) -> list[Finding]:
        """Name what would go wrong with this layer's scales; empty when nothing would.

        Example:
            >>> QuantAttention(2, 8).audit()
            []
        """
        return audit(self)

    def extra_repr(self) -> str:
        """Head counts, dimensions and cache format, for `print(model)`."""
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads},"
            f" head_dim={self.head_dim}, kv_cache_dtype={self.cache_format.name!r},"
            f" scale_granularity={self.scale_shape.granularity.value!r}"
        )
