"""What one forward pass must know about its batch: which rows, which keys, which pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantattn.errors import FormatError
from quantattn.layout import PAD_SLOT

__all__ = ["AttentionMetadata"]


@dataclass(frozen=True)
class AttentionMetadata:
    """The batch of one forward pass, prefill and decode mixed freely.

    Attributes:
        cu_seqlens_q: Prefix sums of the query lengths, `[num_seqs + 1]`, int32, first 0.
        seq_lens: Keys of each sequence, the new ones included, `[num_seqs]`, int32.
        block_table: Block ids of each sequence, `[num_seqs, max_blocks]`, int32; entries behind a
            sequence's last block are never read.
        slot_mapping: Slot of each token's K and V, `[num_tokens]`, int64; `PAD_SLOT` for padding.
        max_seqlen_q: Longest query, tokens.
    """

    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_seqlen_q: int

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Tensor | Sequence[Sequence[int]],
        block_size: int,
        *,
        num_tokens: int | None = None,
        device: torch.device | str | None = None,
    ) -> AttentionMetadata:
        """Build the metadata of a batch on the host and move it to a device.

        The last `query_lens[i]` of the `seq_lens[i]` tokens of sequence i are the new ones; their
        slots follow from the block table.

        Args:
            query_lens: New tokens of each sequence.
            seq_lens: Keys of each sequence, the new tokens included.
            block_table: Block ids of each sequence, `[num_seqs, max_blocks]`.
            block_size: Tokens a page.
            num_tokens: Rows of the query, padding included; None: no padding.
            device: Where the tensors go; None: the CPU.

        Raises:
            FormatError: The lengths contradict each other, or the block table is too narrow or
                holds a negative block id where a block is needed.

        Example:
            >>> meta = AttentionMetadata.from_lengths([2, 1], [2, 5], [[7, 0], [3, 4]], 4)
            >>> meta.slot_mapping.tolist()
            [28, 29, 16]
        """
        with torch.device("cpu"):
            queries = torch.as_tensor(query_lens, dtype=torch.int64)
            keys = torch.as_tensor(seq_lens, dtype=torch.int64)
            table = torch.as_tensor(block_table, dtype=torch.int32).cpu()
            _check_lengths(queries, keys, table, block_size)
            slots = _new_slots(queries, keys, table, block_size)
            rows = len(slots) if num_tokens is None else num_tokens
            if rows < len(slots):
                raise FormatError(
                    f"num_tokens: got {num_tokens}, expected at least the {len(slots)} tokens of"
                    " query_lens"
                )
            padding = torch.full((rows - len(slots),), PAD_SLOT)
            starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)])
        return cls(
            cu_seqlens_q=starts.int(),
            seq_lens=keys.int(),
            block_table=table,
            slot_mapping=torch.cat([slots, padding]),
            max_seqlen_q=max(query_lens, default=0),
        ).to(device or "cpu")

    def to(self, device: torch.device | str) -> AttentionMetadata:
        """Return the same batch with its tensors on another device.

        Example:
            >>> metadata = AttentionMetadata.from_lengths([1], [1], torch.zeros(1, 1).int(), 16)
            >>> metadata.to("meta").seq_lens.device.type
            'meta'
        """
        return replace(
            self,
            cu_seqlens_q=self.cu_seqlens_q.to(device),
            seq_lens=self.seq_lens.to(device),
            block_table=self.block_table.to(device),
            slot_mapping=self.slot_mapping.to(device),
        )


# torch.export flattens its inputs, and keeps this name and a sample of them in what it saves.
torch.export.register_dataclass(
    AttentionMetadata, serialized_type_name="quantattn.AttentionMetadata"
)
torch.serialization.add_safe_globals([AttentionMetadata])


def _check_lengths(queries: Tensor, keys: Tensor, table: Tensor, block_size: int) -> None:
    if len(queries) != len(keys) or table.ndim != 2 or len(table) != len(keys):
        raise FormatError(
            f"query_lens, seq_lens, block_table: got {len(queries)} and {len(keys)} sequences and a"
            f" table of shape {tuple(table.shape)}, expected one row for each sequence"
        )
    if bool((queries < 0).any()) or bool((queries > keys).any()):
        raise FormatError(
            f"query_lens: got {queries.tolist()} for seq_lens {keys.tolist()}, expected from 0 to"
            " the sequence's own length, which counts the new tokens"
        )
    if block_size < 1 or bool((keys > table.shape[1] * block_size).any()):
        raise FormatError(
            f"block_table: {table.shape[1]} blocks of {block_size} tokens do not hold seq_lens"
            f" {keys.tolist()}; widen the table"
        )


def _new_slots(queries: Tensor, keys: Tensor, table: Tensor, block_size: int) -> Tensor:
    """Slots of the new tokens of all sequences, `[sum(queries)]`, int64."""
    sequence = torch.repeat_interleave(torch.arange(len(queries)), queries)
    position = torch.arange(len(sequence)) - (queries.cumsum(0) - keys)[sequence]
    block = table[sequence, position // block_size].long()
    if bool((block < 0).any()):
        raise FormatError("block_table: a new token falls into a negative block id")
    return block * block_size + position % block_size
