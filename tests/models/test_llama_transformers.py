"""The model against transformers' own, on the same weights: every family that is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantattn.models import CachedSequence, load_llama, replay
from tests.models.oracle import Oracle

transformers = pytest.importorskip("transformers", reason="transformers is a test extra")

BASE = Path(__file__).parent.parent / "data" / "checkpoints" / "base"
PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 238, 46, 8, 33, 83, 27, 95, 2, 88, 41]
TOKENS = [4, 197, 16, 77, 99, 37, 51]
BF16_ROUNDOFF = 2.0**-9

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 60,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    ),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 7, "head_dim": 8}),
    "mistral-full": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "qwen3-biases": ("Qwen3Config", {"head_dim": 8, "attention_bias": True}),
}


def reference(model: torch.nn.Module, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double()


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    """In float32 only the order of additions differs: some 100 of them a logit, 2**-24 each."""
    config_name, settings = FAMILIES[family]
    config = getattr(transformers, config_name)(**SHAPE, **settings)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in theirs.named_parameters():
        offset = 1.0 if "norm" in name else 0.0
        torch.nn.init.normal_(parameter, mean=offset, std=0.2)
    theirs.save_pretrained(tmp_path)
    model, report = load_llama(tmp_path)
    assert report.missing == ()
    expected = reference(theirs, PROMPT + TOKENS)
    prefill = CachedSequence(model, 32).extend(PROMPT + TOKENS)
    assert relative(prefill, expected) < 1e-5
    assert relative(replay(model, PROMPT, TOKENS), expected[len(PROMPT) - 1 : -1]) < 1e-5


@pytest.mark.parametrize("is_decoding", [False, True], ids=["prefill", "decode"])
def test_base_is_as_near_to_float64_as_transformers_in_bfloat16(is_decoding: bool) -> None:
    """Both round to bfloat16 after every product and sum, in places that differ a little.

    So neither is the truth: float64 is, and transformers' own distance from it, which is what the
    roundings of such a model amount to, sets the scale. Twice it, and one rounding of the logits,
    is allowed.
    """
    theirs = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.bfloat16).eval()
    model, _ = load_llama(BASE)
    assert model.lm_head.weight.dtype is torch.bfloat16
    exact = Oracle(BASE).logits(PROMPT + TOKENS)
    allowed = 2 * relative(reference(theirs, PROMPT + TOKENS), exact) + BF16_ROUNDOFF
    if is_decoding:
        found, exact = replay(model, PROMPT, TOKENS), exact[len(PROMPT) - 1 : -1]
    else:
        found = CachedSequence(model, 32).extend(PROMPT + TOKENS)
    assert relative(found, exact) < allowed
    assert allowed < 2e-2


def test_base_agrees_with_transformers_in_float32() -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
    model, _ = load_llama(BASE, dtype=torch.float32)
    expected = reference(theirs, PROMPT + TOKENS)
    assert relative(CachedSequence(model, 32).extend(PROMPT + TOKENS), expected) < 1e-5


@pytest.mark.parametrize(
    "rope", [None, {**LLAMA3, "type": "llama3"}, {"type": "linear", "factor": 2}]
)
def test_older_configs_state_rope_in_two_fields(rope: dict | None, tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling`, as written before transformers 5."""
    import json

    parameters = {"rope_type": "default", **(rope or {}), "rope_theta": 700.0}
    parameters["rope_type"] = parameters.pop("type", parameters["rope_type"])
    config = transformers.LlamaConfig(**SHAPE, rope_parameters=parameters)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["rope_parameters"]
    old = (
        None
        if rope is None
        else {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type")}
    )
    fields.update(rope_theta=700.0, rope_scaling=old)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model, _ = load_llama(tmp_path)
    found = CachedSequence(model, 32).extend(PROMPT + TOKENS)
    assert relative(found, reference(theirs, PROMPT + TOKENS)) < 1e-5
