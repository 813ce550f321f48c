"""Section E through the kernels, in Triton's interpreter; test_interpreted.py runs this apart."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from triton.runtime import interpreter

from tests.test_cases_e import *  # noqa: F403

# numpy, which interprets, says where float32 division overflows or meets a signalling NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """The CPU, with the operations going to their kernels, whose assertions are checked."""
    options = interpreter.InterpreterOptions(debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    for name in (
        "dynamic_quant_fp8",
        "paged_attention",
        "rope_write_kv",
        "static_quant_fp8",
        "write_kv",
    ):
        module = import_module(f"quantattn.ops.{name}")
        monkeypatch.setattr(torch.ops.quantattn, name, module._cuda)
    return "cpu"
