"""FP8Linear: what it computes, and that nothing rounds its codes and scales."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from quantattn import ops
from quantattn.errors import FormatError
from quantattn.models import FP8Linear, fp8_linear
from quantattn.testing import assert_matches
from tests.models.oracle import round_e4m3

IN, OUT = 37, 11
FP8 = torch.float8_e4m3fn


def make(
    granularity: str, activation: str | None, *, bias: bool = True, width: int = IN, out: int = OUT
) -> FP8Linear:
    layer = FP8Linear(width, out, bias, weight_granularity=granularity, activation=activation)
    layer.weight.data = torch.randn(out, width).mul(30).to(FP8)
    scale = layer.weight_scale
    scale.data = torch.rand(scale.shape) * 0.01 + 0.003
    if layer.input_scale is not None:
        layer.input_scale.data = torch.tensor([0.0173])
    if layer.bias is not None:
        layer.bias.data = torch.randn(out)
    return layer


def expected(layer: FP8Linear, x: Tensor) -> Tensor:
    x = x.double()
    if layer.activation == "static":
        x = round_e4m3(x, layer.input_scale.double().item())
    elif layer.activation == "dynamic":
        rows = [round_e4m3(row, (row.abs().max().float() / 448).double().item()) for row in x]
        x = torch.stack(rows)
    weight = layer.weight.float().double() * layer.weight_scale.double()
    bias = 0.0 if layer.bias is None else layer.bias.double()
    return x @ weight.T + bias


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("activation", ["static", "dynamic", None])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_it_multiplies_what_the_codes_stand_for(
    granularity: str, activation: str | None, bias: bool
) -> None:
    layer = make(granularity, activation, bias=bias)
    x = torch.randn(5, IN)
    torch.testing.assert_close(layer(x).double(), expected(layer, x), rtol=1e-5, atol=1e-5)


def test_codes_that_the_attention_made_are_taken_as_they_are() -> None:
    layer = make("tensor", "static")
    x = torch.randn(5, IN, dtype=torch.bfloat16)
    codes = ops.static_quant_fp8(x, layer.input_scale)
    out = layer(codes, torch.bfloat16)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, layer(x))


def test_a_row_of_zeros_gives_the_bias() -> None:
    layer = make("channel", "dynamic")
    assert torch.equal(layer(torch.zeros(2, IN)), layer.bias.expand(2, OUT))


def test_inputs_beyond_the_range_saturate() -> None:
    layer = make("tensor", "static", bias=False)
    huge = torch.full((1, IN), 1e6)
    limit = torch.full((1, IN), 448 * 0.0173)
    torch.testing.assert_close(layer(huge), layer(limit))


@pytest.mark.parametrize(
    "cast",
    [nn.Module.half, nn.Module.bfloat16, nn.Module.double, lambda m: m.to(torch.bfloat16)],
    ids=["half", "bfloat16", "double", "to"],
)
def test_casts_leave_codes_and_scales_alone(cast) -> None:
    layer = make("channel", "static")
    before = copy.deepcopy(layer)
    cast(layer)
    for name in ("weight", "weight_scale", "input_scale"):
        kept, original = getattr(layer, name), getattr(before, name)
        assert kept.dtype is original.dtype, name
        assert torch.equal(kept.view(torch.uint8), original.view(torch.uint8)), name
    assert layer.bias.dtype is not torch.float32


def test_a_meta_layer_takes_the_dtype_of_each_tensor_to_the_device() -> None:
    with torch.device("meta"):
        layer = FP8Linear(IN, OUT, weight_granularity="channel", activation="static")
    layer.to(torch.bfloat16).to_empty(device="cpu")
    assert layer.weight.dtype is FP8
    assert layer.weight_scale.dtype is layer.input_scale.dtype is torch.float32
    assert layer.weight.device.type == layer.weight_scale.device.type == "cpu"


def test_the_state_dict_holds_the_names_of_checkpoints() -> None:
    layer = make("tensor", "static")
    assert set(layer.state_dict()) == {"weight", "weight_scale", "input_scale", "bias"}
    assert set(make("tensor", "dynamic", bias=False).state_dict()) == {"weight", "weight_scale"}


@pytest.mark.parametrize("activation", ["dynamic", None])
def test_codes_need_a_static_scale(activation: str | None) -> None:
    with pytest.raises(FormatError, match="input: got e4m3 codes"):
        make("tensor", activation)(torch.zeros(1, IN).to(FP8), torch.float32)


def test_codes_need_the_dtype_of_the_result() -> None:
    with pytest.raises(FormatError, match="out_dtype None"):
        make("tensor", "static")(torch.zeros(1, IN).to(FP8))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"weight_granularity": "block", "activation": None}, "weight_granularity: got 'block'"),
        ({"weight_granularity": "tensor", "activation": "token"}, "activation: got 'token'"),
    ],
)
def test_unknown_kinds_are_named(arguments: dict, named: str) -> None:
    with pytest.raises(FormatError, match=named):
        FP8Linear(IN, OUT, **arguments)


def test_it_compiles_without_a_break() -> None:
    layer = make("channel", "static")
    x = torch.randn(5, IN)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), layer(x))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def products_of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of sm_89, also on the CPU, where torch multiplies codes too."""
    monkeypatch.setattr(fp8_linear, "_has_fp8_products", lambda device: True)


@pytest.mark.usefixtures("products_of_codes")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("activation", ["static", "dynamic"])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_products_of_codes_are_as_exact(granularity, activation, bias, dtype, device) -> None:
    layer = make(granularity, activation, bias=bias, width=528, out=48)
    x = torch.randn(2, 3, 528).to(dtype)
    right = torch.stack([expected(layer, rows) for rows in x])
    out = layer.to(device)(x.to(device))
    assert (out.dtype, out.shape) == (dtype, (2, 3, 48))
    # One rounding to the dtype; tensor cores keep 13 bits of a sum's largest term.
    assert_matches(out, right, rel_l2=torch.finfo(dtype).eps / 2 + 2**-11)


@pytest.mark.usefixtures("products_of_codes")
@pytest.mark.parametrize("device", DEVICES)
def test_products_of_codes_of_the_attention_and_of_no_rows(device) -> None:
    layer = make("tensor", "static", bias=False, width=64, out=16).to(device)
    x = torch.randn(5, 64, dtype=torch.bfloat16, device=device)
    codes = ops.static_quant_fp8(x, layer.input_scale)
    assert torch.equal(layer(codes, torch.bfloat16), layer(x))
    assert layer(x[:0]).shape == (0, 16)
    by_token = make("channel", "dynamic", width=64, out=16).to(device)
    assert by_token(x[:0]).shape == (0, 16)


def test_widths_that_the_hardware_does_not_multiply_are_decoded(products_of_codes) -> None:
    layer = make("tensor", "static", width=64, out=17)
    x = torch.randn(5, 64)
    torch.testing.assert_close(layer(x).double(), expected(layer, x), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's, on TF32 and on the empty graph that it starts with
@pytest.mark.parametrize("activation", ["static", "dynamic"])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_a_cuda_graph_of_compiled_products_follows_new_scales(granularity, activation) -> None:
    torch.compiler.reset()
    layer = make(granularity, activation, bias=False, width=256, out=64)
    x = torch.randn(3, 256).bfloat16()
    right = expected(layer, x)
    layer.cuda()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for doubling in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            # A quotient at the boundary of two codes may fall on the other: 1/8 off, one in 2000.
            bound = 2**-9 + 2**-11 + 2**-3 * 2000**-0.5
            assert_matches(compiled(x.cuda()), right * 2**doubling, rel_l2=bound)
            layer.weight_scale.mul_(2)
    torch.compiler.reset()
