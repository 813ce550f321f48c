"""Rotation, write and query quantization become one operation, with the same bits."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import pytest
import torch
import torch._inductor.config

from quantattn import AttentionMetadata, QuantAttention
from quantattn.fusion import FusionOptions
from quantattn.fusion.patterns import ATTENTION_QUANT, ROPE_WRITE
from quantattn.models import load_llama
from quantattn.models.rope import Rope, rotate, rotation
from quantattn.ops import static_quant_fp8
from quantattn.testing import GraphRecorder, assert_fused_matches, count_ops, poisoned_pages
from tests.fusion import rotations
from tests.fusion.rotations import SPELLINGS, Spelling, half_angles, in_float32
from tests.fusion.running import HEADS, make_run, ops_lost, run_compiled

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


def test_one_llama_graph_serves_all_batches_and_lengths() -> None:
    model, _ = load_llama(DEMO, kv_cache_dtype="fp8")
    torch.compiler.reset()
    recorder = GraphRecorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True, dynamic=True)
    caches = [model.new_cache(9, block_size=16) for _ in range(2)]
    for new, lengths in (((5, 1, 3), (5, 9, 3)), ((1, 2), (20, 2)), ((4,) * 4, (7, 4, 5, 31))):
        table = [[2 * row, 2 * row + 1] for row in range(len(new))]
        batch = AttentionMetadata.from_lengths(new, lengths, table, 16)
        ends = zip(new, lengths, strict=True)
        positions = torch.cat([torch.arange(end - count, end) for count, end in ends])
        ids = torch.arange(len(positions)) + 7
        with torch.no_grad():
            fused, expected = (
                run(ids, positions, cache, batch)
                for run, cache in zip((compiled, model), caches, strict=True)
            )
        assert torch.equal(fused, expected)
    assert len(recorder.after) == 2  # torch takes `max_seqlen_q` for a constant until it changes
    assert len(recorder.report().fused) == 2 * 2


class Layer(QuantAttention):
    """Rotates as a spelling does, the queries perhaps as another, then attends."""

    def __init__(self, key: Spelling, query: Spelling | None = None, **options) -> None:
        super().__init__(4, 64, num_kv_heads=2, kv_cache_dtype="fp8", **options)
        self.key, self.query = key, query or key
        self.register_buffer("table", torch.randn(32, 2, 64))
        self.set_scale("k", 0.0123)
        self.set_scale("v", 0.031)

    def forward(self, packed, positions, pages, metadata):
        query, key, value = packed.split([4, 2, 2], dim=1)
        angles = self.key.angles(positions, packed.dtype, self.table)
        key, query = self.key.turn(key, *angles), self.query.turn(query, *angles)
        out = super().forward(query, key, value, pages, metadata)
        return self.besides(out, query, key)

    def besides(self, out, query, key):
        return out


class FewerQueries(Layer):
    """Angles of one position for all, so that only the number of rows tells them apart."""

    def forward(self, packed, positions, pages, metadata):
        query, key, value = packed.split([4, 2, 2], dim=1)
        angles = [x[2:3] for x in self.key.angles(positions, packed.dtype, self.table)]
        key, query = self.key.turn(key, *angles), self.key.turn(query[1:], *angles)
        self._write(key, value, pages, metadata, self.k_scale, self.v_scale)
        ends = replace(metadata, cu_seqlens_q=metadata.cu_seqlens_q.clamp(max=3))
        return QuantAttention.forward(self, query, None, None, pages, ends)


NEOX = SPELLINGS["halves"]


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


def assert_fuses(layer: Layer, same: Layer, device: str = "cpu") -> None:
    """Fused, the layer gives the bits of `same` as it is."""
    fused, pages, recorder = run_layer(layer, device)
    assert [entry.pattern for entry in recorder.report().fused][-1] == ROPE_WRITE
    assert count_ops(recorder.after[0])["quantattn::write_kv"] == 0
    unfused, plain_pages, _ = run_layer(same, device, options=None)
    assert torch.equal(fused, unfused)
    assert torch.equal(pages, plain_pages)
    assert fused.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_fuses_to_a_rotation_in_float32(spelling, device) -> None:
    spelled = SPELLINGS[spelling]
    assert_fuses(Layer(spelled), Layer(in_float32(spelled)), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_the_query_is_quantized_there_too(granularity, device) -> None:
    layer = Layer(NEOX, quantize_query=True, scale_granularity=granularity)
    layer.set_scale("q", [0.021, 0.047] if granularity == "head" else 0.021)
    assert_fuses(layer, layer, device)
    _, _, recorder = run_layer(layer, device)
    assert count_ops(recorder.after[0])["quantattn::static_quant_fp8"] == 0


class Whole(torch.nn.Module):
    """Layers that rotate, write, attend and quantize, each with pages of its own."""

    def __init__(self, num_heads: int, **options) -> None:
        super().__init__()
        shape = {"num_heads": num_heads, "head_dim": 128, "num_kv_heads": 8}
        self.layers = torch.nn.ModuleList(QuantAttention(**shape, **options) for _ in range(2))
        for number, layer in enumerate(self.layers, 2):
            layer.set_scale("q", 0.017 * number)
            layer.set_scale("k", 0.011 * number)
            layer.set_scale("v", 0.007 * number)
        self.register_buffer("out_scale", torch.tensor(0.0371))

    def forward(self, query, key, value, positions, pages, metadata):
        angles = rotation(Rope(), positions, 128)
        for layer, own in zip(self.layers, pages, strict=True):
            turned = rotate(query, *angles), rotate(key, *angles)
            out = layer(*turned, value, own, metadata)
            codes = static_quant_fp8(out.flatten(1), self.out_scale)
            query = (codes.float() / 448).to(query.dtype).view(query.shape)
            key, value = value, key
        return codes


MIXED = ("40/8", 7, "mixed", torch.bfloat16, "fp8")
DECODE = [
    ("64/8", 256, "decode", torch.float16, "auto"),
    ("32/8", 533, "decode", torch.bfloat16, "fp8"),
]


@pytest.mark.parametrize(
    ("case", "device"),
    [(MIXED, "cpu")]
    + [pytest.param(case, "cuda", marks=pytest.mark.gpu) for case in (MIXED, *DECODE)],
    ids=lambda x: x if isinstance(x, str) else x[0].replace("/", "x"),
)
def test_a_layer_is_one_write_and_one_attention(case, device) -> None:
    heads, size, mode, dtype, pages = case
    options = {"kv_cache_dtype": pages, "quantize_query": mode == "mixed"}
    model = Whole(HEADS[heads][0], **options).to(device)
    _, batch = make_run(
        *(heads, size),
        mode=mode,
        dtype=dtype,
        kv_cache_dtype=pages,
        out_scale=model.out_scale,
        device=device,
    )
    metadata = batch.metadata
    key, value = torch.randn(2, len(batch.query), 8, 128, device=device).to(dtype)
    positions = metadata.slot_mapping % 16 + 3

    def run(options: FusionOptions | None):
        caches = [batch.pages.clone() for _ in model.layers]
        arguments = batch.query, key, value, positions, caches, metadata
        codes, recorder = run_compiled(model, *arguments, options=options)
        return codes, torch.stack(caches).view(torch.uint8), recorder

    (fused, written, recorder), (unfused, plain, _) = run(FusionOptions()), run(None)
    patterns = [entry.pattern for entry in recorder.report().fused]
    assert patterns == [ATTENTION_QUANT] * 2 + [ROPE_WRITE] * 2
    called = {n: c for n, c in count_ops(recorder.after[0]).items() if n.startswith("quantattn::")}
    assert called == {"quantattn::rope_write_kv": 2, "quantattn::paged_attention": 2}
    assert_fused_matches(fused, unfused, model_dtype=dtype)
    assert torch.equal(written, plain)


NO_ROTATION, OTHER_ANGLES = "is no rotation", "by the key's angles"
NEAR_MISSES = {
    "not rotated": (Layer(Spelling(lambda x, *_: x, half_angles)), NO_ROTATION),
    "backwards": (Layer(Spelling(rotations.backwards, half_angles)), NO_ROTATION),
    "swapped": (Layer(Spelling(rotations.swapped, half_angles)), NO_ROTATION),
    "in fp16": (Layer(Spelling(rotations.in_fp16, half_angles)), NO_ROTATION),
    "products rounded": (Layer(Spelling(rotations.rounded, half_angles)), NO_ROTATION),
    "pairs joined as halves": (Layer(Spelling(rotations.mixed, half_angles)), NO_ROTATION),
    "the last columns": (Layer(Spelling(rotations.last_columns, half_angles)), NO_ROTATION),
    "others' columns stay": (Layer(Spelling(rotations.foreign_rest, half_angles)), NO_ROTATION),
    "angles a head": (
        Layer(Spelling(rotations.by_heads, rotations.angles_of_heads)),
        "not a token's",
    ),
    "angles from a table": (
        Layer(Spelling(rotations.rotate_half, rotations.angles_of_table)),
        "not made of two copies",
    ),
    "angles of the other pairs": (
        Layer(Spelling(rotations.rotate_half, rotations.repeated_angles)),
        "not made of two copies",
    ),
    "the query by other angles": (
        Layer(NEOX, Spelling(lambda x, cos, sin: rotate(x, sin, cos), half_angles)),
        OTHER_ANGLES,
    ),
    "the query not": (Layer(NEOX, Spelling(lambda x, *_: x, half_angles)), OTHER_ANGLES),
    "the query by other pairs": (Layer(NEOX, SPELLINGS["pairs"]), OTHER_ANGLES),
    "fewer queries than keys": (FewerQueries(NEOX), OTHER_ANGLES),
    "the key used besides": (UsesKeys(NEOX), "rotated key"),
    "the query used besides": (UsesQueries(NEOX), "rotated query"),
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_another_computation_stays_and_says_why(near_miss) -> None:
    layer, reason = NEAR_MISSES[near_miss]
    fused, pages, recorder = run_layer(layer)
    misses = [miss for miss in recorder.report().missed if miss.pattern == ROPE_WRITE]
    assert len(misses) == 1
    assert reason in misses[0].reason
    assert count_ops(recorder.before[0]) == count_ops(recorder.after[0])
    unfused, plain_pages, _ = run_layer(layer, options=None)
    assert torch.equal(fused, unfused)
    assert torch.equal(pages, plain_pages)
