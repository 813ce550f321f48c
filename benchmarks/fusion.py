"""What fusion saves: the quantization behind an attention, and the host's time in generation.

    python -m benchmarks.fusion [--layers 32]

First decode attention over FP8 pages, alone, with its output quantized by a second kernel, and
with both fused. Then a random model of Llama-3.1-8B's shape, FP8 weights and cache, that generates
eagerly and compiled: tokens a second, and how long a step keeps the host.
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.decode import Case
from benchmarks.report import milliseconds
from quantattn import fusion, ops, process_weights_after_loading
from quantattn.models import (
    CachedSequence,
    LinearScheme,
    LinearSchemes,
    LlamaConfig,
    LlamaForCausalLM,
)

SHAPES = ((7, 1024), (64, 1024), (64, 8192), (256, 1024), (533, 512))
HEADS = ((40, 8), (64, 8), (32, 8))
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
PROMPT, STEPS, WARM = 512, 64, 8


def show_fused_quantization() -> None:
    scale = torch.full((), 0.0371, device="cuda")
    print(f"{'':<44} {'attention':>11} {'+ quantized':>11} {'fused':>11}   saved")
    for heads in HEADS:
        for shape in SHAPES:
            case = Case(*shape, heads)
            outputs = torch.randn_like(case.query)

            def separate(case=case, outputs=outputs) -> None:
                case.ours()
                for _ in case.tables:
                    ops.static_quant_fp8(outputs.flatten(1), scale)

            runs = [case.ours, separate, lambda case=case: case.ours(scale)]
            alone, both, fused = (t * 1e3 / len(case.tables) for t in milliseconds(runs))
            times = f"{alone:8.1f} us {both:8.1f} us {fused:8.1f} us"
            title = f"{case.name()} of {case.num_keys}"
            print(f"{title:<44} {times} {(both - fused) / (both - alone):7.0%}", flush=True)


@torch.no_grad()
def random_llama(num_layers: int) -> LlamaForCausalLM:
    config = LlamaConfig.from_dict({**LLAMA, "num_hidden_layers": num_layers})
    schemes = LinearSchemes((("Linear", LinearScheme(False, "static")),), ("lm_head",))
    with torch.device("meta"):
        model = LlamaForCausalLM(config, schemes, kv_cache_dtype="fp8")
    model.to_empty(device="cuda")
    for name, parameter in model.named_parameters():
        if name.endswith("_scale"):
            parameter.fill_(0.03)
        else:
            parameter.copy_(torch.randn(parameter.shape, device="cuda", dtype=torch.bfloat16) * 0.3)
    process_weights_after_loading(model)
    return model.eval()


def show_generation(model: LlamaForCausalLM, compile: bool) -> None:
    sequence = CachedSequence(model, PROMPT + WARM + 2 * STEPS, compile=compile)
    sequence.extend(range(PROMPT))
    for _ in range(WARM):
        sequence.extend([1])
    torch.cuda.synchronize()
    start = time.perf_counter()
    token = 1
    for _ in range(STEPS):
        token = int(sequence.extend([token])[-1].argmax())
    per_second = STEPS / (time.perf_counter() - start)
    host = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        sequence.extend([1])
        host.append(time.perf_counter() - start)
    name = "compiled" if compile else "eager"
    print(
        f"{name:<9} {per_second:7.1f} tokens/s, host {sorted(host)[STEPS // 2] * 1e3:6.2f} ms/step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32, help="layers of the random model")
    chosen = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    show_fused_quantization()
    model = random_llama(chosen.layers)
    with fusion.enable(require=True) as enabled:
        for compile in (False, True):
            show_generation(model, compile)
    print(f"fused {len(enabled.report().fused)} of {chosen.layers} layers' rotation and write")


if __name__ == "__main__":
    main()
