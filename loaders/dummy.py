"""Dummy weights: deterministic noise for every weight, and no scale touched."""

from __future__ import annotations

import re
import zlib

import torch
from torch import Tensor, nn

from quantattn.loaders.postprocess import process_weights_after_loading
from quantattn.loaders.report import guarded_layers
from quantattn.quant_scales import QuantScales

__all__ = ["initialize_dummy_weights"]

_KEPT = re.compile(r"(^|_)(scale|scales|scale_inv|zero_point|range|amax|offset)$")
_LARGEST = 1e-3
_LARGEST_FP8 = 1.0


@torch.no_grad()
def initialize_dummy_weights(model: nn.Module, *, seed: int = 0) -> None:
    """Fill every weight with small noise that depends only on its name, its shape and the seed.

    Scales, zero points and ranges are left as they are, whether guarded or a Linear's own; guarded
    scales are then written from their record, as `process_weights_after_loading` does.

    Args:
        model: A model on a real device; integer tensors are left alone.
        seed: Another seed gives other noise.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> initialize_dummy_weights(layer)
        >>> first = layer.weight.clone()
        >>> initialize_dummy_weights(layer)
        >>> torch.equal(first, layer.weight)
        True
    """
    guarded = {id(t) for m in guarded_layers(model).values() for t in _scale_buffers(m)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        leaf = name.rpartition(".")[2]
        if id(tensor) in guarded or not tensor.is_floating_point() or _KEPT.search(leaf):
            continue
        _fill(tensor, zlib.crc32(f"{seed}:{name}".encode()))
    process_weights_after_loading(model)


def _scale_buffers(layer: QuantScales) -> list[Tensor]:
    return [getattr(layer, f"{role}_scale") for role in layer.scale_roles]


def _fill(tensor: Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.empty(tensor.shape, dtype=torch.float32)
    largest = _LARGEST_FP8 if tensor.element_size() == 1 else _LARGEST
    noise.uniform_(-largest, largest, generator=generator)
    tensor.copy_(noise)
