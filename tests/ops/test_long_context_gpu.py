"""Attention on a GPU over up to 131,072 keys a sequence, by whichever kernels serve it there."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from quantattn import ops
from quantattn.testing import assert_matches
from tests.ops.long_batches import KV_HEADS, draw
from tests.ops.paged_cases import FORMATS

pytestmark = pytest.mark.gpu

QUERIES = [1, 2, 63, 64, 65, 127, 129, 1000]
RAGGED = [0, 1, 15, 16, 17, 1023, 131_072, 40_001]
FAR = 2**31
"""Bytes before the first block that is used: as many elements for codes; half for numbers."""


@pytest.mark.parametrize("context", [0, 131_072])
@pytest.mark.parametrize("name", FORMATS)
def test_queries_of_any_length_behind_any_context(name, context) -> None:
    batch = draw(name, QUERIES, [query + context for query in QUERIES], "cuda")
    batch.check(*batch.attend())


@pytest.mark.parametrize("name", FORMATS)
def test_decode_of_ragged_lengths(name) -> None:
    batch = draw(name, [min(1, length) for length in RAGGED], RAGGED, "cuda")
    batch.check(*batch.attend())


@pytest.mark.parametrize("name", FORMATS)
def test_a_prefill_in_chunks_is_the_whole_one(name) -> None:
    batch = draw(name, [2100], [30_000], "cuda")
    whole, whole_lse = batch.attend()
    # Between cuts lie one token, or more than decode takes.
    cuts = sorted((torch.randperm(130)[:6] * 16 + torch.randint(7, (6,))).tolist())
    for first, end in pairwise([0, 1, *(20 + cut for cut in cuts), 2100]):
        out, lse = batch.part(first, end).attend()
        assert_matches(out, whole[first:end].double(), rel_l2=3e-3)
        torch.testing.assert_close(lse, whole_lse[first:end], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "placement"),
    [*((name, "page") for name in FORMATS), *((name, "inline") for name in FORMATS[3:])],
)
def test_blocks_beyond_two_to_the_31_elements(name, placement) -> None:
    size = draw(name, [1], [1], "cpu", scale_placement=placement).pages.shape[1]
    lens = [1, 3, 40], [500, 70, 40]
    batch = draw(name, *lens, "cuda", scale_placement=placement, first_block=FAR // size + 1)
    assert batch.pages.numel() > FAR
    batch.check(*batch.attend())


@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [1, 90, 1, 20]], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_captured_call_replays_other_batches_bit_by_bit(name, query_lens) -> None:
    """Lengths, tables, scales and queries are others, all in the tensors that were captured."""
    first = draw(name, query_lens, [900, 90, 17, 4000], "cuda")
    later = draw(name, query_lens[::-1], [4000, 300, 90, 250], "cuda")
    query, pages = first.query.clone(), first.pages[: len(later.pages)].clone()
    call, other = first.arguments(), later.arguments()
    call |= {scale: 3 * number for scale, number in first.scales.items()}
    call["block_table"] = call["block_table"].clamp(0, len(pages) - 1)
    ops.paged_attention(query, pages, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.paged_attention(query, pages, **call)
    query.copy_(later.query)
    pages.view(torch.uint8).copy_(later.pages.view(torch.uint8))
    for changed in ("cu_seqlens_q", "seq_lens", "block_table", *later.scales):
        call[changed].copy_(other[changed])
    graph.replay()
    eager = ops.paged_attention(query, pages, **call)
    assert all(torch.equal(*pair) for pair in zip(captured, eager, strict=True))
    later.check(*captured)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_packed_keys_of_any_length(stored) -> None:
    """The same numbers in pages give the same result within rounding."""
    name = "auto" if stored == torch.bfloat16 else "fp8_e4m3"
    lengths = [query + 20_000 for query in QUERIES]
    batch = draw(name, QUERIES, lengths, "cuda")
    rows = [batch.keys_and_values(number, length) for number, length in enumerate(lengths)]
    scales = batch.scales or dict.fromkeys(("k_scale", "v_scale"))
    key, value = (
        (torch.cat(x) if scale is None else torch.cat(x) / scale.double()[:, None]).to(stored)
        for x, scale in zip(zip(*rows, strict=True), scales.values(), strict=True)
    )
    assert key.shape[1] == KV_HEADS
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    out, lse = ops.varlen_attention(
        batch.query,
        key,
        value,
        cu_seqlens_q=batch.arguments()["cu_seqlens_q"],
        cu_seqlens_k=ends,
        max_seqlen_q=max(QUERIES),
        max_seqlen_k=max(lengths),
        return_lse=True,
        **scales,
    )
    batch.check(out, lse)
