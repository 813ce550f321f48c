"""The marks of tests that need a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]
