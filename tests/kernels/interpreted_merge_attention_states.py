"""The kernel in Triton's interpreter, on the CPU; test_interpreted.py runs this in a process."""

from __future__ import annotations

import math

import pytest
import torch

from quantattn.kernels.merge_attention_states import merge_attention_states
from quantattn.reference import merge_attention_states as reference
from quantattn.reference.static_quant_fp8 import static_quant_fp8
from quantattn.testing import assert_matches


def states(tokens=14, heads=3, dim=20, dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    """Strided states; every sixth row is empty on one side, every seventh on both."""
    outs = torch.randn(2, heads, tokens, 2 * dim).to(dtype)[..., :dim].transpose(1, 2)
    logs = 9 * torch.randn(2, heads, tokens).transpose(1, 2)
    row = torch.arange(tokens * heads).view(tokens, heads)
    for side, infinity in ((0, -math.inf), (1, math.inf)):
        empty = (row % 6 == 3 * side) | (row % 7 == 0)
        outs[side][empty] = math.nan
        logs[side][empty] = infinity
    return outs[0], logs[0], outs[1], logs[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(14, 3, 20), (1, 1, 1), (7, 40, 128), (3, 4, 2500)], ids=str)
def test_matches_the_reference(dtype, shape) -> None:
    given = states(*shape, dtype)
    out, lse = merge_attention_states(*given, None, False, dtype, True)
    want, want_lse = reference.merge_attention_states(
        *(x.double() for x in given), None, False, torch.float32, True
    )
    assert out.dtype == dtype
    assert_matches(out, want, rel_l2=max(1e-6, torch.finfo(dtype).eps / 2))
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("round_through", [False, True])
@pytest.mark.parametrize("groups", [None, 1, 3, 6, 60])
def test_a_quantized_output_is_the_quantized_float32_output(round_through, groups) -> None:
    given = states(dtype=torch.bfloat16)
    out_scale = torch.tensor(0.013) if groups is None else torch.linspace(0.001, 0.04, groups)
    fused, none = merge_attention_states(*given, out_scale, round_through, torch.bfloat16, False)
    source = torch.bfloat16 if round_through else torch.float32
    unfused, _ = merge_attention_states(*given, None, False, source, False)
    assert none.numel() == 0
    codes = static_quant_fp8(unfused, out_scale, torch.float8_e4m3fn)
    assert torch.equal(fused.view(torch.uint8), codes.view(torch.uint8))


def test_a_side_without_keys_leaves_the_other_unchanged() -> None:
    out, lse = torch.randn(9, 3, 20).half(), torch.randn(9, 3)
    empty = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    for order in ((*empty, out, lse), (out, lse, *empty)):
        merged, merged_lse = merge_attention_states(*order, None, False, torch.float16, True)
        assert torch.equal(merged, out)
        assert torch.equal(merged_lse, lse)


def test_a_nan_is_not_hidden() -> None:
    out_a, out_b, lse_a = torch.zeros(2, 1, 4), torch.ones(2, 1, 4), torch.zeros(2, 1)
    lse_b = torch.tensor([[math.nan], [0.0]])
    out, lse = merge_attention_states(out_a, lse_a, out_b, lse_b, None, False, torch.float32, True)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1].isfinite().all()
    assert lse[1].isfinite().all()


def test_no_rows_at_all() -> None:
    given = states(0)
    out, lse = merge_attention_states(*given, None, False, torch.float32, True)
    assert out.shape == (0, 3, 20)
    assert lse.shape == (0, 3)
