"""Small complete models whose attention subclasses QuantAttention."""

from __future__ import annotations

from quantattn.models.fp8_linear import FP8Linear
from quantattn.models.generation import CachedSequence, Generation, generate, replay
from quantattn.models.linear_scheme import LinearScheme, LinearSchemes, read_linear_schemes
from quantattn.models.llama import LlamaAttention, LlamaForCausalLM, load_llama
from quantattn.models.llama_config import LlamaConfig
from quantattn.models.rope import Llama3Scaling, Rope, rotate, rotation

__all__ = [
    "CachedSequence",
    "FP8Linear",
    "Generation",
    "LinearScheme",
    "LinearSchemes",
    "Llama3Scaling",
    "LlamaAttention",
    "LlamaConfig",
    "LlamaForCausalLM",
    "Rope",
    "generate",
    "load_llama",
    "read_linear_schemes",
    "replay",
    "rotate",
    "rotation",
]
