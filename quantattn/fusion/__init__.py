"""Fusion under torch.compile: attention with the quantization after it, rotation with the write.

fusion = quantattn.fusion.enable()
compiled = torch.compile(model)
compiled(...)
print(fusion.report())
"""

from __future__ import annotations

from quantattn.fusion.graphs import target_name
from quantattn.fusion.handle import Fusion, enable
from quantattn.fusion.report import FusionRecord, FusionReport
from quantattn.fusion.rewriting import FusionOptions, fuse

__all__ = [
    "Fusion",
    "FusionOptions",
    "FusionRecord",
    "FusionReport",
    "enable",
    "fuse",
    "target_name",
]
