"""From tensors to what the attention kernels take: pointers, strides and what they compile for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton.language as tl
from torch import Tensor

from quantattn.formats import CacheFormat, format_of_numbers
from quantattn.kernels._attend_rows import Batch, Output, OutputSpec, Query, Scale, Scales
from quantattn.kernels._attend_spec import Side, SideSpec, Spec
from quantattn.kernels._attention_call import AttentionCall, Call, LatentCall, PackedCall
from quantattn.kernels._tiles import is_native

__all__ = ["Arguments", "TileSizes", "latent_arguments", "packed_arguments", "paged_arguments"]

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_CODES = {
    "auto": None,
    "fp8_e4m3": "e4m3",
    "fp8_e5m2": "e5m2",
    "fp8_per_token_head": "e4m3",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4",
}


@dataclass(frozen=True)
class TileSizes:
    """Query rows and keys of a tile, and how a program works on them."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Arguments:
    """Arguments that the attention kernels share; the names are those of the kernels."""

    output: Output
    query: Query
    keys: Side
    values: Side
    scales: Scales
    sinks: Tensor | None
    batch: Batch
    softmax_scale: float
    spec: Spec
    output_spec: OutputSpec

    @property
    def is_hopper(self) -> bool:
        """Whether the tensors are on a Hopper GPU."""
        device = self.query.numbers.device
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9

    def spec_for(self, sizes: TileSizes) -> Spec:
        """The spec of a kernel with these tile sizes."""
        return replace(self.spec, block_m=sizes.block_m, block_n=sizes.block_n)


def paged_arguments(call: AttentionCall, out: Tensor, lse: Tensor) -> Arguments:
    """Gather the arguments for attention over pages."""
    layout = call.layout
    fmt = layout.format
    pages = call.kv_cache.view(torch.uint8) if fmt.is_quantized else call.kv_cache
    key_numbers, value_numbers = layout.scale_views(pages) or (None, None)
    keys = _side(layout.key_view(pages), key_numbers, layout.head_dim)
    values = _side(layout.value_view(pages), value_numbers, layout.head_dim_v)
    batch = _paged_batch(call, pages)
    return _arguments(call, out, lse, keys, values, batch, fmt, layout.block_size(pages))


def latent_arguments(call: LatentCall, out: Tensor, lse: Tensor) -> Arguments:
    """Gather the arguments for attention over pages of latent rows."""
    fmt, latent_dim = call.layout.format, call.latent_dim
    pages = call.kv_cache.view(torch.uint8) if fmt.is_quantized else call.kv_cache
    rows = call.layout.key_view(pages).expand(-1, -1, call.num_kv_heads, -1)
    side = _side(rows, None, latent_dim)
    batch, block_size = _paged_batch(call, pages), call.layout.block_size(pages)
    arguments = _arguments(call, out, lse, side, side, batch, fmt, block_size)
    rope_dim = rows.shape[3] - latent_dim
    rope = replace(side[1], width=rope_dim, first=latent_dim) if rope_dim > 0 else None
    compute = TRITON_DTYPES[call.product_dtype]
    return replace(arguments, spec=replace(arguments.spec, rope=rope, compute=compute))


def packed_arguments(call: PackedCall, out: Tensor, lse: Tensor) -> Arguments:
    """Gather the arguments for attention over keys and values that lie one after another."""
    fmt = format_of_numbers(call.key.dtype)
    key, value = (_packed_rows(t, fmt) for t in (call.key, call.value))
    keys, values = (_side(t[:, None], None, t.shape[2]) for t in (key, value))
    ends = call.cu_seqlens_q.contiguous(), call.cu_seqlens_k.contiguous()
    batch = Batch(*ends, None, 0, 0, call.num_seqs, len(call.query))
    return _arguments(call, out, lse, keys, values, batch, fmt, None)


def _paged_batch(call: AttentionCall | LatentCall, pages: Tensor) -> Batch:
    table = call.block_table.contiguous()
    max_keys = table.shape[1] * call.layout.block_size(pages) if len(pages) > 0 else 0
    return Batch(
        call.cu_seqlens_q.contiguous(),
        call.seq_lens.contiguous(),
        table,
        table.stride(0),
        max_keys,
        call.num_seqs,
        len(call.query),
    )


def _arguments(
    call: Call,
    out: Tensor,
    lse: Tensor,
    keys: tuple[Side, SideSpec],
    values: tuple[Side, SideSpec],
    batch: Batch,
    fmt: CacheFormat,
    block_size: int | None,
) -> Arguments:
    return Arguments(
        output=_output(out, lse, call.out_scale),
        query=_query(call.query),
        keys=keys[0],
        values=values[0],
        scales=Scales(
            _scale(call.q_scale),
            _scale(call.k_scale if fmt.uses_layer_scales else None),
            _scale(call.v_scale if fmt.uses_layer_scales else None),
            _scale(call.prob_scale),
        ),
        sinks=None if call.sinks is None else call.sinks.contiguous(),
        batch=batch,
        softmax_scale=call.softmax_scale,
        spec=_spec(call, keys, values, fmt, block_size),
        output_spec=OutputSpec(
            TRITON_DTYPES[call.out_dtype],
            call.round_through,
            _group_columns(call.out_scale, out.shape[1] * out.shape[2]),
        ),
    )


def _spec(
    call: Call,
    keys: tuple[Side, SideSpec],
    values: tuple[Side, SideSpec],
    fmt: CacheFormat,
    block_size: int | None,
) -> Spec:
    return Spec(
        codes=_CODES[fmt.name],
        keys=keys[1],
        values=values[1],
        block_size=block_size,
        group_size=call.group_size,
        num_kv_heads=call.num_kv_heads,
        causal=call.causal,
        window=call.sliding_window,
        soft_cap=call.logits_soft_cap,
        rounds_prob=call.prob_scale is not None,
        compute=TRITON_DTYPES[_compute_dtype(call.query, keys[0].codes.dtype, fmt)],
        native=is_native(call.query.device),
        block_m=0,
        block_n=0,
    )


def _packed_rows(rows: Tensor, fmt: CacheFormat) -> Tensor:
    """Rows `[keys, heads, width]` with unit stride; those of one key close together.

    Otherwise a stride would depend on the number of keys, and each number compile a kernel.
    """
    rows = rows.view(torch.uint8) if fmt.is_quantized else rows
    is_compact = rows.stride(2) == 1 and rows.stride(1) <= rows.stride(0)
    return rows if is_compact else rows.contiguous()


def _side(rows: Tensor, numbers: Tensor | None, width: int) -> tuple[Side, SideSpec]:
    """Rows `[blocks, tokens, heads, code_width]` and numbers `[blocks, tokens, heads(, 2)]`."""
    places = (0, 0, 0, 0) if numbers is None else (*numbers.stride(), 0)[:4]
    side = Side(rows, rows.stride(0), numbers, places[0])
    return side, SideSpec(width, rows.stride(1), rows.stride(2), *places[1:])


def _query(query: Tensor) -> Query:
    query = query if query.stride(2) == 1 else query.contiguous()
    codes = query.view(torch.uint8) if query.dtype == torch.float8_e4m3fn else query
    return Query(codes, query.stride(0), query.stride(1))


def _scale(scale: Tensor | None) -> Scale:
    if scale is None:
        return Scale(None, 0)
    return Scale(scale, scale.stride(0) if scale.numel() > 1 else 0)


def _output(out: Tensor, lse: Tensor, scale: Tensor | None) -> Output:
    rows = out if scale is None else out.view(torch.uint8)
    return Output(
        rows, lse if lse.numel() > 0 else None, None if scale is None else scale.contiguous()
    )


def _group_columns(scale: Tensor | None, columns: int) -> int | None:
    return None if scale is None or scale.numel() == 1 else columns // scale.numel()


def _compute_dtype(query: Tensor, stored: torch.dtype, fmt: CacheFormat) -> torch.dtype:
    """The narrowest dtype that holds the query and the stored numbers, or codes, exactly.

    A bf16 query fits in float16 once a power of two is taken out of each row, see `load_query`.
    """
    if query.dtype != torch.float32 and fmt.is_quantized:
        return torch.float16
    fits = query.dtype in (stored, torch.float8_e4m3fn)
    # Triton's interpreter, which takes tensors of the CPU, multiplies bf16 as integers.
    is_interpreted = query.device.type == "cpu" and stored == torch.bfloat16
    return stored if fits and not is_interpreted else torch.float32
