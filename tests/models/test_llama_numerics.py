"""The model against a float64 decoder, and an FP8 cache against an unquantized one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantattn.models import load_llama, replay
from tests.models.oracle import Disturb, Oracle, half_step, round_e4m3

CHECKPOINTS = Path(__file__).parent.parent / "data" / "checkpoints"
PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 238, 46, 8, 33, 83, 27, 95, 2, 88, 41]
TOKENS = [4, 197, 16, 77, 99, 37, 51]
NAMES = ("ct-fp8-kv-tensor", "ct-kv-only-tensor", "mo-fp8-kvfp8", "llmcompressor-qwen3-kvtensor")


def run(name: str, kv_cache_dtype: str) -> Tensor:
    """The logits of the prompt's last token and of one decode step after another."""
    model, _ = load_llama(CHECKPOINTS / name, kv_cache_dtype=kv_cache_dtype, dtype=torch.float32)
    return replay(model, PROMPT, TOKENS)


def run_oracle(oracle: Oracle, disturb: Disturb) -> Tensor:
    return oracle.logits(PROMPT + TOKENS, disturb)[len(PROMPT) - 1 : -1]


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("name", NAMES)
def test_prefill_and_decode_follow_the_float64_decoder(name: str, kv_cache_dtype: str) -> None:
    """Both round to e4m3 at the same places, with the same scales.

    In float32 the two differ by 2**-24 a step, unless a number lies so near the middle of two codes
    that they round it apart; one such code moves its token's output by about 2**-4 / sqrt(width).
    5e-3 leaves room for one. A cache that does not round where it should is at 2e-2 and more.
    """
    oracle = Oracle(CHECKPOINTS / name)
    scales = oracle.quantizers(fp8_cache=kv_cache_dtype == "fp8")

    def rounded(place: str, x: Tensor) -> Tensor:
        return round_e4m3(x, scales[place]) if place in scales else x

    expected = run_oracle(oracle, rounded)
    assert relative(run(name, kv_cache_dtype), expected) < 5e-3


def square_gradients(
    oracle: Oracle, places: set[str], probes: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By place: sum over the logits of the squared derivative in each element; and the elements.

    A random sign vector w has E[(w J)_i^2] = sum_j J_ji^2, so that few backward passes estimate it.
    """
    values: dict[str, Tensor] = {}

    def keep(place: str, x: Tensor) -> Tensor:
        if place in places:
            values[place] = x if x.requires_grad else x.requires_grad_()
            x.retain_grad()
        return x

    logits = run_oracle(oracle, keep)
    squares = {place: torch.zeros_like(x) for place, x in values.items()}
    for _ in range(probes):
        signs = torch.randint(0, 2, logits.shape).double() * 2 - 1
        for x in values.values():
            x.grad = None
        (logits * signs).sum().backward(retain_graph=True)
        for place, x in values.items():
            squares[place] += x.grad.square() / probes
    return squares, {place: x.detach() for place, x in values.items()}


@pytest.mark.parametrize("name", NAMES)
def test_an_fp8_cache_differs_from_none_by_its_rounding(name: str) -> None:
    """The logits' L2 difference between an FP8 and an unquantized cache, derived to first order.

    e4m3 has 3 mantissa bits, so rounding moves an element x of K or V by at most u(x), half a step:
    2**-4 of its binade, or 2**-10 scales below 2**-6 scales. Spread evenly, that has the variance
    u^2 / 3. To first order and for independent roundings, E|d logits|^2 = sum over the elements of
    |J|^2 u^2 / 3, where J is the derivative of all logits in the element.

    Where Linears quantize their inputs, both runs round these as well. If they rounded them alike,
    the cache's part were all; if they rounded them independently, every input behind the first
    attention added 2 |J|^2 u^2 / 3. The truth lies between, and a factor of 1.5 on either side
    covers the sampling of J, the second order, and roundings that are not independent.
    """
    oracle = Oracle(CHECKPOINTS / name)
    inputs = oracle.quantizers(fp8_cache=False)
    cache = {p: s for p, s in oracle.quantizers(fp8_cache=True).items() if p not in inputs}
    first = tuple(f"model.layers.0.self_attn.{role}_proj" for role in "qkv")
    behind = {place: scale for place, scale in inputs.items() if place not in first}
    squares, elements = square_gradients(oracle, {*behind, *cache}, probes=32)

    def variance(scales: Mapping[str, float]) -> float:
        parts = (squares[p] * half_step(elements[p], scale) ** 2 for p, scale in scales.items())
        return sum(part.sum().item() for part in parts) / 3

    least = variance(cache) ** 0.5
    most = (variance(cache) + 2 * variance(behind)) ** 0.5
    found = (run(name, "fp8") - run(name, "auto")).double().norm().item()
    assert least / 1.5 < found < most * 1.5
