"""MLAAttention: attention over one cached latent a token, as DeepSeek's models do it.

The cache row of a token is its latent and, after it, the rotated part of its key. Both products
read that row, so one scale serves both: `k_scale`, of which `v_scale` is another name.
"""

from __future__ import annotations

from torch import Tensor

from quantattn import ops
from quantattn.audit import Finding, audit
from quantattn.calibration import calibrate_scales
from quantattn.metadata import AttentionMetadata
from quantattn.quant_scales import QuantScales
from quantattn.registration import register_quant_scales
from quantattn.scales import DEFAULT_RANGES

__all__ = ["MLAAttention"]


class MLAAttention(QuantScales):
    """Multi-head latent attention in its absorbed form, with its scales as guarded buffers.

    Buffers: `q_scale`, `k_scale` and `prob_scale` `[]`, float32, in the state dict; `q_range` and
    `k_range` outside it. The latent is one head, so every scale is per tensor.

    Args:
        num_heads: Query heads.
        latent_dim: Dimension of the latent, which is also that of an output head.
        rope_dim: Dimension of the rotated part of query and key.
        softmax_scale: Multiplier of the logits; models define it from their expanded head.
        kv_cache_dtype: `auto`, `fp8` (= `fp8_e4m3`) or `fp8_e5m2`.
        quantize_query: Quantize the query to e4m3 with `q_scale` first.
        layer_name: Name in messages and reports; by convention the path in the model.
        kv_sharing_target: The layer whose cache this one reads; its k scale is used.
        q_range: amax of q is divided by this to calibrate `q_scale`.
        k_range: amax of the latent row is divided by this to calibrate `k_scale`.

    Example:
        >>> layer = MLAAttention(4, 32, 8, softmax_scale=0.125, kv_cache_dtype="fp8")
        >>> layer.set_scale("k", 0.5)
        >>> layer.v_scale is layer.k_scale
        True
    """

    def __init__(
        self,
        num_heads: int,
        latent_dim: int,
        rope_dim: int,
        *,
        softmax_scale: float,
        kv_cache_dtype: str = "auto",
        quantize_query: bool = False,
        layer_name: str = "",
        kv_sharing_target: QuantScales | None = None,
        q_range: float = DEFAULT_RANGES["q"],
        k_range: float = DEFAULT_RANGES["k"],
    ) -> None:
        super().__init__()
        register_quant_scales(
            self,
            num_heads=num_heads,
            num_kv_heads=1,
            kv_cache_dtype=kv_cache_dtype,
            layer_name=layer_name,
            kv_sharing_target=kv_sharing_target,
            one_latent=True,
            q_range=q_range,
            k_range=k_range,
        )
        self.num_heads = num_heads
        self.latent_dim = latent_dim
        self.rope_dim = rope_dim
        self.softmax_scale = softmax_scale
        self.quantize_query = quantize_query

    def forward(
        self,
        query: Tensor,
        latent: Tensor | None,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        out_scale: Tensor | None = None,
    ) -> Tensor:
        """Write new latent rows into their pages and attend over each sequence's pages.

        Args:
            query: Absorbed query `[num_tokens, num_heads, latent_dim + rope_dim]`.
            latent: `[num_tokens, latent_dim + rope_dim]`; None to write nothing.
            kv_cache: One layer's pages `[num_blocks, block_size * (latent_dim + rope_dim)]`;
                written in place.
            metadata: What the batch looks like.
            out_scale: float32 scale of the output, `[]` or by groups of columns.

        Returns:
            `[num_tokens, num_heads, latent_dim]`, query's dtype, or e4m3 with `out_scale`.

        Raises:
            FormatError: A shape, dtype, device or the cache format does not fit.

        Example:
            >>> layer = MLAAttention(2, 16, 8, softmax_scale=0.2)
            >>> cache = PagedKVCache(1, 4, 16, 1, 24, head_dim_v=0, dtype=torch.float32)
            >>> metadata = AttentionMetadata.from_lengths([3], [3], torch.zeros(1, 1).int(), 16)
            >>> query, latent = torch.randn(3, 2, 24), torch.randn(3, 24)
            >>> layer(query, latent, cache.layer(0), metadata).shape
            torch.Size([3, 2, 16])
        """
        self.mend_scales()
        scale = self.effective_scale("k")
        if latent is not None:
            ops.write_latent(
                latent,
                kv_cache,
                metadata.slot_mapping,
                scale=scale,
                kv_cache_dtype=self.cache_format.name,
            )
        dtype = query.dtype
        if self.quantize_query:
            query = ops.static_quant_fp8(query, self.q_scale)
        out: Tensor = ops.mla_attention(
            query,
            kv_cache,
            cu_seqlens_q=metadata.cu_seqlens_q,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table,
            max_seqlen_q=metadata.max_seqlen_q,
            latent_dim=self.latent_dim,
            rope_dim=self.rope_dim,
            kv_cache_dtype=self.cache_format.name,
            scale=scale,
            q_scale=self.q_scale if self.quantize_query else None,
            softmax_scale=self.softmax_scale,
            out_scale=out_scale,
            out_dtype=dtype,
        )
        return out

    def calibrate(self, query: Tensor, latent: Tensor) -> None:
        """Set the q scale and the latent's scale from one batch, `scale = amax / range`.

        Args:
            query: `[num_tokens, num_heads, latent_dim + rope_dim]`.
            latent: `[num_tokens, latent_dim + rope_dim]`.

        Raises:
            ScaleError: The data is not finite, a live cache holds entries written with another
                scale, or a CUDA graph is being captured.

        Example:
            >>> layer = MLAAttention(2, 16, 8, softmax_scale=0.2)
            >>> layer.calibrate(torch.randn(5, 2, 24), torch.full((5, 24), 4.0))
            >>> round(layer.host_scale("k"), 6)
            0.02
        """
        calibrate_scales(self, {"q": query, "k": latent})

    def audit(self) -> list[Finding]:
        """Name what would go wrong with this layer's scales; empty when nothing would.

        Example:
            >>> MLAAttention(2, 16, 8, softmax_scale=0.2).audit()
            []
        """
        return audit(self)
