"""Kernels with a fault that compute-sanitizer must report, or a clean report would say nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def shift_kernel(out_ptr, in_ptr, offset, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(out_ptr + places + offset, tl.load(in_ptr + places) + 1.0)


@triton.jit
def race_kernel(out_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    # Threads of several warps write one word of shared memory, and read it without a barrier.
    word = tl.inline_asm_elementwise(
        "{ .shared .b32 word; st.shared.b32 [word], $1; ld.volatile.shared.b32 $0, [word]; }",
        "=r,r",
        [places],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(out_ptr + places, word)


def reads_uninitialised() -> None:
    memory = torch.empty(2, 128, device="cuda")
    shift_kernel[(1,)](memory[0], memory[1], 0, SIZE=128)


def races_in_shared_memory() -> None:
    race_kernel[(1,)](torch.empty(128, dtype=torch.int32, device="cuda"), SIZE=128)


def writes_out_of_bounds() -> None:
    numbers = torch.zeros(128).cuda()
    shift_kernel[(1,)](numbers, numbers, 4096, SIZE=128)
