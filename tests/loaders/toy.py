"""Toy models and checkpoints for the loader tests: two decoder layers, attention in two styles."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from quantattn import QuantAttention, QuantScales

KV_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": KV_SCHEME},
}


class Subclassed(QuantAttention):
    """Attention as quantattn's users write it: the module at `self_attn` is the base's subclass."""

    def __init__(self, num_heads: int = 4, num_kv_heads: int = 2, **options: object) -> None:
        super().__init__(num_heads, 8, num_kv_heads=num_kv_heads, **options)
        self.q_proj = nn.Linear(32, 32, bias=False)


class Wrapped(nn.Module):
    """Attention as engines write it: the attention layer is `self_attn.attn`."""

    def __init__(self, num_heads: int = 4, num_kv_heads: int = 2, **options: object) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 32, bias=False)
        self.attn = QuantAttention(num_heads, 8, num_kv_heads=num_kv_heads, **options)


class Decoder(nn.Module):
    """`model.layers.N.self_attn`, as in most checkpoints."""

    def __init__(
        self, style: type[nn.Module] = Subclassed, layers: int = 2, **options: object
    ) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList()
        for _ in range(layers):
            block = nn.Module()
            block.self_attn = style(**options)
            self.model.layers.append(block)

    def attention(self, layer: int) -> QuantScales:
        """The guarded attention layer of a block."""
        module = self.model.layers[layer].self_attn
        return module if isinstance(module, QuantScales) else module.attn


def save(
    folder: Path, tensors: dict[str, Tensor | float | list[float]], config: dict | None = CONFIG
) -> Path:
    """Write a one-file checkpoint; numbers become float32 tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v if isinstance(v, Tensor) else torch.tensor(v) for k, v in tensors.items()}
    safetensors.torch.save_file(state, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def bits(model: nn.Module) -> dict[str, bytes]:
    """Every tensor of a model as bytes, buffers outside the state dict included."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {
        name: t.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, t in tensors.items()
    }


def float32(value: float) -> float:
    """The float32 next to a number."""
    return torch.tensor(value, dtype=torch.float32).item()
