"""`quantattn demo`: the main job, on a checkpoint that the package carries."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import TYPE_CHECKING

import typer

from quantattn.cli.tables import print_table

if TYPE_CHECKING:
    from torch import Tensor

    from quantattn.models.generation import Generation

__all__ = ["demo_command"]

PROMPT = (1, 17, 42, 99, 128, 7, 200, 64)
NEW_TOKENS = 12


def demo_command() -> None:
    """Load an FP8 checkpoint and generate with an FP8 cache and with an unquantized one.

    The checkpoint is a tiny random Llama, quantized by llm-compressor, that the package carries.
    """
    from quantattn.models.generation import generate, replay
    from quantattn.models.llama import load_llama

    with as_file(files("quantattn") / "data" / "demo") as path:
        model, report = load_llama(path, kv_cache_dtype="fp8_e4m3")
        unquantized, _ = load_llama(path, kv_cache_dtype="auto")
    typer.echo("1. Every layer's scales, and where each came from\n")
    typer.echo(f"{report}\n")
    typer.echo(f"2. {NEW_TOKENS} tokens after {list(PROMPT)}, cache in fp8_e4m3 and unquantized\n")
    generation = generate(model, PROMPT, NEW_TOKENS)
    logits = replay(unquantized, PROMPT, generation.token_ids)
    _print_steps(generation, logits)
    _print_difference(generation.logits, logits)


def _print_steps(generation: Generation, logits: Tensor) -> None:
    choices = logits.argmax(-1).tolist()
    differences = (generation.logits - logits).abs().amax(-1).tolist()
    print_table(
        ("step", "fp8_e4m3", "unquantized", "largest logit difference"),
        [
            (str(step), str(ours), str(theirs), f"{difference:.4f}")
            for step, (ours, theirs, difference) in enumerate(
                zip(generation.token_ids, choices, differences, strict=True)
            )
        ],
    )


def _print_difference(quantized: Tensor, unquantized: Tensor) -> None:
    relative = (quantized - unquantized).norm() / unquantized.norm()
    same = int((quantized.argmax(-1) == unquantized.argmax(-1)).sum())
    typer.echo()
    typer.echo(f"same token at {same} of {len(quantized)} steps (each after the same tokens)")
    typer.echo(f"relative difference of all logits, L2: {relative:.2%}")
