"""The tests of mla_attention through its kernels, in Triton's interpreter; see test_interpreted."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from tests.ops.test_mla_attention import *  # noqa: F403

# numpy, which interprets, says where a denominator is 0, as without keys.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def _kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("quantattn.ops.mla_attention")
    monkeypatch.setattr(torch.ops.quantattn, "mla_attention", module._cuda)
