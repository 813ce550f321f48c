"""The plan of Hopper's prefill in Triton's interpreter; test_interpreted.py runs this in a process.

Entries are counted out here sequence by sequence, in plain Python.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from quantattn.kernels._attend_rows import Scale, Scales
from quantattn.kernels._attend_spec import SideSpec, Spec
from quantattn.kernels.hopper import prefill_plan as plan_kernel
from quantattn.kernels.hopper.prefill_plan import (
    ENTRY,
    HEAD,
    HEADS,
    entries_of_a_sequence,
    first_entry,
    most_entries,
)

ROWS, TILE, KV_HEADS, BLOCK = 64, 128, 3, 16
SLOTS = 64
BUCKET_ERROR = 1 / 8
"""Relative difference of the numbers of tiles that one bucket can hold."""


def lengths(num_seqs: int, longest: int) -> list[tuple[int, int]]:
    """Query length and keys of each sequence, some with no query, some with no other keys."""
    draw = random.Random(num_seqs)
    queries = [draw.choice((0, 1, 2, 63, 64, 65, draw.randrange(longest))) for _ in range(num_seqs)]
    return [(query, query + draw.choice((0, 1, 127, draw.randrange(5000)))) for query in queries]


def expected_entries(
    batch: list[tuple[int, int]],
    padding: int,
    groups: int,
    group_size: int,
    limit: int,
    starts: list[int] | None,
) -> list[tuple[int, ...]]:
    """The entries of a causal batch; those of padding have no keys."""
    found = []
    start = 0
    for number, (query, keys) in enumerate([*batch, (padding, 0)]):
        is_padding = number == len(batch)
        if limit == 0 or (query > limit and not is_padding):
            strips = group_size * -(-query // ROWS)
            for top in range(strips - 1, -1, -groups):
                tokens = min((top // group_size + 1) * ROWS, query)
                visible = min(keys - query + tokens, keys)
                end = max(0, -(-visible // TILE))
                place = number if starts is None else (0 if is_padding else starts[number])
                found.append((0, end, top, start, query, keys, place, visible))
        start += query
    return found


@pytest.mark.parametrize("num_seqs", [1, 2, 33, 150])
@pytest.mark.parametrize(
    ("paged", "groups", "group_size", "limit"),
    [(True, 3, 4, 0), (False, 2, 1, 2), (True, 3, 7, 2), (False, 3, 4, 0)],
)
def test_every_strip_is_in_one_entry_and_long_ones_come_first(
    num_seqs, paged, groups, group_size, limit, monkeypatch
) -> None:
    monkeypatch.setattr(plan_kernel, "gdc_launch_dependents", lambda: None)
    batch, padding = lengths(num_seqs, 900 if num_seqs < 30 else 200), 70
    queries, keys = ([pair[side] for pair in batch] for side in (0, 1))
    tokens = sum(queries) + padding
    starts = [0, *itertools.accumulate(keys)]
    side = SideSpec(128, KV_HEADS * 128, 128, 0, 0, 0)
    spec = Spec(
        codes="e4m3",
        keys=side,
        values=side,
        block_size=BLOCK if paged else None,
        group_size=group_size,
        num_kv_heads=KV_HEADS,
        causal=True,
        window=None,
        soft_cap=None,
        rounds_prob=True,
        compute=None,
        native=True,
        block_m=ROWS,
        block_n=TILE,
    )
    count = most_entries(tokens, num_seqs, group_size, ROWS, groups)
    first = first_entry(KV_HEADS)
    plan = torch.full((first + count * ENTRY.value,), 123_456_789, dtype=torch.int32)
    numbers = torch.tensor([[0.5, 0.7, 0.9], [1.5, 1.7, 1.9], [2.5, 2.7, 2.9], [0.3, 0.6, 1.0]])
    query_scale, key_scale, value_scale, prob_scale = numbers
    query_starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
    plan_kernel.hopper_prefill_plan_kernel[(1,)](
        plan,
        Scales(
            query=Scale(query_scale, 1),
            key=Scale(key_scale, 1),
            value=Scale(value_scale, 1),
            prob=Scale(prob_scale, 1),
        ),
        query_starts,
        torch.tensor(keys if paged else starts, dtype=torch.int32),
        0.1,
        limit,
        10_000,
        num_seqs,
        tokens,
        count,
        GROUPS=groups,
        SPARE=entries_of_a_sequence(group_size, ROWS, groups),
        HEADROOM=8.0,
        HEAD_COUNT=4,
        SPEC=spec,
        SLOTS=SLOTS,
    )
    number = int(plan[0])
    entries = plan[first:].view(-1, ENTRY.value)[:number].tolist()
    found = [(*entry[:7], entry[8]) for entry in entries]
    wanted = expected_entries(batch, padding, groups, group_size, limit, None if paged else starts)
    assert sorted(found) == sorted(wanted)
    tiles = [entry[1] - entry[0] for entry in found]
    assert all(b <= a * (1 + BUCKET_ERROR) for a, b in itertools.pairwise(tiles))
    assert int(plan[1]) == 0
    heads = plan[HEADS.value : first].view(KV_HEADS, HEAD.value)
    factor, headroom, v_scale = heads[:, :3].T.contiguous().view(torch.float32)
    torch.testing.assert_close(factor, 0.1 * math.log2(math.e) * query_scale * key_scale)
    # 0.3 is 1.2 / 4, 0.6 is 1.2 / 2.
    torch.testing.assert_close(headroom, 8.0 - torch.tensor([1.2, 1.2, 1.0]).log2())
    assert v_scale.tolist() == value_scale.tolist()
    assert heads[:, 3].tolist() == list(range(KV_HEADS))
