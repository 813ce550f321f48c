"""write_latent in plain torch."""

from __future__ import annotations

from torch import Tensor

from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout
from quantattn.reference._pages import ScaledRows, as_codes

__all__ = ["write_latent"]


def write_latent(
    latent: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    scale: Tensor | None,
    kv_cache_dtype: str,
) -> None:
    """See `quantattn.ops.write_latent`."""
    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    rows = PageLayout(1, latent.shape[1], 0).key_view(as_codes(kv_cache, fmt))
    ScaledRows(rows, fmt, scale).store(latent[:, None], slot_mapping)
