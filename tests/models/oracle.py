"""A float64 Llama decoder, written apart from quantattn, over the tensors of a checkpoint's files.

It computes whole sequences at once, without a cache. Each number that quantattn may quantize passes
through a `disturb` function by the name of its place, where a test can round or differentiate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

LINEARS = (
    *(f"self_attn.{role}_proj" for role in "qkvo"),
    *(f"mlp.{role}_proj" for role in ("gate", "up", "down")),
)
Disturb = Callable[[str, Tensor], Tensor]


def round_e4m3(x: Tensor, scale: float) -> Tensor:
    """Nearest multiple of the scale that e4m3 holds, ties to even, from the format's definition."""
    units = x / scale
    exponent = torch.frexp(units.abs()).exponent - 1
    step = torch.pow(2.0, exponent.clamp(min=-6).double() - 3)
    return (units / step).round().mul(step).clamp(-448, 448) * scale


def half_step(x: Tensor, scale: float) -> Tensor:
    """How far rounding to e4m3 can move each number."""
    units = x.abs() / scale
    exponent = (torch.frexp(units).exponent - 1).clamp(min=-6).double()
    return torch.pow(2.0, exponent - 4) * scale


class Oracle:
    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.tensors.update(load_file(file))

    def scale(self, name: str) -> float | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else tensor.double().item()

    def weight(self, name: str) -> Tensor:
        weight = self.tensors[f"{name}.weight"].double()
        scale = self.tensors.get(f"{name}.weight_scale")
        if scale is None:
            return weight
        return weight * (scale.double().reshape(-1, 1) if scale.numel() > 1 else scale.double())

    def quantizers(self, *, fp8_cache: bool) -> dict[str, float]:
        """Place -> scale, for every place where the checkpoint says that e4m3 is used."""
        found: dict[str, float | None] = {}
        for layer in range(self.config["num_hidden_layers"]):
            path = f"model.layers.{layer}"
            for name in LINEARS:
                found[f"{path}.{name}"] = self.scale(f"{path}.{name}.input_scale")
            for role in "kv" if fp8_cache else "":
                # ModelOpt keeps the scales of K and V beside their projections.
                own, projection = f"{path}.self_attn", f"{path}.self_attn.{role}_proj"
                found[f"{path}.{role}"] = self.scale(f"{own}.{role}_scale") or self.scale(
                    f"{projection}.{role}_scale"
                )
        return {place: scale for place, scale in found.items() if scale is not None}

    def logits(self, ids: list[int], disturb: Disturb = lambda place, x: x) -> Tensor:
        """Logits after each token, `[len(ids), vocab_size]`, float64."""
        hidden = self.tensors["model.embed_tokens.weight"].double()[ids]
        for layer in range(self.config["num_hidden_layers"]):
            path = f"model.layers.{layer}"
            hidden = hidden + self.attend(
                path, self.norm(f"{path}.input_layernorm", hidden), disturb
            )
            normal = self.norm(f"{path}.post_attention_layernorm", hidden)
            gate = self.linear(f"{path}.mlp.gate_proj", normal, disturb)
            up = self.linear(f"{path}.mlp.up_proj", normal, disturb)
            inner = gate * torch.sigmoid(gate) * up
            hidden = hidden + self.linear(f"{path}.mlp.down_proj", inner, disturb)
        return self.norm("model.norm", hidden) @ self.weight("lm_head").T

    def linear(self, name: str, x: Tensor, disturb: Disturb) -> Tensor:
        return disturb(name, x) @ self.weight(name).T

    def norm(self, name: str, x: Tensor) -> Tensor:
        mean_square = x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return x / mean_square.sqrt() * self.weight(name)

    def attend(self, path: str, x: Tensor, disturb: Disturb) -> Tensor:
        width, tokens = self.config["head_dim"], len(x)
        q, k, v = (
            self.linear(f"{path}.self_attn.{role}_proj", x, disturb).reshape(tokens, -1, width)
            for role in "qkv"
        )
        if f"{path}.self_attn.q_norm.weight" in self.tensors:
            q = self.norm(f"{path}.self_attn.q_norm", q)
            k = self.norm(f"{path}.self_attn.k_norm", k)
        k, v = disturb(f"{path}.k", self.rotate(k)), disturb(f"{path}.v", v)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", self.rotate(q), k) / math.sqrt(width)
        hidden_keys = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden_keys, -math.inf).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", weights, v).reshape(tokens, -1)
        return self.linear(f"{path}.self_attn.o_proj", mixed, disturb)

    def rotate(self, x: Tensor) -> Tensor:
        width = self.config["head_dim"]
        theta = self.config["rope_parameters"]["rope_theta"]
        pairs = torch.complex(*x.chunk(2, dim=-1))
        frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequency
        turned = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], dim=-1)
