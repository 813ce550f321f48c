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
from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout

FORMAT, PLACEMENT, ORDER, SCALES, DEVICE, DTYPE, DIM, BLOCK = sys.argv[1:]
DTYPE, DIM, BLOCK = getattr(torch, DTYPE), int(DIM), int(BLOCK)
torch.set_default_device(DEVICE)
HEADS, KV_HEADS, BLOCKS, LAYERS, OWN, STEPS = 4, 2, 9, 4, 2, 2
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1], [8, 2, 8, 1, 8, 2, 8, 4, 5, 9]]
TABLE = torch.arange(BLOCKS, dtype=torch.int32).flip(0).view(3, 3)
LAYOUT = PageLayout(KV_HEADS, DIM, DIM, ORDER, parse_kv_cache_dtype(FORMAT), SCALES)
PLACE = dict(kv_cache_dtype=FORMAT, layout=ORDER, scale_placement=SCALES)


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
            options = dict(num_kv_heads=KV_HEADS, kv_sharing_target=target, **PLACE)
            self.attention.append(QuantAttention(HEADS, DIM, **options))
        self.to(DTYPE)

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
            borrow([caches[layer][:]])
            if attention.kv_sharing_target is not None:
                key = value = None
            hidden = hidden + attention(query, key, value, caches[layer], metadata)
        return hidden @ self.embed.weight.T


def borrow(views):
    return PagedKVCache.borrow(views, num_kv_heads=KV_HEADS, head_dim=DIM, **PLACE)


@torch.no_grad()
def generate(model, caches):
    '''Logits of the last token of each prompt, and of the tokens that follow.'''
    new, lens, found = PROMPTS, [0] * len(PROMPTS), []
    for _ in range(STEPS):
        counts = [len(tokens) for tokens in new]
        lens = [length + count for length, count in zip(lens, counts)]
        metadata = AttentionMetadata.from_lengths(counts, lens, TABLE, BLOCK, device=DEVICE)
        logits = model(torch.tensor(sum(new, [])), caches, metadata)
        found.append(logits[metadata.cu_seqlens_q[1:] - 1])
        new = [[token] for token in found[-1].argmax(1).tolist()]
    return torch.stack(found)


def pages(layers):
    '''Pages of some layers: each with storage of its own, or slices of one storage.'''
    if PLACEMENT == "own":
        cache = PagedKVCache(layers, BLOCKS, BLOCK, KV_HEADS, DIM, **PLACE)
        return [cache.layer(i) for i in range(layers)]
    size = LAYOUT.page_size(BLOCK)
    packed = torch.full((BLOCKS, layers * size + 64), 0x7F, dtype=torch.uint8)[:, 32:-32]
    return list(packed.split(size, 1))


def assert_scales_of_rows_without_tokens_are_one(views):
    position = torch.arange(3 * BLOCK).view(3, BLOCK)
    is_written = torch.zeros(BLOCKS, BLOCK, dtype=torch.bool)
    for blocks, prompt in zip(TABLE.long(), PROMPTS):
        is_written[blocks] = position < len(prompt) + STEPS - 1
    assert not is_written.all()
    for numbers in (numbers for view in views for numbers in LAYOUT.scale_views(view)):
        scales = numbers if numbers.ndim == 3 else numbers[..., 0]
        assert (scales[~is_written] == 1.0).all()
        assert (scales[is_written] != 1.0).all()


torch.manual_seed(0)
model = Model(sharing=True)
own = pages(OWN)
shared = [own[layer % OWN] for layer in range(LAYERS)]
first = generate(model, shared)
assert_scales_of_rows_without_tokens_are_one(own)

separate_model, separate = Model(sharing=False), pages(LAYERS)
separate_model.load_state_dict(model.state_dict(), strict=False)
assert torch.equal(generate(separate_model, separate), first)
for layer in range(LAYERS):
    written = [LAYOUT.scale_views(views[layer]) for views in (shared, separate)]
    assert all(torch.equal(one, other) for one, other in zip(*written))

borrow(own).clear()
assert torch.equal(generate(model, shared), first)

addresses, returned = {own[0].data_ptr()}, 0
del own, shared, separate, written
for _ in range(200):
    own = pages(OWN)
    if own[0].data_ptr() in addresses:
        returned += 1
        assert torch.equal(generate(model, [own[layer % OWN] for layer in range(LAYERS)]), first)
        assert_scales_of_rows_without_tokens_are_one(own)
    else:
        addresses.add(own[0].data_ptr())
        borrow(own)
    del own
    if returned == 3:
        break
assert returned == 3, "no storage came back at an address"
assert torch.isfinite(first).all() and first.std() > 0.1
print("equal")
"""

# Dtype, head_dim, block_size; on Hopper the last ones are for its own kernels.
SMALL, WIDE = ("float32", "16", "4"), ("bfloat16", "128", "16")


@pytest.mark.parametrize(
    ("device", "sizes"),
    [
        pytest.param("cpu", SMALL, id="cpu"),
        pytest.param("cuda", SMALL, id="cuda", marks=pytest.mark.gpu),
        pytest.param("cuda", WIDE, id="cuda-wide", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    ("kv_cache_dtype", "place"),
    [
        ("int8_per_token_head", ("own", "NHD", "page")),
        ("int8_per_token_head", ("packed", "NHD", "page")),
        ("int8_per_token_head", ("packed", "HND", "inline")),
        ("fp8_per_token_head", ("own", "HND", "page")),
        ("fp8_per_token_head", ("packed", "NHD", "inline")),
        ("int4_per_token_head", ("own", "NHD", "inline")),
        ("int4_per_token_head", ("packed", "HND", "page")),
    ],
)
def test_the_first_batch_of_a_process_equals_later_ones_and_separate_caches(
    kv_cache_dtype: str, place: tuple[str, ...], device: str, sizes: tuple[str, ...]
) -> None:
    command = [sys.executable, "-c", SCRIPT, kv_cache_dtype, *place, device, *sizes]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.stdout == "equal\n", done.stderr
