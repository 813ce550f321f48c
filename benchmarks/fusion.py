"""What fusion saves: the quantization behind an attention, and the host's time in generation.

    python -m benchmarks.fusion [--plot FILE.svg] [--json FILE]

First decode attention over FP8 pages with an FP8 output, beside the attention alone and beside the
attention with `static_quant_fp8` behind it. Then one sequence through a random model of
Llama-3.1-8B's shape, FP8 weights and cache: tokens a second, compiled beside eager, and how fast
the host alone is. The limit there is the bytes of a step at the speed of the device's copy.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.decode import Case
from benchmarks.report import COPY, TOKENS, UNITS, Limit, Report, Run, Speed, run_benchmark
from quantattn import fusion, ops, process_weights_after_loading
from quantattn.models import (
    CachedSequence,
    LinearScheme,
    LinearSchemes,
    LlamaConfig,
    LlamaForCausalLM,
)

HEADS = ((40, 8), (64, 8), (32, 8))
BATCHES = (7, 256, 533, 2048)
CASES = (
    *((num_seqs, 128, heads) for heads in HEADS for num_seqs in BATCHES),
    (7, 1024, (40, 8)),
    (64, 8192, (32, 8)),
)
"""Sequences, keys of each, heads."""
ROUNDS = 200
ALONE, SEPARATE = "attention alone", "attention, then quantization"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
STEP = "the bytes of a step"
PROMPT, STEPS, WARM = 512, 64, 8


def measure_fused_quantization(report: Report) -> None:
    scale = torch.full((), 0.0371, device="cuda")
    for arguments in CASES:
        case = Case(*arguments)
        outputs = torch.randn_like(case.query).flatten(1)

        def separate(table: Tensor, case=case, outputs=outputs) -> None:
            case.attend(table)
            ops.static_quant_fp8(outputs, scale)

        runs = (case.ours(scale), case.ours(), case.pool.for_each_table(separate))
        rounds = taking_turns(runs) / len(case.pool.tables)
        fused, alone, both = rounds.median(dim=1).values.tolist()
        title, sizes = f"{case.name()}, FP8 output", (case.num_keys, "keys", case.pool.moved)
        times = {ALONE: alone, SEPARATE: both}
        report.speeds.append(Speed(title, *sizes, COPY, fused, times))
        cost, saved = ((rounds[2] - rounds[n]) * 1e3 for n in (1, 0))
        share = saved.median() / cost.median()
        print(
            f"{report.line(report.speeds[-1])}; quantization {with_error(cost)} us,"
            f" fusing saves {with_error(saved)} us: {share:.0%}"
        )


def with_error(differences: Tensor) -> str:
    """Median of the rounds, and what the median may be off by (95 %)."""
    low, middle, high = differences.quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    return f"{middle:.2f} +- {1.57 * (high - low) / len(differences) ** 0.5:.2f}"


def taking_turns(runs: Sequence[Run]) -> Tensor:
    """Milliseconds of each run in each round, `[runs, rounds]`, all replayed as CUDA graphs."""
    graphs = []
    for run in runs:
        run()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS * len(runs) + 1)]
    for graph in graphs:
        graph.replay()
    for place, mark in enumerate(marks):
        mark.record()
        if place + 1 < len(marks):
            graphs[place % len(runs)].replay()
    torch.cuda.synchronize()
    times = [first.elapsed_time(last) for first, last in itertools.pairwise(marks)]
    return torch.tensor(times, dtype=torch.float64).view(ROUNDS, -1).T


@torch.no_grad()
def random_llama() -> LlamaForCausalLM:
    schemes = LinearSchemes((("Linear", LinearScheme(False, "static")),), ("lm_head",))
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_dict(LLAMA), schemes, kv_cache_dtype="fp8")
    model.to_empty(device="cuda")
    for name, parameter in model.named_parameters():
        if name.endswith("_scale"):
            parameter.fill_(0.03)
        else:
            parameter.copy_(torch.randn(parameter.shape, device="cuda", dtype=torch.bfloat16) * 0.3)
    for layer in model.model.layers:
        layer.self_attn.set_scale("k", 0.07)
        layer.self_attn.set_scale("v", 0.05)
    process_weights_after_loading(model)
    return model.eval()


def bytes_of_a_step(model: LlamaForCausalLM) -> int:
    """Weights, of the embedding one row, and the keys and values in the middle of the run."""
    embedding = model.model.embed_tokens.weight
    weights = sum(p.numel() * p.itemsize for p in model.parameters()) - embedding.nbytes
    cache = model.new_cache(1, block_size=1)
    return weights + cache.layer(0).nbytes * model.config.num_layers * (PROMPT + WARM + STEPS)


def measure_generation(report: Report) -> None:
    model = random_llama()
    moved = bytes_of_a_step(model)
    copy = next(limit for limit in report.limits if limit.name == COPY)
    report.limits.append(Limit(STEP, TOKENS, copy.rate * UNITS[copy.unit] / UNITS[TOKENS] / moved))
    print(f"{moved / 1e9:.2f} GB a step, {report.limits[-1].rate:.0f} {TOKENS} at the copy's speed")
    with fusion.enable(require=True) as enabled:
        runs = {
            name: Generation(model, compile=name == "compiled") for name in ("compiled", "eager")
        }
    print(enabled.report())
    for case, measure in (("decode", Generation.step), ("decode, host alone", Generation.host)):
        times = {name: measure(run) for name, run in runs.items()}
        ours = times.pop("compiled")
        report.speeds.append(Speed(f"Llama-3.1-8B {case}", PROMPT, "keys", 1, STEP, ours, times))
        print(report.line(report.speeds[-1]), flush=True)


class Generation:
    """One sequence behind its prompt and the first steps."""

    def __init__(self, model: LlamaForCausalLM, *, compile: bool) -> None:
        start = time.perf_counter()
        self.sequence = CachedSequence(model, PROMPT + WARM + 2 * STEPS, compile=compile)
        self.sequence.extend(range(PROMPT))
        for _ in range(WARM):
            self.sequence.extend([1])
        torch.cuda.synchronize()
        print(f"    ready after {time.perf_counter() - start:.1f} s", flush=True)

    def step(self) -> float:
        """Milliseconds of a step whose token depends on the one before."""
        token = 1
        start = time.perf_counter()
        for _ in range(STEPS):
            token = int(self.sequence.extend([token])[-1].argmax())
        return (time.perf_counter() - start) / STEPS * 1e3

    def host(self) -> float:
        """Milliseconds until a step's call returns, the device being idle before."""
        times = []
        for _ in range(STEPS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.sequence.extend([1])
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e3


def measure(report: Report) -> None:
    measure_fused_quantization(report)
    measure_generation(report)


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
