"""HostBlocks: blocks of every layer in host memory or a file, with what their bytes mean."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantattn.cache_identity import Identity, identity_fingerprint
from quantattn.errors import CheckpointError

__all__ = ["HostBlocks", "load_blocks", "save_blocks"]

TENSOR = "blocks"
IDENTITY = "quantattn_identity"
FINGERPRINT = "quantattn_fingerprint"


@dataclass(frozen=True)
class HostBlocks:
    """Blocks that `PagedKVCache.swap_out` read; `swap_in` writes them back.

    Attributes:
        data: `[num_layers, num_blocks, bytes of a block]`, uint8, on the CPU; scales that lie in
            pages are among the bytes.
        identity: What the bytes mean, see `quantattn.cache_identity`.
    """

    data: Tensor
    identity: Identity

    @property
    def num_blocks(self) -> int:
        """Blocks a layer."""
        return self.data.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks of all layers."""
        return self.data.numel()

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the cache that they came from."""
        return identity_fingerprint(self.identity)


def save_blocks(blocks: HostBlocks, path: str | os.PathLike[str]) -> None:
    """Write blocks to a safetensors file, their identity and fingerprint in its metadata.

    Args:
        blocks: What `PagedKVCache.swap_out` gave.
        path: File to write; one that exists is replaced.

    Raises:
        CheckpointError: The file cannot be written.

    Example:
        >>> cache = PagedKVCache(2, 4, 16, num_kv_heads=2, head_dim=8)
        >>> save_blocks(cache.swap_out([3, 1]), "prefix.safetensors")
    """
    metadata = {
        IDENTITY: json.dumps(dict(blocks.identity)),
        FINGERPRINT: blocks.fingerprint,
    }
    file = os.fspath(path)
    try:
        save_file({TENSOR: blocks.data}, file, metadata)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: it cannot be written: {error}", file=file) from error


def load_blocks(path: str | os.PathLike[str]) -> HostBlocks:
    """Read blocks that `save_blocks` wrote; `PagedKVCache.swap_in` checks that they fit.

    Args:
        path: A safetensors file.

    Raises:
        CheckpointError: There is no such file, it is damaged, or it holds something else.

    Example:
        >>> cache = PagedKVCache(2, 4, 16, num_kv_heads=2, head_dim=8)
        >>> save_blocks(cache.swap_out([3, 1]), "prefix.safetensors")
        >>> load_blocks("prefix.safetensors").nbytes
        4096
    """
    file = os.fspath(path)
    data, metadata = _read(file)
    if data.dtype is not torch.uint8 or data.ndim != 3:
        raise CheckpointError(
            f"{file}: got {data.dtype} of shape {list(data.shape)}, expected uint8"
            " [num_layers, num_blocks, bytes of a block]",
            file=file,
            place=TENSOR,
        )
    return HostBlocks(data, _identity(file, metadata))


def _read(file: str) -> tuple[Tensor, dict[str, str]]:
    if not Path(file).is_file():
        raise CheckpointError(f"{file}: expected a safetensors file, found none", file=file)
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            # A copy: what safe_open gives would change with the file.
            data = opened.get_tensor(TENSOR).clone() if TENSOR in set(opened.keys()) else None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: it cannot be read: {error}", file=file) from error
    if data is None or not {IDENTITY, FINGERPRINT} <= set(metadata):
        raise CheckpointError(
            f"{file}: it holds no saved blocks; expected what save_blocks wrote",
            file=file,
            place=TENSOR,
        )
    return data, metadata


def _identity(file: str, metadata: dict[str, str]) -> Identity:
    try:
        identity = json.loads(metadata[IDENTITY])
        is_right = identity_fingerprint(identity) == metadata[FINGERPRINT]
    except (TypeError, ValueError, RecursionError):
        is_right = False
    if not is_right:
        raise CheckpointError(
            f"{file}: its {IDENTITY} does not have the {FINGERPRINT} beside it; save the blocks"
            " anew",
            file=file,
            place=IDENTITY,
        )
    return dict(identity)
