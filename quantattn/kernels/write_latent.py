"""write_latent in Triton."""

from __future__ import annotations

from torch import Tensor

from quantattn.formats import parse_kv_cache_dtype
from quantattn.kernels._write_rows import write_rows
from quantattn.layout import PageLayout

__all__ = ["write_latent"]


def write_latent(
    latent: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    scale: Tensor | None,
    kv_cache_dtype: str,
    *,
    native: bool | None = None,
) -> None:
    """See `quantattn.ops.write_latent`; a latent is one K head without V.

    `native` is as for `write_kv`.
    """
    key = latent[:, None]
    page_layout = PageLayout(1, latent.shape[1], 0, format=parse_kv_cache_dtype(kv_cache_dtype))
    write_rows(key, key, kv_cache, slot_mapping, scale, None, page_layout, native)
