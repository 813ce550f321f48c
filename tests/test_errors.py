"""What errors say: where they are raised in compiled code, and when they are copied."""

from __future__ import annotations

import pickle

import pytest
import torch

from quantattn import ops
from quantattn.errors import Problem, RefusedCheckpointError, ScaleError


def test_a_compiled_function_says_what_is_wrong_with_a_scale() -> None:
    def quantize(x, scale):
        return ops.static_quant_fp8(x, scale)

    compiled = torch.compile(quantize, backend="eager", fullgraph=True)
    scale = torch.tensor(0.25, dtype=torch.bfloat16)
    with pytest.raises(Exception, match=r"scale: got dtype torch\.bfloat16, expected"):
        compiled(torch.ones(2, 3), scale)


@pytest.mark.parametrize(
    "error",
    [
        ScaleError("a bad scale", layer="layers.1", role="v", value=-2.0, key="k", file="f"),
        RefusedCheckpointError("two problems", [Problem("invalid", "key", "file", "why")]),
    ],
)
def test_errors_keep_their_message_and_facts_when_pickled(error: ScaleError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == error.args[0]
    assert vars(copy) == vars(error)
    assert (error.key, error.file) in {("k", "f"), ("key", "file")}
