"""Cuts the query rows of a batch into tiles of one sequence each, without waiting for a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Batch", "Tiles", "cut_tiles", "known_size", "rows_of_tokens"]

TILE_ROWS = 64


@dataclass(frozen=True)
class Batch:
    """Which query rows belong to which sequence, and which blocks hold its keys.

    The fields are those of `AttentionMetadata`.
    """

    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_seqlen_q: int

    @property
    def query_lens(self) -> Tensor:
        """New tokens of each sequence, `[num_seqs]`."""
        return self.cu_seqlens_q.diff()


@dataclass(frozen=True)
class Tiles:
    """Some tiles: `rows` query rows each, all of one sequence.

    Attributes:
        rows: Query rows a tile; the last tile of a sequence is partly empty.
        sequence: Each tile's sequence, `[num_tiles]`.
        first: Each tile's first row, counted within its sequence, `[num_tiles]`.
    """

    rows: int
    sequence: Tensor
    first: Tensor

    def split(self, count: int) -> list[Tiles]:
        """Split into runs of up to `count` tiles."""
        pieces = zip(self.sequence.split(count), self.first.split(count), strict=True)
        return [Tiles(self.rows, sequence, first) for sequence, first in pieces]


def cut_tiles(batch: Batch, num_tokens: int) -> Tiles:
    """Cut every sequence's rows into tiles, those of one sequence adjacent.

    Where the number of tiles is not known on the host, empty tiles follow.
    """
    rows = max(1, min(TILE_ROWS, batch.max_seqlen_q))
    num_seqs = batch.seq_lens.shape[0]
    ends = _tile_counts(batch, rows).cumsum(0)
    num_tiles = known_size(ends[-1], num_tokens // rows + num_seqs)
    tile = torch.arange(num_tiles, device=ends.device)
    sequence = torch.searchsorted(ends, tile, right=True).clamp(max=num_seqs - 1)
    first = (tile - (ends - _tile_counts(batch, rows))[sequence]) * rows
    return Tiles(rows, sequence, first)


def rows_of_tokens(batch: Batch, rows: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Find each token's row among the rows of all tiles.

    Returns:
        Row of each token, `[num_tokens]`, and whether the token is padding, `[num_tokens]`.
    """
    ends = batch.cu_seqlens_q[1:].long()
    token = torch.arange(num_tokens, device=ends.device)
    sequence = torch.searchsorted(ends, token, right=True)
    padding = sequence == len(ends)
    sequence = sequence.clamp(max=len(ends) - 1)
    counts = _tile_counts(batch, rows)
    start = (counts.cumsum(0) - counts) * rows - batch.cu_seqlens_q[:-1]
    return (token + start[sequence]).masked_fill(padding, 0), padding


def known_size(size: Tensor, limit: int) -> int:
    """Read a size from the CPU, where that costs nothing; elsewhere take its upper limit."""
    return max(1, min(int(size), limit)) if size.device.type == "cpu" else limit


def _tile_counts(batch: Batch, rows: int) -> Tensor:
    return (batch.query_lens.long() + rows - 1).div(rows, rounding_mode="floor")
