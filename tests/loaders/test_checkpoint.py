"""What a well-formed checkpoint reads as; `safetensors.torch.load_file` is the oracle."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantattn.errors import CheckpointError
from quantattn.loaders import checkpoint as checkpoint_module
from quantattn.loaders.checkpoint import TensorInfo, open_checkpoint

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (left.dtype, left.shape) == (right.dtype, right.shape) and (
        left.numel() == 0 or tensor_bytes(left) == tensor_bytes(right)
    )


def random_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "layers.0.weight": torch.randn(97, 65, generator=generator),
        "layers.0.k_scale": torch.tensor([0.031, 0.017], dtype=torch.bfloat16),
        "layers.0.v_scale": torch.tensor(0.023),
        "layers.1.weight": torch.randn(33, 7, 5, generator=generator).to(torch.float8_e4m3fn),
        "layers.1.empty": torch.empty(0, 5, dtype=torch.float16),
        "layers.1.mask": torch.tensor([True, False, True]),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(random_tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def shard(folder: Path, layout: dict[str, list[str]], index: str | None) -> None:
    """Spread `random_tensors` over files as `layout` says, with an index of that name."""
    tensors = random_tensors()
    for name, keys in layout.items():
        save_file({key: tensors[key] for key in keys}, folder / name)
    if index is not None:
        weight_map = {key: name for name, keys in layout.items() for key in keys}
        text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
        (folder / index).write_text(text)


TWO_SHARDS = {
    "model-00001-of-00002.safetensors": ["layers.0.weight", "layers.0.k_scale"],
    "model-00002-of-00002.safetensors": ["layers.0.v_scale", "layers.1.weight"],
}


@pytest.mark.parametrize("name", sorted(path.name for path in CHECKPOINTS.iterdir()))
def test_real_checkpoint_reads_as_safetensors_reads_it(name: str) -> None:
    folder = CHECKPOINTS / name
    with open_checkpoint(folder) as checkpoint:
        expected = {
            (file, key): tensor
            for file in checkpoint.files
            for key, tensor in load_file(folder / file).items()
        }
        assert {(info.file, key) for key, info in checkpoint.tensors.items()} == set(expected)
        for (file, key), tensor in expected.items():
            info = checkpoint.tensors[key]
            assert info == TensorInfo(
                key, tensor.dtype, tuple(tensor.shape), tensor.untyped_storage().nbytes(), file
            )
            assert same(checkpoint.read(key), tensor), key
        assert checkpoint.json("config.json") == json.loads((folder / "config.json").read_text())
        assert checkpoint.unlisted_files == ()


def test_real_sharded_checkpoint_has_all_files_in_order() -> None:
    with open_checkpoint(CHECKPOINTS / "llmcompressor-llama-kvhead-sharded22") as checkpoint:
        assert len(checkpoint.files) == 22
        assert [*checkpoint.files] == sorted(checkpoint.files)
        files = [info.file for info in checkpoint.tensors.values()]
        assert files == sorted(files)


def test_tensors_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    header = {
        "late": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]},
        "early": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
    }
    write_file(tmp_path / "model.safetensors", header, bytes([11, 12, 13, 14, 15]))
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == ["early", "late"]
        assert checkpoint.read("late").tolist() == [14, 15]


def write_file(path: Path, header: dict[str, object], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_at_any_alignment(tmp_path: Path, name: str, padding: int) -> None:
    dtype = DTYPES[name]
    raw = bytes(value % 2 for value in range(48)) if name == "BOOL" else bytes(range(80, 128))
    header = {
        "padding": {"dtype": "U8", "shape": [padding], "data_offsets": [0, padding]},
        "x": {
            "dtype": name,
            "shape": [2, 24 // dtype.itemsize],
            "data_offsets": [padding, padding + 48],
        },
        "empty": {"dtype": name, "shape": [3, 0], "data_offsets": [padding, padding]},
    }
    write_file(tmp_path / "model.safetensors", header, bytes(padding) + raw)
    strided = torch.empty(24 // dtype.itemsize, 2, dtype=dtype).t()
    with open_checkpoint(tmp_path) as checkpoint:
        tensor = checkpoint.read("x")
        checkpoint.copy_to("x", strided)
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, (2, 24 // dtype.itemsize))
        assert tensor_bytes(tensor) == tensor_bytes(strided) == raw
        assert tuple(checkpoint.read("empty").shape) == (3, 0)


def test_read_owns_its_memory(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        first, second = checkpoint.read("layers.0.weight"), checkpoint.read("layers.0.weight")
    first.zero_()
    assert same(second, random_tensors()["layers.0.weight"])
    assert same(load_file(folder / "model.safetensors")["layers.0.weight"], second)


def test_copy_to_converts_and_ignores_autograd(folder: Path) -> None:
    parameter = torch.nn.Parameter(torch.full((2,), float("nan")))
    with open_checkpoint(folder) as checkpoint:
        checkpoint.copy_to("layers.0.k_scale", parameter)
    expected = random_tensors()["layers.0.k_scale"].to(torch.float64)
    assert torch.equal(parameter.detach().to(torch.float64), expected)
    assert parameter.is_leaf
    assert parameter.grad_fn is None


def test_copy_to_meta_does_nothing_and_read_stays_on_the_cpu(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        with torch.device("meta"):
            checkpoint.copy_to("layers.0.weight", torch.empty(97, 65))
            tensor = checkpoint.read("layers.0.weight")
        assert same(tensor, random_tensors()["layers.0.weight"])


@pytest.mark.gpu
def test_copy_to_a_gpu(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        for key, tensor in random_tensors().items():
            destination = torch.empty_like(tensor, device="cuda")
            checkpoint.copy_to(key, destination)
            assert same(destination.cpu(), tensor)


@pytest.mark.parametrize("window", [1, 100, 4096, 10_000])
def test_large_tensors_are_copied_through_a_small_window(
    folder: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    lengths = []

    def spy(descriptor: int, length: int, **options: int) -> mmap.mmap:
        lengths.append(length)
        return original(descriptor, length, **options)

    original = mmap.mmap
    monkeypatch.setattr(checkpoint_module.mmap, "mmap", spy)
    monkeypatch.setattr(checkpoint_module, "WINDOW_BYTES", window)
    with open_checkpoint(folder) as checkpoint:
        for key, tensor in random_tensors().items():
            assert same(checkpoint.read(key), tensor)
    row = 65 * 4
    assert max(lengths) <= max(window, row) + mmap.ALLOCATIONGRANULARITY
    assert len(lengths) > (97 * row) // max(window, row) - 1


def test_opening_and_small_tensors_map_a_file_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = mmap.mmap
    monkeypatch.setattr(
        checkpoint_module.mmap, "mmap", lambda *a, **k: calls.append(a) or original(*a, **k)
    )
    with open_checkpoint(folder) as checkpoint:
        assert calls == []
        for key in checkpoint.tensors:
            checkpoint.read(key)
        assert len(calls) == 1


def test_index_decides_and_other_files_are_left_aside(tmp_path: Path) -> None:
    shard(tmp_path, TWO_SHARDS, "model.safetensors.index.json")
    save_file({"overlay.k_scale": torch.tensor(0.5)}, tmp_path / "model-kvscales.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.files == tuple(TWO_SHARDS)
        assert checkpoint.unlisted_files == ("model-kvscales.safetensors",)
        assert "overlay.k_scale" not in checkpoint.tensors
        for key in checkpoint.tensors:
            assert same(checkpoint.read(key), random_tensors()[key])


@pytest.mark.parametrize("by_file", [True, False])
def test_index_of_another_name_is_used_when_it_is_the_only_one(
    tmp_path: Path, by_file: bool
) -> None:
    shard(tmp_path, TWO_SHARDS, "quantized.safetensors.index.json")
    path = tmp_path / "quantized.safetensors.index.json" if by_file else tmp_path
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.files == tuple(TWO_SHARDS)
        assert checkpoint.root == tmp_path.resolve()


def test_model_index_wins_over_others_and_several_others_are_refused(tmp_path: Path) -> None:
    shard(tmp_path, TWO_SHARDS, "a.safetensors.index.json")
    shard(tmp_path, TWO_SHARDS, "b.safetensors.index.json")
    with pytest.raises(CheckpointError, match=r"a\.safetensors.*b\.safetensors.*path of the one"):
        open_checkpoint(tmp_path)
    shard(tmp_path, TWO_SHARDS, "model.safetensors.index.json")
    assert open_checkpoint(tmp_path).files == tuple(TWO_SHARDS)


def test_key_that_the_index_does_not_list_is_kept(tmp_path: Path) -> None:
    shard(tmp_path, TWO_SHARDS, "model.safetensors.index.json")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    del index["weight_map"]["layers.0.k_scale"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "layers.0.k_scale" in open_checkpoint(tmp_path).tensors


def test_shards_may_lie_in_a_subfolder(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    shard(tmp_path, {"shards/one.safetensors": ["layers.0.weight"]}, "model.safetensors.index.json")
    assert open_checkpoint(tmp_path).files == ("shards/one.safetensors",)


def test_consolidated_files_are_left_aside_only_beside_others(tmp_path: Path) -> None:
    shard(tmp_path, {"consolidated.safetensors": ["layers.0.weight"]}, None)
    assert open_checkpoint(tmp_path).files == ("consolidated.safetensors",)
    shard(tmp_path, {"model.safetensors": ["layers.0.weight"]}, None)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.files == ("model.safetensors",)
    assert checkpoint.unlisted_files == ("consolidated.safetensors",)


def test_one_file_is_read_alone(tmp_path: Path) -> None:
    shard(tmp_path, TWO_SHARDS, None)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with open_checkpoint(str(tmp_path / "model-00002-of-00002.safetensors")) as checkpoint:
        assert checkpoint.files == ("model-00002-of-00002.safetensors",)
        assert list(checkpoint.tensors) == ["layers.0.v_scale", "layers.1.weight"]
        assert checkpoint.json("config.json") == {"model_type": "llama"}
        assert checkpoint.json("hf_quant_config.json") is None


def test_the_path_itself_may_be_a_link(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("links")
    (other / "folder").symlink_to(folder)
    (other / "weights.safetensors").symlink_to(folder / "model.safetensors")
    assert open_checkpoint(other / "folder").root == folder.resolve()
    with open_checkpoint(other / "weights.safetensors") as checkpoint:
        assert checkpoint.files == ("weights.safetensors",)
        assert same(checkpoint.read("layers.0.v_scale"), torch.tensor(0.023))


def test_a_link_inside_the_folder_is_followed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "stored")
    (folder / "model.safetensors").symlink_to("stored")
    with open_checkpoint(folder) as checkpoint:
        assert same(checkpoint.read("layers.0.v_scale"), torch.tensor(0.023))


def test_unknown_key_wrong_shape_and_closed_are_named(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        with pytest.raises(CheckpointError, match="'lm_head'") as caught:
            checkpoint.read("lm_head")
        assert caught.value.place == "lm_head"
        with pytest.raises(CheckpointError, match=r"shape \(2,\).*\(3,\)") as caught:
            checkpoint.copy_to("layers.0.k_scale", torch.empty(3))
        assert (caught.value.file, caught.value.place) == ("model.safetensors", "layers.0.k_scale")
        checkpoint.read("layers.0.k_scale")
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("layers.0.k_scale")


def test_tensors_cannot_be_changed(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint, pytest.raises(TypeError):
        checkpoint.tensors["x"] = checkpoint.tensors["layers.0.weight"]  # type: ignore[index]


@pytest.mark.parametrize("change", ["cut", "replaced"])
def test_a_file_that_changes_after_opening_is_refused(folder: Path, change: str) -> None:
    file = folder / "model.safetensors"
    with open_checkpoint(folder) as checkpoint:
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content[:1000] if change == "cut" else content)
        with pytest.raises(CheckpointError, match="changed since") as caught:
            checkpoint.read("layers.0.weight")
    assert caught.value.file == "model.safetensors"


def test_a_file_that_is_cut_under_its_window_is_refused(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        first, *_, last = (key for key, info in checkpoint.tensors.items() if info.nbytes)
        checkpoint.read(first)
        os.truncate(folder / "model.safetensors", 5000)
        with pytest.raises(CheckpointError, match="was cut") as caught:
            checkpoint.read(last)
    assert (caught.value.file, caught.value.place) == ("model.safetensors", last)
