"""Scales under the frameworks that build, wrap, shard, cast and offload modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from quantattn import (
    QuantAttention,
    ScaleError,
    audit,
    register_quant_scales,
    snapshot_scales,
)
from quantattn.loaders import load_weights
from tests.loaders.toy import Wrapped, float32

SCALES = {"q": 0.31, "k": 0.0123, "v": 0.05, "prob": 0.0022}


class Block(nn.Module):
    """An attention module around a guarded layer."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.attn = QuantAttention(4, 8, num_kv_heads=2, k_range=210.0)


def transformers_model():
    transformers = pytest.importorskip("transformers")

    class Config(transformers.PretrainedConfig):
        model_type = "quantattn_test"

    class Model(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config) -> None:
            super().__init__(config)
            self.block = Block()
            self.post_init()

        def _init_weights(self, module) -> None:
            pass

    return Model(Config())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("omitted", [(), ("q", "prob"), ("q", "k", "v", "prob")])
def test_from_pretrained_ends_in_the_files_scales_and_the_defaults(omitted, tmp_path: Path) -> None:
    """A17: transformers assigns uninitialised memory to what a checkpoint lacks."""
    model = transformers_model()
    for role, value in SCALES.items():
        model.block.attn.set_scale(role, value)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = safetensors.torch.load_file(file)
    for role in omitted:
        del state[f"block.attn.{role}_scale"]
    safetensors.torch.save_file(state, file, {"format": "pt"})
    poison = [torch.full((), float("nan")) for _ in range(64)]
    del poison
    loaded = type(model).from_pretrained(tmp_path).block.attn
    for role, value in SCALES.items():
        expected = 1.0 if role in omitted else float32(value)
        assert loaded.host_scale(role) == expected
        source = "default" if role in omitted else "checkpoint"
        assert loaded.scale_sources[role].source == source
    assert (loaded.k_range.item(), loaded.v_range.item()) == (210.0, 100.0)
    assert audit(loaded) == []


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpointed_layer_loads_its_own_state_dict(strict: bool) -> None:
    block = Block()
    block.attn.set_scale("k", 0.0123)
    block.attn = checkpoint_wrapper(block.attn)
    state = block.state_dict()
    fresh = Block()
    fresh.attn = checkpoint_wrapper(fresh.attn)
    fresh.load_state_dict(state, strict=strict)
    assert fresh.attn.host_scale("k") == float32(0.0123)


def test_a_compiled_layer_still_gets_the_names_beside_it() -> None:
    block = Block()
    block.attn = torch.compile(block.attn, backend="eager")
    others = {k: v for k, v in block.state_dict().items() if "scale" not in k}
    block.load_state_dict({**others, "k_scale": torch.tensor(0.0123)})
    assert block.attn.host_scale("k") == float32(0.0123)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel])
def test_load_weights_looks_through_wrappers(wrap) -> None:
    model = wrap(Wrapped())
    weight = torch.randn(32, 32)
    report = load_weights(model, [("q_proj.weight", weight), ("attn.k_scale", torch.tensor(0.5))])
    inner = next(m for m in model.modules() if isinstance(m, Wrapped))
    assert torch.equal(inner.q_proj.weight, weight)
    assert inner.attn.host_scale("k") == 0.5
    assert (report.missing, report.unexpected) == ((), ())


FSDP = """
import sys, torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from quantattn import snapshot_scales
from quantattn.errors import CheckpointError
from quantattn.loaders import load_weights
from tests.loaders.toy import float32
from tests.test_frameworks import Block

init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
options = dict(
    mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
    sharding_strategy=ShardingStrategy.NO_SHARD,
    device_id=torch.device("cpu"),
)
block = Block()
block.attn.set_scale("k", 0.0123)
block.attn = FullyShardedDataParallel(block.attn, **options)
sharded = FullyShardedDataParallel(block, **options)
state = sharded.state_dict()
for buffer in block.attn.module.buffers():
    buffer.data = buffer.data.to(torch.bfloat16)
assert sharded.state_dict()["attn.k_scale"].item() == float32(0.0123)
for buffer in block.attn.module.buffers():
    buffer.data = buffer.data.to(torch.bfloat16)
snapshot_scales(block)
assert block.attn.module.host_scale("k") == float32(0.0123)
block.attn.module.set_scale("k", 0.5)
sharded.load_state_dict(state)
assert block.attn.module.host_scale("k") == float32(0.0123)
try:
    load_weights(sharded, [("proj.weight", torch.ones(8, 8))])
except CheckpointError as error:
    assert "FullyShardedDataParallel" in str(error)
    print("intact")
destroy_process_group()
"""


def test_fsdp_saves_and_loads_float32_scales(tmp_path: Path) -> None:
    """In a process of its own: a process group is global."""
    command = [sys.executable, "-W", "ignore", "-c", FSDP, str(tmp_path / "store")]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root)
    assert done.stdout == "intact\n", done.stderr


def test_a_loader_that_rebinds_a_buffer_in_another_dtype_is_believed() -> None:
    """accelerate with dtype=bfloat16 puts bfloat16 tensors in place of the buffers."""
    layer = QuantAttention(4, 8)
    layer._buffers["k_scale"] = torch.tensor(0.0123, dtype=torch.bfloat16)
    layer.mend_scales()
    assert layer.k_scale.dtype is torch.float32
    assert layer.host_scale("k") == torch.tensor(0.0123, dtype=torch.bfloat16).item()
    assert layer.scale_sources["k"].source == "buffer"
    layer._buffers["k_scale"] = torch.tensor(-1.0, dtype=torch.bfloat16)
    with pytest.raises(ScaleError, match="k_scale"):
        layer.mend_scales()


def test_a_cast_leaves_the_buffer_where_captured_graphs_read_it() -> None:
    layer = QuantAttention(4, 8)
    layer.set_scale("k", 0.0123)
    addresses = {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}
    layer.half().to(torch.bfloat16).double().float()
    assert {name: buffer.data_ptr() for name, buffer in layer.named_buffers()} == addresses


def test_a_move_copies_the_bits_and_not_the_record() -> None:
    layer = QuantAttention(4, 8)
    layer.set_scale("k", 0.0123)
    layer.k_scale.fill_(0.07)
    layer.to_empty(device="cpu")
    assert layer.host_scale("k") == float32(0.07)


def test_registering_a_buffer_of_a_guarded_name_writes_into_the_guarded_one() -> None:
    class Own(QuantAttention):
        def __init__(self) -> None:
            super().__init__(4, 8)
            self.register_buffer("k_scale", torch.tensor(0.5), persistent=False)

    layer = Own()
    layer.process_weights_after_loading()
    assert layer.host_scale("k") == 0.5
    assert "k_scale" in layer.state_dict()
    for bad in (torch.tensor(-0.5), torch.tensor([0.5, 0.25])):
        with pytest.raises(ScaleError):
            layer.register_buffer("k_scale", bad)
    with pytest.raises(ScaleError, match="k_scale"):
        layer.register_parameter("k_scale", nn.Parameter(torch.tensor(0.5)))


@pytest.mark.parametrize("context", [lambda: torch.device("meta"), torch.inference_mode])
def test_writing_works_under_a_default_device_and_inference_mode(context) -> None:
    layer = QuantAttention(4, 8)
    with context():
        layer.set_scale("k", 0.0123)
        layer.process_weights_after_loading()
        layer.reset_parameters()
        layer.to_empty(device="cpu")
        layer.set_scale("k", 0.5)
    assert layer.host_scale("k") == 0.5


def test_a_layer_that_was_built_in_inference_mode_can_be_written_later() -> None:
    with torch.inference_mode():
        layer = QuantAttention(4, 8).to(torch.float64)
    layer.set_scale("k", 0.5)
    assert layer.host_scale("k") == 0.5


def test_a_siblings_own_tensor_is_not_taken_for_a_scale() -> None:
    """B06: an exact match with what a module owns wins over any rule."""
    block = Wrapped()
    block.k_proj = nn.Linear(2, 2, bias=False)
    block.k_proj.register_buffer("output_scale", torch.tensor(1.0))
    state = block.state_dict()
    state["k_proj.output_scale"] = torch.tensor(0.5)
    block.load_state_dict(state)
    assert (block.k_proj.output_scale.item(), block.attn.host_scale("k")) == (0.5, 1.0)


def test_a_snapshot_does_not_go_into_layers_of_another_shape() -> None:
    per_head = QuantAttention(4, 8, num_kv_heads=2, scale_granularity="head")
    per_head.set_scale("k", [0.5, 0.25])
    layer = QuantAttention(4, 8, num_kv_heads=2)
    from quantattn import restore_scales

    with pytest.raises(ScaleError, match="2 numbers"):
        restore_scales(layer, snapshot_scales(per_head))
    assert layer.host_scale("k") == 1.0


@pytest.mark.parametrize(
    "options",
    [{"num_kv_heads": 4}, {"kv_cache_dtype": "fp8"}],
)
def test_layers_share_a_cache_only_if_they_agree_on_it(options: dict) -> None:
    target = QuantAttention(4, 8, num_kv_heads=2)
    with pytest.raises(ScaleError, match="kv_sharing_target"):
        QuantAttention(4, 8, **{"num_kv_heads": 2, **options}, kv_sharing_target=target)
    sharing = QuantAttention(4, 8, num_kv_heads=2, kv_sharing_target=target)
    with pytest.raises(ScaleError, match="construction"):
        sharing.kv_sharing_target = QuantAttention(4, 8, num_kv_heads=2)


def test_a_foreign_layer_mends_the_target_it_shares_with() -> None:
    class Foreign(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.k_scale

    target = QuantAttention(4, 8)
    target.set_scale("k", 0.0123)
    sharing = Foreign()
    register_quant_scales(sharing, num_heads=4, kv_sharing_target=target)
    target.k_scale.data = target.k_scale.data.to(torch.bfloat16)
    assert sharing(torch.ones(())).item() == float32(0.0123)
