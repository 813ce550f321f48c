"""What the bytes of a cache's blocks mean, so that saved blocks are never read as something else.

An identity is every fact that the bytes depend on, by name; a fingerprint is its hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantattn.errors import FormatError, ScaleError
from quantattn.formats import fnuz_factor
from quantattn.layout import PageLayout
from quantattn.quant_scales import guarded_layers
from quantattn.validation import check_scale

__all__ = [
    "Identity",
    "LayerScales",
    "cache_identity",
    "check_same_identity",
    "identity_fingerprint",
    "layer_scales",
]

Identity = Mapping[str, Any]
LayerScales = Sequence[tuple[Tensor, Tensor]]
"""`k_scale` and `v_scale` of each layer that has pages of its own."""

REVISION = 1
"""Raised when the same identity comes to mean other bytes."""

MOST_NAMED = 4
"""Differences that one message names."""


def layer_scales(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Collect `k_scale` and `v_scale` of a model's attention layers, in the order of its modules.

    Args:
        model: Its layers that share another's cache are left out, as they have no pages.

    Returns:
        The layers' own buffers, which `PagedKVCache` reads with one synchronisation.

    Example:
        >>> layers = torch.nn.ModuleList(QuantAttention(2, 8) for _ in range(3))
        >>> len(layer_scales(layers))
        3
    """
    owners = [layer for layer in guarded_layers(model).values() if layer.kv_sharing_target is None]
    for layer in owners:
        layer.mend_scales()
    return [(layer.k_scale, layer.v_scale) for layer in owners]


def cache_identity(
    layout: PageLayout,
    block_size: int,
    dtype: torch.dtype,
    num_layers: int,
    scales: LayerScales | None = None,
) -> Identity:
    """Name every fact on which the bytes of a block depend.

    Args:
        layout: How a page is laid out, and its format.
        block_size: Tokens a page.
        dtype: What the pages store, so that `auto` in fp16 and in bf16 differ.
        num_layers: Layers that have pages of their own.
        scales: `k_scale` and `v_scale` of each of these layers, float32, `[]` or
            `[num_kv_heads]`; read with one synchronisation. Left aside for a format that ignores
            them.

    Raises:
        ScaleError: The format needs the scales, and they are absent, or do not fit.

    Example:
        >>> cache_identity(PageLayout(2, 8, 8), 16, torch.float16, 4)["dtype"]
        'float16'
    """
    fmt = layout.format
    facts = {
        "revision": REVISION,
        "format": fmt.name,
        "dtype": str(dtype).removeprefix("torch."),
        "fnuz_factor": fnuz_factor() if fmt.has_fnuz_form else None,
        "layout": layout.layout,
        "scale_placement": layout.scale_placement if fmt.has_page_scales else None,
        "block_size": block_size,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "head_dim_v": layout.head_dim_v,
        "num_layers": num_layers,
    }
    if fmt.uses_layer_scales:
        facts |= _scale_values(scales, num_layers, layout)
    return facts


def identity_fingerprint(identity: Identity) -> str:
    """Hash an identity: 64 hexadecimal digits, the same on every machine.

    Example:
        >>> identity_fingerprint({"format": "auto"})[:8]
        'e08cc9ce'
    """
    text = json.dumps(dict(identity), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_same_identity(saved: Identity, own: Identity) -> None:
    """Refuse blocks whose bytes mean something else in this cache.

    Args:
        saved: Identity of the cache that the blocks came from.
        own: Identity of the cache that they go to.

    Raises:
        FormatError: They differ; it names what does.

    Example:
        >>> check_same_identity({"block_size": 16}, {"block_size": 16})
    """
    names = [name for name in {**own, **saved} if saved.get(name) != own.get(name)]
    if not names:
        return
    differences = [
        f"{name} (saved {saved.get(name)!r}, this cache {own.get(name)!r})"
        for name in names[:MOST_NAMED]
    ]
    rest = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    raise FormatError(
        f"saved blocks: they differ from this cache in {', '.join(differences)}{rest}; restore"
        " them into a cache as it was when they were saved, or compute them anew"
    )


def _scale_values(
    scales: LayerScales | None, num_layers: int, layout: PageLayout
) -> dict[str, list[float]]:
    """Host values of every layer's scales by name; one number where all heads have the same."""
    if scales is None or len(scales) != num_layers:
        given = "None" if scales is None else f"{len(scales)} pairs"
        raise ScaleError(
            f"scales: got {given} for {num_layers} layers, but {layout.format.name} blocks mean"
            " nothing without the k_scale and v_scale of each; pass scales=layer_scales(model)"
        )
    named = {
        f"{role}_scale of layer {index}": scale
        for index, pair in enumerate(scales)
        for role, scale in zip("kv", pair, strict=True)
    }
    for name, scale in named.items():
        check_scale(name, scale, layout.num_kv_heads, scale.device)
    device = next(iter(named.values())).device
    flat = torch.cat([scale.detach().flatten().to(device) for scale in named.values()]).tolist()
    values = {}
    for name, scale in named.items():
        heads, flat = flat[: scale.numel()], flat[scale.numel() :]
        values[name] = heads if len(set(heads)) > 1 else heads[:1]
    return values
