"""Others' attention beside ours; each function gives None where its library cannot be imported."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
Attend = Callable[[], object]
AttendTable = Callable[[Tensor], object]


@dataclass(frozen=True)
class Inputs:
    """Causal attention; keys and values as rows `[keys, heads, width]`, or in blocks of them.

    Attributes:
        starts: Prefix sums of the query lengths.
        longest: Longest query and most keys of a sequence.
        lengths: Keys of each sequence, where there are blocks.
        key_starts: Prefix sums of them, where there are none.
        scale: Of queries, keys and values that are FP8; None: they are not.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    starts: Tensor
    longest: tuple[int, int]
    lengths: Tensor | None = None
    key_starts: Tensor | None = None
    scale: Tensor | None = None

    @property
    def softmax_scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    @property
    def head_scales(self) -> Tensor | None:
        """The scale for each sequence and KV head."""
        if self.scale is None:
            return None
        return self.scale.expand(len(self.starts) - 1, self.key.shape[-2])


def flash_attention(inputs: Inputs) -> Callable[..., object] | None:
    """FlashAttention-3, vLLM's build, with a query of the keys' dtype; takes a table of blocks."""
    _module("vllm.vllm_flash_attn._vllm_fa3_C")
    kernel = getattr(torch.ops._vllm_fa3_C, "fwd", None)
    if kernel is None:
        return None
    query, out = inputs.query.to(inputs.key.dtype), _output(inputs)
    rows = (query, inputs.key, inputs.value, None, None, None, out)
    batch = (inputs.starts, inputs.key_starts, None, None, inputs.lengths, *inputs.longest)
    scales = (None, None, None, None, None, *[inputs.head_scales] * 3, inputs.softmax_scale)
    options = (True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None)
    return lambda table=None: kernel(*rows, *batch, table, *scales, *options)


def vllm_triton(
    inputs: Inputs, mode: str = "", row_scales: tuple[Tensor, Tensor] | None = None
) -> AttendTable | None:
    """vLLM's Triton kernel; a mode of it for pages with a scale for each token and head."""
    library = _module("vllm.v1.attention.ops.triton_unified_attention")
    if library is None:
        return None
    modes = _module("vllm.v1.kv_cache_interface").KVQuantMode
    num_heads, width = inputs.query.shape[1:]
    segments, most = 16, 128 // inputs.key.shape[-2]
    shape = (most, num_heads, segments)
    partial = [torch.empty(*shape, *x, device="cuda") for x in ((width,), (), ())]
    scales = dict(zip(("k_scale_cache", "v_scale_cache"), row_scales or (None, None), strict=True))
    query_scale = inputs.scale if inputs.query.dtype == FP8 else None
    layer_scale = None if row_scales else inputs.head_scales
    rows = (inputs.query, inputs.key, inputs.value, _output(inputs))
    batch = (inputs.starts, inputs.longest[0], inputs.lengths, inputs.longest[1])
    name = mode.upper() or ("NONE" if inputs.scale is None else "FP8_PER_TENSOR")
    return lambda table: library.unified_attention(
        *(*rows, *batch, inputs.softmax_scale, True, (-1, -1), table, 0),
        *(query_scale, layer_scale, layer_scale, most, segments, *partial),
        kv_quant_mode=modes[name],
        **scales,
    )


def flashinfer_decode(inputs: Inputs, tables: list[Tensor]) -> Attend | None:
    """FlashInfer, planned for each table of blocks beforehand; keys of whole blocks only."""
    library = _module("flashinfer")
    if library is None:
        return None
    (num_heads, width), heads = inputs.query.shape[1:], inputs.key.shape[-2]
    out, block_size = _output(inputs), inputs.key.shape[1]
    wrappers = []
    for table in tables:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(), "NHD", use_tensor_cores=True
        )
        ends = torch.arange(len(table) + 1, dtype=torch.int32, device="cuda") * table.shape[1]
        last = torch.full_like(ends[1:], block_size)
        wrapper.plan(
            *(ends, table.flatten(), last, num_heads, heads, width, block_size),
            q_data_type=inputs.query.dtype,
            kv_data_type=inputs.key.dtype,
        )
        wrappers.append(wrapper)
    pages = (inputs.key, inputs.value)

    def run() -> None:
        for wrapper in wrappers:
            wrapper.run(inputs.query, pages, out=out, k_scale=0.7, v_scale=0.7)

    return run


def cudnn_16_bit(inputs: Inputs) -> Attend:
    """cuDNN as torch calls it, for sequences of one length, whose keys are their queries' own."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, attend = len(inputs.starts) - 1, torch.nn.functional.scaled_dot_product_attention
    tensors = (inputs.query, inputs.key, inputs.value)
    rows = [x.unflatten(0, (batch, -1)).transpose(1, 2) for x in tensors]

    def run() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attend(*rows, is_causal=True, enable_gqa=True)

    return run


def cudnn_fp8(inputs: Inputs) -> Attend | None:
    """cuDNN with FP8 probabilities and output, as `cudnn_16_bit`; None also for widths it lacks."""
    library = _module("cudnn")
    if library is None:
        return None
    batch, length = len(inputs.starts) - 1, inputs.longest[1]
    e4m3, number = library.data_type.FP8_E4M3, library.data_type.FLOAT
    handle = library.create_handle()
    graph = library.pygraph(
        io_data_type=e4m3, intermediate_data_type=number, compute_data_type=number, handle=handle
    )

    def layout(rows: Tensor) -> dict[str, list[int]]:
        heads, width = rows.shape[1:]
        stride = [length * heads * width, width, heads * width, 1]
        return {"dim": [batch, heads, length, width], "stride": stride}

    single = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1]}
    tensors = {"q": inputs.query, "k": inputs.key, "v": inputs.value}
    rows = {n: graph.tensor(name=n, data_type=e4m3, **layout(x)) for n, x in tensors.items()}
    names = [*(f"descale_{x}" for x in "qkvs"), "scale_s", "scale_o"]
    scales = {n: graph.tensor(name=n, data_type=number, **single) for n in names}
    options = {"is_inference": True, "attn_scale": inputs.softmax_scale, "use_causal_mask": True}
    out, _, *largest = graph.sdpa_fp8(**rows, **scales, **options)
    _place(out, e4m3, **layout(inputs.query))
    for x in largest:
        _place(x, number, **single)
    try:
        graph.build([library.heur_mode.A, library.heur_mode.FALLBACK])
    except library.cudnnGraphNotSupportedError:
        return None
    workspace = torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)
    values = {rows[n]: x for n, x in tensors.items()} | {out: torch.empty_like(inputs.query)}
    values |= {
        x: torch.full((1, 1, 1, 1), 0.7, device="cuda") for x in [*scales.values(), *largest]
    }

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        library.set_stream(handle=handle, stream=stream)
        graph.execute(values, workspace, handle=handle)

    return run


def _place(tensor, dtype, dim: list[int], stride: list[int]) -> None:
    tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(dtype)


def _output(inputs: Inputs) -> Tensor:
    shape = (*inputs.query.shape[:2], inputs.value.shape[-1])
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


@cache
def _workspace() -> Tensor:
    return torch.empty(512 << 20, dtype=torch.uint8, device="cuda")


def _module(name: str) -> ModuleType | None:
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    return None
