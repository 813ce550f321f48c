"""Slots and prefix sums of a batch, against a cache kept in a dictionary."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantattn.errors import FormatError
from quantattn.layout import PAD_SLOT
from quantattn.metadata import AttentionMetadata


@given(st.data())
def test_new_tokens_get_the_slots_of_their_positions(data) -> None:
    block_size = data.draw(st.integers(1, 5))
    seq_lens = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    query_lens = [data.draw(st.integers(0, length)) for length in seq_lens]
    width = -(-max(seq_lens) // block_size) + 1
    table = torch.arange(len(seq_lens) * width).flip(0).view(len(seq_lens), width)
    padding = data.draw(st.integers(0, 3))
    total = sum(query_lens)
    meta = AttentionMetadata.from_lengths(
        query_lens, seq_lens, table, block_size, num_tokens=total + padding
    )
    expected = []
    for row, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for position in range(length - new, length):
            block = int(table[row, position // block_size])
            expected.append(block * block_size + position % block_size)
    assert meta.slot_mapping.tolist() == expected + [PAD_SLOT] * padding
    assert meta.cu_seqlens_q.tolist() == [sum(query_lens[:i]) for i in range(len(seq_lens) + 1)]
    assert meta.seq_lens.tolist() == seq_lens
    assert meta.max_seqlen_q == max(query_lens)


def test_dtypes_are_those_the_operations_take() -> None:
    meta = AttentionMetadata.from_lengths([1], [3], [[0]], 4)
    assert meta.cu_seqlens_q.dtype == meta.seq_lens.dtype == meta.block_table.dtype == torch.int32
    assert meta.slot_mapping.dtype == torch.int64


def test_a_batch_of_no_sequences_is_served() -> None:
    meta = AttentionMetadata.from_lengths([], [], torch.zeros(0, 2), 4, num_tokens=2)
    assert meta.cu_seqlens_q.tolist() == [0]
    assert meta.slot_mapping.tolist() == [PAD_SLOT] * 2


def test_to_moves_every_tensor() -> None:
    meta = AttentionMetadata.from_lengths([1], [3], [[0]], 4).to("meta")
    tensors = [v for v in vars(meta).values() if isinstance(v, torch.Tensor)]
    assert [t.device.type for t in tensors] == ["meta"] * 4
    assert AttentionMetadata.from_lengths([1], [3], [[0]], 4, device="meta").seq_lens.is_meta


def test_the_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        meta = AttentionMetadata.from_lengths([1], [3], [[2]], 4, device="cpu")
    assert meta.slot_mapping.tolist() == [10]


def test_a_batch_cannot_be_changed() -> None:
    meta = AttentionMetadata.from_lengths([1], [3], [[0]], 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        meta.max_seqlen_q = 7


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "table", "num_tokens", "message"),
    [
        ([1, 1], [3], [[0]], None, "2 and 1 sequences"),
        ([1], [3], [[0], [1]], None, r"shape \(2, 1\)"),
        ([4], [3], [[0]], None, r"query_lens: got \[4\]"),
        ([-1], [3], [[0]], None, r"query_lens: got \[-1\]"),
        ([1], [5], [[0]], None, "1 blocks of 4 tokens do not hold"),
        ([1], [3], [[-1]], None, "negative block id"),
        ([2], [3], [[0]], 1, "num_tokens: got 1, expected at least the 2"),
    ],
)
def test_contradictions_are_refused(query_lens, seq_lens, table, num_tokens, message) -> None:
    with pytest.raises(FormatError, match=message):
        AttentionMetadata.from_lengths(query_lens, seq_lens, table, 4, num_tokens=num_tokens)
