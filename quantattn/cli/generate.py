"""`quantattn generate`: load a Llama-family checkpoint and continue a prompt."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantattn.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["generate_command"]

MOST_NEW_TOKENS = 1_000_000
"""Longer than any context; the pages for all of them are allocated at the start."""


def generate_command(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A folder with config.json and safetensors.")
    ],
    prompt_ids: Annotated[
        str | None, typer.Option(help="The prompt as tokens: 1,2,3.", show_default=False)
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="The prompt as text; needs tokenizer.json in PATH.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, max=MOST_NEW_TOKENS, help="Most tokens to produce.")
    ] = 16,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help="auto (unquantized), fp8 (= fp8_e4m3), fp8_e5m2, fp8_per_token_head,"
            " int8_per_token_head or int4_per_token_head."
        ),
    ] = "auto",
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1.")] = "cpu",
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile and fuse the steps behind the prompt.")
    ] = False,
) -> None:
    """Load a Llama, Mistral, Qwen2 or Qwen3 checkpoint, show its scales, and generate greedily.

    Give the prompt as --prompt-ids or as --prompt. Exit status: 0 tokens were generated, 2 the
    checkpoint is unreadable or refused, or the arguments are wrong.
    """
    from quantattn import fusion
    from quantattn.models.generation import generate
    from quantattn.models.llama import load_llama

    if (prompt_ids is None) == (prompt is None):
        given = "neither" if prompt is None else "both"
        raise typer.BadParameter(
            f"got {given}, expected one of them", param_hint="'--prompt-ids' / '--prompt'"
        )
    tokenizer = None if prompt is None else _load_tokenizer(path)
    ids = _parse_ids(prompt_ids) if tokenizer is None else tokenizer.encode(prompt).ids
    model, report = load_llama(path, kv_cache_dtype=kv_cache_dtype, device=_parse_device(device))
    typer.echo(f"{report}\n")
    with fusion.enable() if compile else contextlib.nullcontext() as fused:
        generation = generate(model, ids, max_new_tokens, compile=compile)
    if fused is not None:
        typer.echo(f"{fused.report()}\n")
    typer.echo(f"prompt: {_join(ids)}")
    typer.echo(f"tokens: {_join(generation.token_ids)}")
    if tokenizer is not None:
        typer.echo(f"text: {tokenizer.decode(list(generation.token_ids))}")


def _parse_device(name: str) -> torch.device:
    import torch

    count = torch.cuda.device_count()
    devices = ["cpu", "cuda", *(f"cuda:{n}" for n in range(count))] if count else ["cpu"]
    if name not in devices:
        raise typer.BadParameter(
            f"got {name!r}, expected one of those that torch finds here: {', '.join(devices)}",
            param_hint="'--device'",
        )
    return torch.device(name)


def _parse_ids(text: str | None) -> list[int]:
    try:
        return [int(part) for part in (text or "").split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"got {text!r}, expected tokens like 1,2,3", param_hint="'--prompt-ids'"
        ) from None


def _load_tokenizer(path: Path) -> Any:
    file = (path if path.is_dir() else path.parent) / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"--prompt: {file} is not there; give the prompt as tokens with --prompt-ids",
            file="tokenizer.json",
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CheckpointError(
            "--prompt: the package 'tokenizers' is not installed; pip install tokenizers, or give"
            " the prompt as tokens with --prompt-ids",
            file="tokenizer.json",
        ) from None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no class of its own
        raise CheckpointError(f"{file}: {error}", file="tokenizer.json") from None


def _join(ids: list[int] | tuple[int, ...]) -> str:
    return ",".join(str(token) for token in ids)
