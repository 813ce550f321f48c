"""Scales survive what happens to modules: moves, casts, copies, empty builds, released memory."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from quantattn import (
    AttentionMetadata,
    MLAAttention,
    PagedKVCache,
    QuantAttention,
    ScaleError,
    adopt,
    audit,
    loaders,
    ops,
    process_weights_after_loading,
    register_quant_scales,
    restore_scales,
    snapshot_scales,
)

SCALES = {"q": 0.31, "k": 0.0123, "v": 0.05, "prob": 0.0022}
SCALE_NAMES = [f"{role}_scale" for role in SCALES]
RANGES = {"q_range": 190.0, "k_range": 210.0, "v_range": 110.0}


class Block(nn.Module):
    """A decoder layer's attention as models write it: projections beside the attention layer."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8)
        self.attn = QuantAttention(4, 8, num_kv_heads=2, **RANGES, **options)


class Foreign(nn.Module):
    """An attention module that knows nothing of quantattn until it is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) * self.k_scale


def subclassed() -> QuantAttention:
    return QuantAttention(4, 8, num_kv_heads=2, **RANGES)


def registered() -> nn.Module:
    module = Foreign()
    register_quant_scales(module, num_heads=4, num_kv_heads=2, **RANGES)
    return module


class Old(nn.Module):
    """The pattern that quantattn replaces: plain tensors, with a float copy beside each scale."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = 4, 2
        self.proj = nn.Linear(8, 8)
        for role in SCALES:
            setattr(self, f"_{role}_scale", torch.tensor(1.0))
            setattr(self, f"_{role}_scale_float", 1.0)
        for name, value in RANGES.items():
            setattr(self, name, torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) * self._k_scale


def adopted() -> nn.Module:
    module = Old()
    names = {f"_{role}_scale": f"{role}_scale" for role in SCALES}
    adopt(module, names | {name: name for name in RANGES})
    return module


BUILDERS = {"subclassed": subclassed, "registered": registered, "adopted": adopted}


@pytest.fixture(params=BUILDERS.values(), ids=BUILDERS)
def layer(request: pytest.FixtureRequest) -> nn.Module:
    module = request.param()
    for role, value in SCALES.items():
        module.set_scale(role, value)
    return module


def float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def assert_intact(module: nn.Module, device: str = "cpu") -> None:
    """Every scale and range is a float32 buffer with its own bits on the expected device."""
    buffers = dict(module.named_buffers())
    expected = {f"{role}_scale": value for role, value in SCALES.items()} | RANGES
    for name, value in expected.items():
        buffer = buffers[name]
        assert buffer.dtype is torch.float32, name
        assert buffer.device.type == device, name
        if device != "meta":
            assert buffer.item() == float32(value), name
    assert not set(expected) & set(dict(module.named_parameters()))


def test_scales_and_ranges_are_buffers_and_only_scales_are_saved(layer: nn.Module) -> None:
    assert_intact(layer)
    saved = [name for name in layer.state_dict() if "scale" in name or "range" in name]
    assert saved == SCALE_NAMES


def test_they_follow_a_move_to_another_device(layer: nn.Module) -> None:
    """A01 (vLLM #31395): plain tensors stayed on the host and the kernel read a host pointer."""
    assert_intact(layer.cpu())
    assert_intact(layer.to("meta"), "meta")


@pytest.mark.gpu
def test_they_follow_a_move_to_the_gpu_and_back(layer: nn.Module) -> None:
    assert_intact(layer.to("cuda"), "cuda")
    assert_intact(layer.half(), "cuda")
    assert_intact(layer.cpu())


def test_a_scale_on_another_device_is_refused_and_both_devices_are_named(layer: nn.Module) -> None:
    elsewhere = layer.to("meta").q_scale
    with pytest.raises(ScaleError, match=r"scale.*meta.*cpu"):
        ops.static_quant_fp8(torch.randn(3, 5), elsewhere)


@pytest.mark.parametrize(
    "cast",
    [
        nn.Module.half,
        nn.Module.bfloat16,
        nn.Module.float,
        nn.Module.double,
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to(dtype=torch.float64),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.to(torch.empty((), dtype=torch.bfloat16)),
        lambda m: m.type(torch.float16),
        lambda m: m.half().float().bfloat16(),
    ],
)
def test_casts_leave_dtype_and_bits(layer: nn.Module, cast) -> None:
    """A16 (torchao / NeMo Automodel #686): scales reached the kernels rounded to bfloat16."""
    assert_intact(cast(layer))


def test_a_cast_of_the_whole_model_casts_the_weights_and_not_the_scales() -> None:
    block = Block()
    block.attn.set_scale("k", 3e-8)
    block.half()
    assert block.q_proj.weight.dtype is torch.float16
    assert block.attn.k_scale.item() == float32(3e-8)


def test_a_cast_of_buffers_under_the_module_is_mended_before_the_next_forward() -> None:
    """Sharded training casts buffers through `.data`, past every method of the module."""
    module = registered()
    for role, value in SCALES.items():
        module.set_scale(role, value)
    buffers = list(module.buffers())
    for buffer in buffers:
        buffer.data = buffer.data.to(torch.bfloat16)
    module(torch.randn(2, 8))
    assert_intact(module)
    assert all(a is b for a, b in zip(buffers, module.buffers(), strict=True))


FSDP = """
import sys, torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from tests.test_module_state import SCALES, assert_intact, float32, registered

init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
module = registered()
for role, value in SCALES.items():
    module.set_scale(role, value)
sharded = FullyShardedDataParallel(
    module,
    mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
    sharding_strategy=ShardingStrategy.NO_SHARD,
    device_id=torch.device("cpu"),
)
x = torch.randn(2, 8)
assert torch.equal(sharded(x), module.proj(x) * float32(SCALES["k"]))
assert_intact(module)
destroy_process_group()
print("intact")
"""


def test_fsdp_with_bf16_buffers_computes_with_float32_scales(tmp_path: Path) -> None:
    """In a process of its own: a process group is global."""
    command = [sys.executable, "-c", FSDP, str(tmp_path / "store")]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root)
    assert done.stdout == "intact\n", done.stderr


def test_copies_are_equal_and_independent(layer: nn.Module) -> None:
    twin = copy.deepcopy(layer)
    assert_intact(twin)
    twin.set_scale("k", 0.5)
    assert_intact(layer)
    assert type(twin) is type(layer)


def test_pickling_keeps_values_records_and_guards(layer: nn.Module) -> None:
    loaded = pickle.loads(pickle.dumps(layer))
    assert_intact(loaded.half())
    assert loaded.scale_sources == layer.scale_sources
    with pytest.raises(ScaleError):
        loaded.k_scale = -1.0


def test_building_on_meta_then_to_empty_ends_in_the_defaults() -> None:
    """A17 (Transformers #45902): a plain buffer read -7.2e-28 after to_empty."""
    with torch.device("meta"):
        module = subclassed()
    recycled = [torch.full((), 123.0) for _ in range(64)]
    del recycled
    module.to_empty(device="cpu")
    assert [module.host_scale(role) for role in SCALES] == [1.0] * 4
    assert {name: getattr(module, name).item() for name in RANGES} == RANGES
    assert audit(module) == []


def test_to_empty_of_a_real_module_keeps_what_was_loaded(layer: nn.Module) -> None:
    layer.to_empty(device="cpu")
    assert_intact(layer)


def test_to_empty_then_reset_parameters_ends_in_the_defaults(layer: nn.Module) -> None:
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert [layer.host_scale(role) for role in SCALES] == [1.0] * 4
    assert all(record.source == "default" for record in layer.scale_sources.values())


def test_post_load_materialises_scales_that_are_still_on_meta() -> None:
    with torch.device("meta"):
        module = subclassed()
    process_weights_after_loading(module)
    assert [module.host_scale(role) for role in SCALES] == [1.0] * 4
    assert module.k_range.item() == RANGES["k_range"]


def test_accelerate_builds_empty_and_a_checkpoint_fills_it(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    for include_buffers in (False, True):
        with accelerate.init_empty_weights(include_buffers=include_buffers):
            block = Block()
        assert block.attn.k_scale.is_meta is include_buffers
        state = {"q_proj.weight": torch.ones(8, 8), "q_proj.bias": torch.ones(8)}
        path = tmp_path / "model.safetensors"
        safetensors.torch.save_file(state | {"attn.k_scale": torch.tensor(0.0123)}, path)
        loaders.load_checkpoint(block, path)
        assert block.attn.host_scale("k") == float32(0.0123)
        assert block.attn.host_scale("v") == 1.0
        assert block.attn.v_range.item() == RANGES["v_range"]
        assert block.q_proj.weight.device.type == "cpu"


def test_accelerates_own_loader_rebinds_buffers_and_accept_buffers_takes_them(
    tmp_path: Path,
) -> None:
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights(include_buffers=True):
        block = Block()
    state = {"q_proj.weight": torch.ones(8, 8), "q_proj.bias": torch.ones(8)}
    state |= {f"attn.{role}_scale": torch.tensor(value) for role, value in SCALES.items()}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    accelerate.load_checkpoint_in_model(block, str(tmp_path), device_map={"": "cpu"})
    block.attn.accept_buffers()
    process_weights_after_loading(block)
    assert_intact(block.attn)


def test_assigning_a_parameter_writes_into_the_buffer(layer: nn.Module) -> None:
    """A06 (vLLM #57163): a placeholder Parameter moved the scale out of the buffer table."""
    address = layer.k_scale.data_ptr()
    layer.k_scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
    for _ in range(2):
        process_weights_after_loading(layer)
    assert dict(layer.named_buffers())["k_scale"].item() == 0.5
    assert layer.k_scale.dtype is torch.float32
    assert layer.k_scale.data_ptr() == address
    assert "k_scale" not in dict(layer.named_parameters())


def test_assigning_a_tensor_or_a_number_writes_into_the_buffer(layer: nn.Module) -> None:
    address = layer.v_scale.data_ptr()
    layer.v_scale = torch.tensor([0.25], dtype=torch.bfloat16)
    assert layer.v_scale.item() == 0.25
    layer.v_scale = 0.75
    assert (layer.v_scale.item(), layer.v_scale.data_ptr()) == (0.75, address)
    layer.k_range = 150.0
    assert layer.k_range.item() == 150.0


def test_a_per_head_value_does_not_replace_a_per_tensor_buffer(layer: nn.Module) -> None:
    with pytest.raises(ScaleError, match=r"\[2\].*\[\]"):
        layer.k_scale = nn.Parameter(torch.tensor([0.5, 0.25]), requires_grad=False)
    assert_intact(layer)


def test_scales_cannot_be_deleted(layer: nn.Module) -> None:
    with pytest.raises(ScaleError, match="k_scale"):
        del layer.k_scale
    assert_intact(layer)


@pytest.mark.parametrize("noise", [float("nan"), 0.0, 1e-3, -1.0])
def test_snapshot_and_restore_bring_scales_back_bit_equal(layer: nn.Module, noise: float) -> None:
    """A07, A08 (vLLM #25800, #45617): waking read new pages, or hard-coded 1.0."""
    kept = snapshot_scales(layer)
    for buffer in layer.buffers():
        buffer.fill_(noise)
    layer.scale_state.ranges["k"] = 7.0
    layer.scale_state.record.clear()
    restore_scales(layer, kept)
    assert_intact(layer)
    assert layer.host_scale("k") == layer.k_scale.item() == float32(0.0123)
    layer.set_scale("q", 0.5)
    layer.reset_scales()
    restore_scales(layer, kept)
    assert_intact(layer)


def test_a_snapshot_keeps_what_the_buffer_holds_when_it_was_overwritten(layer: nn.Module) -> None:
    layer.k_scale.fill_(0.07)
    kept = snapshot_scales(layer)
    layer.k_scale.fill_(0.0)
    restore_scales(layer, kept)
    assert layer.host_scale("k") == float32(0.07)


def test_a_snapshot_of_an_invalid_buffer_is_refused(layer: nn.Module) -> None:
    layer.k_scale.fill_(0.0)
    with pytest.raises(ScaleError, match="k_scale"):
        snapshot_scales(layer)


def test_a_snapshot_of_other_layers_is_refused(layer: nn.Module) -> None:
    with pytest.raises(ScaleError, match="other layers"):
        restore_scales(nn.ModuleList([layer, subclassed()]), snapshot_scales(layer))
    assert_intact(layer)


def test_a_fresh_cache_reads_as_finite_after_a_wake() -> None:
    cache = PagedKVCache(1, 2, 4, 2, 8, kv_cache_dtype="fp8")
    assert torch.isfinite(cache.layer(0).float()).all()


def test_the_host_value_follows_a_write_into_the_buffer(layer: nn.Module) -> None:
    """A12 (ModelExpress #711): floats kept the dummy value after the buffers were overwritten."""
    process_weights_after_loading(layer)
    layer.k_scale.copy_(torch.tensor(0.07))
    assert layer.host_scale("k") == layer.k_scale.item() == float32(0.07)
    layer.accept_buffers()
    process_weights_after_loading(layer)
    assert layer.host_scale("k") == float32(0.07)
    assert layer.scale_sources["k"].source == "buffer"


def test_accepting_an_invalid_buffer_changes_no_record(layer: nn.Module) -> None:
    before = layer.scale_sources
    layer.q_scale.fill_(0.5)
    layer.k_scale.fill_(float("inf"))
    with pytest.raises(ScaleError, match="k_scale"):
        layer.accept_buffers()
    assert layer.scale_sources == before


def test_post_load_undoes_noise_and_is_idempotent(layer: nn.Module) -> None:
    """A02, A11 (vLLM #31395, SGLang #40586)."""
    for _ in range(3):
        for buffer in layer.buffers():
            buffer.uniform_(-1e-3, 1e-3)
        process_weights_after_loading(layer)
        assert_intact(layer)


def test_the_fnuz_factor_is_applied_once_and_outside_the_stored_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A11, C11: the platform's factor compounded with each reload."""
    module = QuantAttention(4, 8, kv_cache_dtype="fp8")
    module.set_scale("k", 0.05)
    monkeypatch.setattr("quantattn.scale_access.fnuz_factor", lambda: 2.0)
    for _ in range(3):
        process_weights_after_loading(module)
        assert module.effective_scale("k").item() == 2 * float32(0.05)
        assert module.k_scale.item() == float32(0.05)
    assert module.effective_scale("prob").item() == 1.0


def test_a_round_trip_through_safetensors_restores_everything(
    layer: nn.Module, tmp_path: Path
) -> None:
    """A15 (vLLM #41174): the saver dropped the scale keys that the loader expected."""
    process_weights_after_loading(layer)
    keys = list(layer.state_dict())
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(layer.state_dict(), path)
    builders = {Foreign: registered, Old: adopted, QuantAttention: subclassed}
    fresh = next(build for kind, build in builders.items() if isinstance(layer, kind))()
    result = fresh.load_state_dict(safetensors.torch.load_file(path), strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_intact(fresh)
    assert list(fresh.state_dict()) == keys


def test_a_shared_kv_scale_is_two_buffers_that_can_be_saved(tmp_path: Path) -> None:
    module = subclassed()
    shared = torch.tensor(0.0123)
    module.load_state_dict({"k_scale": shared, "v_scale": shared})
    assert module.k_scale.data_ptr() != module.v_scale.data_ptr()
    safetensors.torch.save_file(module.state_dict(), tmp_path / "model.safetensors")


def test_load_state_dict_with_assign_keeps_the_buffers(layer: nn.Module) -> None:
    addresses = {name: getattr(layer, name).data_ptr() for name in SCALE_NAMES}
    state = {name: tensor.clone().to(torch.bfloat16) for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    assert {name: getattr(layer, name).data_ptr() for name in SCALE_NAMES} == addresses
    assert layer.k_scale.dtype is torch.float32


def pages_with_one_token(layer: QuantAttention, key: float) -> tuple[PagedKVCache, Tensor]:
    """A cache with one token of constant key, and that key read back through attention's pages."""
    cache = PagedKVCache(1, 2, 4, 2, 8, dtype=torch.float32, kv_cache_dtype="fp8")
    metadata = AttentionMetadata.from_lengths([1], [1], torch.zeros(1, 1, dtype=torch.int32), 4)
    query = torch.randn(1, 4, 8)
    layer(query, torch.full((1, 2, 8), key), torch.ones(1, 2, 8), cache.layer(0), metadata)
    return cache, cache.layer(0)


@pytest.mark.parametrize(
    ("granularity", "old", "new"),
    [("tensor", 0.01, 0.02), ("head", [0.01, 0.03], [0.03, 0.01])],
)
def test_a_scale_does_not_change_under_a_cache_that_holds_entries(granularity, old, new) -> None:
    """A20 (ModelExpress #784): old entries were decoded with the new scale."""
    layer = QuantAttention(
        4, 8, num_kv_heads=2, kv_cache_dtype="fp8", scale_granularity=granularity
    )
    layer.set_scale("k", old)
    cache, pages = pages_with_one_token(layer, 1.0)
    written = pages.clone()
    entry_points = [
        lambda: layer.set_scale("k", new),
        lambda: setattr(layer, "k_scale", new),
        lambda: layer.load_state_dict({"k_scale": torch.tensor(new)}),
        lambda: loaders.load_weights(layer, [("k_scale", torch.tensor(new))]),
        layer.reset_scales,
    ]
    for change in entry_points:
        with pytest.raises(ScaleError, match=r"k_scale.*clear"):
            change()
    layer.k_scale.copy_(torch.tensor(new))
    with pytest.raises(ScaleError, match=r"k_scale.*clear"):
        layer.accept_buffers()
    process_weights_after_loading(layer)
    assert torch.equal(layer.k_scale, torch.tensor(old))
    assert torch.equal(pages.view(torch.uint8), written.view(torch.uint8))
    layer.set_scale("k", old)
    cache.clear()
    layer.set_scale("k", new)
    assert torch.equal(layer.k_scale, torch.tensor(new))


def test_a_scale_may_change_once_the_cache_is_gone() -> None:
    layer = QuantAttention(4, 8, num_kv_heads=2, kv_cache_dtype="fp8")
    cache, pages = pages_with_one_token(layer, 1.0)
    del cache, pages
    layer.set_scale("k", 0.02)
    assert layer.host_scale("k") == float32(0.02)


def test_an_unquantized_cache_holds_no_scale_fast() -> None:
    layer = QuantAttention(2, 8)
    cache = PagedKVCache(1, 2, 4, 2, 8, dtype=torch.float32)
    metadata = AttentionMetadata.from_lengths([1], [1], torch.zeros(1, 1, dtype=torch.int32), 4)
    layer(*torch.randn(3, 1, 2, 8), cache.layer(0), metadata)
    layer.set_scale("k", 0.02)
    assert layer.host_scale("k") == float32(0.02)


def test_a_sharing_layer_uses_its_targets_scales_now_and_after_an_update() -> None:
    """D10 (vLLM #55559), invariant 8."""
    target = QuantAttention(4, 8, num_kv_heads=2, kv_cache_dtype="fp8", layer_name="layers.0")
    target.set_scale("k", 0.25)
    target.set_scale("v", 2.0)
    sharing = QuantAttention(
        4, 8, num_kv_heads=2, kv_cache_dtype="fp8", kv_sharing_target=target, layer_name="layers.1"
    )
    assert (sharing.host_scale("k"), sharing.host_scale("v")) == (0.25, 2.0)
    target.set_scale("k", 0.5)
    assert sharing.k_scale is target.k_scale
    assert list(sharing.state_dict()) == ["q_scale", "prob_scale"]
    with pytest.raises(ScaleError, match=r"layers\.0"):
        sharing.set_scale("k", 0.1)
    model = copy.deepcopy(nn.ModuleList([target, sharing]))
    assert model[1].k_scale is model[0].k_scale is not target.k_scale


def test_an_mla_layer_has_one_scale_under_two_names() -> None:
    layer = MLAAttention(4, 16, 4, softmax_scale=0.1, kv_cache_dtype="fp8")
    layer.set_scale("k", 0.5)
    assert layer.v_scale is layer.k_scale
    assert "v_scale" not in layer.state_dict()
    with pytest.raises(ScaleError, match="latent"):
        layer.set_scale("v", 0.25)
    assert layer.half().v_scale.dtype is torch.float32
