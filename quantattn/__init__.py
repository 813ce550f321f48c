"""Quantized attention layers for PyTorch: scales that cannot be lost, FP8 loading, paged caches.

Subclass `QuantAttention` in a model definition, load FP8 checkpoints with
`loaders.load_checkpoint`, or give the attention modules of a model that exists already the same
guarantees with `register_quant_scales` and `adopt`.
"""

from __future__ import annotations

from pathlib import Path

# In a checkout, loaders/ lies beside this package and not in it (installed, it is
# quantattn/loaders).
if not (Path(__file__).parent / "loaders").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

from quantattn import loaders, ops
from quantattn.attention import QuantAttention
from quantattn.audit import Finding, audit
from quantattn.cache import PagedKVCache
from quantattn.cache_identity import layer_scales
from quantattn.errors import (
    CheckpointError,
    FormatError,
    Problem,
    QuantAttnError,
    RefusedCheckpointError,
    ScaleError,
)
from quantattn.host_blocks import HostBlocks, load_blocks, save_blocks
from quantattn.loaders.postprocess import process_weights_after_loading
from quantattn.metadata import AttentionMetadata
from quantattn.mla import MLAAttention
from quantattn.page_scales import forget_page_scales, initialize_page_scales
from quantattn.quant_scales import QuantScales
from quantattn.registration import adopt, register_quant_scales
from quantattn.scale_snapshot import ScaleSnapshot, restore_scales, snapshot_scales

__all__ = [
    "AttentionMetadata",
    "CheckpointError",
    "Finding",
    "FormatError",
    "HostBlocks",
    "MLAAttention",
    "PagedKVCache",
    "Problem",
    "QuantAttention",
    "QuantAttnError",
    "QuantScales",
    "RefusedCheckpointError",
    "ScaleError",
    "ScaleSnapshot",
    "adopt",
    "audit",
    "forget_page_scales",
    "initialize_page_scales",
    "layer_scales",
    "load_blocks",
    "loaders",
    "ops",
    "process_weights_after_loading",
    "register_quant_scales",
    "restore_scales",
    "save_blocks",
    "snapshot_scales",
]
