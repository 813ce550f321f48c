"""The merge of Hopper's decode in Triton's interpreter; test_interpreted.py runs this in a process.

The partial results are made here, by an own cut of the keys into runs.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy
import pytest
import torch

from quantattn.formats import format_of_numbers
from quantattn.kernels._attention_arguments import paged_arguments
from quantattn.kernels._attention_call import AttentionCall
from quantattn.kernels._partials import Partials
from quantattn.kernels.hopper import merge
from quantattn.layout import PageLayout

# numpy warns of log 0, which a row without keys needs.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")

KV_HEADS, GROUP, DIM, BLOCK_N = 2, 3, 64, 32
QUERY_LENS = [1, 0, 3, 2, 9, 1, 2]
SEQ_LENS = [300, 50, 3, 130, 200, 0, 33]
LIMIT, PADDING = 3, 2
ROWS = LIMIT * GROUP


def make_call(sinks) -> AttentionCall:
    tokens = sum(QUERY_LENS) + PADDING
    layout = PageLayout(KV_HEADS, DIM, DIM, "NHD", format_of_numbers(torch.float8_e4m3fn))
    return AttentionCall(
        query=torch.zeros(tokens, KV_HEADS * GROUP, DIM, dtype=torch.bfloat16),
        kv_cache=torch.zeros(1, layout.page_size(16)).to(torch.float8_e4m3fn),
        layout=layout,
        cu_seqlens_q=torch.tensor([0, *QUERY_LENS]).cumsum(0).int(),
        seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32),
        block_table=torch.zeros(len(SEQ_LENS), 20, dtype=torch.int32),
        max_seqlen_q=9,
        k_scale=torch.tensor(0.3),
        v_scale=torch.tensor([0.4, 0.7]),
        q_scale=None,
        prob_scale=None,
        softmax_scale=0.1,
        causal=True,
        sliding_window=None,
        logits_soft_cap=None,
        sinks=sinks,
        out_scale=None,
        round_through=False,
        out_dtype=torch.float32,
        return_lse=True,
    )


def partial_results(scores, values, num_workers):
    """What each worker finds of its run; NaN where it stores nothing."""
    shape = (num_workers + len(SEQ_LENS), KV_HEADS, ROWS)
    means, weights = torch.full((*shape, DIM), math.nan), torch.full(shape, math.nan)
    tiles = [
        (sequence, start)
        for sequence, (tokens, length) in enumerate(zip(QUERY_LENS, SEQ_LENS, strict=True))
        for start in range(0, length if 0 < tokens <= LIMIT else 0, BLOCK_N)
    ]
    for worker, run in enumerate(numpy.array_split(numpy.array(tiles), num_workers)):
        for sequence in {s for s, _ in run.tolist()}:
            starts = [start for s, start in run.tolist() if s == sequence]
            keys = slice(min(starts), max(starts) + BLOCK_N)
            some = scores[sequence][..., keys]
            place = (worker + sequence, slice(None), slice(some.shape[1]))
            means[place] = (some.softmax(2).nan_to_num() @ values[sequence][:, keys]).float()
            weights[place] = (some.logsumexp(2) / math.log(2)).float()
    return Partials(means, weights)


def merged(scores, values, num_workers, heads, workers, sinks):
    call = make_call(sinks)
    out, lse = call.new_outputs()
    out.fill_(math.nan)
    lse.fill_(math.nan)
    arguments = paged_arguments(call, out, lse)
    grid = (len(SEQ_LENS) * LIMIT, KV_HEADS * -(-GROUP // heads))
    merge.hopper_merge_kernel[grid](
        arguments.output,
        partial_results(scores, values, num_workers),
        arguments.scales,
        sinks,
        arguments.batch,
        num_workers,
        LIMIT,
        ROWS=ROWS,
        HEADS=heads,
        WORKERS=workers,
        SPEC=replace(arguments.spec, block_m=16, block_n=BLOCK_N),
        OUTPUT=arguments.output_spec,
    )
    return call, out, lse


@pytest.mark.parametrize(
    ("num_workers", "heads", "workers", "with_sinks"),
    [(1, 4, 2, True), (3, 1, 8, False), (5, 4, 2, False), (40, 1, 8, True)],
)
def test_merges_what_all_workers_found(
    num_workers, heads, workers, with_sinks, monkeypatch
) -> None:
    monkeypatch.setattr(merge, "gdc_wait", lambda: None)
    scores, values = [], []
    for tokens, length in zip(QUERY_LENS, SEQ_LENS, strict=True):
        places = length - tokens + torch.arange(tokens)[:, None]
        hidden = (torch.arange(length) > places).repeat_interleave(GROUP, 0)
        random = 3 * torch.randn(KV_HEADS, tokens * GROUP, length, dtype=torch.float64)
        scores.append(random.masked_fill(hidden, -math.inf))
        values.append(torch.randn(KV_HEADS, length, DIM, dtype=torch.float64))
    sinks = torch.randn(KV_HEADS * GROUP) if with_sinks else None
    call, out, lse = merged(scores, values, num_workers, heads, workers, sinks)
    starts = call.cu_seqlens_q.tolist()
    for sequence, tokens in enumerate(QUERY_LENS):
        rows = slice(starts[sequence], starts[sequence] + tokens)
        if tokens > LIMIT:
            assert out[rows].isnan().all()
            assert lse[rows].isnan().all()
            continue
        logits = scores[sequence].unflatten(1, (tokens, GROUP))
        if with_sinks:
            sink = sinks.double().view(KV_HEADS, 1, GROUP, 1).expand(-1, tokens, -1, -1)
            logits = torch.cat([logits, sink], 3)
        prob = logits.softmax(3)[..., : SEQ_LENS[sequence]].nan_to_num()
        want = prob @ values[sequence][:, None] * call.v_scale.double().view(-1, 1, 1, 1)
        want_lse = logits.logsumexp(3)
        if SEQ_LENS[sequence] == 0:
            want_lse.fill_(-math.inf)
        torch.testing.assert_close(
            out[rows].double(), want.transpose(0, 1).flatten(1, 2), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(
            lse[rows].double(), want_lse.transpose(0, 1).flatten(1, 2), rtol=1e-5, atol=1e-5
        )
    assert not out[starts[-1] :].any()
    assert (lse[starts[-1] :] == -math.inf).all()
