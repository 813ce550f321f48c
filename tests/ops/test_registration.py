"""The operations as torch sees them: schemas, fakes, compilation, no Triton before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from quantattn import ops
from quantattn.ops import _library
from quantattn.ops.support import DEVICES, support_table
from quantattn.testing import make_batch

SCALES = [torch.tensor(0.03), torch.tensor([0.03])]
SCALE_IDS = ["scale []", "scale [1]"]


def check(name: str, *arguments) -> None:
    # opcheck compares inputs before and after with arithmetic that torch lacks for FP8, so pages
    # are given as bytes.
    results = torch.library.opcheck(getattr(torch.ops.quantattn, name).default, arguments)
    assert set(results.values()) == {"SUCCESS"}


SCHEMAS = {
    schema.name.removeprefix("quantattn::"): schema
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("quantattn::")
}


def test_pages_are_all_that_an_operation_writes_into() -> None:
    written = {
        name: [
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for name, schema in SCHEMAS.items()
    }
    writers = {"write_kv", "write_latent", "rope_write_kv"}
    assert written.keys() >= writers | {"static_quant_fp8", "paged_attention", "mla_attention"}
    assert {name for name, arguments in written.items() if arguments} == writers
    assert all(written[name] == ["kv_cache"] for name in writers)


def one_call_of_each() -> dict[str, tuple]:
    """Arguments of one call of every operation, scales all different."""
    q_scale, k_scale, v_scale, out_scale = torch.tensor([0.02, 0.03, 0.05, 0.07]).unbind()
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 24, "kv_cache_dtype": "fp8"}
    batch = make_batch([1, 3], [5, 3], **shape, k_scale=k_scale, v_scale=v_scale)
    meta, pages = batch.metadata, batch.pages.view(torch.uint8)
    index = (meta.cu_seqlens_q, meta.seq_lens, meta.block_table, meta.max_seqlen_q)
    key, value = torch.randn(2, 4, 2, 24).bfloat16()
    out, lse = torch.randn(2, 4, 6, 24).bfloat16(), torch.randn(2, 4, 6)
    fp8, scores = ("fp8_e4m3", "NHD", "page"), (0.3, True, None, None, None)
    tail = (out_scale, True, torch.bfloat16, True)
    latents = torch.randint(100, (3, 16 * 24 + 8), dtype=torch.uint8)[:, :-8]
    return {
        "static_quant_fp8": (batch.query, out_scale, torch.float8_e4m3fn),
        "dynamic_quant_fp8": (batch.query, "token_head", torch.float8_e4m3fn),
        "write_kv": (key, value, pages, meta.slot_mapping, k_scale, v_scale, *fp8),
        "write_latent": (key[:, 0], latents, meta.slot_mapping, k_scale, "fp8_e4m3"),
        "rope_write_kv": (
            *(batch.query, key, value, pages, meta.slot_mapping, k_scale, v_scale, *fp8),
            *(meta.slot_mapping % 16, torch.randn(16, 24), False, q_scale),
        ),
        "paged_attention": (
            *(batch.query, pages, *index, 2, 24, *fp8, k_scale, v_scale, None, None),
            *(*scores, *tail),
        ),
        "mla_attention": (batch.query, latents, *index, 16, "fp8_e4m3", k_scale, None, 0.3, *tail),
        "varlen_attention": (
            *(batch.query, key, value, meta.cu_seqlens_q, meta.cu_seqlens_q, 3, 3),
            *(None, None, None, None, *scores, *tail),
        ),
        "merge_attention_states": (out[0], lse[0], out[1], lse[1], *tail),
    }


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_operation_passes_opcheck(name, device) -> None:
    """Names come from torch: a new operation fails until it has a call above."""
    arguments = one_call_of_each()[name]
    check(name, *(x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments))


@pytest.mark.parametrize("scale", [*SCALES, torch.tensor([0.03, 0.5])], ids=[*SCALE_IDS, "[2]"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_static_quant_fp8_passes_opcheck(scale, strided, rows, dtype) -> None:
    x = torch.randn(rows, 4, 12)[:, ::2] if strided else torch.randn(rows, 2, 12)
    check("static_quant_fp8", x, scale, dtype)


@pytest.mark.parametrize("scale", SCALES, ids=SCALE_IDS)
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_writes_pass_opcheck(scale, rows, kv_cache_dtype, order) -> None:
    stored = torch.float16 if kv_cache_dtype == "auto" else torch.uint8
    slots = torch.tensor([5, -1, 2])[:rows]
    pages = torch.zeros(3, 4 * 2 * 10 + 6).to(stored)[:, :-6]
    key, value = torch.randn(rows, 2, 12)[..., ::2], torch.randn(rows, 2, 4)
    check("write_kv", key, value, pages, slots, scale, scale, kv_cache_dtype, order, "page")
    pages = torch.zeros(3, 4 * 12 + 6).to(stored)[:, :-6]
    check("write_latent", torch.randn(rows, 12), pages, slots, scale, kv_cache_dtype)


@pytest.mark.parametrize("scale", SCALES, ids=SCALE_IDS)
@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("out_scale", [None, *SCALES], ids=["plain", *SCALE_IDS])
@pytest.mark.parametrize("return_lse", [False, True])
def test_attention_passes_opcheck(scale, rows, out_scale, return_lse) -> None:
    lens = ([1, 3], [5, 3]) if rows else ([], [])
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    batch = make_batch(*lens, **shape, kv_cache_dtype="fp8", k_scale=scale, v_scale=scale)
    meta, pages = batch.metadata, batch.pages.view(torch.uint8)
    index = (meta.cu_seqlens_q, meta.seq_lens, meta.block_table, meta.max_seqlen_q)
    tail = (out_scale, False, torch.bfloat16, return_lse)
    query = batch.query.repeat(1, 1, 2)[..., :8]
    scores = (0.3, True, None, None, None)
    layout = ("fp8_e4m3", "NHD", "page", scale, scale, None, None)
    check("paged_attention", query, pages, *index, 2, 8, *layout, *scores, *tail)
    mla = ("fp8_e4m3", scale, None, 0.3)
    check("mla_attention", query, pages[:, :256], *index, 6, *mla, *tail)


@pytest.mark.parametrize(
    "name", ["fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"]
)
@pytest.mark.parametrize("placement", ["page", "inline"])
@pytest.mark.parametrize("rows", [0, 4])
def test_formats_per_token_and_head_pass_opcheck(name, placement, rows) -> None:
    lens = ([1, 3], [5, 3]) if rows else ([], [])
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    batch = make_batch(*lens, **shape, kv_cache_dtype=name, scale_placement=placement)
    meta, pages = batch.metadata, batch.pages
    key, value = torch.randn(2, rows, 2, 16)[..., ::2]
    check("write_kv", key, value, pages, meta.slot_mapping, None, None, name, "NHD", placement)
    index = (meta.cu_seqlens_q, meta.seq_lens, meta.block_table, meta.max_seqlen_q)
    scores = (0.3, True, None, None, None)
    layout = (name, "NHD", placement, None, None, None, None)
    tail = (torch.tensor(0.03), False, torch.bfloat16, True)
    check("paged_attention", batch.query, pages, *index, 2, 8, *layout, *scores, *tail)


@pytest.mark.parametrize(
    "name", ["fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"]
)
def test_formats_per_token_and_head_compile_without_graph_breaks(name) -> None:
    def layer(query, key, value, pages, meta):
        arguments = {"kv_cache_dtype": name, "scale_placement": "inline", "layout": "HND"}
        ops.write_kv(key, value, pages, meta.slot_mapping, k_scale=None, v_scale=None, **arguments)
        return ops.paged_attention(
            query,
            pages,
            cu_seqlens_q=meta.cu_seqlens_q,
            seq_lens=meta.seq_lens,
            block_table=meta.block_table,
            max_seqlen_q=meta.max_seqlen_q,
            num_kv_heads=2,
            **arguments,
        )

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    for lens in (([1, 3], [5, 3]), ([2, 4, 1], [2, 40, 17])):
        batch = make_batch(
            *lens, **shape, kv_cache_dtype=name, scale_placement="inline", layout="HND"
        )
        key, value = torch.randn(2, sum(lens[0]), 2, 8).bfloat16().unbind(0)
        eager_pages, compiled_pages = batch.pages.clone(), batch.pages.clone()
        eager = layer(batch.query, key, value, eager_pages, batch.metadata)
        actual = compiled(batch.query, key, value, compiled_pages, batch.metadata)
        assert torch.equal(actual, eager)
        assert torch.equal(compiled_pages, eager_pages)


def test_all_operations_compile_without_graph_breaks() -> None:
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    k_scale, v_scale, out_scale = torch.tensor(0.03), torch.tensor(0.05), torch.tensor(0.01)

    def layer(query, key, value, pages, meta):
        ops.write_kv(
            key,
            value,
            pages,
            meta.slot_mapping,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_cache_dtype="fp8",
        )
        out, lse = ops.paged_attention(
            query,
            pages,
            cu_seqlens_q=meta.cu_seqlens_q,
            seq_lens=meta.seq_lens,
            block_table=meta.block_table,
            max_seqlen_q=meta.max_seqlen_q,
            num_kv_heads=2,
            kv_cache_dtype="fp8",
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=True,
        )
        return ops.static_quant_fp8(out, out_scale).view(torch.uint8), lse

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for lens in (([1, 3], [5, 3]), ([2, 4, 1], [2, 40, 17])):
        batch = make_batch(*lens, **shape, kv_cache_dtype="fp8", k_scale=k_scale, v_scale=v_scale)
        key, value = torch.randn(2, sum(lens[0]), 2, 8).bfloat16().unbind(0)
        eager_pages, compiled_pages = batch.pages.clone(), batch.pages.clone()
        eager = layer(batch.query, key, value, eager_pages, batch.metadata)
        actual = compiled(batch.query, key, value, compiled_pages, batch.metadata)
        assert all(torch.equal(a, b) for a, b in zip(actual, eager, strict=True))
        assert torch.equal(compiled_pages.view(torch.uint8), eager_pages.view(torch.uint8))


def test_latent_operations_compile_without_graph_breaks() -> None:
    scale = torch.tensor(0.03)

    def layer(query, latent, pages, slots, index, table):
        ops.write_latent(latent, pages, slots, scale=scale, kv_cache_dtype="fp8")
        return ops.mla_attention(
            query,
            pages,
            cu_seqlens_q=index,
            seq_lens=index[1:],
            block_table=table,
            max_seqlen_q=2,
            latent_dim=4,
            rope_dim=2,
            kv_cache_dtype="fp8",
            scale=scale,
            softmax_scale=0.4,
        )

    arguments = (
        torch.randn(2, 3, 6),
        torch.randn(2, 6),
        torch.zeros(2, 24, dtype=torch.float8_e4m3fn),
        torch.tensor([4, 5]),
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([[1]], dtype=torch.int32),
    )
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), layer(*arguments))


def test_a_wrong_device_is_named_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="scale is on meta, but the call's first tensor is on cpu"):
        ops.static_quant_fp8(torch.randn(2, 2), torch.tensor(0.5, device="meta"))


def test_importing_and_running_on_the_cpu_imports_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, quantattn.ops as ops\n"
        "ops.static_quant_fp8(torch.ones(2, 2), torch.tensor(0.5))\n"
        "assert not any(name.startswith('quantattn.kernels') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_support_table_covers_every_operation_format_and_device() -> None:
    table = support_table()
    assert {row.operation for row in table} == set(ops.__all__)
    cells = {(row.operation, row.kv_cache_dtype, row.device) for row in table}
    assert len(cells) == len(table) == (5 * 6 + 4) * len(DEVICES)
    assert all((row.runs is None) != (row.reason is None) for row in table)


@pytest.mark.parametrize("device", [d for d in DEVICES if d != "cpu"])
def test_the_support_table_says_what_the_launcher_does(device, monkeypatch) -> None:
    from quantattn.kernels import _tiles

    number = int(device.removeprefix("sm_"))
    capability = (number // 10, number % 10)
    monkeypatch.setattr(_tiles, "capability", lambda _: capability)
    (row,) = (
        r for r in support_table() if r.operation == "static_quant_fp8" and r.device == device
    )
    native = _tiles.is_native(torch.device("cuda", 0))
    assert row.runs == f"triton static_quant_fp8 ({'native' if native else 'software fp8'})"


@pytest.mark.parametrize(
    ("device", "runs"),
    [("sm_75", "reference (plain torch)"), ("sm_80", "triton varlen_attention (software fp8)")],
)
def test_plain_torch_attends_where_triton_multiplies_no_tiles(device, runs, monkeypatch) -> None:
    number = int(device.removeprefix("sm_"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(number, 10))
    _library._multiplies.cache_clear()
    run = _library.by_capability(lambda x: "triton", lambda x: "reference")
    try:
        ran = run(torch.empty(0))
    finally:
        _library._multiplies.cache_clear()
    rows = [r for r in support_table() if r.device == device]
    (row,) = (r for r in rows if r.operation == "varlen_attention")
    assert row.runs == runs
    assert ran == runs.split()[0]
    of_torch = {r.operation for r in rows if r.runs is not None and "torch" in r.runs}
    attending = {"mla_attention", "paged_attention", "varlen_attention"}
    assert of_torch == (attending if device == "sm_75" else set())


@pytest.mark.parametrize("operation", ["mla_attention", "write_latent"])
def test_a_format_that_is_not_served_says_why(operation) -> None:
    (row,) = (
        r
        for r in support_table()
        if (r.operation, r.kv_cache_dtype, r.device) == (operation, "int8_per_token_head", "sm_90")
    )
    assert row.runs is None
    assert "no scales in its pages" in row.reason


@pytest.mark.parametrize("operation", ["paged_attention", "rope_write_kv", "write_kv"])
def test_formats_per_token_and_head_run_on_every_device(operation) -> None:
    rows = [r for r in support_table() if r.operation == operation]
    served = [r for r in rows if "per_token_head" in r.kv_cache_dtype]
    assert len(served) == 3 * len(DEVICES)
    assert all(r.runs is not None for r in served)


@pytest.mark.parametrize(
    ("device", "kernel"), [("sm_90", "gluon decode and prefill, triton"), ("sm_89", "triton")]
)
def test_the_support_table_names_the_kernels_for_hopper(device, kernel) -> None:
    rows = [r for r in support_table() if r.operation == "paged_attention" and r.device == device]
    assert len(rows) == 6
    assert all(row.runs.startswith(f"{kernel} paged_attention") for row in rows)
