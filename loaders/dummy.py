"""Dummy weights: deterministic noise for every weight, and no scale touched."""

from __future__ import annotations

import re
import zlib

import torch
from torch import Tensor, nn

from quantattn.errors import ScaleError
from quantattn.loaders.postprocess import process_weights_after_loading

__all__ = ["initialize_dummy_weights"]

_KEPT = re.compile(
    r"(^|_)(q?scales?(_\w+)?|scal(e|ing)_factor|zero_point|range|amax|offset|alpha)$"
)
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

    Raises:
        ScaleError: A tensor of the model is on the meta device; nothing was filled.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> initialize_dummy_weights(layer)
        >>> first = layer.weight.clone()
        >>> initialize_dummy_weights(layer)
        >>> torch.equal(first, layer.weight)
        True
    """
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if tensor.is_meta:
            raise ScaleError(f"model: {name!r} is on the meta device; call model.to_empty first")
    for name, tensor in state.items():
        if tensor.is_floating_point() and not _KEPT.search(name.rpartition(".")[2]):
            _fill(tensor, zlib.crc32(f"{seed}:{name}".encode()))
    process_weights_after_loading(model)


def _fill(tensor: Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.empty(tensor.shape, dtype=torch.float32)
    largest = _LARGEST_FP8 if tensor.element_size() == 1 else _LARGEST
    noise.uniform_(-largest, largest, generator=generator)
    tensor.copy_(noise)
