"""Section D through the kernels, in Triton's interpreter; test_interpreted.py runs this apart."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from tests.test_cases_d import *  # noqa: F403

# numpy, which interprets, says where an exponential is infinite, as under a soft cap, and where a
# denominator is 0, as without keys.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("paged_attention", "varlen_attention", "merge_attention_states"):
        module = import_module(f"quantattn.ops.{name}")
        monkeypatch.setattr(torch.ops.quantattn, name, module._cuda)
