"""A whole model, compiled: the same tokens, steps of one graph."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch
from typer.testing import CliRunner

from quantattn.cli import app
from quantattn.models import generate, load_llama, replay
from quantattn.testing import assert_matches

DEMO = files("quantattn") / "data" / "demo"
PROMPT = [5, 9, 17, 33, 2]


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def test_generate_compile_fuses_and_produces_the_models_tokens() -> None:
    command = ["generate", str(DEMO), "--prompt-ids", "5,9,17", "--max-new-tokens", "4"]
    options = ["--kv-cache-dtype", "fp8", "--compile"]
    done = CliRunner().invoke(app, command + options)
    assert done.exit_code == 0, done.output
    assert "fused 2, missed 0" in done.output
    tokens = [int(n) for n in done.output.split("tokens: ")[1].split()[0].split(",")]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    model, _ = load_llama(DEMO, kv_cache_dtype="fp8")
    logits = replay(model, [5, 9, 17], tokens)
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    # Inductor keeps float32 where eager rounds to bf16, which may turn a tie.
    assert (logits.amax(1) - chosen).max() <= 0.05


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's, on TF32 and on the empty graph that it starts with
def test_steps_replay_one_cuda_graph() -> None:
    model, _ = load_llama(DEMO, kv_cache_dtype="fp8", device="cuda")
    produced = generate(model, PROMPT, max_new_tokens=8, compile=True)
    expected = replay(model, PROMPT, produced.token_ids)
    assert_matches(produced.logits, expected.double(), rel_l2=2e-2)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
