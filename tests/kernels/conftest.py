"""Lets Triton 3.6's interpreter run loops whose bounds are values of the kernel, with any numpy."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=os.environ.get("TRITON_INTERPRET") == "1")
def _loops_with_computed_bounds(monkeypatch) -> None:
    # numpy 2.4 makes no int of an array of one element, as scalars are there.
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
