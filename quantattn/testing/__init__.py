"""Help for tests of attention, its caches, and its fusion under torch.compile."""

from __future__ import annotations

from quantattn.testing.attention_quant import SPELLINGS as SPELLINGS
from quantattn.testing.attention_quant import AttentionQuant
from quantattn.testing.batches import GARBAGE_BLOCK as GARBAGE_BLOCK
from quantattn.testing.batches import POISON as POISON
from quantattn.testing.batches import PagedBatch, make_batch, poisoned_pages
from quantattn.testing.comparing import assert_fused_matches, assert_matches
from quantattn.testing.graphs import GraphRecorder, count_ops

__all__ = [
    "AttentionQuant",
    "GraphRecorder",
    "PagedBatch",
    "assert_fused_matches",
    "assert_matches",
    "count_ops",
    "make_batch",
    "poisoned_pages",
]
