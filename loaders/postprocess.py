"""process_weights_after_loading: put every layer's recorded scales into its buffers."""

from __future__ import annotations

import itertools
import logging

from torch import nn

from quantattn.loaders.report import default_warning
from quantattn.quant_scales import guarded_layers
from quantattn.scale_buffers import process_scales

__all__ = ["process_weights_after_loading"]

logger = logging.getLogger("quantattn")


def process_weights_after_loading(model: nn.Module) -> None:
    """Write what was last loaded or set into every scale buffer, 1.0 where nothing was.

    Undoes what a dummy load left in the buffers, materialises buffers that are still on the meta
    device, and may run any number of times. Takes one layer or a whole model; needs no
    synchronisation with the device. Logs one warning that names the layers whose FP8 cache is left
    at the default.

    Args:
        model: A layer or a model; modules without guarded scales are left alone.

    Example:
        >>> layer = QuantAttention(4, 32)
        >>> layer.set_scale("k", 0.0123)
        >>> _ = layer.k_scale.uniform_(-1e-3, 1e-3)
        >>> process_weights_after_loading(layer)
        >>> layer.host_scale("k") == torch.tensor(0.0123).item()
        True
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    home = next((tensor.device for tensor in tensors if not tensor.is_meta), None)
    process_scales(guarded_layers(model).values(), home)
    warning = default_warning(model)
    if warning is not None:
        logger.warning(warning)
