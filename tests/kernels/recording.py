"""What a call launches, and what else it makes a device do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


class Launch(NamedTuple):
    kernel: str
    options: dict[str, Any]

    @property
    def is_native(self) -> bool:
        """Whether the device itself was to convert to and from FP8."""
        spec = self.options.get("SPEC")
        return self.options["NATIVE"] if spec is None else spec.native


@contextmanager
def recorded_launches(*, run: bool) -> Iterator[list[Launch]]:
    """The launches of Triton's kernels inside the block, which run or do not."""
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (JITFunction, InterpretedFunction):

            def record(kernel, *arguments, launch=kind.run, **options):
                launches.append(Launch(kernel.fn.__name__, options))
                return launch(kernel, *arguments, **options) if run else None

            patch.setattr(kind, "run", record)
        yield launches


class _Computing(TorchDispatchMode):
    """Torch's operations that do more than to see or to take memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def work_of(act: Callable[[], object]) -> list[str]:
    """Kernels of Triton that a call would launch, then torch's operations that compute."""
    with recorded_launches(run=False) as launches, _Computing() as computing:
        act()
    return [launch.kernel for launch in launches] + computing.names


def gpu_work_of(act: Callable[[], object]) -> list[str]:
    """Kernels, copies and fills that a call makes the GPU do, as the profiler sees them."""
    act()  # compiles
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        act()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == on_gpu]
