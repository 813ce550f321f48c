"""QuantAttention and MLAAttention: what the layers pass to the operations, and what comes out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from quantattn import (
    AttentionMetadata,
    FormatError,
    MLAAttention,
    PagedKVCache,
    QuantAttention,
    ScaleError,
    ops,
)

HEADS, KV_HEADS, DIM, DIM_V, BLOCK = 6, 2, 24, 16, 4
QUERY_LENS, SEQ_LENS = [1, 5, 3], [9, 5, 7]
TABLE = torch.tensor([[7, 0, 3], [2, 5, -9], [4, 1, 123456]], dtype=torch.int32)


def metadata(num_tokens: int | None = None) -> AttentionMetadata:
    return AttentionMetadata.from_lengths(
        QUERY_LENS, SEQ_LENS, TABLE.clamp(0, 7), BLOCK, num_tokens=num_tokens
    )


def cache(dtype: str = "fp8", **options: object) -> PagedKVCache:
    return PagedKVCache(
        1,
        8,
        BLOCK,
        KV_HEADS,
        DIM,
        head_dim_v=DIM_V,
        kv_cache_dtype=dtype,
        dtype=torch.float32,
        **options,
    )


def layer(dtype: str = "fp8", **options: object) -> QuantAttention:
    module = QuantAttention(
        HEADS, DIM, num_kv_heads=KV_HEADS, head_dim_v=DIM_V, kv_cache_dtype=dtype, **options
    )
    for role, value in {"q": 0.013, "k": 0.021, "v": 0.017, "prob": 1 / 448}.items():
        module.set_scale(role, value)
    return module


def tokens(count: int = sum(QUERY_LENS)) -> list[Tensor]:
    return [torch.randn(count, h, d) for h, d in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM_V))]


def history(pages: Tensor, module: QuantAttention) -> None:
    """Write the tokens that came before the batch."""
    earlier = [s - q for q, s in zip(QUERY_LENS, SEQ_LENS, strict=True)]
    past = AttentionMetadata.from_lengths(earlier, earlier, TABLE.clamp(0, 7), BLOCK)
    module(*tokens(sum(earlier)), pages, past)


def oracle(module: QuantAttention, q: Tensor, pages: Tensor, scales: dict[str, float]) -> Tensor:
    """float64 attention over what the pages hold, NHD order, written from the definition."""
    rows = pages.to(torch.float64)
    size = BLOCK * KV_HEADS * DIM
    keys = rows[:, :size].reshape(-1, BLOCK, KV_HEADS, DIM) * scales["k"]
    values = rows[:, size:].reshape(-1, BLOCK, KV_HEADS, DIM_V) * scales["v"]
    out = []
    first = 0
    for seq, (q_len, seq_len) in enumerate(zip(QUERY_LENS, SEQ_LENS, strict=True)):
        blocks = TABLE[seq, : -(-seq_len // BLOCK)].long()
        k = keys[blocks].reshape(-1, KV_HEADS, DIM)[:seq_len]
        v = values[blocks].reshape(-1, KV_HEADS, DIM_V)[:seq_len]
        for i in range(q_len):
            position = seq_len - q_len + i
            low = (
                0 if module.sliding_window is None else max(0, position + 1 - module.sliding_window)
            )
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                logits = (
                    k[low : position + 1, kv] @ q[first + i, head].double() * module.softmax_scale
                )
                if module.logits_soft_cap is not None:
                    logits = module.logits_soft_cap * torch.tanh(logits / module.logits_soft_cap)
                top = logits.max()
                weights = torch.exp(logits - top)
                total = weights.sum()
                if module.sinks is not None:
                    total = total + torch.exp(module.sinks[head].double() - top)
                out.append(weights @ v[low : position + 1, kv] / total)
        first += q_len
    return torch.stack(out).reshape(first, HEADS, DIM_V)


OPTIONS = [
    {},
    {"sliding_window": 3},
    {"logits_soft_cap": 0.7},
    {"sinks": torch.linspace(-1, 2, HEADS)},
    {"softmax_scale": 0.4, "sliding_window": 2, "sinks": torch.linspace(2, -1, HEADS)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("dtype", ["auto", "fp8", "fp8_e5m2"])
def test_a_mixed_batch_matches_float64_over_the_stored_pages(dtype: str, options: dict) -> None:
    """D01, D06: an unquantized cache ignores scales, a quantized one applies each once."""
    module, pages = layer(dtype, **options), cache(dtype).layer(0)
    history(pages, module)
    q, k, v = tokens()
    out = module(q, k, v, pages, metadata())
    scales = {r: 1.0 if dtype == "auto" else module.host_scale(r) for r in "kv"}
    torch.testing.assert_close(out.double(), oracle(module, q, pages, scales), rtol=1e-4, atol=1e-5)


def test_an_unquantized_cache_gives_the_bits_of_scales_of_one() -> None:
    """D01 (vLLM #37054)."""
    q, k, v = tokens()
    outs = []
    for value in (0.06, 1.0):
        module, pages = layer("auto"), cache("auto").layer(0)
        for role in ("q", "k", "v", "prob"):
            module.set_scale(role, value)
        history_seed = torch.random.get_rng_state()
        history(pages, module)
        torch.random.set_rng_state(history_seed)
        outs.append((module(q, k, v, pages, metadata()), pages.clone()))
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])


def test_per_head_scales_reach_their_heads() -> None:
    module, pages = layer(scale_granularity="head"), cache().layer(0)
    module.set_scale("k", [0.021, 0.084])
    module.set_scale("v", [0.068, 0.017])
    q, k, v = tokens()
    module(q, k, v, pages, metadata())
    size = BLOCK * KV_HEADS * DIM
    stored = pages[2, :size].reshape(BLOCK, KV_HEADS, DIM)[1].float()
    for head in range(KV_HEADS):
        scale = module.host_scale("k")[head]
        torch.testing.assert_close(
            stored[head] * scale, k[2, head], rtol=2.0**-4, atol=scale * 2.0**-10
        )


def test_flat_and_split_shapes_give_the_same() -> None:
    q, k, v = tokens()
    split_module, flat_module = layer(), layer()
    split_pages, flat_pages = cache().layer(0), cache().layer(0)
    split = split_module(q, k, v, split_pages, metadata())
    flat = flat_module(q.flatten(1), k.flatten(1), v.flatten(1), flat_pages, metadata())
    assert flat.shape == (sum(QUERY_LENS), HEADS * DIM_V)
    assert torch.equal(split.flatten(1), flat)


@pytest.mark.parametrize("dtype", ["fp8", "int8_per_token_head"])
@pytest.mark.parametrize("placement", ["page", "inline"])
def test_pages_laid_out_in_every_way_give_the_same(dtype, placement) -> None:
    q, k, v = tokens()
    plain = layer(dtype)(q, k, v, cache(dtype).layer(0), metadata())
    options = {"layout": "HND", "scale_placement": placement}
    pages = cache(dtype, **options).layer(0)
    assert torch.equal(layer(dtype, **options)(q, k, v, pages, metadata()), plain)


def test_padding_rows_are_zero_and_write_nothing() -> None:
    module, pages = layer(), cache().layer(0)
    q, k, v = tokens(sum(QUERY_LENS) + 3)
    out = module(q, k, v, pages, metadata(num_tokens=len(q)))
    assert torch.equal(out[-3:], torch.zeros(3, HEADS, DIM_V))
    untouched = pages[6].view(torch.uint8)
    assert torch.equal(untouched, torch.zeros_like(untouched))


@pytest.mark.parametrize("scale", [torch.tensor(0.125), torch.linspace(0.02, 0.05, HEADS)])
def test_the_output_is_quantized_with_the_next_projections_scale(scale: Tensor) -> None:
    """G03: 3.0 at scale 0.125 is stored as 24.0."""
    q, k, v = tokens()
    plain = layer()(q, k, v, cache().layer(0), metadata())
    quantized = layer()(q, k, v, cache().layer(0), metadata(), out_scale=scale)
    assert quantized.dtype is torch.float8_e4m3fn
    expected = ops.static_quant_fp8(plain, scale)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))


def test_a_quantized_query_and_prob_stay_within_their_bound() -> None:
    """D04 (vLLM #42580): e4m3 rounds by up to 2^-4, so an error far above 3e-2 is a lost scale."""
    q, k, v = tokens()
    exact, pages = layer(), cache().layer(0)
    history(pages, exact)
    expected = exact(q, k, v, pages, metadata()).double()
    for options in ({"quantize_query": True}, {"quantize_prob": True}):
        out = layer(**options)(q, None, None, pages, metadata())
        assert out.dtype is q.dtype
        error = ((out.double() - expected).norm() / expected.norm()).item()
        assert 1e-5 < error < 5e-2


def test_one_side_of_key_and_value_is_refused() -> None:
    q, k, _ = tokens()
    with pytest.raises(FormatError, match="key, value"):
        layer()(q, k, None, cache().layer(0), metadata())


def test_a_sharing_layer_reads_its_targets_pages_and_writes_nothing() -> None:
    """D10 (vLLM #55559)."""
    target, pages = layer(), cache().layer(0)
    sharing = layer_sharing(target)
    q, k, v = tokens()
    expected = target(q, k, v, pages, metadata())
    assert torch.equal(sharing(q, None, None, pages, metadata()), expected)
    with pytest.raises(FormatError, match=r"layers\.7"):
        sharing(q, k, v, pages, metadata())


def layer_sharing(target: QuantAttention) -> QuantAttention:
    target.layer_name = "layers.7"
    return QuantAttention(
        HEADS,
        DIM,
        num_kv_heads=KV_HEADS,
        head_dim_v=DIM_V,
        kv_cache_dtype="fp8",
        kv_sharing_target=target,
    )


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [("fp8_per_token_head", 0.05), ("int8_per_token_head", 0.02), ("int4_per_token_head", 0.25)],
)
def test_pages_that_hold_their_scales_ignore_the_layers(dtype: str, bound: float) -> None:
    """Half a step: 2^-4 of a number in e4m3, 1/254 of amax in int8, 1/30 of the span in int4."""
    q, k, v = tokens()
    expected = layer("auto")(q, k, v, cache("auto").layer(0), metadata())
    outs = []
    for value in (0.06, 1.0):
        module, pages = layer(dtype), cache(dtype).layer(0)
        for role in ("k", "v"):
            module.set_scale(role, value)
        outs.append(module(q, k, v, pages, metadata()))
        module.set_scale("k", 0.5)
    assert torch.equal(*outs)
    fresh = slice(1, 6)  # the one sequence of which nothing came before
    error = (outs[0][fresh] - expected[fresh]).norm() / expected[fresh].norm()
    assert 1e-4 < error.item() < bound


def test_a_latent_cache_refuses_pages_that_hold_their_scales() -> None:
    module = MLAAttention(2, LATENT, ROPE, softmax_scale=0.2, kv_cache_dtype="int8_per_token_head")
    pages = torch.zeros(1, 4 * (LATENT + ROPE + 4), dtype=torch.uint8)
    one = AttentionMetadata.from_lengths([1], [1], torch.zeros(1, 1, dtype=torch.int32), BLOCK)
    with pytest.raises(FormatError, match="int8_per_token_head"):
        module(torch.randn(1, 2, LATENT + ROPE), torch.ones(1, LATENT + ROPE), pages, one)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_new_scale_values_and_lengths_compile_once(dtype: str) -> None:
    """G08: no graph break, no recompilation for a new scale value."""
    counter = CompileCounter()
    module, store = layer(dtype), cache(dtype)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    q, k, v = tokens()
    outs = []
    for scale in (0.017, 0.023):
        store.clear()
        module.set_scale("v", scale)
        outs.append(compiled(q, k, v, store.layer(0), metadata()))
        store.clear()
        assert torch.equal(outs[-1], module(q, k, v, store.layer(0), metadata()))
    assert counter.frame_count == 1
    assert torch.equal(*outs) is (dtype == "auto")


def test_sinks_may_be_a_parameter_of_the_model() -> None:
    sinks = nn.Parameter(torch.zeros(HEADS))
    module = layer(sinks=sinks)
    assert module.sinks is sinks
    assert "sinks" in layer(sinks=torch.zeros(HEADS)).state_dict()
    assert "sinks" not in layer().state_dict()


def test_print_shows_what_the_layer_is() -> None:
    assert "num_kv_heads=2" in repr(layer())
    assert "'fp8_e4m3'" in repr(layer())


LATENT, ROPE = 16, 8


def test_mla_matches_float64_over_the_stored_latent() -> None:
    """D02: one scale for both products."""
    module = MLAAttention(HEADS, LATENT, ROPE, softmax_scale=0.21, kv_cache_dtype="fp8")
    module.set_scale("k", 0.02)
    store = PagedKVCache(
        1, 8, BLOCK, 1, LATENT + ROPE, head_dim_v=0, kv_cache_dtype="fp8", dtype=torch.float32
    )
    pages = store.layer(0)
    total = sum(SEQ_LENS)
    full = AttentionMetadata.from_lengths(SEQ_LENS, SEQ_LENS, TABLE.clamp(0, 7), BLOCK)
    query, latent = torch.randn(total, HEADS, LATENT + ROPE), torch.randn(total, LATENT + ROPE)
    out = module(query, latent, pages, full)
    rows = pages.double().reshape(-1, BLOCK, LATENT + ROPE) * module.host_scale("k")
    first = 0
    for seq, seq_len in enumerate(SEQ_LENS):
        blocks = TABLE[seq, : -(-seq_len // BLOCK)].long()
        kv = rows[blocks].reshape(-1, LATENT + ROPE)[:seq_len]
        for i in range(seq_len):
            logits = query[first + i].double() @ kv[: i + 1].T * 0.21
            expected = torch.softmax(logits, -1) @ kv[: i + 1, :LATENT]
            torch.testing.assert_close(out[first + i].double(), expected, rtol=1e-4, atol=1e-5)
        first += seq_len


def mla(**options: object) -> MLAAttention:
    module = MLAAttention(4, LATENT, ROPE, softmax_scale=0.21, kv_cache_dtype="fp8", **options)
    module.set_scale("q", 0.013) if "q" in module.scale_roles else None
    return module


def mla_batch() -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
    store = PagedKVCache(
        1, 2, BLOCK, 1, LATENT + ROPE, head_dim_v=0, kv_cache_dtype="fp8", dtype=torch.float32
    )
    one = AttentionMetadata.from_lengths([3], [3], torch.zeros(1, 1, dtype=torch.int32), BLOCK)
    return torch.randn(3, 4, LATENT + ROPE), torch.randn(3, LATENT + ROPE), store.layer(0), one


def test_mla_passes_its_options_on() -> None:
    query, latent, pages, one = mla_batch()
    target = mla(layer_name="layers.0")
    target.set_scale("k", 0.02)
    plain = target(query, latent, pages, one)
    scale = torch.tensor(0.125)
    quantized = target(query, None, pages, one, out_scale=scale)
    expected = ops.static_quant_fp8(plain, scale)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))
    rounded = ops.static_quant_fp8(query, target.q_scale).float() * target.q_scale
    out = mla(quantize_query=True, kv_sharing_target=target)(query, None, pages, one)
    torch.testing.assert_close(out, target(rounded, None, pages, one), rtol=1e-5, atol=1e-6)
    sharing = mla(kv_sharing_target=target)
    assert torch.equal(sharing(query, None, pages, one), plain)
    target.k_scale.data = target.k_scale.data.to(torch.bfloat16)
    assert torch.equal(target(query, None, pages, one), plain)


def test_mla_has_its_own_range_of_q_and_one_of_k_under_two_names() -> None:
    module = mla(q_range=190.0, k_range=210.0)
    assert (module.q_range.item(), module.k_range.item()) == (190.0, 210.0)
    assert module.v_range is module.k_range


def test_mla_reads_back_a_latent_of_one() -> None:
    module = MLAAttention(2, LATENT, ROPE, softmax_scale=0.21, kv_cache_dtype="fp8")
    module.set_scale("k", 0.5)
    store = PagedKVCache(
        1, 1, BLOCK, 1, LATENT + ROPE, head_dim_v=0, kv_cache_dtype="fp8", dtype=torch.float32
    )
    one = AttentionMetadata.from_lengths([1], [1], torch.zeros(1, 1, dtype=torch.int32), BLOCK)
    out = module(
        torch.randn(1, 2, LATENT + ROPE), torch.ones(1, LATENT + ROPE), store.layer(0), one
    )
    assert torch.equal(out, torch.ones(1, 2, LATENT))
    with pytest.raises(ScaleError, match="clear"):
        module.set_scale("k", 0.25)


FNUZ_BYTES = torch.tensor([0x40, 0x38, 0x80, 0x7E], dtype=torch.uint8)


def test_the_factor_of_two_makes_fnuz_bytes_mean_what_they_were_calibrated_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C11 (vLLM #45720): the same bytes are half as large where e4m3 is FNUZ, and 0x80 is NaN."""
    ocp = FNUZ_BYTES.view(torch.float8_e4m3fn).float().tolist()
    fnuz = FNUZ_BYTES.view(torch.float8_e4m3fnuz).float().tolist()
    assert ocp == [2.0, 1.0, -0.0, 448.0]
    assert (fnuz[:2], fnuz[3]) == ([1.0, 0.5], 224.0)
    assert fnuz[2] != fnuz[2]
    shared = torch.tensor([code for code in range(256) if code & 0x7F not in (0x7F, 0x00)])
    codes = shared.to(torch.uint8)
    module = layer("fp8")
    plain = codes.view(torch.float8_e4m3fn).float() * module.effective_scale("k")
    monkeypatch.setattr("quantattn.scale_access.fnuz_factor", lambda: 2.0)
    doubled = codes.view(torch.float8_e4m3fnuz).float() * module.effective_scale("k")
    assert torch.equal(plain, doubled)
    for other in ("auto", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"):
        assert layer(other).effective_scale("k").item() == module.host_scale("k")


def test_a_scale_that_is_no_power_of_two_is_used_to_the_last_bit() -> None:
    """C12 (vLLM #54563): a reader took 0.0123 for 0.0078125, its power of two."""
    module, pages = layer(), cache().layer(0)
    module.set_scale("k", 0.0123)
    module.set_scale("v", 0.0123)
    q, k, v = (torch.full_like(tensor, 0.0123 * 3.5) for tensor in tokens())
    out = module(q, k, v, pages, metadata())
    written = pages[2, : KV_HEADS * DIM].float()  # the second sequence's first token
    assert torch.equal(written, torch.full_like(written, 3.5))
    whole = out[1:6]  # the one sequence of which nothing came before
    torch.testing.assert_close(whole, torch.full_like(whole, 0.0123 * 3.5), rtol=1e-6, atol=0)


def test_scales_are_keyword_only() -> None:
    """D07 (FlashInfer #1023): scales given by position were swallowed."""
    _, k, v = tokens()
    scales = (torch.tensor(0.5), torch.tensor(2.0))
    with pytest.raises(TypeError):
        ops.write_kv(k, v, cache().layer(0), metadata().slot_mapping, *scales, "fp8")
