"""merge_attention_states against attention over all keys at once, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from quantattn.errors import FormatError, ScaleError
from quantattn.ops import merge_attention_states, static_quant_fp8
from quantattn.testing import assert_matches
from tests.ops import oracles

TOKENS, HEADS, DIM = 5, 3, 20


def attended(keys: slice, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE over some of 40 keys, float64."""
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(TOKENS, HEADS, DIM, generator=generator).double()
    key, value = torch.randn(2, 40, HEADS, DIM, generator=generator).double()
    options = oracles.Options(softmax_scale=0.7, causal=False)
    return oracles.attend(query, [(key[keys], value[keys])], [TOKENS], options)


def states(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Two states and the LSE that they have together, and the right output, float64."""
    (out_a, lse_a), (out_b, lse_b) = attended(slice(0, 13)), attended(slice(13, 40))
    return out_a.to(dtype), lse_a.float(), out_b.to(dtype), lse_b.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_two_key_sets_give_attention_over_both(dtype) -> None:
    out, lse = merge_attention_states(*states(dtype), return_lse=True)
    want, want_lse = attended(slice(0, 40))
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    # the two rounded inputs and the rounded output: half an ulp each, in quadrature
    assert_matches(out, want, rel_l2=torch.finfo(dtype).eps)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


def test_the_order_and_the_number_of_merges_do_not_matter() -> None:
    parts = [attended(keys) for keys in (slice(0, 1), slice(1, 30), slice(30, 40))]
    a, b, c = ((out.float(), lse.float()) for out, lse in parts)
    left = merge_attention_states(*merge_attention_states(*a, *b, return_lse=True), *c)
    right = merge_attention_states(*b, *merge_attention_states(*c, *a, return_lse=True))
    assert_matches(left, attended(slice(0, 40))[0], rel_l2=1e-6)
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("infinity", [-math.inf, math.inf])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 3.0])
@pytest.mark.parametrize("first", [True, False])
def test_a_side_without_keys_leaves_the_other_unchanged(infinity, garbage, first) -> None:
    """D15 (FlashInfer #4401): some kernels leave an empty split's output as it was allocated."""
    out, lse, _, _ = states(torch.bfloat16)
    empty = (torch.full_like(out, garbage), torch.full_like(lse, infinity))
    order = (*empty, out, lse) if first else (out, lse, *empty)
    merged, merged_lse = merge_attention_states(*order, return_lse=True)
    assert torch.equal(merged, out)
    assert torch.equal(merged_lse, lse)


@pytest.mark.parametrize("infinity", [-math.inf, math.inf])
@pytest.mark.parametrize("out_scale", [None, torch.tensor(0.3)])
def test_no_key_on_either_side_gives_zero_and_minus_infinity(infinity, out_scale) -> None:
    """D15 (TensorRT-LLM #17477)."""
    out = torch.full((2, HEADS, DIM), math.nan)
    lse = torch.full((2, HEADS), infinity)
    merged, merged_lse = merge_attention_states(
        out, lse, out, -lse, out_scale=out_scale, return_lse=True
    )
    assert not merged.float().any()
    assert (merged_lse == -math.inf).all()


def test_rows_without_keys_are_told_apart() -> None:
    out_a, lse_a, out_b, lse_b = states()
    lse_a[1, 0] = lse_b[1, 0] = lse_a[2, 1] = lse_b[3, 2] = -math.inf
    merged, lse = merge_attention_states(out_a, lse_a, out_b, lse_b, return_lse=True)
    want, want_lse = (x.clone() for x in attended(slice(0, 40)))
    want[1, 0], want_lse[1, 0] = 0.0, -math.inf
    want[2, 1], want_lse[2, 1] = out_b[2, 1], lse_b[2, 1]
    want[3, 2], want_lse[3, 2] = out_a[3, 2], lse_a[3, 2]
    assert_matches(merged, want, rel_l2=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("lse_a", "lse_b"), [(-6e4, -6.0001e4), (3e4, 3e4 + 1), (-3e38, 3e38)])
def test_logs_far_from_zero_do_not_overflow(lse_a, lse_b) -> None:
    logs = torch.tensor([lse_a, lse_b])
    weights = torch.softmax(logs.double(), 0)
    out, lse = merge_attention_states(
        torch.ones(1, 1, 1),
        logs[:1, None],
        torch.full((1, 1, 1), 2.0),
        logs[1:, None],
        return_lse=True,
    )
    assert out.item() == pytest.approx(float(weights @ torch.tensor([1.0, 2.0]).double()))
    assert lse.item() == pytest.approx(float(torch.logsumexp(logs.double(), 0)))


def test_a_nan_is_not_hidden() -> None:
    out_a, lse_a, out_b, lse_b = states()
    lse_a[0, 0], out_b[1, 1, 2] = math.nan, math.nan
    out, lse = merge_attention_states(out_a, lse_a, out_b, lse_b, return_lse=True)
    assert out[0, 0].isnan().all()
    assert out[1, 1, 2].isnan()
    assert int(out.isnan().sum()) == DIM + 1
    assert int(lse.isnan().sum()) == 1


@pytest.mark.parametrize("round_through", [False, True])
@pytest.mark.parametrize("groups", [None, 1, 3, 2, 60])
def test_a_quantized_output_is_the_quantized_float32_output(round_through, groups) -> None:
    out_scale = torch.tensor(0.0013) if groups is None else torch.linspace(0.001, 0.004, groups)
    given = states(torch.bfloat16)
    fused = merge_attention_states(*given, out_scale=out_scale, round_through=round_through)
    source = torch.bfloat16 if round_through else torch.float32
    unfused = merge_attention_states(*given, out_dtype=source)
    assert fused.dtype == torch.float8_e4m3fn
    codes = static_quant_fp8(unfused, out_scale)
    assert torch.equal(fused.view(torch.uint8), codes.view(torch.uint8))


def test_rounding_through_the_model_dtype_changes_some_codes() -> None:
    given, scale = states(torch.bfloat16), torch.tensor(0.0013)
    direct = merge_attention_states(*given, out_scale=scale).view(torch.uint8)
    through = merge_attention_states(*given, out_scale=scale, round_through=True)
    assert (direct != through.view(torch.uint8)).any()


def test_strided_inputs_give_the_same_and_a_contiguous_output() -> None:
    given = states(torch.bfloat16)
    strided = [x.mT.contiguous().mT for x in given]
    out, lse = merge_attention_states(*strided, return_lse=True)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    want, want_lse = merge_attention_states(*given, return_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("out_scale", [None, torch.tensor([0.3]), torch.tensor([0.3, 0.2])])
@pytest.mark.parametrize("return_lse", [False, True])
def test_passes_opcheck(tokens, out_scale, return_lse) -> None:
    out, lse = torch.randn(2, tokens, 2, 12), torch.randn(2, tokens, 2)
    arguments = (out[0], lse[0], out[1], lse[1], out_scale, True, torch.bfloat16, return_lse)
    operation = torch.ops.quantattn.merge_attention_states.default
    assert set(torch.library.opcheck(operation, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("out_a", torch.zeros(5, 60), FormatError, r"out_a: got shape \[5, 60\]"),
        ("out_a", torch.zeros(5, 3, 20).double(), FormatError, "out_a: got dtype torch.float64"),
        ("out_b", torch.zeros(5, 3, 20).half(), FormatError, "out_b: got dtype torch.float16"),
        ("out_b", torch.zeros(5, 3, 19), FormatError, r"out_b: got shape \[5, 3, 19\]"),
        ("lse_a", torch.zeros(3, 5), FormatError, r"lse_a: got shape \[3, 5\], expected \[5, 3\]"),
        ("lse_b", torch.zeros(5, 3).half(), FormatError, "lse_b: got dtype torch.float16"),
        ("lse_b", torch.zeros(5, 3, device="meta"), FormatError, "lse_b is on meta"),
        ("out_scale", torch.ones(7), ScaleError, "out_scale: 7 groups do not cut 60"),
        ("out_scale", torch.tensor(1.0, device="meta"), ScaleError, "out_scale is on meta"),
        ("out_dtype", torch.int8, FormatError, "out_dtype: got torch.int8"),
    ],
)
def test_wrong_arguments_are_refused_by_name(name, value, error, message) -> None:
    good = dict(zip(("out_a", "lse_a", "out_b", "lse_b"), states(), strict=True))
    with pytest.raises(error, match=message):
        merge_attention_states(**{**good, name: value})
