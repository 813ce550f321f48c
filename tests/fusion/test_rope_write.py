"""Rotation, write and query quantization become one operation, with the same bits."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch
import torch._inductor.config
from torch import Tensor

from quantattn import AttentionMetadata, QuantAttention
from quantattn.fusion.patterns import ROPE_WRITE
from quantattn.models import load_llama
from quantattn.models.rope import Rope, rotate, rotation
from quantattn.testing import count_ops, poisoned_pages
from tests.fusion.running import ops_lost, run_compiled

DEMO = files("quantattn") / "data" / "demo"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAIRS = {"quantattn::write_kv": 2, "quantattn::rope_write_kv": -2}


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_llama_writes_and_rotates_in_one_operation_a_layer(version) -> None:
    model, _ = load_llama(DEMO, kv_cache_dtype="fp8")
    batch = AttentionMetadata.from_lengths([5, 1], [5, 9], [[0], [2]], 16)
    arguments = torch.arange(6), torch.tensor([0, 1, 2, 3, 4, 8])
    caches = [model.new_cache(4, block_size=16) for _ in range(2)]
    with torch._inductor.config.patch(enable_auto_functionalized_v2=version == "v2"):
        fused, recorder = run_compiled(model, *arguments, caches[0], batch)
    assert [entry.pattern for entry in recorder.report().fused] == [ROPE_WRITE] * 2
    lost = ops_lost(recorder)
    assert {name: lost[name] for name in PAIRS} == PAIRS
    after = count_ops(recorder.after[0])
    # One table of angles serves all layers.
    assert (after["prims::iota"], lost["aten::cat"]) == (2, 4 - 1)
    expected = model(*arguments, caches[1], batch)
    assert torch.equal(fused, expected)
    for layer in range(2):
        assert torch.equal(*(cache.layer(layer).view(torch.uint8) for cache in caches))


def halves_by_slices(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat((cos * a - b * sin, sin * a + b * cos), dim=-1).to(x.dtype)


def in_bf16(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(x.float(), cos.bfloat16(), sin.bfloat16()).to(x.dtype)


def backwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1).to(x.dtype)


def swapped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((b * cos - a * sin, a * cos + b * sin), dim=-1).to(x.dtype)


class Layer(QuantAttention):
    """Rotates with the given functions, then attends."""

    def __init__(self, turn=rotate, turn_query=None, **options) -> None:
        super().__init__(4, 64, num_kv_heads=2, kv_cache_dtype="fp8", **options)
        self.turn, self.turn_query = turn, turn_query or turn
        self.set_scale("k", 0.0123)
        self.set_scale("v", 0.031)

    def forward(self, packed, positions, pages, metadata):
        query, key, value = packed.split([4, 2, 2], dim=1)
        angles = rotation(Rope(), positions, 64)
        query, key = self.turn_query(query, *angles), self.turn(key, *angles)
        out = super().forward(query, key, value, pages, metadata)
        return self.besides(out, query, key)

    def besides(self, out, query, key):
        return out


class UsesKeys(Layer):
    def besides(self, out, query, key):
        return out + key.sum()


class UsesQueries(Layer):
    def besides(self, out, query, key):
        return out + query


def run_layer(layer: Layer, device: str = "cpu", **options):
    torch.manual_seed(5)
    packed, positions = torch.randn(4, 8, 64).bfloat16(), torch.tensor([0, 1, 2, 30])
    metadata = AttentionMetadata.from_lengths([3, 1], [3, 31], [[0, 9], [2, 1]], 16, device=device)
    pages = poisoned_pages(3, 2 * 16 * 2 * 64, torch.float8_e4m3fn)
    pages[1:] = torch.randn(2, 4096).to(pages.dtype)
    pages = pages.to(device)
    arguments = packed.to(device), positions.to(device), pages, metadata
    out, recorder = run_compiled(layer.to(device), *arguments, **options)
    return out, pages.contiguous().view(torch.uint8), recorder


def assert_fuses_exactly(layer: Layer, device: str = "cpu") -> None:
    fused, pages, recorder = run_layer(layer, device)
    assert [entry.pattern for entry in recorder.report().fused][-1] == ROPE_WRITE
    assert count_ops(recorder.after[0])["quantattn::write_kv"] == 0
    unfused, plain_pages, _ = run_layer(layer, device, options=None)
    assert torch.equal(fused, unfused)
    assert torch.equal(pages, plain_pages)
    assert fused.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("turn", [rotate, halves_by_slices])
def test_halves_are_found_however_they_are_cut(turn, device) -> None:
    assert_fuses_exactly(Layer(turn), device)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_the_query_is_quantized_there_too(granularity) -> None:
    layer = Layer(quantize_query=True, scale_granularity=granularity)
    layer.set_scale("q", [0.021, 0.047] if granularity == "head" else 0.021)
    assert_fuses_exactly(layer)
    _, _, recorder = run_layer(layer)
    assert count_ops(recorder.after[0])["quantattn::static_quant_fp8"] == 0


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Layer(in_bf16), "no rotation in float32"),
        (Layer(backwards), "no rotation in float32"),
        (Layer(swapped), "no rotation in float32"),
        (Layer(lambda x, cos, sin: x), "no rotation in float32"),
        (Layer(rotate, lambda x, cos, sin: rotate(x, sin, cos)), "by the key's angles"),
        (Layer(rotate, lambda x, cos, sin: x), "by the key's angles"),
        (UsesKeys(), "rotated key"),
        (UsesQueries(), "rotated query"),
    ],
    ids=["bf16", "backwards", "swapped", "key as it is", "angles", "query", "key", "both"],
)
def test_another_computation_stays_and_says_why(layer, reason) -> None:
    fused, pages, recorder = run_layer(layer)
    misses = [miss for miss in recorder.report().missed if miss.pattern == ROPE_WRITE]
    assert len(misses) == 1
    assert reason in misses[0].reason
    assert count_ops(recorder.before[0]) == count_ops(recorder.after[0])
    unfused, plain_pages, _ = run_layer(layer, options=None)
    assert torch.equal(fused, unfused)
    assert torch.equal(pages, plain_pages)
