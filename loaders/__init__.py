"""Reading checkpoints of every known producer into guarded scales."""

from __future__ import annotations

from quantattn.loaders.dummy import initialize_dummy_weights
from quantattn.loaders.inspect import Inspection, inspect_checkpoint
from quantattn.loaders.load import load_checkpoint, load_weights
from quantattn.loaders.load_kv_scales import load_kv_scales
from quantattn.loaders.postprocess import process_weights_after_loading
from quantattn.loaders.report import LoadReport, ScaleRow
from quantattn.loaders.state_dict import install as _install

__all__ = [
    "Inspection",
    "LoadReport",
    "ScaleRow",
    "initialize_dummy_weights",
    "inspect_checkpoint",
    "load_checkpoint",
    "load_kv_scales",
    "load_weights",
    "process_weights_after_loading",
]

_install()
