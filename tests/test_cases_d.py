"""Section D of the cases: faults that users met in applying scales, each with its right values.

Every case runs on the CPU and on a GPU, over pages and, where it applies, over packed keys; the
interpreter runs this file too (tests/kernels/interpreted_cases_d.py). More of a case is tested
elsewhere: D01, D02, D04, D06, D07, D10 of the layers in test_attention.py and test_module_state.py,
D02 of checkpoints in loaders/test_load.py, D12, D14, D15, D16 of each operation in tests/ops.
"""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import Tensor, nn

from quantattn import (
    AttentionMetadata,
    FormatError,
    MLAAttention,
    PagedKVCache,
    QuantAttention,
    ScaleError,
    ops,
)
from quantattn.testing import assert_matches, make_batch
from tests.ops import oracles
from tests.ops.one_sequence import PATHS, attend

HEADS, KV_HEADS, DIM = 4, 2, 64
K_SCALE, V_SCALE = torch.tensor(0.25), torch.tensor(0.5)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def along(first: list[float], *, heads: int = KV_HEADS, dim: int = DIM) -> Tensor:
    """Rows whose first number is given and whose others are 0, bf16 `[rows, heads, dim]`."""
    rows = torch.zeros(len(first), heads, dim)
    rows[..., 0] = torch.tensor(first)[:, None]
    return rows.bfloat16()


def constant(numbers: list[float], *, dim: int = DIM) -> Tensor:
    """Rows of one number each, bf16 `[rows, KV_HEADS, dim]`."""
    return torch.tensor(numbers).view(-1, 1, 1).expand(-1, KV_HEADS, dim).bfloat16()


def layer(kv_cache_dtype: str, device: str, **scales: float) -> QuantAttention:
    module = QuantAttention(HEADS, DIM, num_kv_heads=KV_HEADS, kv_cache_dtype=kv_cache_dtype)
    for role, value in scales.items():
        module.set_scale(role, value)
    return module.to(device)


def cache(kv_cache_dtype: str, device: str) -> PagedKVCache:
    """Pages for the one sequence of `tokens`."""
    return PagedKVCache(
        1,
        4,
        16,
        KV_HEADS,
        DIM,
        kv_cache_dtype=kv_cache_dtype,
        dtype=torch.bfloat16,
        device=device,
    )


def tokens(device: str, count: int = 20) -> tuple[list[Tensor], AttentionMetadata]:
    """Query, key and value of a sequence, and its batch."""
    rows = [torch.randn(count, heads, DIM).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)]
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    batch = AttentionMetadata.from_lengths([count], [count], table, 16)
    return [row.to(device) for row in rows], batch.to(device)


def expected(query: Tensor, key: Tensor, value: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Output and LSE of one sequence in float64."""
    sequence = (key.double().cpu(), value.double().cpu())
    given = oracles.Options(**{"softmax_scale": DIM**-0.5, **options})
    return oracles.attend(query.double().cpu(), [sequence], [len(query)], given)


def stored(rows: Tensor, scale: Tensor) -> Tensor:
    """What is left of rows in an e4m3 cache."""
    return oracles.as_fp8(rows.double().cpu(), float(scale))


@pytest.mark.parametrize("scales", [{"k": 0.06, "v": 0.05}, {"k": 0.06, "v": 0.05, "q": 0.03}])
def test_d01_an_unquantized_cache_ignores_scales(device: str, scales: dict) -> None:
    """D01 (vLLM #37054): also in a layer that opts out of its model's FP8 cache."""
    rows, batch = tokens(device)
    plain = layer("auto", device)(*rows, cache("auto", device).layer(0), batch)
    opted_out = nn.ModuleList([layer("fp8", device, **scales), layer("auto", device, **scales)])
    scaled = opted_out[1](*rows, cache("auto", device).layer(0), batch)
    assert torch.equal(scaled, plain)


def test_d02_one_scale_serves_both_products_of_a_latent(device: str) -> None:
    """D02 (vLLM #37054): a latent of 1.0 at scale 0.5 comes back as 1.0."""
    module = MLAAttention(HEADS, 64, 32, softmax_scale=0.1, kv_cache_dtype="fp8").to(device)
    module.set_scale("k", 0.5)
    with pytest.raises(ScaleError, match="latent"):
        module.set_scale("v", 0.25)
    pages = torch.zeros(1, 16 * 96, dtype=torch.float8_e4m3fn, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32)
    one = AttentionMetadata.from_lengths([3], [3], table, 16).to(device)
    latent = torch.ones(3, 96, device=device).bfloat16()
    out = module(torch.ones(3, HEADS, 96, device=device).bfloat16(), latent, pages, one)
    assert (pages[0, : 3 * 96].float() == 2.0).all()
    assert (out == 1.0).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (20, 300)], ids=["one", "decode", "prefill"])
def test_d04_an_fp8_query_keeps_every_scale(device: str, path: str, lengths: tuple) -> None:
    """D04 (vLLM #42580): q fp8 and q bf16 both equal float64 over the dequantized tensors."""
    k_scale, v_scale, q_scale = torch.tensor(0.5), torch.tensor(2.0), torch.tensor(0.125)
    query = torch.randn(lengths[0], HEADS, DIM).bfloat16()
    key, value = torch.randn(2, lengths[1], KV_HEADS, DIM).bfloat16()
    scales = (k_scale, v_scale)
    key_left, value_left = stored(key, k_scale), stored(value, v_scale)
    out, _ = attend(path, query, key, value, *scales, device=device)
    assert_matches(out, expected(query, key_left, value_left)[0])
    codes = ops.static_quant_fp8(query, q_scale)
    out, _ = attend(path, codes, key, value, *scales, device=device, q_scale=q_scale)
    assert out.dtype == torch.bfloat16
    assert_matches(out, expected(stored(query, q_scale), key_left, value_left)[0])


def test_d06_no_scale_is_applied_twice_or_to_what_is_not_quantized(device: str) -> None:
    """D06 (vLLM #48016): k 0.5, v 0.25, and q 0.125 beside a query that stays bf16."""
    (query, key, value), batch = tokens(device)
    module = layer("fp8", device, k=0.5, v=0.25, q=0.125)
    out = module(query, key, value, cache("fp8", device).layer(0), batch)
    left = stored(key, torch.tensor(0.5)), stored(value, torch.tensor(0.25))
    assert_matches(out, expected(query, *left)[0])


def test_d07_scales_by_position_are_refused_or_work(device: str) -> None:
    """D07 (FlashInfer #1023): there they were swallowed."""
    for name in set(ops.__all__) - {"static_quant_fp8"}:
        parameters = inspect.signature(getattr(ops, name)).parameters.values()
        scales = [p for p in parameters if p.name.endswith("scale")]
        assert all(p.kind is p.KEYWORD_ONLY for p in scales), name
        assert not any(p.kind is p.VAR_POSITIONAL for p in parameters), name
    x, scale = torch.randn(3, 16, device=device), torch.tensor(0.04, device=device)
    by_position, by_name = ops.static_quant_fp8(x, scale), ops.static_quant_fp8(x, scale=scale)
    assert torch.equal(by_position.view(torch.uint8), by_name.view(torch.uint8))
    assert not torch.equal(by_name.float(), ops.static_quant_fp8(x, 2 * scale).float())


def test_d10_a_sharing_layer_uses_its_targets_scales_now_and_later(device: str) -> None:
    """D10 (vLLM #55559): k 0.25 and v 2.0 belong to layer 0, layer 1 has none."""
    target = layer("fp8", device, k=0.25, v=2.0)
    sharing = QuantAttention(
        HEADS, DIM, num_kv_heads=KV_HEADS, kv_cache_dtype="fp8", kv_sharing_target=target
    ).to(device)
    (query, key, value), batch = tokens(device)
    store = cache("fp8", device)
    for k, v in ((0.25, 2.0), (0.125, 0.5)):
        store.clear()
        target.set_scale("k", k)
        target.set_scale("v", v)
        assert (sharing.host_scale("k"), sharing.host_scale("v")) == (k, v)
        own = target(query, key, value, store.layer(0), batch)
        assert torch.equal(sharing(query, None, None, store.layer(0), batch), own)
        left = stored(key, torch.tensor(k)), stored(value, torch.tensor(v))
        assert_matches(own, expected(query, *left)[0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("k_scale", [0.25, 2.0])
@pytest.mark.parametrize("num_keys", [2, 700], ids=["one split", "many splits"])
@pytest.mark.parametrize("num_rows", [1, 12], ids=["decode", "prefill"])
def test_d12_a_sink_counts_once_in_the_logits_own_scale(
    device: str, path: str, k_scale: float, num_keys: int, num_rows: int
) -> None:
    """D12 (b12x #119, imp #1345): scores 1 and 2, a sink of 0.5, values 1 and 3."""
    # the scores lie at both ends, and keys between them weigh e^-104
    scores = [1.0] + [-104.0] * (num_keys - 2) + [2.0]
    values = [1.0] + [0.0] * (num_keys - 2) + [3.0]
    rows = along([1.0] * num_rows, heads=HEADS)
    operands = (rows, along(scores), constant(values), torch.tensor(k_scale), V_SCALE)
    sinks = torch.full((HEADS,), 0.5)
    out, lse = attend(path, *operands, device=device, softmax_scale=1.0, sinks=sinks)
    want = math.log(math.exp(0.5) + math.exp(1.0) + math.exp(2.0))
    # bf16 keeps 2.11682 to 2^-8; P in fp16 adds 2^-11
    torch.testing.assert_close(
        out[-1].float(), torch.full_like(out[-1], 2.11682).float(), atol=0.011, rtol=0
    )
    torch.testing.assert_close(lse[-1], torch.full((HEADS,), want), atol=1e-4, rtol=0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_rows", [1, 12], ids=["decode", "prefill"])
@pytest.mark.parametrize("score", [1.0, 100.0, 1e3, 3e3, 4400.0, 5e3, 1e4, -1e4])
def test_d14_a_soft_cap_stays_finite(device: str, path: str, num_rows: int, score: float) -> None:
    """D14 (vLLM #56578): a cap of 50 on scores that overflow a tanh made of two exponentials."""
    rows = along([1.0] * num_rows, heads=HEADS)
    operands = (rows, along([1.0] * num_rows), constant([3.0] * num_rows), K_SCALE, V_SCALE)
    out, lse = attend(path, *operands, device=device, softmax_scale=score, logits_soft_cap=50.0)
    seen = torch.arange(1, num_rows + 1.0).log()[:, None]
    want = (50 * math.tanh(score / 50) + seen).expand(-1, HEADS)
    torch.testing.assert_close(lse, want, rtol=1e-4, atol=1e-4)
    assert (out == 3.0).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", [(1, 0), (5, 0), (12, 3), (40, 25)], ids=str)
@pytest.mark.parametrize("window", [None, 4])
def test_d15_rows_that_see_no_key_are_zero(
    device: str, path: str, lengths: tuple, window: int | None
) -> None:
    """D15 (TensorRT-LLM #17477): more queries than keys, or no key at all."""
    num_rows, num_keys = lengths
    query = torch.randn(num_rows, HEADS, DIM).bfloat16()
    key, value = torch.randn(2, num_keys, KV_HEADS, DIM).bfloat16()
    scales = {"sliding_window": window, "sinks": torch.full((HEADS,), 0.5)}
    out, lse = attend(path, query, key, value, K_SCALE, V_SCALE, device=device, **scales)
    assert not out[: num_rows - num_keys].any()
    assert (lse[: num_rows - num_keys] == -math.inf).all()
    left = stored(key, K_SCALE), stored(value, V_SCALE)
    want, want_lse = expected(query, *left, **scales)
    assert_matches(out, want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_rows", [1, 12], ids=["decode", "prefill"])
def test_d15_logits_far_below_zero_are_no_mask(device: str, path: str, num_rows: int) -> None:
    """D15: a finite stand-in for -inf, -5e4, swallowed rows whose logits are -61440 and -61441."""
    rows, keys = along([240.0] * num_rows, heads=HEADS), along([-256.0] * num_rows)
    rows[..., 1], keys[:-1, :, 1] = 1.0, 0.0
    keys[-1, :, 1] = -1.0
    values = constant([1.0] * (num_rows - 1) + [3.0])
    options = {"device": device, "softmax_scale": 1.0}
    out, lse = attend(path, rows, keys, values, torch.tensor(2.0), V_SCALE, **options)
    want, want_lse = expected(rows, keys, values, softmax_scale=1.0)
    # float32 holds such a logit, times log2(e), to 2^-8: a weight to 0.27 %, a ratio to 0.54 %
    assert_matches(out, want, rel_l2=1e-2)
    # Tensor cores that sum FP8 products keep 13 bits behind the largest one's first, so Hopper's
    # decode loses the 1 that is added to 61440, 2^-16 of it.
    rtol = 2**-15 if (device, path, num_rows) == ("cuda", "paged", 1) else 1e-6
    torch.testing.assert_close(lse.double(), want_lse, rtol=rtol, atol=0.02)


@pytest.mark.parametrize("num_rows", [1, 20], ids=["decode", "prefill"])
def test_d15_an_empty_split_changes_nothing(device: str, num_rows: int) -> None:
    """D15 (FlashInfer #4401): a split that owns no key, merged from either side."""
    query = torch.randn(num_rows, HEADS, DIM).bfloat16()
    key, value = torch.randn(2, 50, KV_HEADS, DIM).bfloat16()
    scales = (K_SCALE, V_SCALE)
    some = attend("paged", query, key, value, *scales, device=device, causal=False)
    none = attend("packed", query, key[:0], value[:0], *scales, device=device, causal=False)
    some, none = ([t.to(device) for t in state] for state in (some, none))
    for order in ((*some, *none), (*none, *some)):
        merged = ops.merge_attention_states(*order, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(merged, some, strict=True))


FORMATS = ["auto", "fp8", "fp8_e5m2"]
ROW_FORMATS = ["fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"]
STORED = [(name, "page") for name in FORMATS] + [
    (name, placement) for name in ROW_FORMATS for placement in ("page", "inline")
]


@pytest.mark.parametrize(("name", "placement"), STORED, ids=str)
@pytest.mark.parametrize("poison", [0x7F, 0xFF], ids=hex)
def test_d16_unused_entries_never_reach_the_output(
    device: str, name: str, placement: str, poison: int
) -> None:
    """D16 (FlashAttention #2374, vLLM #43990): some tokens in a page of 16, NaN in the rest."""
    scales = {"k_scale": None, "v_scale": None}
    if name in ("fp8", "fp8_e5m2"):
        scales = {"k_scale": K_SCALE, "v_scale": V_SCALE}
    shape = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    kept = {"kv_cache_dtype": name, "scale_placement": placement, **scales}
    batch = make_batch([1, 12], [5, 12], **shape, **kept)
    every = AttentionMetadata.from_lengths([5, 12], [5, 12], batch.metadata.block_table, 16)
    outs = []
    for fill, where in ((0, "cpu"), (poison, device)):
        bytes_ = torch.full_like(batch.pages.view(torch.uint8), fill, device=where)
        pages = bytes_.view(batch.pages.dtype)
        moved = {n: o.to(where) if isinstance(o, Tensor) else o for n, o in kept.items()}
        new, meta = (batch.key.to(where), batch.value.to(where)), batch.metadata.to(where)
        ops.write_kv(*new, pages, every.slot_mapping.to(where), **moved)
        out = ops.paged_attention(
            batch.query.to(where),
            pages,
            cu_seqlens_q=meta.cu_seqlens_q,
            seq_lens=meta.seq_lens,
            block_table=meta.block_table,
            max_seqlen_q=12,
            num_kv_heads=KV_HEADS,
            **moved,
        )
        outs.append(out.cpu())
    assert outs[1].isfinite().all()
    # both are bf16, each within 4e-3 of float64
    assert_matches(outs[1], outs[0], rel_l2=8e-3)


def test_d18_a_cache_of_another_dtype_is_refused_or_converted(device: str) -> None:
    """D18 (vLLM #54338): the bits 0x3E25 are 0.1611 in bf16, but 1.5361 in fp16."""
    row = torch.tensor([0x3E25], dtype=torch.int16).view(torch.bfloat16)
    row = row.to(device).expand(1, 1, DIM)
    pages = torch.zeros(1, 16 * 2 * DIM, dtype=torch.float16, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    scales = {"k_scale": None, "v_scale": None}
    with pytest.raises(FormatError, match="float16"):
        ops.write_kv(row, row, pages, slots, kv_cache_dtype="float16", **scales)
    ops.write_kv(row, row, pages, slots, kv_cache_dtype="auto", **scales)
    assert (pages[0, :DIM] == row[0, 0].half()).all()
    one = torch.tensor([0, 1], dtype=torch.int32, device=device)
    out = ops.paged_attention(
        row,
        pages,
        cu_seqlens_q=one,
        seq_lens=one[1:],
        block_table=one[:1, None],
        max_seqlen_q=1,
        num_kv_heads=1,
        kv_cache_dtype="auto",
    )
    assert torch.equal(out, row)
