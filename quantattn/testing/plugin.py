"""pytest plugin: what a test of fusion needs, as fixtures.

Installed with quantattn; without installation, `pytest_plugins = ["quantattn.testing.plugin"]`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quantattn.fusion import Fusion, enable
from quantattn.testing.attention_quant import AttentionQuant
from quantattn.testing.graphs import GraphRecorder

__all__ = ["quantattn_fusion", "quantattn_graphs", "quantattn_model"]


@pytest.fixture
def quantattn_graphs() -> Iterator[GraphRecorder]:
    """A `GraphRecorder` as backend of torch.compile, with nothing compiled before the test."""
    torch.compiler.reset()
    yield GraphRecorder()
    torch.compiler.reset()


@pytest.fixture
def quantattn_fusion() -> Iterator[Fusion]:
    """The fusions, on for this test under Inductor, with nothing compiled before it."""
    torch.compiler.reset()
    with enable() as fusion:
        yield fusion
    torch.compiler.reset()


@pytest.fixture
def quantattn_model() -> type[AttentionQuant]:
    """The model that the fusions are tested on."""
    return AttentionQuant
