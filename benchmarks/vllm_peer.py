"""vLLM's kernels beside ours; each function gives None where vLLM cannot be imported."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

OPS = "vllm.v1.attention.ops"


Run = Callable[[], object]


def static_quant(out: Tensor, x: Tensor, scale: Tensor) -> Run | None:
    """Its CUDA kernel for static FP8."""
    kernel = _kernel("static_scaled_fp8_quant")
    return kernel and (lambda: kernel(out, x, scale.view(1), None))


def dynamic_quant(out: Tensor, x: Tensor, groups: int) -> Run | None:
    """Its CUDA kernel for FP8 with a scale for each row, which is one group."""
    scales = torch.empty(len(x), groups, device=x.device)
    kernel = _kernel("dynamic_per_token_scaled_fp8_quant")
    return kernel and (lambda: kernel(out, x, scales, None))


def group_quant(out: Tensor, x: Tensor, groups: int) -> Run | None:
    """Its CUDA kernel for FP8 with a scale for each group of columns."""
    scales = torch.empty(len(x), groups, device=x.device)
    kernel = _kernel("per_token_group_fp8_quant")
    arguments = (x.shape[1] // groups, 1e-10, -448.0, 448.0, False, False, False)
    return kernel and (lambda: kernel(x, out, scales, *arguments))


def rope(positions: Tensor, query: Tensor, key: Tensor, table: Tensor) -> Run | None:
    """Its CUDA kernel that rotates queries and keys in place."""
    kernel = _kernel("rotary_embedding")
    arguments = (query.flatten(1), key.flatten(1), query.shape[2], table, True)
    return kernel and (lambda: kernel(positions, *arguments))


def one_after_another(*runs: Run | None) -> Run | None:
    if None in runs:
        return None
    return lambda: [run() for run in runs if run is not None]


def write_fp8(
    key: Tensor, value: Tensor, slots: Tensor, blocks: int, block_size: int, scale: Tensor
) -> Run | None:
    """Its Triton kernel for FP8 pages with one scale."""
    writes = _module(f"{OPS}.triton_reshape_and_cache_flash")
    if writes is None:
        return None
    shape = (blocks, block_size, *key.shape[1:])
    pages = [torch.empty(shape, dtype=torch.float8_e4m3fn, device=key.device) for _ in "kv"]
    arguments = (key, value, *pages, slots, "fp8", scale, scale)
    return lambda: writes.triton_reshape_and_cache_flash(*arguments)


def write_rows(
    key: Tensor, value: Tensor, slots: Tensor, name: str, blocks: int, block_size: int
) -> Run | None:
    """Its Triton kernels for pages with a scale for each token and head."""
    writes = _module(f"{OPS}.triton_reshape_and_cache_flash")
    if writes is None:
        return None
    mode = _module("vllm.v1.kv_cache_interface").KVQuantMode[name.upper()]
    arguments = (key, value, *_pages(name, key, blocks, block_size), slots, mode)
    return lambda: writes.triton_reshape_and_cache_flash_per_token_head_quant(*arguments)


def int4_round_trip(key: Tensor, value: Tensor, block_size: int) -> tuple[Tensor, ...] | None:
    """What its int4 pages hold of keys and values, float32, rotated back."""
    tokens, _, width = key.shape
    blocks = -(-tokens // block_size)
    slots = torch.arange(tokens, device=key.device)
    writes = _module(f"{OPS}.triton_reshape_and_cache_flash")
    if writes is None:
        return None
    mode = _module("vllm.v1.kv_cache_interface").KVQuantMode.INT4_PER_TOKEN_HEAD
    pages = _pages("int4_per_token_head", key, blocks, block_size)
    writes.triton_reshape_and_cache_flash_per_token_head_quant(key, value, *pages, slots, mode)
    return tuple(
        _int4_values(codes[..., : width // 2], scales, tokens)
        for codes, scales in zip(pages[:2], pages[2:], strict=True)
    )


def _int4_values(codes: Tensor, scales: Tensor, tokens: int) -> Tensor:
    """Two codes a byte, the low one first; a scale's four lowest bits are its zero point."""
    rotation = _module(f"{OPS}.int4_per_token_head")
    codes, bits = codes.flatten(0, 1)[:tokens], scales.flatten(0, 1)[:tokens].view(torch.int32)
    numbers = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float()
    steps = (bits & -16).view(torch.float32)
    rotated = (numbers - (bits & 15)[..., None]) * steps[..., None]
    # Its rotation multiplies lengths by the root of the run of numbers that it mixes.
    return rotation.single_rht(rotated, inverse=True) / (codes.shape[-1] * 2)


def _pages(name: str, key: Tensor, blocks: int, block_size: int) -> list[Tensor]:
    """K codes, V codes, K scales and V scales of pages `[K row | scale | V row | scale]`."""
    _, heads, width = key.shape
    row = width // 2 if name.startswith("int4") else width
    dtypes = {"fp8": torch.float8_e4m3fn, "int": torch.int8 if row == width else torch.uint8}
    records = torch.zeros(
        blocks, heads, block_size, 2 * (row + 4), dtype=torch.uint8, device=key.device
    ).transpose(1, 2)
    key_codes, value_codes = records.view(dtypes[name[:3]]).split(row + 4, -1)
    numbers = records.view(torch.float32)
    return [key_codes, value_codes, numbers[..., row // 4], numbers[..., row // 2 + 1]]


def _kernel(name: str) -> Callable[..., object] | None:
    """One of its CUDA kernels."""
    for library in ("vllm._C", "vllm._C_stable_libtorch"):
        _module(library)
    return getattr(torch.ops._C, name, None)


def _module(name: str) -> ModuleType | None:
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    return None
