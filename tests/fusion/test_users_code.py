"""Attention inside code as users write it: what is around it does not hide the pattern."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quantattn import AttentionMetadata, PagedKVCache, QuantAttention, ops
from quantattn.fusion.patterns import ATTENTION_QUANT, ROPE_WRITE
from quantattn.testing import assert_fused_matches, count_ops
from tests.fusion.running import run_compiled

E4M3 = torch.float8_e4m3fn
HEADS, KV_HEADS, WIDTH = 4, 2, 32


class Attention(QuantAttention):
    """Projects, rotates as transformers does, attends, and quantizes for the next projection."""

    def __init__(self) -> None:
        super().__init__(HEADS, WIDTH, num_kv_heads=KV_HEADS, kv_cache_dtype="fp8")
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(128, heads * WIDTH, bias=False, dtype=torch.bfloat16)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.register_buffer("o_scale", torch.tensor([0.0371]))
        self.set_scale("k", 0.021)
        self.set_scale("v", 0.013)

    def forward(self, hidden, position_embeddings, pages, metadata):
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        batch, tokens, _ = hidden.shape
        shape = (batch, tokens, -1, WIDTH)
        states = (proj(hidden).view(shape) for proj in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (state.transpose(1, 2) for state in states)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        rows = (x.transpose(1, 2).reshape(batch * tokens, -1) for x in (query, key, value))
        out = super().forward(*rows, pages, metadata).reshape(batch, tokens, -1).contiguous()
        codes = out.view(-1, out.shape[-1]).to(torch.float32) / self.o_scale
        return codes.clamp(min=-448.0, max=448.0).to(E4M3)


class Decoder(nn.Module):
    def __init__(self) -> None:
        from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

        super().__init__()
        shape = {"hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS}
        self.rotary_emb = LlamaRotaryEmbedding(LlamaConfig(**shape, num_key_value_heads=KV_HEADS))
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, hidden, positions, pages, metadata):
        angles = self.rotary_emb(hidden, positions)
        for layer, of_layer in zip(self.layers, pages, strict=True):
            codes = layer(hidden, angles, of_layer, metadata)
            hidden = (codes.float() * layer.o_scale).to(hidden.dtype).view(hidden.shape)
        return codes


@pytest.mark.parametrize(("batch", "tokens"), [(1, 5), (3, 4)])
def test_an_attention_of_transformers_fuses_whole(batch, tokens) -> None:
    pytest.importorskip("transformers")
    decoder = Decoder()
    hidden = torch.randn(batch, tokens, 128).bfloat16()
    positions = torch.arange(tokens).expand(batch, -1)
    lengths = [tokens] * batch
    table = [[number] for number in range(batch)]
    metadata = AttentionMetadata.from_lengths(lengths, lengths, table, 16)
    cache = PagedKVCache(2, batch, 16, KV_HEADS, WIDTH, kv_cache_dtype="fp8")
    pages = [cache.layer(0), cache.layer(1)]
    fused, recorder = run_compiled(decoder, hidden, positions, pages, metadata)
    patterns = [entry.pattern for entry in recorder.report().fused]
    assert patterns == [ATTENTION_QUANT] * 2 + [ROPE_WRITE] * 2
    assert not recorder.report().missed
    left = {"aten::neg", "aten::div", "aten::clamp_min", "quantattn::write_kv"}
    assert not left & set(count_ops(recorder.after[0]))
    # The unfused rotation rounds its products and sums to bf16.
    error = (fused.float() - decoder(hidden, positions, pages, metadata).float()).norm()
    assert error <= 2**-4 * fused.float().norm()


def plain(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-448.0, 448.0).to(E4M3)


def scale_changed_later(layer: QuantAttention, out: Tensor, scale: Tensor) -> Tensor:
    scale.mul_(2)
    return ops.static_quant_fp8(out, scale)


def padded(layer: QuantAttention, out: Tensor, scale: Tensor) -> Tensor:
    """As for a product that needs 16 rows."""
    return nn.functional.pad(ops.static_quant_fp8(out, scale).view(torch.uint8), (0, 0, 0, 13))


Use = Callable[[QuantAttention, Tensor, Tensor], Tensor]
FUSED: dict[str, Use] = {
    "a copy": lambda layer, out, s: ops.static_quant_fp8(out.clone(), s),
    "a batch of one": lambda layer, out, s: plain(out.unsqueeze(0), s),
    "no-ops": lambda layer, out, s: plain(out.to(torch.bfloat16).contiguous().view(3, -1), s),
    "a constant scale": lambda layer, out, s: plain(out, torch.full((1,), 0.0371)),
    "another layer's scale": lambda layer, out, s: plain(out, layer.k_scale),
    "one of several scales": lambda layer, out, s: plain(out, torch.stack([s, s * 2])[1]),
    "finfo": lambda layer, out, s: (
        (out.float() * s.reciprocal()).clamp(torch.finfo(E4M3).min, torch.finfo(E4M3).max).to(E4M3)
    ),
    "hardtanh": lambda layer, out, s: nn.functional.hardtanh(out.float() / s, -448.0, 448.0).to(
        E4M3
    ),
    "a parameter": lambda layer, out, s: plain(out, nn.Parameter(s)),
    "a scale changed in place": scale_changed_later,
    "padded": padded,
}
LEFT: dict[str, tuple[Use, str]] = {
    "a residual": (lambda layer, out, s: plain(out, s).float() + out, "is used by"),
    "two quantizers": (
        lambda layer, out, s: torch.cat([plain(out, s), plain(out, s * 2)]),
        "is used by",
    ),
    "changed in place": (lambda layer, out, s: plain(out.mul_(2), s), "a scale's tensor"),
    "gated": (lambda layer, out, s: plain(out * out.new_full((3, 1), 0.5), s), "division"),
    "some rows": (lambda layer, out, s: plain(out[:2], s), "aten.slice"),
    "float64 scale": (lambda layer, out, s: plain(out, s.double()), "torch.float64"),
}


def run_use(use: Use, *, is_inference: bool, fuse: bool = True):
    """Flat rows, as most models have them."""
    torch.manual_seed(7)
    layer = QuantAttention(HEADS, WIDTH, num_kv_heads=KV_HEADS, kv_cache_dtype="fp8")
    layer.set_scale("k", 0.021)
    layer.set_scale("v", 0.013)
    rows = [torch.randn(3, heads * WIDTH).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)]
    pages = PagedKVCache(1, 4, 16, KV_HEADS, WIDTH, kv_cache_dtype="fp8").layer(0)
    metadata = AttentionMetadata.from_lengths([2, 1], [2, 9], [[1], [3]], 16)
    scale = torch.tensor(0.0371)

    def run(pages: Tensor) -> Tensor:
        return use(layer, layer(*rows, pages, metadata), scale)

    with torch.inference_mode(is_inference):
        return run_compiled(run, pages) if fuse else (run(pages), None)


@pytest.mark.parametrize("is_inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("use", FUSED)
def test_what_users_write_around_it_fuses(use, is_inference) -> None:
    fused, recorder = run_use(FUSED[use], is_inference=is_inference)
    assert [entry.pattern for entry in recorder.report().fused] == [ATTENTION_QUANT]
    unfused, _ = run_use(FUSED[use], is_inference=is_inference, fuse=False)
    if use == "padded":
        fused, unfused = fused.view(E4M3), unfused.view(E4M3)
    assert_fused_matches(fused, unfused.detach(), model_dtype=torch.bfloat16)


@pytest.mark.parametrize("use", LEFT)
def test_what_is_another_computation_stays(use) -> None:
    function, reason = LEFT[use]
    out, recorder = run_use(function, is_inference=False)
    misses = [x.reason for x in recorder.report().missed if x.pattern == ATTENTION_QUANT]
    assert len(misses) == 1
    assert reason in misses[0]
    unfused, _ = run_use(function, is_inference=False, fuse=False)
    assert torch.equal(out.float(), unfused.float())
