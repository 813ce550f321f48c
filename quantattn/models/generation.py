"""Greedy generation through a paged KV cache, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from quantattn.cache import PagedKVCache
from quantattn.errors import FormatError
from quantattn.metadata import AttentionMetadata
from quantattn.models.llama import LlamaForCausalLM

__all__ = ["CachedSequence", "Generation", "generate", "replay"]

_Inputs = tuple[Tensor, Tensor, PagedKVCache, AttentionMetadata]

BLOCK_SIZE = 16
"""Tokens a page."""


class CachedSequence:
    """One sequence and its pages; grows by any number of tokens at a time.

    Args:
        model: The model.
        capacity: Tokens that the pages must hold.
        compile: Compile the steps of one token with torch.compile, without graph breaks; on a CUDA
            device each is then the replay of one CUDA graph.

    Raises:
        FormatError: There is no memory for that many.

    Example:
        >>> from importlib.resources import files
        >>> from quantattn.models.llama import load_llama
        >>> model, _ = load_llama(files("quantattn") / "data" / "demo")
        >>> sequence = CachedSequence(model, capacity=8)
        >>> sequence.extend([1, 2, 3]).shape, sequence.extend([4]).shape, sequence.length
        (torch.Size([3, 256]), torch.Size([1, 256]), 4)
    """

    def __init__(self, model: LlamaForCausalLM, capacity: int, *, compile: bool = False) -> None:
        self.model = model
        self.length = 0
        num_blocks = max(1, -(-capacity // BLOCK_SIZE))
        try:
            self._cache = model.new_cache(num_blocks, block_size=BLOCK_SIZE)
        except (RuntimeError, TypeError) as error:
            raise FormatError(
                f"capacity: no memory for the pages of {capacity} tokens; ask for fewer ({error})"
            ) from error
        self._one_token = _inputs_of_one_token(self._cache)
        self._step = _compiled_step(model, self._cache, self._one_token) if compile else None

    @torch.no_grad()
    def extend(self, token_ids: Sequence[int]) -> Tensor:
        """Append tokens and predict the one after each.

        Args:
            token_ids: At least one token, each from 0 to the vocabulary's size.

        Returns:
            Logits, `[len(token_ids), vocab_size]`, the model's dtype.

        Raises:
            FormatError: There is no token, one is out of range, or the capacity is used up.
        """
        self._check(token_ids)
        start = self.length
        self.length += len(token_ids)
        if len(token_ids) > 1:
            logits: Tensor = self.model(*self._inputs(token_ids, start))
            return logits
        ids, positions, cache, metadata = self._one_token
        ids.fill_(token_ids[0])
        metadata.seq_lens.fill_(self.length)
        # The blocks lie in order, so that a token's slot is its position.
        for places in (positions, metadata.slot_mapping):
            places.fill_(start)
        if self._step is None:
            return self.model(ids, positions, cache, metadata)  # type: ignore[no-any-return]
        torch.compiler.cudagraph_mark_step_begin()
        # The next replay writes to the same memory.
        return self._step(ids, positions, cache, metadata).clone()

    def _inputs(self, token_ids: Sequence[int], start: int) -> _Inputs:
        device, cache = self._cache.layer(0).device, self._cache
        metadata = AttentionMetadata.from_lengths(
            [len(token_ids)],
            [self.length],
            [range(cache.num_blocks)],
            cache.block_size,
            device=device,
        )
        positions = torch.arange(start, self.length, device=device)
        return torch.tensor(token_ids, device=device), positions, cache, metadata

    def _check(self, token_ids: Sequence[int]) -> None:
        vocabulary = self.model.config.vocab_size
        odd = [token for token in token_ids if not 0 <= token < vocabulary]
        if not token_ids or odd:
            found = f"got {odd[0]}" if odd else "got no token"
            raise FormatError(f"token_ids: {found}, expected tokens from 0 to {vocabulary - 1}")
        room = self._cache.num_blocks * self._cache.block_size - self.length
        if len(token_ids) > room:
            raise FormatError(
                f"token_ids: got {len(token_ids)} tokens, but the pages have room for {room};"
                " make the sequence with a larger capacity"
            )


def _inputs_of_one_token(cache: PagedKVCache) -> _Inputs:
    """Inputs of a step that appends one token; their numbers are filled in for each."""
    device = cache.layer(0).device
    ids, positions, slots = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(3))
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.arange(2, dtype=torch.int32, device=device),
        seq_lens=torch.zeros(1, dtype=torch.int32, device=device),
        block_table=torch.arange(cache.num_blocks, dtype=torch.int32, device=device)[None],
        slot_mapping=slots,
        max_seqlen_q=1,
    )
    return ids, positions, cache, metadata


def _compiled_step(
    model: LlamaForCausalLM, cache: PagedKVCache, inputs: _Inputs
) -> Callable[..., Tensor]:
    from torch._dynamo import mark_static_address

    layers = [cache.layer(layer) for layer in range(model.config.num_layers)]
    # A CUDA graph does not take inputs that it writes to, unless they stay where they are; and it
    # copies others to a place of its own.
    for tensor in (*layers, *tree_leaves(inputs)):
        if isinstance(tensor, Tensor):
            mark_static_address(tensor)
    mode = "reduce-overhead" if cache.layer(0).is_cuda else None
    step: Callable[..., Tensor] = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
    return step


@dataclass(frozen=True)
class Generation:
    """What `generate` produced.

    Attributes:
        token_ids: The new tokens.
        logits: The logits that each was chosen from, `[len(token_ids), vocab_size]`, float32.
    """

    token_ids: tuple[int, ...]
    logits: Tensor


def generate(
    model: LlamaForCausalLM,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    compile: bool = False,
) -> Generation:
    """Append the likeliest token again and again, through a cache of the model's own format.

    Ends after `max_new_tokens` tokens, or after the first that the config calls the end of a text.

    Args:
        model: The model; its `kv_cache_dtype` is the cache's format.
        prompt_ids: At least one token.
        max_new_tokens: Most tokens to produce, at least 1.
        compile: Compile the steps behind the prompt, as `CachedSequence` does.

    Raises:
        FormatError: The prompt is empty or has a token out of range, or `max_new_tokens` is below
            1.

    Example:
        >>> from importlib.resources import files
        >>> from quantattn.models.llama import load_llama
        >>> model, _ = load_llama(files("quantattn") / "data" / "demo", kv_cache_dtype="fp8")
        >>> len(generate(model, [1, 2, 3], max_new_tokens=4).token_ids)
        4
    """
    if max_new_tokens < 1:
        raise FormatError(f"max_new_tokens: got {max_new_tokens}, expected at least 1")
    sequence = CachedSequence(model, len(prompt_ids) + max_new_tokens, compile=compile)
    logits = [sequence.extend(prompt_ids)[-1]]
    token_ids = [int(logits[-1].argmax())]
    while len(token_ids) < max_new_tokens and token_ids[-1] not in model.config.stop_ids:
        logits.append(sequence.extend(token_ids[-1:])[-1])
        token_ids.append(int(logits[-1].argmax()))
    return Generation(tuple(token_ids), torch.stack(logits).float())


def replay(model: LlamaForCausalLM, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Tensor:
    """Compute the logits that a model would have chosen from, had it produced `token_ids`.

    With the tokens of another model's generation, the two can be compared step by step even where
    they would have chosen differently.

    Args:
        model: The model.
        prompt_ids: At least one token.
        token_ids: What follows the prompt.

    Returns:
        Logits, `[len(token_ids), vocab_size]`, float32.

    Raises:
        FormatError: The prompt is empty, or a token is out of range.

    Example:
        >>> from importlib.resources import files
        >>> from quantattn.models.llama import load_llama
        >>> model, _ = load_llama(files("quantattn") / "data" / "demo")
        >>> produced = generate(model, [1, 2, 3], max_new_tokens=4)
        >>> torch.equal(replay(model, [1, 2, 3], produced.token_ids), produced.logits)
        True
    """
    sequence = CachedSequence(model, len(prompt_ids) + len(token_ids))
    logits = [sequence.extend(prompt_ids)[-1:]]
    logits += [sequence.extend([token]) for token in token_ids]
    return torch.cat(logits)[:-1].float()
