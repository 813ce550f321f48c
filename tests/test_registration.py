"""register_quant_scales, audit and adopt: the same guarantees for modules that exist already."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from quantattn import (
    QuantAttention,
    QuantAttnError,
    ScaleError,
    adopt,
    audit,
    register_quant_scales,
)
from quantattn.loaders import load_weights

SCALES = {"q": 0.31, "k": 0.0123, "v": 0.05, "prob": 0.0022}
RANGES = {"q": 190.0, "k": 210.0, "v": 110.0}


class OldAttention(nn.Module):
    """The pattern quantattn replaces: plain tensors, and float and host copies beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.num_kv_heads = 2
        self.kv_cache_dtype = "fp8"
        self.qkv_proj = nn.Linear(4, 4)
        for role, value in SCALES.items():
            setattr(self, f"_{role}_scale", torch.tensor(value))
            setattr(self, f"_{role}_scale_float", 1.0)
        for role, value in RANGES.items():
            setattr(self, f"{role}_range", torch.tensor(value))
        self._k_scale_cpu = torch.tensor(1.0)
        self._v_scale_cpu = torch.tensor(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.qkv_proj(x) * self._k_scale


NAMES = {f"_{role}_scale": f"{role}_scale" for role in SCALES}
NAMES |= {f"{role}_range": f"{role}_range" for role in RANGES}


def codes(model: nn.Module) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in audit(model):
        found.setdefault(finding.name, set()).add(finding.code)
    return found


def test_audit_names_every_attribute_of_the_old_pattern() -> None:
    plain = {f"_{role}_scale": {"plain_tensor"} for role in SCALES}
    plain |= {f"{role}_range": {"plain_tensor"} for role in RANGES}
    mirrors = {f"_{role}_scale_float": {"host_mirror"} for role in SCALES}
    mirrors |= {"_k_scale_cpu": {"host_mirror"}, "_v_scale_cpu": {"host_mirror"}}
    assert codes(OldAttention()) == plain | mirrors
    model = nn.ModuleDict({"layers": nn.ModuleList([OldAttention()])})
    assert {finding.module for finding in audit(model)} == {"layers.0"}
    assert str(audit(model)[0]).startswith("layers.0._q_scale: ")


def test_audit_finds_nothing_on_quant_attention() -> None:
    model = nn.ModuleList([QuantAttention(4, 8, kv_cache_dtype="fp8") for _ in range(2)])
    assert audit(model) == []
    assert model[0].audit() == []


def test_audit_names_parameters_and_buffers_that_casts_round() -> None:
    module = nn.Module()
    module.k_scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
    module.register_buffer("v_scale", torch.tensor(-1.0))
    module.register_buffer("q_scale", torch.tensor([float("nan"), 1.0]))
    module.q_proj = nn.Linear(2, 2)
    assert codes(module) == {
        "k_scale": {"parameter"},
        "v_scale": {"cast_rounds", "invalid"},
        "q_scale": {"cast_rounds", "invalid"},
    }


def test_audit_proposes_only_what_can_be_done() -> None:
    layer, old = QuantAttention(4, 8), nn.Module()
    for module in (layer, old):
        module.register_buffer("o_scale", torch.tensor(0.5))
        module._k_scale = torch.tensor(0.25)
    told = [finding.message.split("; ")[1] for finding in [*audit(layer), *audit(old)]]
    kept = "keep it in a buffer, and set it again in float32 after a cast"
    assert told == [kept, "use the layer's own scale and remove this one", kept, "adopt it"]


def test_audit_names_guarded_buffers_that_were_overwritten_hidden_or_never_materialised() -> None:
    layer = QuantAttention(4, 8)
    layer.v_scale.fill_(0.5)
    layer.q_scale.fill_(float("nan"))
    layer.k_scale_float = 1.0
    assert codes(layer) == {
        "v_scale": {"differs_from_record"},
        "q_scale": {"invalid", "differs_from_record"},
        "k_scale_float": {"host_mirror"},
    }
    with torch.device("meta"):
        empty = QuantAttention(4, 8)
    names = [f"{role}_scale" for role in SCALES] + [f"{role}_range" for role in RANGES]
    assert codes(empty) == {name: {"on_meta"} for name in names}


def test_audit_names_fp8_layers_that_loading_left_at_the_default() -> None:
    layer = QuantAttention(4, 8, kv_cache_dtype="fp8")
    load_weights(layer, [("k_scale", torch.tensor(0.5))])
    assert codes(layer) == {"v_scale": {"never_loaded"}}


def adopted() -> nn.Module:
    module = OldAttention()
    adopt(module, NAMES)
    return module


def test_after_adopt_audit_finds_nothing_and_old_names_stay_readable() -> None:
    module = adopted()
    assert audit(module) == []
    for role, value in SCALES.items():
        assert getattr(module, f"_{role}_scale") is getattr(module, f"{role}_scale")
        assert module.host_scale(role) == torch.tensor(value).item()
        assert getattr(module, f"_{role}_scale_float") == torch.tensor(value).item()
    assert module.k_range.item() == RANGES["k"]
    assert list(module.state_dict())[:4] == [f"{role}_scale" for role in SCALES]


def test_old_names_and_mirrors_follow_the_buffer() -> None:
    module = adopted()
    address = module.k_scale.data_ptr()
    module._k_scale = torch.tensor(0.5)
    assert (module.host_scale("k"), module._k_scale_float, module._k_scale_cpu.item()) == (0.5,) * 3
    module.k_scale.fill_(0.25)
    assert (module._k_scale_float, module._k_scale_cpu.item()) == (0.25, 0.25)
    assert module.k_scale.data_ptr() == address
    with pytest.raises(ScaleError):
        module._k_scale = -1.0
    with pytest.raises(ScaleError):
        module._k_scale_float = 0.0
    assert module.host_scale("k") == 0.25


def test_an_adopted_module_keeps_its_scales_through_casts_copies_and_pickling() -> None:
    module = adopted()
    x = torch.randn(3, 4)
    expected = module(x)
    module.half().float()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    assert isinstance(twin, OldAttention)
    for m in (module, twin):
        assert m._k_scale.dtype is torch.float32
        assert m.host_scale("k") == torch.tensor(SCALES["k"]).item()
    torch.testing.assert_close(twin(x), expected, rtol=1e-3, atol=1e-3)


def test_adopt_takes_over_parameters_buffers_floats_and_heads() -> None:
    module = nn.Module()
    module.k_scale = nn.Parameter(torch.tensor([0.5, 0.25]), requires_grad=False)
    module.register_buffer("old_v", torch.tensor([2.0]), persistent=False)
    module.q_scale_value = 0.125
    names = {"k_scale": "k_scale", "old_v": "v_scale", "q_scale_value": "q_scale"}
    adopt(module, names, num_heads=4, num_kv_heads=2, kv_cache_dtype="fp8_e5m2")
    assert module.host_scale("k") == [0.5, 0.25]
    assert module.host_scale("v") == [2.0, 2.0]
    assert module.host_scale("q") == [0.125, 0.125]
    assert not dict(module.named_parameters())
    assert module.cache_format.name == "fp8_e5m2"


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"_k_scale": "key_scale"}, "key_scale"),
        ({"_missing": "k_scale"}, "_missing"),
        ({"_k_scale": "k_scale", "_bad": "v_scale"}, "_bad"),
        ({"_k_scale": "k_scale", "_word": "v_scale"}, "_word"),
    ],
)
def test_a_refused_adoption_leaves_the_module_as_it_was(names: dict, reason: str) -> None:
    module = OldAttention()
    module._bad = torch.tensor(-1.0)
    module._word = "0.1"
    before = dict(vars(module))
    with pytest.raises(ScaleError, match=reason):
        adopt(module, names)
    assert dict(vars(module)) == before
    assert type(module) is OldAttention


def with_public_scale(module: nn.Module) -> None:
    module.k_scale = nn.Parameter(torch.tensor(0.5))


def with_own_format(module: nn.Module) -> None:
    module.kv_cache_dtype = "fp7"


@pytest.mark.parametrize(
    ("prepare", "options", "names"),
    [
        (with_public_scale, {}, NAMES),
        (with_own_format, {}, NAMES),
        (None, {"kv_cache_dtype": "fp7"}, NAMES),
        (None, {"num_heads": 4, "num_kv_heads": 3}, NAMES),
        (None, {"num_heads": 2.5}, NAMES),
        (None, {}, {"_k_scale": "k_scale"}),
        (None, {}, {**NAMES, "_q_scale": "k_scale"}),
        (None, {}, {**NAMES, "num_layers": "k_scale"}),
    ],
)
def test_an_adoption_refused_for_any_reason_leaves_the_module_as_it_was(
    prepare, options, names
) -> None:
    OldAttention.num_layers = 3
    module = OldAttention()
    if prepare is not None:
        prepare(module)
    before = {**vars(module), **module._parameters}
    with pytest.raises(QuantAttnError):
        adopt(module, names, **options)
    assert {**vars(module), **module._parameters} == before
    assert type(module) is OldAttention


def test_a_guarded_module_is_not_adopted_again() -> None:
    layer = QuantAttention(4, 8)
    with pytest.raises(ScaleError, match="already"):
        adopt(layer, {"k_scale": "k_scale"})
    assert layer.host_scale("k") == 1.0


def test_a_sharing_module_is_adopted_with_its_target() -> None:
    target = QuantAttention(4, 8, num_kv_heads=2, kv_cache_dtype="fp8")
    target.set_scale("k", 0.7)
    module = OldAttention()
    adopt(module, NAMES, kv_sharing_target=target, layer_name="layers.1")
    assert module._k_scale is target.k_scale
    assert list(module.state_dict())[:2] == ["q_scale", "prob_scale"]
    assert (module.cache_format.name, module.layer_name) == ("fp8_e4m3", "layers.1")


def test_an_adopted_modules_own_old_state_dict_loads() -> None:
    module = adopted()
    state = {name: tensor for name, tensor in module.state_dict().items() if "scale" not in name}
    module.load_state_dict({**state, "_k_scale": torch.tensor(0.5)})
    assert module.host_scale("k") == 0.5


def test_registering_twice_or_over_existing_scales_is_refused() -> None:
    module = nn.Linear(2, 2)
    register_quant_scales(module, num_heads=2)
    with pytest.raises(ScaleError, match="already"):
        register_quant_scales(module, num_heads=2)
    other = nn.Module()
    other.k_scale = torch.tensor(0.5)
    with pytest.raises(ScaleError, match="adopt"):
        register_quant_scales(other, num_heads=2)
    assert type(other) is nn.Module


def test_a_registered_module_keeps_its_class_and_its_own_hooks() -> None:
    class WithHooks(nn.Module):
        def reset_parameters(self) -> None:
            self.was_reset = True

        def process_weights_after_loading(self, dtype: torch.dtype) -> None:
            self.seen = dtype

    module = WithHooks()
    register_quant_scales(module, num_heads=2)
    module.set_scale("k", 0.5)
    module.k_scale.fill_(-1.0)
    module.process_weights_after_loading(torch.bfloat16)
    assert (module.seen, module.host_scale("k")) == (torch.bfloat16, 0.5)
    module.reset_parameters()
    assert (module.was_reset, module.host_scale("k")) == (True, 1.0)
    assert isinstance(module, WithHooks)
    assert type(module).__name__ == "WithHooks"
    register_quant_scales(second := WithHooks(), num_heads=2)
    assert type(second) is type(module)


def test_a_guarded_module_in_a_compiled_graph_reads_the_buffer() -> None:
    module = adopted()
    module.k_scale = 2.0
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(x), module.qkv_proj(x) * 2.0)
    module.k_scale = 0.5
    torch.testing.assert_close(compiled(x), module.qkv_proj(x) * 0.5)
