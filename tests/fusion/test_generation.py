"""A whole model, compiled: the same tokens, steps of one graph."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch
from typer.testing import CliRunner

from quantattn.cli import app
from quantattn.models import generate, load_llama, replay
from quantattn.testing import assert_matches

pytestmark = pytest.mark.usefixtures("fresh_compiler")
DEMO = files("quantattn") / "data" / "demo"
PROMPT = [5, 9, 17, 33, 2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.filterwarnings("ignore")  # torch's, on TF32 and on the empty graph that it starts with
@pytest.mark.parametrize("device", DEVICES)
def test_generate_compile_fuses_and_produces_the_models_tokens(device) -> None:
    command = ["generate", str(DEMO), "--prompt-ids", "5,9,17", "--max-new-tokens", "4"]
    options = ["--kv-cache-dtype", "fp8", "--device", device, "--compile"]
    done = CliRunner().invoke(app, command + options)
    assert done.exit_code == 0, done.output
    assert "fused 2, missed 0" in done.output
    tokens = [int(n) for n in done.output.split("tokens: ")[1].split()[0].split(",")]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    model, _ = load_llama(DEMO, kv_cache_dtype="fp8", device=device)
    logits = replay(model, [5, 9, 17], tokens)
    chosen = logits.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]
    # Inductor keeps float32 where eager rounds to bf16, which may turn a tie.
    assert (logits.amax(1) - chosen).max() <= 0.05


@pytest.mark.filterwarnings("ignore")  # torch's, on TF32 and on the empty graph that it starts with
@pytest.mark.parametrize(
    ("kv_cache_dtype", "device"),
    [("fp8", "cpu"), ("auto", "cpu"), pytest.param("fp8", "cuda", marks=pytest.mark.gpu)],
)
def test_compiled_steps_are_as_exact_and_one_graph(kv_cache_dtype, device) -> None:
    model, wide = (
        load_llama(DEMO, kv_cache_dtype=kv_cache_dtype, device=device, dtype=dtype)[0]
        for dtype in (torch.bfloat16, torch.float32)
    )
    produced = generate(model, PROMPT, max_new_tokens=8, compile=True)
    eager, exact = (replay(m, PROMPT, produced.token_ids).double() for m in (model, wide))
    # Both round to bf16, at other places: errors of one size, and at worst independent.
    error = float((eager - exact).norm() / eager.norm())
    assert 0.0 < error < 0.1
    assert_matches(produced.logits, eager, rel_l2=2**0.5 * error)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    # Nothing is copied to where the graph reads it.
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] == 0
