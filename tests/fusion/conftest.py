"""What tests that compile under Inductor itself can ask for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile with empty caches and counters of the test's own, and leave no pass behind."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    assert torch._inductor.config.post_grad_custom_post_pass is None
    torch.compiler.reset()
