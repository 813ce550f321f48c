"""Random writes through the kernels in Triton's interpreter; test_interpreted.py runs this."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch

from tests.ops.random_writes import draw


@pytest.mark.parametrize("seed", range(16))
def test_random_writes_are_those_of_the_definition(seed, monkeypatch) -> None:
    for name in ("rope_write_kv", "write_kv"):
        module = import_module(f"quantattn.ops.{name}")
        monkeypatch.setattr(torch.ops.quantattn, name, module._cuda)
    write = draw(2000 + seed)
    np.testing.assert_array_equal(write.act("cpu"), write.expected())
