"""Saved blocks come back as they were, and a file that is anything else is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantattn.cache import PagedKVCache
from quantattn.errors import CheckpointError
from quantattn.host_blocks import HostBlocks, load_blocks, save_blocks


@pytest.fixture
def blocks() -> HostBlocks:
    cache = PagedKVCache(2, 5, 4, 1, 8, kv_cache_dtype="int8_per_token_head")
    cache.layer(0).random_(0, 256)
    cache.layer(1).random_(0, 256)
    return cache.swap_out([3, 0, 4])


def test_a_file_gives_back_bytes_and_identity(blocks, tmp_path) -> None:
    save_blocks(blocks, tmp_path / "a.safetensors")
    loaded = load_blocks(str(tmp_path / "a.safetensors"))
    assert torch.equal(loaded.data, blocks.data)
    assert loaded.identity == blocks.identity
    assert loaded.fingerprint == blocks.fingerprint
    assert (loaded.num_blocks, loaded.nbytes) == (3, 2 * 3 * 4 * 2 * (8 + 4))


def test_a_file_that_cannot_be_written_is_named(blocks, tmp_path) -> None:
    path = tmp_path / "absent" / "a.safetensors"
    with pytest.raises(CheckpointError, match=r"a\.safetensors: it cannot be written"):
        save_blocks(blocks, path)


def test_loaded_blocks_do_not_change_with_their_file(blocks, tmp_path) -> None:
    path = tmp_path / "a.safetensors"
    save_blocks(blocks, path)
    loaded = load_blocks(path)
    raw = path.read_bytes()
    path.write_bytes(raw[: -blocks.nbytes] + bytes(blocks.nbytes))
    assert torch.equal(loaded.data, blocks.data)


def test_no_blocks_are_saved_and_loaded(tmp_path) -> None:
    cache = PagedKVCache(2, 5, 4, 1, 8)
    cache.layer(0).fill_(3.0)
    save_blocks(cache.swap_out([]), tmp_path / "a.safetensors")
    loaded = load_blocks(tmp_path / "a.safetensors")
    cache.swap_in(loaded, [])
    assert (loaded.num_blocks, loaded.nbytes) == (0, 0)
    assert bool((cache.layer(0) == 3.0).all())


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors.*found none") as caught:
        load_blocks(tmp_path / "gone.safetensors")
    assert caught.value.file == str(tmp_path / "gone.safetensors")


@pytest.mark.parametrize("keep", [0, 7, 40, -1])
def test_a_cut_file_is_refused(blocks, tmp_path, keep) -> None:
    path = tmp_path / "a.safetensors"
    save_blocks(blocks, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_blocks(path)


def test_a_checkpoint_is_no_saved_blocks(tmp_path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"blocks": torch.zeros(1, 1, 8, dtype=torch.uint8)}, path)
    with pytest.raises(CheckpointError, match="holds no saved blocks"):
        load_blocks(path)
    save_file({"weight": torch.zeros(3)}, path, {"quantattn_identity": "{}"})
    with pytest.raises(CheckpointError, match="holds no saved blocks"):
        load_blocks(path)


@pytest.mark.parametrize(
    "identity",
    ["", "[", "[1]", "3", "null", "[" * 100_000, "9" * 5000, json.dumps({"format": "auto"})],
    ids=["empty", "broken", "list", "number", "null", "deep", "long", "other"],
)
def test_an_identity_without_its_fingerprint_is_refused(blocks, tmp_path, identity) -> None:
    path = tmp_path / "a.safetensors"
    metadata = {"quantattn_identity": identity, "quantattn_fingerprint": blocks.fingerprint}
    save_file({"blocks": blocks.data}, path, metadata)
    with pytest.raises(CheckpointError, match="does not have the quantattn_fingerprint"):
        load_blocks(path)


@pytest.mark.parametrize(
    "data", [torch.zeros(2, 3, 8), torch.zeros(2, 24, dtype=torch.uint8)], ids=["dtype", "shape"]
)
def test_data_of_another_kind_is_refused(blocks, tmp_path, data) -> None:
    path = tmp_path / "a.safetensors"
    save_blocks(HostBlocks(data, blocks.identity), path)
    assert load_file(path)["blocks"].shape == data.shape
    with pytest.raises(CheckpointError, match="expected uint8"):
        load_blocks(path)
