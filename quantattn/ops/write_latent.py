"""write_latent: schema, checks, fake and dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from quantattn.cache_writes import note_write
from quantattn.layout import PageLayout
from quantattn.ops._library import register
from quantattn.reference import write_latent as reference
from quantattn.validation import (
    MODEL_DTYPES,
    check_pages,
    check_scale,
    check_tensor,
    latent_format,
)

__all__ = ["write_latent"]


def write_latent(
    latent: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    scale: Tensor | None,
    kv_cache_dtype: str,
) -> None:
    """Quantize new latent rows (MLA) and store them in their pages.

    Stored code = round(latent / scale), saturating; an `auto` cache converts to its own dtype and
    ignores the scale. While the pages live, `cache_writes.holds_entries` of the scale is true.

    Args:
        latent: New rows, the latent followed by the rotated key part,
            `[num_tokens, latent_dim + rope_dim]`, fp32, fp16 or bf16.
        kv_cache: Pages of one layer, `[num_blocks, block_size * (latent_dim + rope_dim)]`, model
            dtype for `auto`, else the FP8 dtype or uint8; written in place.
        slot_mapping: Slot of each token, `[num_tokens]`, int64; slot = block * block_size + offset.
            A slot may not be there twice: what it would hold is undefined.
            Negative: the token is padding, skipped. Slots behind the last page are an IndexError on
            the CPU, and checked on a GPU with TRITON_DEBUG=1 only.
        scale: Dequantizing multiplier of the whole row, float32, `[]` or `[1]`; None only for
            `auto`.
        kv_cache_dtype: `auto`, `fp8` (= `fp8_e4m3`) or `fp8_e5m2`.

    Raises:
        FormatError: A dtype, shape, device, stride or the format does not fit.
        ScaleError: The scale is absent, or its dtype, shape or device does not fit.

    Example:
        >>> pages, slot = torch.zeros(1, 4, dtype=torch.float8_e4m3fn), torch.tensor([1])
        >>> latent, scale = torch.tensor([[1.0, 3.0]]), torch.tensor(0.5)
        >>> write_latent(latent, pages, slot, scale=scale, kv_cache_dtype="fp8")
        >>> pages.float()
        tensor([[0., 0., 2., 6.]])
    """
    fmt = latent_format(kv_cache_dtype)
    device = latent.device
    check_tensor("latent", latent, shape=(None, None), dtypes=MODEL_DTYPES)
    num_tokens, width = latent.shape
    check_tensor(
        "slot_mapping", slot_mapping, shape=(num_tokens,), dtypes=(torch.int64,), device=device
    )
    check_pages(kv_cache, PageLayout(1, width, 0, format=fmt), fmt, device=device)
    if fmt.uses_layer_scales:
        check_scale("scale", scale, 1, device)
    else:
        scale = None
    torch.ops.quantattn.write_latent(latent, kv_cache, slot_mapping, scale, fmt.name)


def _cpu(
    latent: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    scale: Tensor | None,
    kv_cache_dtype: str,
) -> None:
    reference.write_latent(latent, kv_cache, slot_mapping, scale, kv_cache_dtype)
    _note(latent, kv_cache, scale)


def _cuda(
    latent: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    scale: Tensor | None,
    kv_cache_dtype: str,
) -> None:
    from quantattn.kernels import write_latent as kernel

    kernel.write_latent(latent, kv_cache, slot_mapping, scale, kv_cache_dtype)
    _note(latent, kv_cache, scale)


def _note(latent: Tensor, kv_cache: Tensor, scale: Tensor | None) -> None:
    if scale is not None and len(latent) > 0:
        note_write(scale, kv_cache)


def _fake(
    latent: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    scale: Tensor | None,
    kv_cache_dtype: str,
) -> None:
    return None


register(
    "write_latent(Tensor latent, Tensor(a!) kv_cache, Tensor slot_mapping, Tensor? scale,"
    " str kv_cache_dtype) -> ()",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
)
