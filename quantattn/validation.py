"""Checks of tensor arguments on the host: each message names the argument; none waits for a device.

What is wrong with a scale is a ScaleError, what is wrong with any other argument a FormatError.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantattn.errors import FormatError, QuantAttnError, ScaleError
from quantattn.formats import CacheFormat, parse_kv_cache_dtype
from quantattn.layout import PageLayout

__all__ = [
    "FP8_DTYPES",
    "MODEL_DTYPES",
    "check_group_scale",
    "check_pages",
    "check_scale",
    "check_tensor",
    "latent_format",
]

MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
    error: type[QuantAttnError] = FormatError,
) -> None:
    """Check one argument's type, dtype, shape and device.

    Args:
        name: The argument's name.
        tensor: The argument.
        shape: Expected shape; None stands for any size.
        dtypes: Allowed dtypes.
        device: Device of the call's first tensor; None: this is the first.
        error: Class to raise.

    Raises:
        FormatError: Or `error`; the argument is not as expected.

    Example:
        >>> check_tensor("query", torch.zeros(2, 3), shape=(None, 3), dtypes=[torch.float32])
    """
    if not isinstance(tensor, Tensor):
        raise error(f"{name}: got {type(tensor).__name__}, expected a tensor")
    if tensor.dtype not in dtypes:
        known = ", ".join(str(d) for d in dtypes)
        raise error(f"{name}: got dtype {tensor.dtype}, expected one of: {known}")
    if not _fits(tensor.shape, shape):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise error(f"{name}: got shape {list(tensor.shape)}, expected [{wanted}]")
    if device is not None and tensor.device != device:
        raise error(
            f"{name} is on {tensor.device}, but the call's first tensor is on {device};"
            " move one of them"
        )


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    if len(shape) != len(wanted):
        return False
    for got, want in zip(shape, wanted, strict=True):
        if want is not None and got != want:
            return False
    return True


def check_scale(name: str, scale: Tensor | None, length: int, device: torch.device) -> None:
    """Check a scale that is one number, or one a head or group.

    Args:
        name: The argument's name.
        scale: float32, `[]`, `[1]` or `[length]`.
        length: Heads or groups that a longer scale must have.
        device: Device of the tensor that it scales.

    Raises:
        ScaleError: It is absent, or its dtype, shape or device does not fit.

    Example:
        >>> check_scale("k_scale", torch.tensor(0.5), 8, torch.device("cpu"))
    """
    if scale is None:
        raise ScaleError(
            f"{name}: got None, but an FP8 operand needs its scale; pass a float32 tensor"
            " (1.0 where the checkpoint has none)"
        )
    single = isinstance(scale, Tensor) and (scale.ndim == 0 or scale.shape == (1,))
    shape = tuple(scale.shape) if single else (length,)
    check_tensor(name, scale, shape=shape, dtypes=(torch.float32,), device=device, error=ScaleError)


def check_group_scale(name: str, scale: Tensor, columns: int, device: torch.device) -> None:
    """Check a scale that is one number, or one a run of columns of equal width.

    Args:
        name: The argument's name.
        scale: float32, `[]`, `[1]` or `[num_groups]`; `num_groups` divides `columns`.
        columns: Columns of the tensor that it scales.
        device: Device of the tensor that it scales.

    Raises:
        ScaleError: Its dtype, shape or device does not fit.

    Example:
        >>> check_group_scale("out_scale", torch.tensor([0.5, 0.25]), 8, torch.device("cpu"))
    """
    num_groups = scale.numel() if isinstance(scale, Tensor) else 1
    check_scale(name, scale, num_groups, device)
    if num_groups == 0 or columns % num_groups != 0:
        raise ScaleError(
            f"{name}: {num_groups} groups do not cut {columns} columns evenly; expected a number"
            " of scales that divides the columns"
        )


def check_pages(
    pages: Tensor, layout: PageLayout, fmt: CacheFormat, *, device: torch.device
) -> None:
    """Check the pages of one layer: dtype, strides, whole tokens, scales at whole words.

    Args:
        pages: `[num_blocks, page_size]`.
        layout: How a page is laid out.
        fmt: What the entries are stored as.
        device: Device of the call's first tensor.

    Raises:
        FormatError: The pages are of another format, or overlap, or hold no whole number of tokens,
            or scales in them would lie off a multiple of 4 bytes.
    """
    stored = MODEL_DTYPES if fmt.storage_dtype is None else (fmt.storage_dtype, torch.uint8)
    dtypes = tuple(dict.fromkeys(stored))
    check_tensor("kv_cache", pages, shape=(None, None), dtypes=dtypes, device=device)
    layout.block_size(pages)
    if pages.stride(1) != 1 or (pages.shape[0] > 1 and pages.stride(0) < pages.shape[1]):
        raise FormatError(
            f"kv_cache: got strides {list(pages.stride())} for shape {list(pages.shape)}, expected"
            " unit stride inside a page and pages that do not overlap"
        )
    # Dynamo traces no storage offset; there, the views that the operation itself makes check it.
    if not torch.compiler.is_compiling():
        layout.check_alignment(pages)


def latent_format(kv_cache_dtype: str) -> CacheFormat:
    """Resolve a `kv_cache_dtype` that a latent cache (MLA) may have.

    Raises:
        FormatError: The string is unknown, or its scales lie in the pages.

    Example:
        >>> latent_format("fp8").name
        'fp8_e4m3'
    """
    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    if fmt.has_page_scales:
        raise FormatError(
            f"kv_cache_dtype: a latent cache does not serve {fmt.name}, whose scales lie in the"
            " pages; use auto, fp8_e4m3 (fp8) or fp8_e5m2"
        )
    return fmt
