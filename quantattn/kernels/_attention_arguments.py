"""From tensors to what the attention kernels take: pointers, strides and what they compile for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from quantattn.formats import CacheFormat, format_of_numbers
from quantattn.kernels._attend_rows import Batch, Output, OutputSpec, Query, Scale, Scales
from quantattn.kernels._attend_spec import Side, SideSpec, Spec
from quantattn.kernels._attention_call import AttentionCall, Call, LatentCall, PackedCall
from quantattn.kernels._devices import is_hopper
from quantattn.kernels._tiles import is_native
from quantattn.layout import PageLayout

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


SPECS = 1024
"""Specs that are kept: Triton looks a kernel up faster by the same spec than by an equal one."""


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
        return is_hopper(self.query.numbers.device)

    def spec_for(self, block_m: int, block_n: int) -> Spec:
        """The spec of a kernel with tiles of this size."""
        return _spec_for(self.spec, block_m, block_n)


@lru_cache(maxsize=SPECS)
def _spec_for(spec: Spec, block_m: int, block_n: int) -> Spec:
    return replace(spec, block_m=block_m, block_n=block_n)


def paged_arguments(call: AttentionCall, out: Tensor, lse: Tensor) -> Arguments:
    """Gather the arguments for attention over pages."""
    fmt = call.layout.format
    pages = call.kv_cache.view(torch.uint8) if fmt.is_quantized else call.kv_cache
    block_size, *places = _page_places(call.layout, pages.shape[1])
    words = pages.view(torch.float32) if fmt.has_page_scales else None
    keys, values = (_paged_side(pages, words, place) for place in places)
    batch = _paged_batch(call, pages, block_size)
    return _arguments(call, out, lse, keys, values, batch, fmt, block_size)


@dataclass(frozen=True)
class _Place:
    """Where in a page the first row of one side lies, and its first number, counted in float32."""

    start: int
    width: int
    number_start: int
    spec: SideSpec


@lru_cache(maxsize=SPECS)
def _page_places(layout: PageLayout, page_size: int) -> tuple[int, _Place, _Place]:
    """Tokens a page, and the places of K and V."""
    fmt = layout.format
    page = torch.empty(1, page_size, dtype=fmt.storage_dtype or torch.uint8, device="meta")
    numbers, widths = layout.scale_views(page) or (None, None), (layout.head_dim, layout.head_dim_v)
    views = zip((layout.key_view(page), layout.value_view(page)), numbers, strict=True)
    keys, values = (
        _Place(
            int(rows.storage_offset()),
            rows.shape[3],
            0 if row_numbers is None else int(row_numbers.storage_offset()),
            _side_spec(rows, row_numbers, width),
        )
        for (rows, row_numbers), width in zip(views, widths, strict=True)
    )
    return layout.block_size(page), keys, values


def _paged_side(pages: Tensor, words: Tensor | None, place: _Place) -> tuple[Side, SideSpec]:
    codes = pages.narrow(1, place.start, place.width)
    if words is None:
        return Side(codes, pages.stride(0), None, 0), place.spec
    numbers = words.narrow(1, place.number_start, 1)
    return Side(codes, pages.stride(0), numbers, words.stride(0)), place.spec


def latent_arguments(call: LatentCall, out: Tensor, lse: Tensor) -> Arguments:
    """Gather the arguments for attention over pages of latent rows."""
    fmt, latent_dim = call.layout.format, call.latent_dim
    pages = call.kv_cache.view(torch.uint8) if fmt.is_quantized else call.kv_cache
    rows = call.layout.key_view(pages).expand(-1, -1, call.num_kv_heads, -1)
    side = _side(rows, latent_dim)
    block_size = call.layout.block_size(pages)
    batch = _paged_batch(call, pages, block_size)
    arguments = _arguments(call, out, lse, side, side, batch, fmt, block_size)
    rope_dim = rows.shape[3] - latent_dim
    rope = replace(side[1], width=rope_dim, first=latent_dim) if rope_dim > 0 else None
    compute = TRITON_DTYPES[call.product_dtype]
    return replace(arguments, spec=replace(arguments.spec, rope=rope, compute=compute))


def packed_arguments(call: PackedCall, out: Tensor, lse: Tensor) -> Arguments:
    """Gather the arguments for attention over keys and values that lie one after another."""
    fmt = format_of_numbers(call.key.dtype)
    key, value = (_packed_rows(t, fmt) for t in (call.key, call.value))
    keys, values = (_side(t[:, None], t.shape[2]) for t in (key, value))
    ends = call.cu_seqlens_q.contiguous(), call.cu_seqlens_k.contiguous()
    batch = Batch(*ends, None, 0, 0, call.num_seqs, len(call.query))
    return _arguments(call, out, lse, keys, values, batch, fmt, None)


def _paged_batch(call: AttentionCall | LatentCall, pages: Tensor, block_size: int) -> Batch:
    table = call.block_table.contiguous()
    max_keys = table.shape[1] * block_size if len(pages) > 0 else 0
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
        spec=_spec(
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
        ),
        output_spec=_output_spec(
            TRITON_DTYPES[call.out_dtype],
            call.round_through,
            _group_columns(call.out_scale, out.shape[1] * out.shape[2]),
        ),
    )


_spec = lru_cache(maxsize=SPECS)(Spec)
_output_spec = lru_cache(maxsize=SPECS)(OutputSpec)


def _packed_rows(rows: Tensor, fmt: CacheFormat) -> Tensor:
    """Rows `[keys, heads, width]` with unit stride; those of one key close together.

    Otherwise a stride would depend on the number of keys, and each number compile a kernel.
    """
    rows = rows.view(torch.uint8) if fmt.is_quantized else rows
    is_compact = rows.stride(2) == 1 and rows.stride(1) <= rows.stride(0)
    return rows if is_compact else rows.contiguous()


def _side(rows: Tensor, width: int) -> tuple[Side, SideSpec]:
    return Side(rows, rows.stride(0), None, 0), _side_spec(rows, None, width)


def _side_spec(rows: Tensor, numbers: Tensor | None, width: int) -> SideSpec:
    """Of rows `[blocks, tokens, heads, code_width]` and numbers `[blocks, tokens, heads(, 2)]`."""
    places = (0, 0, 0) if numbers is None else (*numbers.stride()[1:], 0)[:3]
    return SideSpec(width, rows.stride(1), rows.stride(2), *places)


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
