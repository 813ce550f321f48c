"""Prefill on Hopper without a GPU: what it refuses, what it compiles to, and room for its plan.

It must compile without spills, and each role must keep to its registers.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from quantattn.formats import parse_kv_cache_dtype
from quantattn.kernels._attend_rows import Batch, Output, OutputSpec, Scale, Scales
from quantattn.kernels._attend_spec import SideSpec, Spec
from quantattn.kernels._attention_call import AttentionCall, PackedCall
from quantattn.kernels.hopper import prefill as launcher
from quantattn.kernels.hopper.memory import tile_layout
from quantattn.kernels.hopper.prefill_kernel import hopper_prefill_kernel
from quantattn.kernels.hopper.prefill_plan import (
    entries_of_a_sequence,
    hopper_prefill_plan_kernel,
    most_entries,
)
from quantattn.layout import PageLayout
from tests.kernels.compiling import ARCHITECTURES, compile_for
from tests.ops.page_oracle import FORMATS, PLACEMENTS

E4M3 = torch.float8_e4m3fn
BATCH = Batch("*i32", "*i32", "*i32", "i32", "i32", "i32", "i32")
CASES = {
    "packed": {},
    "blocks of 16": {"block_size": 16},
    "full": {"causal": False, "block_size": 64},
    "window": {"window": 1000, "block_size": 16},
    "soft cap": {"soft_cap": 30.0},
    "64 wide": {"widths": (64, 64), "block_size": 16},
    "96 wide": {"widths": (96, 96)},
    "256 wide": {"widths": (256, 256), "block_size": 16},
    "192 and 128 wide": {"widths": (192, 128)},
    "64 and 256 wide": {"widths": (64, 256)},
}
NUMBERS = {
    "packed e4m3": {},
    "e4m3 in blocks of 16": {"block_size": 16},
    "e5m2, full": {"codes": "e5m2", "causal": False, "block_size": 64},
    "numbers": {"codes": None},
    "numbers in blocks of 16": {"codes": None, "block_size": 16, "window": 1000},
    "e4m3 with scales": {"block_size": 16, "has_row_scales": True},
    "int8 with scales": {"codes": "int8", "block_size": 16, "has_row_scales": True},
    "window and soft cap": {"window": 1000, "soft_cap": 30.0, "block_size": 16},
    "64 wide": {"widths": (64, 64), "block_size": 16},
    "96 wide": {"widths": (96, 96)},
    "256 wide": {"widths": (256, 256), "block_size": 16},
    "numbers, 256 wide": {"codes": None, "widths": (256, 256), "block_size": 16},
    "int8 with scales, 256 wide": {
        "codes": "int8",
        "widths": (256, 256),
        "block_size": 16,
        "has_row_scales": True,
    },
    "192 and 128 wide": {"widths": (192, 128)},
    "int4": {"codes": "int4", "block_size": 16, "has_row_scales": True},
    "int4, 256 wide, window": {
        "codes": "int4",
        "widths": (256, 256),
        "block_size": 64,
        "has_row_scales": True,
        "window": 1000,
    },
}
INLINE = {
    "int8": {"codes": "int8", "strides": (8 * 264, 264), "window": 1000},
    "int4, 96 and 192 wide": {
        "codes": "int4",
        "strides": (160, 16 * 160),
        "widths": (96, 192),
    },
}
"""Rows that have their scales behind them, in NHD and HND order."""
QUANTIZED = {
    "numbers": {"codes": None, "block_size": 16},
    "256 wide": {"widths": (256, 256)},
}
FP16_TO_FP8 = (
    "packed e4m3",
    "numbers in blocks of 16",
    "int8 with scales",
    "256 wide",
    "int8 with scales, 256 wide",
)
"""Of a query's two dtypes the instructions are the same: a case of each kind of rows will do."""
TYPES = {"e4m3": "fp8e4nv", "e5m2": "fp8e5", "int8": "i8", "int4": "i8"}


def make_spec(
    widths=(128, 128),
    block_size=None,
    group_size=4,
    *,
    causal=True,
    window=None,
    soft_cap=None,
    codes="e4m3",
    rounds_prob=True,
    has_row_scales=False,
    strides=(0, 0),
) -> Spec:
    in_words = [n // 4 or int(has_row_scales) for n in strides]
    keys, values = (SideSpec(width, *strides, *in_words, 0) for width in widths)
    spec = Spec(
        codes=codes,
        keys=keys,
        values=values,
        block_size=block_size,
        group_size=group_size,
        num_kv_heads=8,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        rounds_prob=rounds_prob,
        compute=tl.bfloat16 if codes is None else tl.float16,
        native=True,
        block_m=launcher.STRIP,
        block_n=0,
    )
    return replace(spec, block_n=launcher.choose_sizes(spec).block_n)


def described(element: str, block: list[int], columns: int) -> str:
    """Signature of a box of rows, as wide as a tile's columns, but 128 bytes at most."""
    bits = 16 if element in ("bf16", "fp16") else 8
    block = [*block, min(1024 // bits, columns)]
    return f"tensordesc<{element}{block},{tile_layout(block[-1], bits, len(block))!r}>"


def compile_kernel(
    spec: Spec, query: str = "fp8e4nv", *, with_lse: bool = True, to_fp8: bool = True
):
    sizes = launcher.choose_sizes(spec)
    box = min(spec.block_size or spec.block_n, spec.block_n)
    packed = 2 if spec.codes == "int4" else 1
    stored = TYPES.get(spec.codes, "bf16" if query == "fp8e4nv" else query)
    signature = {
        "output": Output(
            "*u8" if to_fp8 else "*bf16",
            "*fp32" if with_lse else "constexpr",
            "*fp32" if to_fp8 else "constexpr",
        ),
        "query": described(query, [launcher.STRIP, 1], spec.keys.columns),
        "keys": described(stored, [1, box, 1], spec.keys.columns // packed),
        "values": described(stored, [1, box, 1], spec.values.columns // packed),
        "row_scales": ("*fp32", "*fp32", "i32"),
        "plan": "*i32",
        "sinks": "*bf16",
        "batch": BATCH,
    }
    constants = {
        "SPEC": spec,
        "OUTPUT": OutputSpec(tl.bfloat16, False, spec.values.width),
        "STAGES": sizes.stages,
        "GROUPS": sizes.groups,
        "REGISTERS": sizes.registers,
    }
    if not spec.has_row_scales:
        del signature["row_scales"]
        constants["row_scales"] = None
    if spec.has_inline_scales:
        del signature["keys"], signature["values"]
        constants |= {"keys": None, "values": None}
    if not with_lse:
        constants[0, 1] = None
    if not to_fp8:
        constants[0, 2] = None
    divisible = [(0, 0), (5,), *([(0, 1)] if with_lse else [])]
    return compile_for(90, hopper_prefill_kernel, signature, constants, divisible, num_warps=4)


def machine_code(compiled, folder) -> list[str]:
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(file)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [m[1] for line in lines if (m := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", line))]


def excesses(code: list[str]) -> list[str]:
    """Instructions that use a register beyond the limit that is set before them.

    ptxas once placed the body of a role behind the instruction that ends another role's limit.
    """
    limit, found = 256, []
    for text in code:
        if m := re.search(r"USETMAXREG\S*\s+(?:UP\d, )?(0x[0-9a-f]+|\d+)", text):
            limit = int(m[1], 0)
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", text)]
        if max(registers, default=0) >= limit:
            found.append(f"{text} under a limit of {limit}")
    return found


@pytest.mark.parametrize("case", CASES)
def test_compiles_to_products_within_the_registers(case, tmp_path) -> None:
    code = machine_code(compile_kernel(make_spec(**CASES[case])), tmp_path)
    assert any("QGMMA" in text for text in code)
    assert any("UTMALDG.4D" in text for text in code)
    assert any("LDSM.16.MT88.4" in text for text in code)
    assert sum("USETMAXREG" in text for text in code) > 4
    assert not excesses(code)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_without_an_lse_the_tensor_cores_add_up_probabilities(width, tmp_path) -> None:
    spec = make_spec(widths=(width, width), block_size=16)
    code = machine_code(compile_kernel(spec, with_lse=False), tmp_path)
    assert any("QGMMA.64x8x32" in text for text in code)
    assert not excesses(code)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_an_output_of_16_bits_stays_within_the_registers(
    width, block_size, with_lse, tmp_path
) -> None:
    spec = make_spec(widths=(width, width), block_size=block_size)
    compiled = compile_kernel(spec, with_lse=with_lse, to_fp8=False)
    assert not excesses(machine_code(compiled, tmp_path))


@pytest.mark.parametrize(
    ("case", "query"),
    [*((case, "bf16") for case in NUMBERS), *((case, "fp16") for case in FP16_TO_FP8)],
)
def test_products_of_numbers_stay_within_the_registers(case, query, tmp_path) -> None:
    spec = make_spec(**NUMBERS[case], rounds_prob=False)
    if spec.codes is None and query == "fp16":
        spec = replace(spec, compute=tl.float16)
    assert_multiplies_numbers(spec, query, tmp_path, to_fp8=query == "fp16")


@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized_queries_of_unquantized_probabilities(case, tmp_path) -> None:
    spec = make_spec(**QUANTIZED[case], rounds_prob=False)
    assert_multiplies_numbers(spec, "fp8e4nv", tmp_path, to_fp8=case == "numbers")


@pytest.mark.parametrize("case", INLINE)
def test_rows_with_their_scales_behind_them_are_copied(case, tmp_path) -> None:
    spec = make_spec(**INLINE[case], block_size=16, has_row_scales=True, rounds_prob=False)
    assert_multiplies_numbers(spec, "bf16", tmp_path, to_fp8=False, loads="LDGSTS")


def assert_multiplies_numbers(
    spec: Spec, query: str, tmp_path, *, to_fp8: bool, loads: str = "UTMALDG.4D"
) -> None:
    compiled = compile_kernel(spec, query, with_lse=not to_fp8, to_fp8=to_fp8)
    code = machine_code(compiled, tmp_path)
    assert any("HGMMA" in text for text in code)
    assert any(loads in text for text in code)
    assert sum("USETMAXREG" in text for text in code) > 4
    assert not excesses(code)


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a == 90])
@pytest.mark.parametrize("block_size", [None, 16])
def test_the_plan_compiles(architecture, block_size) -> None:
    spec = make_spec(block_size=block_size)
    signature = {
        "plan": "*i32",
        "scales": Scales(*[Scale("*fp32", "i32")] * 4),
        "cu_seqlens_q": "*i32",
        "keys": "*i32",
        "softmax_scale": "fp32",
        **dict.fromkeys(("decode_limit", "max_keys", "num_seqs", "num_tokens", "num_slots"), "i32"),
    }
    constants = {
        "GROUPS": 3,
        "SPARE": 3,
        "HEADROOM": 8.0,
        "HEAD_COUNT": 8,
        "SPEC": spec,
        "SLOTS": launcher.SLOTS,
    }
    kernel = hopper_prefill_plan_kernel
    compiled = compile_for(architecture, kernel, signature, constants, [(0,)], num_warps=8)
    assert "atom.global.gpu.relaxed.add.u32" in compiled.asm["ptx"]


@pytest.mark.parametrize("group_size", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("groups", [2, 3, 4])
def test_a_sequence_has_room_for_its_entries(group_size, groups) -> None:
    rows = launcher.STRIP
    spare = entries_of_a_sequence(group_size, rows, groups)
    for start in range(0, 200, 7):
        for tokens in range(400):
            slots = [n * group_size // (rows * groups) for n in (start, start + tokens)]
            needed = -(-group_size * -(-tokens // rows) // groups)
            assert needed <= slots[1] - slots[0] + spare
    assert most_entries(600, 1, group_size, rows, groups) >= 600 * group_size // (rows * groups) + 2


def make_call(block_size: int | None = 16) -> AttentionCall | PackedCall:
    numbers = torch.zeros(2, dtype=torch.int32)
    shared = {
        "query": torch.zeros(9, 32, 128).to(E4M3),
        "cu_seqlens_q": numbers,
        "max_seqlen_q": 9,
        "k_scale": torch.ones(()),
        "v_scale": torch.ones(()),
        "q_scale": torch.ones(()),
        "prob_scale": torch.ones(()),
        "softmax_scale": 0.1,
        "causal": True,
        "sliding_window": None,
        "logits_soft_cap": None,
        "sinks": None,
        "out_scale": None,
        "round_through": False,
        "out_dtype": torch.bfloat16,
        "return_lse": True,
    }
    if block_size is None:
        key, value = torch.zeros(2, 20, 8, 128).to(E4M3)
        return PackedCall(**shared, key=key, value=value, cu_seqlens_k=numbers)
    layout = PageLayout(8, 128, 128, "NHD", parse_kv_cache_dtype("fp8_e4m3"))
    pages = torch.zeros(1, layout.page_size(block_size)).to(E4M3)
    where = {"kv_cache": pages, "layout": layout, "seq_lens": numbers[:1]}
    return AttentionCall(**shared, **where, block_table=numbers[None, :1])


REFUSALS = [
    ({"query": torch.zeros(9, 32, 128)}, "query of torch.float32"),
    ({"query": torch.zeros(9, 32, 128).half()}, "query of torch.float16"),
    ({"softmax_scale": -0.1}, "softmax_scale"),
    ({"query": torch.zeros(9, 32, 80).to(E4M3)}, "head_dim"),
    ({"query": torch.zeros(9, 32, 136).to(E4M3)[:, :, 1:129]}, "query: expected rows at multiples"),
    ({"query": torch.zeros(0, 32, 128).to(E4M3)}, "at least one token"),
    ({"block_table": torch.zeros(1, 0, dtype=torch.int32)}, "at least one block"),
    ({"kv_cache": torch.zeros(1, 8 * 2048).to(E4M3)}, "block_size 8"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSALS, ids=lambda x: x if x is str else "")
def test_what_cannot_be_served_is_named(changes, reason, monkeypatch) -> None:
    call = make_call()
    assert "device cpu" in launcher.unsupported(call)
    monkeypatch.setattr(launcher, "is_hopper", lambda device: True)
    assert launcher.unsupported(call) is None
    assert launcher.unsupported(replace(call, prob_scale=None)) is None
    assert reason in launcher.unsupported(replace(call, **changes))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("query", [torch.bfloat16, torch.float16, E4M3], ids=str)
@pytest.mark.parametrize("name", ["auto", "fp8_e4m3", "fp8_e5m2", *FORMATS])
def test_pages_of_every_format_are_served(name, query, placement, monkeypatch) -> None:
    monkeypatch.setattr(launcher, "is_hopper", lambda device: True)
    layout = PageLayout(3, 96, 64, "HND", parse_kv_cache_dtype(name), placement)
    storage = layout.format.storage_dtype or (torch.bfloat16 if query == E4M3 else query)
    pages = torch.zeros(2, layout.page_size(16), dtype=storage)
    changes = {"query": torch.zeros(9, 6, 96).to(query), "prob_scale": None}
    call = replace(make_call(), kv_cache=pages, layout=layout, **changes)
    assert launcher.unsupported(call) is None


def test_rows_that_cannot_be_served_are_named(monkeypatch) -> None:
    monkeypatch.setattr(launcher, "is_hopper", lambda device: True)
    call = make_call(None)
    assert launcher.unsupported(call) is None
    assert "at least one" in launcher.unsupported(replace(call, key=call.key[:0]))
    apart = torch.zeros(20, 8, 136).to(E4M3)[:, :, :128]
    assert launcher.unsupported(replace(call, key=apart)).startswith("key: expected rows")
