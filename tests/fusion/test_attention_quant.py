"""Attention with its quantization: every spelling and shape fuses, once a layer, bit by bit."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from quantattn import fusion, ops
from quantattn.fusion import FusionOptions
from quantattn.fusion.patterns import ATTENTION_QUANT
from quantattn.testing import SPELLINGS, assert_fused_matches, count_ops
from tests.fusion.running import HEADS, make_run, ops_lost, run_compiled

E4M3 = torch.float8_e4m3fn
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCALES = {
    "tensor": torch.tensor(0.125),
    "[1]": torch.tensor([0.0371]),
    "per 128": torch.linspace(0.011, 0.19, 32),
}
# Of one quantization, where not the operator does it.
ELEMENTWISE = ("aten::clamp_min", "aten::clamp_max")


def by_op(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return ops.static_quant_fp8(x, scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_becomes_the_attention_alone(spelling, scale, device) -> None:
    dtype = torch.float16 if scale == "[1]" else torch.bfloat16
    settings = {"out_scale": SCALES[scale], "quantize": SPELLINGS[spelling], "device": device}
    model, batch = make_run("32/8", 7, dtype=dtype, **settings)
    fused, recorder = run_compiled(model, batch)
    assert len(recorder.report().fused) == 1
    assert not recorder.report().missed
    called = count_ops(recorder.after[0])
    assert called["quantattn::paged_attention"] == 1
    assert not {"quantattn::static_quant_fp8", "aten::div", "aten::mul", *ELEMENTWISE} & set(called)
    assert fused.dtype is E4M3
    model.quantize = by_op
    assert_fused_matches(fused, model(batch), model_dtype=dtype)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("scale", "device"),
    [("tensor", "cpu"), *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in SCALES)],
)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_inductor_calls_the_attention_and_writes_no_kernel(spelling, scale, device) -> None:
    settings = {"out_scale": SCALES[scale], "quantize": SPELLINGS[spelling], "device": device}
    model, batch = make_run("32/8", 7, kv_cache_dtype="fp8", **settings)
    with torch.no_grad(), fusion.enable(require=True) as enabled:
        fused, (code,) = run_and_get_code(torch.compile(model, fullgraph=True), batch)
    assert len(enabled.report().fused) == 1
    assert not enabled.report().missed
    assert code.count(".paged_attention.default(") == 1
    assert "static_quant_fp8.default(" not in code
    assert "= async_compile." not in code
    assert fused.dtype is E4M3
    model.quantize = by_op
    assert_fused_matches(fused, model(batch), model_dtype=torch.bfloat16)


CASES = [  # heads, batch, spelling, mode, dtype, pages, scales of k and v, layers, scale
    ("40/8", 7, "op", "mixed", "bf16", "fp8", "head", 3, "0.0371"),
    ("40/8", 256, "divide", "decode", "fp16", "auto", "tensor", 1, "0.0371"),
    ("40/8", 533, "op", "decode", "bf16", "fp8", "tensor", 2, "0.125"),
    ("64/8", 7, "torchao", "prefill", "fp16", "fp8", "head", 2, "per 128"),
    ("64/8", 256, "multiply", "decode", "bf16", "fp8", "tensor", 1, "0.0371"),
    ("64/8", 533, "op", "decode", "fp16", "auto", "tensor", 1, "0.125"),
    ("32/8", 7, "divide_float32", "mixed", "bf16", "auto", "tensor", 2, "0.0371"),
    ("32/8", 256, "op", "mixed", "fp16", "fp8", "head", 1, "per 128"),
    ("32/8", 533, "multiply_float32", "decode", "bf16", "fp8", "head", 1, "0.125"),
]
SETTINGS = product(
    ["decode", "prefill", "mixed"],
    ["bf16", "fp16"],
    ["auto", "fp8"],
    ["tensor", "head"],
    [1, 3],
    ["0.125", "0.0371", "per 128"],
)
EVERY_SIZE = list(product(HEADS, [7, 256, 533], SPELLINGS))
GRID = [  # any two values of two columns meet in a case
    (*size, *settings)
    for size, settings in zip(
        EVERY_SIZE, random.Random(1).sample(list(SETTINGS), len(EVERY_SIZE)), strict=True
    )
]


@pytest.mark.parametrize(
    ("case", "device"),
    [(case, "cpu") for case in CASES]
    + [pytest.param(case, "cuda", marks=pytest.mark.gpu) for case in CASES + GRID],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)).replace("/", "x"),
)
def test_one_quantization_less_in_every_layer(case, device) -> None:
    heads, batch_size, spelling, mode, dtype_name, pages, granularity, num_layers, scale = case
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype_name]
    per_head = torch.linspace(0.011, 0.19, HEADS[heads][0])
    model, batch = make_run(
        heads,
        batch_size,
        mode=mode,
        num_layers=num_layers,
        dtype=dtype,
        kv_cache_dtype=pages,
        scale_granularity=granularity,
        out_scale=per_head if scale == "per 128" else torch.tensor(float(scale)),
        quantize=SPELLINGS[spelling],
        padding=3,
        device=device,
    )
    fused, recorder = run_compiled(model, batch)
    report = recorder.report()
    assert [entry.pattern for entry in report.fused] == [ATTENTION_QUANT] * num_layers
    assert not report.missed
    lost = ops_lost(recorder)
    if spelling == "op":
        assert lost == {"quantattn::static_quant_fp8": num_layers}
    else:
        assert {name: lost[name] for name in ELEMENTWISE} == dict.fromkeys(ELEMENTWISE, num_layers)
    model.quantize = by_op
    unfused, plain = run_compiled(model, batch, options=None)
    assert_fused_matches(fused, unfused, model_dtype=dtype)
    assert count_ops(plain.after[0])["quantattn::static_quant_fp8"] == num_layers
    assert not fused[-3:].float().any()


@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        (torch.bfloat16, "cpu"),
        (torch.float16, "cpu"),
        pytest.param(torch.bfloat16, "cuda", marks=pytest.mark.gpu),
    ],
)
def test_from_float32_codes_move_by_a_step_at_most(dtype, device) -> None:
    model, batch = make_run(
        "32/8", 7, mode="mixed", dtype=dtype, out_scale=torch.tensor(0.0037), device=device
    )
    unfused, _ = run_compiled(model, batch, options=None)
    rounded, _ = run_compiled(model, batch)
    direct, recorder = run_compiled(model, batch, options=FusionOptions(round_through=False))
    assert len(recorder.report().fused) == 1
    assert_fused_matches(direct, unfused, model_dtype=dtype, round_through=False)
    assert torch.equal(rounded.view(torch.uint8), unfused.view(torch.uint8))
    assert not torch.equal(direct.view(torch.uint8), unfused.view(torch.uint8))


def test_the_attention_keeps_all_its_other_arguments() -> None:
    model, batch = make_run("32/8", 3, out_scale=torch.tensor(0.0371), kv_cache_dtype="fp8")
    _, recorder = run_compiled(model, batch)
    (before,), (after,) = (
        [node.args for node in graph.nodes if node.name == "paged_attention"]
        for graph in (recorder.before[0], recorder.after[0])
    )
    changed = [
        i for i, pair in enumerate(zip(before, after, strict=True)) if str(pair[0]) != str(pair[1])
    ]
    assert [before[i] for i in changed] == [None, False]
    scale, round_through = (after[i] for i in changed)
    assert scale.op == "placeholder"
    assert round_through is True


ENDS, LENGTHS, TABLE = (
    torch.tensor([0, 3]).int(),
    torch.tensor([7]).int(),
    torch.tensor([[1, 0]]).int(),
)


def latent(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    out = ops.mla_attention(
        numbers[:288].view(3, 4, 24),
        numbers[288:480].view(2, 96),
        cu_seqlens_q=ENDS.to(numbers.device),
        seq_lens=LENGTHS.to(numbers.device),
        block_table=TABLE.to(numbers.device),
        max_seqlen_q=3,
        latent_dim=16,
        rope_dim=8,
        kv_cache_dtype="auto",
        softmax_scale=0.3,
    )
    return ops.static_quant_fp8(out.flatten(1), scale)


def contiguous(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    packed = numbers.view(3, 4, 40)
    out = ops.varlen_attention(
        *(packed[:, :2], packed[:, 2:3], packed[:, 3:]),
        cu_seqlens_q=ENDS.to(numbers.device),
        cu_seqlens_k=ENDS.to(numbers.device),
        max_seqlen_q=3,
        max_seqlen_k=3,
    )
    return ops.static_quant_fp8(out.flatten(1), scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attend", [latent, contiguous])
def test_latent_and_contiguous_attention_fuse_too(attend, device) -> None:
    numbers, scale = torch.randn(480).bfloat16(), torch.tensor([0.0371, 0.0113])
    arguments = numbers.to(device), scale.to(device)
    fused, recorder = run_compiled(attend, *arguments)
    assert len(recorder.report().fused) == 1
    unfused, _ = run_compiled(attend, *arguments, options=None)
    assert torch.equal(fused.view(torch.uint8), unfused.view(torch.uint8))
