"""What must not fuse, does not, and the report says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from quantattn import FormatError, ops
from quantattn.fusion import FusionOptions, fuse
from quantattn.testing import count_ops
from tests.fusion.running import make_run, run_compiled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALE = torch.tensor(0.0371)
QUANT = ops.static_quant_fp8


def plain(quotient: Tensor, bound: float = 448.0) -> Tensor:
    return quotient.clamp(-bound, bound).to(E4M3)


def summed(x: Tensor, scale: Tensor) -> Tensor:
    codes = QUANT(x, scale)
    return codes.float() + x.sum(1, keepdim=True)


def by_own_amax(x: Tensor, scale: Tensor) -> Tensor:
    return QUANT(x, x.abs().amax().float() / 448)


NEAR_MISSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "a second user": (summed, "is used by"),
    "a scale computed from the output": (by_own_amax, "is used by"),
    "e5m2, by the operator": (
        lambda x, s: QUANT(x, s, dtype=E5M2),
        "quantized to torch.float8_e5m2",
    ),
    "e5m2, in plain torch": (
        lambda x, s: (x / s).clamp(-448.0, 448.0).to(E5M2),
        "quantized to torch.float8_e5m2",
    ),
    "another dtype in between": (
        lambda x, s: QUANT(x.half(), s),
        "from torch.bfloat16 to torch.float16",
    ),
    "another dtype after the division": (
        lambda x, s: (x.float() / s).half().clamp(-448.0, 448.0).to(E4M3),
        "from torch.bfloat16 to torch.float16",
    ),
    "no clamp": (lambda x, s: (x / s).to(E4M3), "clamped at []"),
    "clamped elsewhere": (lambda x, s: plain(x / s, 240.0), "clamped at ['-240.0', '240.0']"),
    "clamped twice": (lambda x, s: plain((x / s).clamp(-99.0, 99.0)), "'99.0'"),
    "clamped the wrong way round": (
        lambda x, s: (x / s).clamp(448.0, -448.0).to(E4M3),
        "from below",
    ),
    "seen as another dtype": (lambda x, s: plain(x.view(torch.int16) / s), "aten.view.dtype"),
    "clamped on one side": (lambda x, s: (x / s).clamp(max=448.0).to(E4M3), "at ['448.0']"),
    "multiplied by the scale": (lambda x, s: plain(x * s), "expected a division"),
    "divided by the reciprocal": (lambda x, s: plain(x / s.reciprocal()), "expected a division"),
    "the scale divided": (lambda x, s: plain(s / x), "expected a division"),
    "a number for a scale": (lambda x, s: plain(x / 0.0371), "expected a division"),
    "bf16 scale": (lambda x, s: plain(x / s.bfloat16()), "expected float32"),
    "a scale a token": (lambda x, s: plain(x / torch.full((3, 1), 0.3)), "equal runs"),
    "scales that alternate": (
        lambda x, s: plain(x.unflatten(1, (-1, 4)) / torch.tensor([0.1, 0.2, 0.3, 0.4])),
        "equal runs",
    ),
    "groups of another shape": (
        lambda x, s: QUANT(x.view(-1, 128), torch.tensor([0.1, 0.2])),
        "equal runs",
    ),
    "transposed first": (lambda x, s: QUANT(x.t(), s), "permute"),
    "not quantized": (lambda x, s: x, "is an output"),
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_a_near_miss_does_not_fuse_and_says_why(near_miss) -> None:
    quantize, reason = NEAR_MISSES[near_miss]
    model, batch = make_run("32/8", 3, out_scale=SCALE)

    def run(batch):
        return quantize(
            model.layers[0](batch.query, None, None, batch.pages, batch.metadata).flatten(1), SCALE
        )

    out, recorder = run_compiled(run, batch)
    report = recorder.report()
    assert not report.fused
    (miss,) = report.missed
    assert reason in miss.reason
    assert count_ops(recorder.before[0]) == count_ops(recorder.after[0])
    unfused, _ = run_compiled(run, batch, options=None)
    assert torch.equal(out.view(torch.uint8), unfused.view(torch.uint8))


def test_a_scale_that_comes_from_the_lse_is_not_static() -> None:
    _, batch = make_run("32/8", 3, out_scale=SCALE)

    def run(batch):
        meta = batch.metadata
        out, lse = ops.paged_attention(
            batch.query,
            batch.pages,
            cu_seqlens_q=meta.cu_seqlens_q,
            seq_lens=meta.seq_lens,
            block_table=meta.block_table,
            max_seqlen_q=meta.max_seqlen_q,
            num_kv_heads=8,
            kv_cache_dtype="auto",
            return_lse=True,
        )
        return QUANT(out.flatten(1), lse.amax().exp())

    _, recorder = run_compiled(run, batch)
    (miss,) = recorder.report().missed
    assert "is computed from paged_attention" in miss.reason


def test_a_scale_that_is_made_after_the_attention_moves_before_it() -> None:
    model, batch = make_run("32/8", 3, out_scale=SCALE)
    model.quantize = lambda x, s: QUANT(x, (s * 3.0).reshape(1))
    fused, recorder = run_compiled(model, batch)
    assert len(recorder.report().fused) == 1
    unfused, _ = run_compiled(model, batch, options=None)
    assert torch.equal(fused.view(torch.uint8), unfused.view(torch.uint8))


def captured() -> Graph:
    model, batch = make_run("32/8", 3, out_scale=SCALE)
    return run_compiled(model, batch, options=None)[1].after[0]


def test_a_scale_on_another_device_stays_where_it_is() -> None:
    graph = captured()
    (quant,) = (n for n in graph.nodes if "static_quant_fp8" in n.name)
    scale = quant.args[1]
    scale.meta["val"] = scale.meta["val"].to("meta")
    (miss,) = fuse(graph, FusionOptions())
    assert "is on meta, it on cpu" in miss.reason


@pytest.mark.gpu
def test_a_scale_of_the_cpu_stays_out_of_attention_on_a_gpu() -> None:
    """Plain torch divides by it; the kernel would read its address."""
    model, batch = make_run("32/8", 3, out_scale=SCALE, device="cuda")
    model.quantize = lambda x, s: plain(x.float() / SCALE)
    out, recorder = run_compiled(model, batch)
    (miss,) = recorder.report().missed
    assert "is on cpu, it on cuda" in miss.reason
    unfused, _ = run_compiled(model, batch, options=None)
    assert torch.equal(out.view(torch.uint8), unfused.view(torch.uint8))


def in_blocks(scale: Tensor, x: Tensor) -> Tensor:
    if scale.numel() == 1 or len(scale) == len(x):
        return scale
    return scale.repeat_interleave(x.shape[-1] // scale.shape[-1], dim=-1)


def test_torchaos_operator_fuses_with_a_scale_of_one_number_or_of_columns() -> None:
    library = torch.library.Library("torchao", "FRAGMENT")
    name = "quantize_affine_float8_non_decomposed"
    # Torch drops an argument that is the schema's default: 24 is e4m3.
    library.define(f"{name}(Tensor tensor, Tensor scale, ScalarType float8_dtype=24) -> Tensor")
    library.impl(name, lambda x, s, d=E4M3: plain(x.float() / in_blocks(s, x)), "CPU")
    torch.library.register_fake(
        f"torchao::{name}", lambda x, s, d=E4M3: torch.empty_like(x, dtype=d), lib=library
    )
    quantize = getattr(torch.ops.torchao, name)
    model, batch = make_run("32/8", 3, out_scale=SCALE)
    for scale in (SCALE, SCALE.view(1, 1), torch.linspace(0.02, 0.3, 32).view(1, 32)):
        model.quantize = lambda x, s, scale=scale: quantize(x, scale, E4M3)
        fused, recorder = run_compiled(model, batch)
        assert len(recorder.report().fused) == 1
        unfused, _ = run_compiled(model, batch, options=None)
        assert torch.equal(fused.view(torch.uint8), unfused.view(torch.uint8))
    # A scale a row, and runs of each head's columns: no runs of a row's.
    model.quantize = lambda x, s: quantize(x, torch.full((3, 1), 0.3), E4M3)
    assert not run_compiled(model, batch)[1].report().fused
    in_runs = torch.linspace(0.02, 0.3, 4).view(1, 1, 4)
    model.quantize = lambda x, s: quantize(x.unflatten(1, (32, -1)), in_runs, E4M3).flatten(1)
    assert not run_compiled(model, batch)[1].report().fused


def test_a_pattern_that_is_not_asked_for_is_not_tried() -> None:
    model, batch = make_run("32/8", 3, out_scale=SCALE)
    _, recorder = run_compiled(model, batch, options=FusionOptions(patterns=("rope_write",)))
    assert (recorder.report().fused, recorder.report().missed) == ((), ())
    for patterns in ((), ("attention",)):
        with pytest.raises(FormatError, match="patterns"):
            FusionOptions(patterns=patterns)


def test_require_raises_where_nothing_fuses_and_says_why() -> None:
    graph = captured()
    required = FusionOptions(require=True)
    assert fuse(graph, required)[0].reason is None
    assert fuse(graph, required) == []
    model, batch = make_run("32/8", 3, out_scale=SCALE)
    model.quantize = lambda x, s: QUANT(x, s, dtype=E5M2)
    graph = run_compiled(model, batch, options=None)[1].after[0]
    with pytest.raises(FormatError, match=r"nothing was fused.*float8_e5m2"):
        fuse(graph, required)
