"""varlen_attention's kernel in Triton's interpreter, on the CPU; test_interpreted.py runs this."""

from __future__ import annotations

import pytest
import torch

from quantattn.kernels._attention_arguments import TileSizes
from quantattn.kernels._attention_call import PackedCall
from quantattn.kernels.varlen_attention import varlen_attention
from quantattn.testing import assert_matches
from tests.ops.packed import PER_HEAD, Packed, pack

# numpy, which interprets, says where a denominator is 0, as without keys.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")

LENS = ([5, 0, 1, 19], [40, 3, 0, 19])
SHAPE = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 24, "head_dim_v": 16}


def attend(packed: Packed, **options):
    given = {
        "q_scale": None,
        "prob_scale": None,
        "softmax_scale": 24**-0.5,
        "causal": True,
        "sliding_window": None,
        "logits_soft_cap": None,
        "sinks": None,
        "out_scale": None,
        "round_through": False,
        "out_dtype": packed.query.dtype,
        "return_lse": True,
        **packed.arguments(),
        **options,
    }
    del given["max_seqlen_k"]
    return varlen_attention(PackedCall(**given), prefill_sizes=TileSizes(16, 16, 4, 1))


def draw(dtype: str, model_dtype=torch.float32, padding: int = 3) -> Packed:
    more = {"scales": PER_HEAD, "model_dtype": model_dtype, "padding": padding}
    return pack(*LENS, dtype=dtype, **SHAPE, **more)


@pytest.mark.parametrize("dtype", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"sliding_window": 9, "sinks": torch.linspace(-1, 2, 6)}],
    ids=str,
)
def test_packed_keys_match_float64(dtype, options) -> None:
    packed = draw(dtype)
    out, lse = attend(packed, **options)
    want, want_lse = packed.expected(**options)
    assert_matches(out, want, rel_l2=2e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert not out[25:].any()


def test_a_bf16_query_holds_its_error_bound() -> None:
    packed = draw("fp8", torch.bfloat16)
    assert_matches(attend(packed)[0], packed.expected()[0])


def test_keys_of_any_strides_give_the_same() -> None:
    packed = draw("auto")
    spread = {
        "key": packed.key.transpose(0, 1).contiguous().transpose(0, 1),
        "value": torch.stack([packed.value, packed.value], 3)[..., 0],
    }
    assert all(map(torch.equal, attend(packed), attend(packed, **spread)))
