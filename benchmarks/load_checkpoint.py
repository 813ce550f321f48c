"""Time and peak memory of `load_checkpoint` against `load_file` and `load_state_dict`.

    python benchmarks/load_checkpoint.py [--folder DIR] [--layers N] [--repeats N]

Makes a sharded bfloat16 Llama checkpoint with k and v scales, then loads it in fresh processes, the
two ways alternating, with the files in the page cache. Both start from a model whose memory is
allocated and not yet touched. Targets: at most 1.1 times the time, a peak of at most 1.05 times the
model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quantattn.loaders import load_checkpoint
from quantattn.models.llama import LlamaForCausalLM
from quantattn.models.llama_config import LlamaConfig

SHARD_BYTES = 1 << 30
WAYS = ("quantattn", "safetensors")


def config_dict(layers: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        },
    }


def empty_model(folder: Path) -> LlamaForCausalLM:
    config = LlamaConfig.from_dict(json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        model = LlamaForCausalLM(config, kv_cache_dtype="fp8")
    return model.to_empty(device="cpu")


def model_tensors(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {k: v for k, v in model.state_dict().items() if not k.endswith("_scale")}


def write_checkpoint(folder: Path, layers: int) -> None:
    (folder / "config.json").write_text(json.dumps(config_dict(layers)))
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name)
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for number, (key, place) in enumerate(model_tensors(empty_model(folder)).items()):
        shard[key] = torch.empty_like(place).uniform_(-0.1, 0.1)
        if key.endswith("k_proj.weight"):
            attention = key.removesuffix(".k_proj.weight")
            shard[f"{attention}.k_scale"] = torch.tensor([0.011 + number / 10_000])
            shard[f"{attention}.v_scale"] = torch.tensor([0.017 + number / 10_000])
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def resident_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def load(way: str, model: LlamaForCausalLM, folder: Path) -> None:
    if way == "quantattn":
        load_checkpoint(model, folder)
        return
    for shard in sorted(folder.glob("*.safetensors")):
        model.load_state_dict(load_file(shard), strict=False)


def work(way: str, folder: Path) -> dict[str, object]:
    model = empty_model(folder)
    # Not earlier: the first module on the meta device makes torch import 127 MB, whatever its size.
    before = resident_bytes("VmRSS")
    begin = time.perf_counter()
    load(way, model, folder)
    seconds = time.perf_counter() - begin
    tensors = model.state_dict()
    return {
        "seconds": seconds,
        "peak_bytes": resident_bytes("VmHWM") - before,
        "model_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "digest": sum(tensor.sum(dtype=torch.float64).item() for tensor in tensors.values()),
    }


def run_worker(way: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", way, "--folder", os.fspath(folder)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def report(results: dict[str, list[dict[str, float]]]) -> None:
    size = results["quantattn"][0]["model_bytes"]
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, torch {torch.__version__}")
    print(f"model: {size / 1e9:.2f} GB")
    medians = {}
    for way, runs in results.items():
        seconds = sorted(run["seconds"] for run in runs)
        medians[way] = statistics.median(seconds)
        peak = max(run["peak_bytes"] for run in runs) / size
        print(
            f"{way:12} median {medians[way]:.3f} s ({seconds[0]:.3f} to {seconds[-1]:.3f}, "
            f"{len(runs)} runs), {size / medians[way] / 1e9:.2f} GB/s, peak {peak:.3f} x the model"
        )
    print(f"time ratio {medians['quantattn'] / medians['safetensors']:.3f} (target: at most 1.1)")


def compare(folder: Path, repeats: int) -> None:
    digests = {run_worker(way, folder)["digest"] for way in WAYS}
    if len(digests) != 1:
        sys.exit(f"the two ways loaded different values: {digests}")
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            results[way].append(run_worker(way, folder))
    report(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(options.worker, options.folder)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_checkpoint(Path(folder), options.layers)
        compare(Path(folder), options.repeats)


if __name__ == "__main__":
    main()
