"""Block moves work on any tensor of pages, whatever its element size, padding and alignment."""

from __future__ import annotations

import pytest
import torch

from quantattn.block_moves import (
    block_ids,
    block_pairs,
    copy_blocks,
    read_blocks,
    write_blocks,
    zero_blocks,
)
from quantattn.errors import FormatError


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("size", [15, 18, 20, 24])
@pytest.mark.parametrize("gap", [0, 1, 2, 4, 8])
def test_every_alignment_moves_whole_pages_and_nothing_else(offset, size, gap) -> None:
    buffer = torch.randint(0, 256, (offset + 6 * (size + gap),), dtype=torch.uint8)
    rows = buffer[offset:].view(6, size + gap)
    expected = rows.clone()
    pages = rows[:, :size]
    copy_blocks([pages], torch.tensor([0, 4, 4]), torch.tensor([4, 0, 2]))
    expected[[4, 0, 2], :size] = expected[[0, 4, 4], :size]
    assert torch.equal(rows, expected)
    data = read_blocks([pages], torch.tensor([3, 1]))
    assert torch.equal(data[0], expected[[3, 1], :size])
    write_blocks([pages], torch.tensor([1, 5]), data)
    expected[[1, 5], :size] = expected[[3, 1], :size]
    assert torch.equal(rows, expected)
    zero_blocks([pages], torch.tensor([2]))
    expected[2, :size] = 0
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_moves_keep_the_bits_of_every_dtype(dtype) -> None:
    raw = torch.randint(0, 256, (4, 24), dtype=torch.uint8)
    pages = raw.clone().view(dtype)
    copy_blocks([pages], torch.tensor([3]), torch.tensor([0]))
    assert torch.equal(pages.view(torch.uint8), raw[[3, 1, 2, 3]])
    assert torch.equal(read_blocks([pages], torch.tensor([2]))[0], raw[[2]])


def test_layers_are_moved_each_for_itself() -> None:
    buffer = torch.randint(0, 256, (3, 2, 8), dtype=torch.uint8)
    before = buffer.clone()
    layers = buffer.unbind(1)
    data = read_blocks(layers, torch.tensor([0, 2]))
    assert torch.equal(data, before[[0, 2]].transpose(0, 1))
    write_blocks(layers, torch.tensor([2, 0]), data)
    assert torch.equal(buffer, before[[2, 1, 0]])


@pytest.mark.parametrize("given", [[3, 0], (3, 0), torch.tensor([3, 0], dtype=torch.int32)])
def test_blocks_may_come_as_a_list_or_a_tensor(given) -> None:
    ids = block_ids("blocks", given, 4)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [3, 0]


def test_a_range_and_no_blocks_at_all_are_blocks() -> None:
    assert block_ids("blocks", range(2, 4), 4).tolist() == [2, 3]
    assert block_ids("blocks", [], 4).tolist() == []
    assert [ids.tolist() for ids in block_pairs([], 4)] == [[], []]


@pytest.mark.parametrize(
    "given",
    [[0.5], [True], ["0"], {1: 2}, None, 3, [[0, 1]], [[0], [1, 2]], torch.zeros(2)],
    ids=repr,
)
def test_what_is_no_list_of_integers_is_refused(given) -> None:
    with pytest.raises(FormatError, match=r"blocks: got .*expected integers \[num_blocks\]"):
        block_ids("blocks", given, 4)


@pytest.mark.parametrize("given", [[0, 1], [(0, 1, 2)], [(0, 1), (2,)], [(0.0, 1.0)]], ids=repr)
def test_what_is_no_list_of_pairs_is_refused(given) -> None:
    with pytest.raises(FormatError, match=r"pairs: got .*expected integers \[num_pairs, 2\]"):
        block_pairs(given, 4)


@pytest.mark.parametrize("block", [-1, 4, 2**40])
def test_a_block_out_of_range_is_refused(block) -> None:
    with pytest.raises(FormatError, match=f"got block {block}, expected blocks from 0 to 3"):
        block_ids("blocks", [0, block], 4)
    with pytest.raises(FormatError, match=f"got block {block}, expected blocks from 0 to 3"):
        block_pairs([(0, block)], 4)


def test_a_block_that_is_there_twice_is_refused() -> None:
    with pytest.raises(FormatError, match="blocks: block 2 is there more than once"):
        block_ids("blocks", [2, 1, 2], 4)
    with pytest.raises(FormatError, match="destination: block 1 is there more than once"):
        block_pairs([(0, 1), (2, 1)], 4)
    sources, _ = block_pairs([(2, 1), (2, 0)], 4)
    assert sources.tolist() == [2, 2]
