"""A small Llama-family decoder (Llama, Mistral, Qwen2, Qwen3) whose attention is a QuantAttention.

Modules are named as in Hugging Face checkpoints, so that their keys fit without a table.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantattn.attention import QuantAttention
from quantattn.cache import PagedKVCache
from quantattn.errors import CheckpointError
from quantattn.loaders.checkpoint import open_checkpoint
from quantattn.loaders.checkpoint_scales import declared_by
from quantattn.loaders.load import load_checkpoint
from quantattn.loaders.report import LoadReport
from quantattn.metadata import AttentionMetadata
from quantattn.models.fp8_linear import FP8Linear, refuse_invalid_scales
from quantattn.models.linear_scheme import LinearSchemes, read_linear_schemes
from quantattn.models.llama_config import LlamaConfig
from quantattn.models.rope import rotate, rotation

__all__ = ["LlamaAttention", "LlamaForCausalLM", "load_llama"]

Angles = tuple[Tensor, Tensor]


class LlamaForCausalLM(nn.Module):
    """A decoder over a paged KV cache.

    Args:
        config: The model's shape.
        schemes: Which Linears are FP8, and how.
        kv_cache_dtype: Format of the cache that the layers write: any of `QuantAttention`'s.
        scale_granularity: `tensor` or `head`: how many k and v scales a layer has.
        dtype: The model's dtype; None: the config's.

    Example:
        >>> from quantattn.models.llama_config import LlamaConfig
        >>> config = LlamaConfig.from_dict(
        ...     {
        ...         "model_type": "llama",
        ...         "vocab_size": 50,
        ...         "hidden_size": 32,
        ...         "intermediate_size": 48,
        ...         "num_hidden_layers": 1,
        ...         "num_attention_heads": 2,
        ...     }
        ... )
        >>> model = LlamaForCausalLM(config, kv_cache_dtype="fp8")
        >>> cache = model.new_cache(num_blocks=2, block_size=16)
        >>> batch = AttentionMetadata.from_lengths([3], [3], [[0]], cache.block_size)
        >>> model(torch.tensor([1, 2, 3]), torch.arange(3), cache, batch).shape
        torch.Size([3, 50])
    """

    def __init__(
        self,
        config: LlamaConfig,
        schemes: LinearSchemes | None = None,
        *,
        kv_cache_dtype: str = "auto",
        scale_granularity: str = "tensor",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.kv_cache_dtype = kv_cache_dtype
        linears = _Linears(schemes or LinearSchemes(), dtype or config.dtype)
        attention = functools.partial(
            LlamaAttention,
            config,
            linears,
            kv_cache_dtype=kv_cache_dtype,
            scale_granularity=scale_granularity,
        )
        layers = [
            _Layer(config, linears, attention(layer), f"model.layers.{layer}.mlp")
            for layer in range(config.num_layers)
        ]
        self.model = _Decoder(config, layers, linears.dtype)
        self.lm_head: nn.Module | None = None
        if not config.tied_head:
            self.lm_head = linears.make("lm_head", config.hidden_size, config.vocab_size)

    def forward(
        self, input_ids: Tensor, positions: Tensor, cache: PagedKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Write the new tokens into the cache and predict the token after each.

        Args:
            input_ids: New tokens of all sequences, one after another, `[num_tokens]`, int64.
            positions: Position of each in its sequence, `[num_tokens]`, int64.
            cache: Pages of every layer; written in place.
            metadata: What the batch looks like.

        Returns:
            Logits, `[num_tokens, vocab_size]`, the model's dtype.
        """
        hidden = self.model(input_ids, positions, cache, metadata)
        if self.lm_head is None:
            return functional.linear(hidden, self.model.embed_tokens.weight)
        logits: Tensor = self.lm_head(hidden)
        return logits

    def new_cache(self, num_blocks: int, *, block_size: int) -> PagedKVCache:
        """Make a zeroed cache that fits this model: its layers, format, dtype and device.

        Args:
            num_blocks: Pages a layer.
            block_size: Tokens a page.
        """
        weight = self.model.embed_tokens.weight
        return PagedKVCache(
            self.config.num_layers,
            num_blocks,
            block_size,
            self.config.num_kv_heads,
            self.config.head_dim,
            kv_cache_dtype=self.kv_cache_dtype,
            dtype=weight.dtype,
            device=weight.device,
        )


class LlamaAttention(QuantAttention):
    """Projections, rotation and paged attention of one layer; its scales are its own buffers.

    Where the output projection has a static `input_scale`, the attention's output is quantized with
    it, and the projection takes the codes as they are.
    """

    def __init__(
        self,
        config: LlamaConfig,
        linears: _Linears,
        layer: int,
        *,
        kv_cache_dtype: str,
        scale_granularity: str,
    ) -> None:
        name = f"model.layers.{layer}.self_attn"
        super().__init__(
            config.num_heads,
            config.head_dim,
            num_kv_heads=config.num_kv_heads,
            sliding_window=config.sliding_windows[layer],
            kv_cache_dtype=kv_cache_dtype,
            scale_granularity=scale_granularity,
            layer_name=name,
        )
        width, kv_width = (
            heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads)
        )
        bias = config.qkv_bias
        self.q_proj = linears.make(f"{name}.q_proj", config.hidden_size, width, bias)
        self.k_proj = linears.make(f"{name}.k_proj", config.hidden_size, kv_width, bias)
        self.v_proj = linears.make(f"{name}.v_proj", config.hidden_size, kv_width, bias)
        self.o_proj = linears.make(f"{name}.o_proj", width, config.hidden_size, config.out_bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = _RMSNorm(config.head_dim, config.norm_eps, linears.dtype)
            self.k_norm = _RMSNorm(config.head_dim, config.norm_eps, linears.dtype)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, angles: Angles, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend from `hidden`, `[num_tokens, hidden_size]`, to the cache; gives the same shape."""
        query = self.q_proj(hidden).unflatten(-1, (self.num_heads, self.head_dim))
        key = self.k_proj(hidden).unflatten(-1, (self.num_kv_heads, self.head_dim))
        value = self.v_proj(hidden).unflatten(-1, (self.num_kv_heads, self.head_dim))
        query = rotate(self.q_norm(query), *angles)
        key = rotate(self.k_norm(key), *angles)
        o_proj = self.o_proj
        out_scale = o_proj.input_scale if isinstance(o_proj, FP8Linear) else None
        out = super().forward(query, key, value, kv_cache, metadata, out_scale=out_scale).flatten(1)
        projected: Tensor = o_proj(out) if out_scale is None else o_proj(out, hidden.dtype)
        return projected


class _Linears:
    """Makes a model's Linears, each as its scheme says."""

    def __init__(self, schemes: LinearSchemes, dtype: torch.dtype) -> None:
        self._schemes = schemes
        self.dtype = dtype

    def make(
        self, name: str, in_features: int, out_features: int, bias: bool = False
    ) -> nn.Linear | FP8Linear:
        scheme = self._schemes.of(name)
        if scheme is None:
            return nn.Linear(in_features, out_features, bias, dtype=self.dtype)
        return FP8Linear(
            in_features,
            out_features,
            bias,
            weight_granularity="channel" if scheme.per_channel else "tensor",
            activation=scheme.activation,
            dtype=self.dtype,
        )


class _RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normal.to(x.dtype)


class _Decoder(nn.Module):
    """From tokens to normalised hidden states; named `model` in checkpoints."""

    def __init__(self, config: LlamaConfig, layers: list[_Layer], dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(layers)
        self.norm = _RMSNorm(config.hidden_size, config.norm_eps, dtype)

    def forward(
        self, input_ids: Tensor, positions: Tensor, cache: PagedKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        hidden: Tensor = self.embed_tokens(input_ids)
        angles = rotation(self.config.rope, positions, self.config.head_dim)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, angles, cache.layer(index), metadata)
        normal: Tensor = self.norm(hidden)
        return normal


class _Layer(nn.Module):
    def __init__(
        self, config: LlamaConfig, linears: _Linears, attention: LlamaAttention, mlp_name: str
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = _MLP(config, linears, mlp_name)
        self.input_layernorm = _RMSNorm(config.hidden_size, config.norm_eps, linears.dtype)
        self.post_attention_layernorm = _RMSNorm(config.hidden_size, config.norm_eps, linears.dtype)

    def forward(
        self, hidden: Tensor, angles: Angles, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        normal = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(normal, angles, kv_cache, metadata)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class _MLP(nn.Module):
    def __init__(self, config: LlamaConfig, linears: _Linears, name: str) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = linears.make(f"{name}.gate_proj", width, inner, bias)
        self.up_proj = linears.make(f"{name}.up_proj", width, inner, bias)
        self.down_proj = linears.make(f"{name}.down_proj", inner, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def load_llama(
    path: str | os.PathLike[str],
    *,
    kv_cache_dtype: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> tuple[LlamaForCausalLM, LoadReport]:
    """Build the model that a checkpoint's config describes and load it.

    Args:
        path: A folder with config.json, or a file in one.
        kv_cache_dtype: Format of the cache that the model writes.
        dtype: The model's dtype; None: the config's.
        device: Where the model goes; None: the CPU.

    Returns:
        The model, and which scale came from where.

    Raises:
        FormatError: The architecture or the Linears' quantization is not served.
        CheckpointError: A file is damaged, weights are missing, or a Linear's scale is invalid.
        RefusedCheckpointError: Scales or weights are invalid or do not fit.

    Example:
        >>> from importlib.resources import files
        >>> model, report = load_llama(files("quantattn") / "data" / "demo", kv_cache_dtype="fp8")
        >>> [row.key for row in report.loaded][:2]
        ['model.layers.0.self_attn.k_scale', 'model.layers.0.self_attn.v_scale']
    """
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.json("config.json")
        hf_quant_config = checkpoint.json("hf_quant_config.json")
        declaration, _ = declared_by(checkpoint)
        quantized_head = "lm_head.weight_scale" in checkpoint.tensors
    if config is None:
        raise CheckpointError(
            f"{os.fspath(path)}: no config.json lies there; it says which model this is",
            file="config.json",
        )
    schemes = read_linear_schemes(config, hf_quant_config)
    if not quantized_head:  # auto-round's compressed-tensors files do not list the head as ignored
        schemes = replace(schemes, ignored=(*schemes.ignored, "lm_head"))
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig.from_dict(config),
            schemes,
            kv_cache_dtype=kv_cache_dtype,
            scale_granularity="head" if declaration.strategy == "head" else "tensor",
            dtype=dtype,
        )
    report = load_checkpoint(model, path, device=device)
    if report.missing:
        names = ", ".join(report.missing[:5]) + (", ..." if len(report.missing) > 5 else "")
        raise CheckpointError(
            f"{os.fspath(path)}: {len(report.missing)} tensors of the model are missing: {names}",
            place=report.missing[0],
        )
    refuse_invalid_scales(model, os.fspath(path))
    return model.eval(), report
