"""The KV-sharing fault, end to end: a model whose last layers read the pages of earlier ones.

E01 (vLLM #51091): a sharing layer's first touch came in the first real forward and set the scales
that its target had written to 1.0, so the first batch of a process was wrong. Everything runs in a
process of its own, because only its first batch shows that.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys

import torch
from torch import nn

from quantattn import AttentionMetadata, PagedKVCache, QuantAttention

FORMAT, PLACEMENT, DEVICE = sys.argv[1:]
torch.set_default_device(DEVICE)
HEADS, KV_HEADS, DIM, BLOCK, BLOCKS, LAYERS, OWN = 4, 2, 16, 4, 9, 4, 2
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1], [8, 2, 8, 1, 8, 2, 8, 4, 5, 9]]


class Model(nn.Module):
    '''Layers 2 and 3 read the pages of layers 0 and 1, as Gemma-3n's last layers do.'''

    def __init__(self, sharing: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, HEADS * DIM)
        self.qkv = nn.ModuleList()
        self.attention = nn.ModuleList()
        for layer in range(LAYERS):
            self.qkv.append(nn.Linear(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM))
            target = self.attention[layer - OWN] if sharing and layer >= OWN else None
            options = dict(num_kv_heads=KV_HEADS, kv_cache_dtype=FORMAT, kv_sharing_target=target)
            self.attention.append(QuantAttention(HEADS, DIM, **options))

    def forward(self, ids, caches, metadata):
        hidden, written = self.embed(ids), []
        for layer in range(LAYERS):
            sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
            query, key, value = self.qkv[layer](hidden).split(sizes, -1)
            if layer >= OWN:
                key, value = written[layer - OWN]
            written.append((key, value))
            attention = self.attention[layer]
            # As in an engine, each layer asks for its pages' scales at each forward.
            initialize(caches[layer])
            if attention.kv_sharing_target is not None:
                key = value = None
            hidden = hidden + attention(query, key, value, caches[layer], metadata)
        return hidden @ self.embed.weight.T


def initialize(view):
    options = dict(num_kv_heads=KV_HEADS, head_dim=DIM, kv_cache_dtype=FORMAT)
    PagedKVCache.borrow([view[:]], **options)


def tokens(model, caches):
    lens = [len(prompt) for prompt in PROMPTS]
    table = torch.arange(BLOCKS, dtype=torch.int32).flip(0).view(3, 3)
    metadata = AttentionMetadata.from_lengths(lens, lens, table, BLOCK, device=DEVICE)
    ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
    with torch.no_grad():
        return model(ids, caches, metadata)


def pages(layers, page=None):
    '''Pages of some layers: each with storage of its own, or slices of one storage.'''
    options = dict(kv_cache_dtype=FORMAT, dtype=torch.float32)
    cache = PagedKVCache(layers, BLOCKS, BLOCK, KV_HEADS, DIM, **options)
    if PLACEMENT == "own":
        return cache, [cache.layer(i) for i in range(layers)]
    size = cache.layer(0).shape[1]
    packed = torch.full((BLOCKS, layers * size + 64), 0x7F, dtype=torch.uint8)[:, 32:-32]
    views = list(packed.split(size, 1))
    options = dict(num_kv_heads=KV_HEADS, head_dim=DIM, kv_cache_dtype=FORMAT)
    return PagedKVCache.borrow(views, **options), views


torch.manual_seed(0)
model = Model(sharing=True)
cache, own = pages(OWN)
shared = [own[layer % OWN] for layer in range(LAYERS)]
first = tokens(model, shared)
cache.clear()
later = tokens(model, shared)
assert torch.equal(first, later)

separate_model = Model(sharing=False)
separate_model.load_state_dict(model.state_dict(), strict=False)
assert torch.equal(tokens(separate_model, pages(LAYERS)[1]), first)

addresses = [own[0].data_ptr()]
del cache, own, shared
for _ in range(20):
    cache, own = pages(OWN)
    assert torch.equal(tokens(model, [own[layer % OWN] for layer in range(LAYERS)]), first)
    addresses.append(own[0].data_ptr())
    del cache, own
assert len(set(addresses)) < len(addresses), "no storage came back at an address"
assert torch.isfinite(first).all() and first.std() > 0.1
print("equal")
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("placement", ["own", "packed"])
@pytest.mark.parametrize(
    "kv_cache_dtype", ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"]
)
def test_the_first_batch_of_a_process_equals_later_ones_and_separate_caches(
    kv_cache_dtype: str, placement: str, device: str
) -> None:
    command = [sys.executable, "-c", SCRIPT, kv_cache_dtype, placement, device]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.stdout == "equal\n", done.stderr
