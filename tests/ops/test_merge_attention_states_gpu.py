"""The Triton kernel on a GPU: the reference's results, at any size, under graph capture."""

from __future__ import annotations

import math

import pytest
import torch

from quantattn.ops import merge_attention_states, static_quant_fp8
from quantattn.testing import assert_matches

pytestmark = pytest.mark.gpu


def states(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Head-major states; every sixth row is empty on one side, every seventh on both."""
    outs = torch.randn(2, heads, tokens, dim).to(dtype).transpose(1, 2)
    logs = 9 * torch.randn(2, heads, tokens).transpose(1, 2)
    row = torch.arange(tokens * heads).view(tokens, heads)
    for side, infinity in ((0, -math.inf), (1, math.inf)):
        empty = (row % 6 == 3 * side) | (row % 7 == 0)
        outs[side][empty] = math.nan
        logs[side][empty] = infinity
    return [outs[0], logs[0], outs[1], logs[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(533, 5, 128), (1, 1, 1), (77, 40, 96), (3, 4, 2500), (0, 4, 64)], ids=str
)
def test_matches_the_reference_in_float64(dtype, shape) -> None:
    given = states(*shape, dtype)
    out, lse = merge_attention_states(*(x.cuda() for x in given), return_lse=True)
    widened = [x.float() for x in given]
    want, want_lse = merge_attention_states(*widened, return_lse=True)
    assert out.dtype == dtype
    assert_matches(out, want, rel_l2=max(1e-5, torch.finfo(dtype).eps / 2))
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("round_through", [False, True])
@pytest.mark.parametrize("groups", [None, 1, 8, 40, 24])
def test_a_quantized_output_is_the_quantized_float32_output(round_through, groups) -> None:
    given = [x.cuda() for x in states(129, 8, 96, torch.bfloat16)]
    scale = torch.tensor(0.013) if groups is None else torch.linspace(0.001, 0.04, groups)
    if groups == 40:
        given = [x.cuda() for x in states(129, 40, 128, torch.bfloat16)]
    fused = merge_attention_states(*given, out_scale=scale.cuda(), round_through=round_through)
    source = torch.bfloat16 if round_through else torch.float32
    unfused = merge_attention_states(*given, out_dtype=source)
    codes = static_quant_fp8(unfused, scale.cuda()).view(torch.uint8)
    assert torch.equal(fused.view(torch.uint8), codes)


def test_a_side_without_keys_leaves_the_other_unchanged() -> None:
    """D15 (FlashInfer #4401)."""
    out = torch.randn(300, 8, 128, device="cuda").bfloat16()
    lse = torch.randn(300, 8, device="cuda")
    empty = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    for order in ((*empty, out, lse), (out, lse, *empty)):
        merged, merged_lse = merge_attention_states(*order, return_lse=True)
        assert torch.equal(merged, out)
        assert torch.equal(merged_lse, lse)


def test_more_than_two_to_the_31_elements() -> None:
    tokens = 2**31 // 4096 + 2
    out = torch.zeros(tokens, 32, 128, dtype=torch.bfloat16, device="cuda")
    lse = torch.zeros(tokens, 32, device="cuda")
    out[-1] = 6.0
    merged = merge_attention_states(out, lse, out, lse + math.log(2.0))
    assert (merged[-1] == 6.0).all()
    assert not merged[-2].any()


def test_capture_and_replay_read_states_and_scale_anew() -> None:
    given = [x.cuda() for x in states(33, 8, 64, torch.float16)]
    scale = torch.tensor(0.5, device="cuda")
    merge_attention_states(*given, out_scale=scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = merge_attention_states(*given, out_scale=scale)
    scale.fill_(0.02)
    for old, new in zip(given, states(33, 8, 64, torch.float16), strict=True):
        old.copy_(new)
    graph.replay()
    eager = merge_attention_states(*given, out_scale=scale)
    assert torch.equal(out.view(torch.uint8), eager.view(torch.uint8))
