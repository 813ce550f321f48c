"""write_kv: schema, checks, fake and dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from quantattn.cache_writes import note_write
from quantattn.formats import parse_kv_cache_dtype
from quantattn.ops._library import register
from quantattn.ops._write_checks import check_write, used_scales
from quantattn.reference import write_kv as reference
from quantattn.validation import MODEL_DTYPES, check_tensor

__all__ = ["write_kv"]


def write_kv(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_cache_dtype: str,
    layout: str = "NHD",
    scale_placement: str = "page",
) -> None:
    """Quantize new keys and values and store them in their pages.

    Stored code = round(key / k_scale), saturating; an `auto` cache converts to its own dtype and
    ignores the scales. While the pages live, `cache_writes.holds_entries` of both scales is true.
    The formats per token and head ignore them too: they compute a scale for each row and store it
    in the page, as `quantattn.arithmetic` and `quantattn.layout` define.

    Args:
        key: New keys, `[num_tokens, num_kv_heads, head_dim]`, fp32, fp16 or bf16.
        value: New values, `[num_tokens, num_kv_heads, head_dim_v]`, dtype of `key`.
        kv_cache: Pages of one layer, `[num_blocks, page_size]`, model dtype for `auto`, uint8 for
            the formats per token and head, else the FP8 dtype or uint8; written in place.
        slot_mapping: Slot of each token, `[num_tokens]`, int64; slot = block * block_size + offset.
            A slot may not be there twice: what it would hold is undefined.
            Negative: the token is padding, skipped. Slots behind the last page are an IndexError on
            the CPU, and checked on a GPU with TRITON_DEBUG=1 only.
        k_scale: Dequantizing multiplier of K, float32, `[]`, `[1]` or `[num_kv_heads]`; may be
            None where it is ignored.
        v_scale: The same for V.
        kv_cache_dtype: `auto`, `fp8` (= `fp8_e4m3`), `fp8_e5m2`, `fp8_per_token_head`,
            `int8_per_token_head` or `int4_per_token_head`.
        layout: `NHD` or `HND`.
        scale_placement: `page` or `inline`: where the scales of the formats per token and head lie.

    Raises:
        FormatError: A dtype, shape, device, stride or the format does not fit.
        ScaleError: A scale is absent, or its dtype, shape or device does not fit.

    Example:
        >>> pages = torch.zeros(2, 4 * 1 * 2, dtype=torch.float8_e4m3fn)
        >>> key, value = torch.ones(1, 1, 1), torch.full((1, 1, 1), 3.0)
        >>> k_scale, v_scale = torch.tensor(0.5), torch.tensor(2.0)
        >>> slot = torch.tensor([5])
        >>> write_kv(
        ...     key, value, pages, slot, k_scale=k_scale, v_scale=v_scale, kv_cache_dtype="fp8"
        ... )
        >>> pages[1].float()
        tensor([0.0000, 2.0000, 0.0000, 0.0000, 0.0000, 1.5000, 0.0000, 0.0000])
    """
    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    check_tensor("key", key, shape=(None, None, None), dtypes=MODEL_DTYPES)
    check_write(key, value, kv_cache, slot_mapping, fmt, layout, scale_placement)
    k_scale, v_scale = used_scales(key, k_scale, v_scale, fmt)
    torch.ops.quantattn.write_kv(
        key, value, kv_cache, slot_mapping, k_scale, v_scale, fmt.name, layout, scale_placement
    )


def _cpu(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_cache_dtype: str,
    layout: str,
    scale_placement: str,
) -> None:
    reference.write_kv(
        key,
        value,
        kv_cache,
        slot_mapping,
        k_scale,
        v_scale,
        kv_cache_dtype,
        layout,
        scale_placement,
    )
    _note(key, kv_cache, k_scale, v_scale)


def _cuda(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_cache_dtype: str,
    layout: str,
    scale_placement: str,
) -> None:
    from quantattn.kernels import write_kv as kernel

    kernel.write_kv(
        key,
        value,
        kv_cache,
        slot_mapping,
        k_scale,
        v_scale,
        kv_cache_dtype,
        layout,
        scale_placement,
    )
    _note(key, kv_cache, k_scale, v_scale)


def _note(key: Tensor, kv_cache: Tensor, *scales: Tensor | None) -> None:
    for scale in scales:
        if scale is not None and len(key) > 0:
            note_write(scale, kv_cache)


def _fake(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_cache_dtype: str,
    layout: str,
    scale_placement: str,
) -> None:
    return None


register(
    "write_kv(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping,"
    " Tensor? k_scale, Tensor? v_scale, str kv_cache_dtype, str layout,"
    " str scale_placement) -> ()",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
)
