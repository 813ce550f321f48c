"""Checkpoints made to do harm: each is refused by name, quickly and by no other exception."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quantattn.errors import CheckpointError
from quantattn.loaders.checkpoint import open_checkpoint
from quantattn.loaders.json_file import open_regular, read_json

GOOD = '"k_scale": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
DATA = torch.tensor([0.031, 0.017]).numpy().tobytes()


def raw_file(header: bytes | str, data: bytes = DATA, length: int | None = None) -> bytes:
    header = header.encode() if isinstance(header, str) else header
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def entry(dtype: str = '"F32"', shape: str = "[2]", offsets: str = "[0, 8]") -> str:
    return f'{{"x": {{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}}}}}'


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.file is not None
    assert caught.value.file in str(caught.value)
    return caught.value


def test_the_form_that_the_cases_below_damage_is_valid(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw_file(entry()))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("x").tolist() == torch.tensor([0.031, 0.017]).tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    {
        "empty file": (b"", "0 bytes"),
        "no length": (b"\x02\x00\x00", "truncated"),
        "length alone": ((2).to_bytes(8, "little"), "header of 2 bytes"),
        "length beyond the file": (raw_file(entry(), length=2000), "header of 2000 bytes"),
        "length of 100 MB": (raw_file(entry(), length=100_000_001), "header of 100000001 bytes"),
        "largest length": (raw_file(entry(), length=2**64 - 1), "header of 18446744073709551615"),
        "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid x", "git lfs pull"),
        "pickle": (b"PK\x03\x04" + bytes(100), "not a safetensors file"),
        "length cuts the header": (raw_file(entry(), length=len(entry()) - 1), "expected '}'"),
        "empty header": (raw_file(b""), "expected '{'"),
        "no UTF-8": (raw_file(b'{"\xff": 1}'), "UTF-8"),
        "zeros": (raw_file(bytes(100)), "expected '{'"),
        "a list": (raw_file("[1]"), "expected '{'"),
        "a string": (raw_file('"x"'), "expected '{'"),
        "NaN": (raw_file("NaN"), "expected '{'"),
        "no quote": (raw_file("{k: 1}"), "expected '\"'"),
        "open string": (raw_file('{"k'), "JSON string"),
        "control character": (raw_file('{"a\nb": 1}'), "JSON string"),
        "lone surrogate": (raw_file(r'{"\ud800": {}}'), "JSON string"),
        "no colon": (raw_file('{"k" {}}'), "expected ':'"),
        "trailing comma": (raw_file("{" + GOOD + ",}"), "expected '\"'"),
        "text behind": (raw_file("{" + GOOD + "} {}"), "text behind"),
        "duplicate tensor": (raw_file("{" + GOOD + "," + GOOD + "}"), "duplicate key 'k_scale'"),
        "duplicate metadata": (
            raw_file('{"__metadata__": {}, "__metadata__": {}, ' + GOOD + "}"),
            "duplicate key '__metadata__'",
        ),
        "metadata of numbers": (raw_file('{"__metadata__": {"a": 1}}', b""), "expected '\"'"),
        "metadata is a list": (raw_file('{"__metadata__": ["a"]}', b""), "expected '{'"),
        "metadata key twice": (
            raw_file('{"__metadata__": {"a": "b", "a": "c"}}', b""),
            "duplicate key 'a'",
        ),
        "bytes of no tensor": (raw_file("{}"), "8 bytes behind the last tensor"),
        "bytes behind": (raw_file(entry(), DATA + b"\0"), "1 bytes behind the last tensor"),
        "data is cut": (raw_file(entry(), DATA[:-1]), "ends at byte"),
    }.values(),
)
def test_damaged_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    error = refused(tmp_path)
    assert message in str(error)
    assert error.file == "model.safetensors"
    assert error.place is not None


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (entry(dtype='"F4"'), "dtype 'F4'"),
        (entry(dtype='"F6_E2M3"'), "dtype 'F6_E2M3'"),
        (entry(dtype='"f32"'), "dtype 'f32'"),
        (entry(dtype='""'), "dtype ''"),
        (entry(dtype="32"), "expected"),
        (entry(dtype="null"), "expected"),
        (entry(shape="[-2]"), "expected"),
        (entry(shape="[-0]", offsets="[0, 0]"), "expected"),
        (entry(shape="[2.0]"), "expected"),
        (entry(shape="[2e0]"), "expected"),
        (entry(shape="[1e400]"), "expected"),
        (entry(shape="[true, 2]"), "expected"),
        (entry(shape="[02]"), "expected"),
        (entry(shape="[NaN]"), "expected"),
        (entry(shape="[null]"), "expected"),
        (entry(shape='["2"]'), "expected"),
        (entry(shape="[[2]]"), "expected"),
        (entry(shape="[2,]"), "expected"),
        (entry(shape="2"), "expected"),
        (entry(shape="{}"), "expected"),
        (entry(shape="[" * 5000), "expected"),
        (entry(shape="[" + "1, " * 64 + "2]"), "at most 64 sizes"),
        (entry(shape=f"[{'9' * 10_000}]"), "expected"),
        (entry(shape=f"[{2**62}, 4]"), "larger than any memory"),
        (entry(shape=f"[0, {2**63 - 1}, {2**62}]", offsets="[0, 0]"), "larger than any memory"),
        (entry(shape="[3]"), "expected 12 bytes"),
        (entry(shape="[1]"), "expected 4 bytes"),
        (entry(shape="[]"), "expected 4 bytes"),
        (entry(dtype='"F64"'), "expected 16 bytes"),
        (entry(offsets="[8, 0]"), "data_offsets 8 to 0"),
        (entry(offsets="[-8, 0]"), "expected"),
        (entry(offsets="[0.0, 8]"), "expected"),
        (entry(offsets="[0]"), "expected"),
        (entry(offsets="[0, 8, 8]"), "expected"),
        (entry(offsets="[false, 8]"), "expected"),
        (entry(offsets="[4, 12]"), "ends at byte"),
        (entry(offsets=f"[{2**62}, {2**62 + 8}]"), "ends at byte"),
        ('{"x": {"dtype": "F32", "shape": [2]}}', "expected"),
        ('{"x": {"dtype": "F32", "shape": [2], "shape": [2]}}', "expected"),
        ('{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8],}}', "expected"),
        ('{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "a": 1}}', "nothing else"),
        ('{"x": ["F32", [2], [0, 8]]}', "expected"),
        ('{"x": null}', "expected"),
        ('{"x": ' * 5000, "expected"),
    ],
)
def test_damaged_entry_names_its_tensor(tmp_path: Path, header: str, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw_file(header))
    error = refused(tmp_path)
    assert message in str(error)
    assert (error.file, error.place) == ("model.safetensors", "x")
    assert "'x'" in str(error)
    assert len(str(error)) < 1000


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((2, 6), "begins at byte .* inside the tensor before it"),
        ((0, 4), "begins at byte .* inside the tensor before it"),
        ((5, 9), "belong to no tensor"),
        ((6, 10), "ends at byte"),
    ],
)
def test_overlaps_and_holes_name_the_tensor_and_the_byte(
    tmp_path: Path, second: tuple[int, int], message: str
) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": list(second)},
    }
    (tmp_path / "model.safetensors").write_bytes(raw_file(json.dumps(header), bytes(9)))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.place in ("a", "b")


@pytest.mark.parametrize(
    "start",
    [
        b'{"x": ' + b"[" * 1000,
        b'{"x": [[],',
        b'{"x": {"dtype": "F32", "shape": [1,',
        b'{"x": {"dtype": "F32", "shape": [' + b" " * 70,
        b'{"__metadata__": {"a": {"b": ',
        b" " * 8,
        bytes(8),
    ],
)
def test_header_of_100_mb_is_refused_quickly_in_bounded_memory(
    tmp_path: Path, start: bytes
) -> None:
    unit = start[-8:]
    header = start + unit * ((100_000_000 - len(start)) // len(unit))
    (tmp_path / "model.safetensors").write_bytes(raw_file(header, b""))
    del header
    tracemalloc.start()
    begin = time.monotonic()
    try:
        refused(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 350_000_000
    finally:
        tracemalloc.stop()
    assert time.monotonic() - begin < 10


def test_header_of_very_many_members_is_refused(tmp_path: Path) -> None:
    members = ",".join(f'"{number}":""' for number in range(500_001))
    header = f'{{"__metadata__":{{{members}}}}}'
    (tmp_path / "model.safetensors").write_bytes(raw_file(header, b""))
    assert "more than 500000 members" in str(refused(tmp_path))


def test_long_names_do_not_make_long_messages(tmp_path: Path) -> None:
    header = {"k" * 100_000: {"dtype": "F5", "shape": [2], "data_offsets": [0, 8]}}
    (tmp_path / "model.safetensors").write_bytes(raw_file(json.dumps(header)))
    assert len(str(refused(tmp_path))) < 1000


# Shards and their index


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": torch.tensor([0.25])}, tmp_path / "one.safetensors")
    save_file({"b": torch.tensor([0.75])}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("weight_map", "place", "message"),
    [
        ({"a": "one.safetensors", "c": "two.safetensors"}, "c", "no file holds it"),
        ({"a": "two.safetensors", "b": "one.safetensors"}, "a", "it is in 'one.safetensors'"),
        ({"a": "one.safetensors", "b": "pytorch_model.bin"}, "b", "'pytorch_model.bin'"),
        ({"a": "one.safetensors", "b": 2}, "b", "is 2, expected"),
        ({"a": "one.safetensors", "b": None}, "b", "is None, expected"),
        ({}, "weight_map", "weight_map"),
        (["one.safetensors"], "weight_map", "weight_map"),
        (None, "weight_map", "weight_map"),
    ],
)
def test_index_that_disagrees(sharded: Path, weight_map: object, place: str, message: str) -> None:
    write_index(sharded, weight_map)
    error = refused(sharded)
    assert message in str(error)
    assert (error.file, error.place) == ("model.safetensors.index.json", place)


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    error = refused(sharded)
    assert error.file == "two.safetensors"
    assert "No such file" in str(error)


@pytest.mark.parametrize("with_index", [True, False])
def test_key_in_two_shards_is_refused(sharded: Path, with_index: bool) -> None:
    save_file({"a": torch.tensor([0.5]), "b": torch.tensor([0.75])}, sharded / "two.safetensors")
    if not with_index:
        (sharded / "model.safetensors.index.json").unlink()
    error = refused(sharded)
    assert (error.file, error.place) == ("two.safetensors", "a")
    assert "one.safetensors" in str(error)


def test_duplicate_key_in_the_index_is_refused(sharded: Path) -> None:
    text = (
        '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "a": "two.safetensors"}}'
    )
    (sharded / "model.safetensors.index.json").write_text(text)
    assert "duplicate key 'a'" in str(refused(sharded))


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "sub/../../outside.safetensors",
        "..\\outside.safetensors",
        "C:\\outside.safetensors",
        "C:outside.safetensors",
        "/{folder}/../outside.safetensors",
        "//host/share/outside.safetensors",
        "\0.safetensors",
        "\ud800.safetensors",
        "\x1b[2J.safetensors",
    ],
)
def test_index_cannot_name_a_file_outside(sharded: Path, name: str) -> None:
    save_file({"b": torch.tensor([0.75])}, sharded.parent / "outside.safetensors")
    name = name.replace("{folder}", sharded.as_posix().lstrip("/"))
    write_index(sharded, {"a": "one.safetensors", "b": name})
    error = refused(sharded)
    assert (error.file, error.place) == ("model.safetensors.index.json", name)
    assert str(error).isprintable()


def test_name_longer_than_the_system_allows_is_refused(sharded: Path) -> None:
    write_index(sharded, {"a": "one.safetensors", "b": "x" * 5000 + ".safetensors"})
    with pytest.raises(CheckpointError):
        open_checkpoint(sharded)


@pytest.mark.parametrize("suffix", [".safetensors", ".safetensors.index.json"])
def test_only_one_file_of_a_kind_of_name_that_is_no_checkpoint(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"model{suffix}").mkdir()
    assert "not a regular file" in str(refused(tmp_path))


# Links and special files


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside")
    save_file({"b": torch.tensor([0.75])}, folder / "two.safetensors")
    (folder / "config.json").write_text('{"secret": 1}')
    index = {"weight_map": {"a": "one.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("name", ["two.safetensors", "model.safetensors.index.json"])
def test_link_out_of_the_folder_is_refused(sharded: Path, outside: Path, name: str) -> None:
    (sharded / name).unlink()
    (sharded / name).symlink_to(outside / name)
    error = refused(sharded)
    assert error.file == name
    assert "symbolic link" in str(error)
    assert "cp -rL" in str(error)


def test_link_out_of_the_folder_is_refused_without_an_index(sharded: Path, outside: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / "two.safetensors").unlink()
    (sharded / "two.safetensors").symlink_to(outside / "two.safetensors")
    assert refused(sharded).file == "two.safetensors"


def test_folder_link_in_a_shard_name_is_refused(sharded: Path, outside: Path) -> None:
    (sharded / "sub").symlink_to(outside)
    write_index(sharded, {"a": "one.safetensors", "b": "sub/two.safetensors"})
    assert refused(sharded).file == "sub/two.safetensors"


@pytest.mark.parametrize("target", ["gone.safetensors", "two.safetensors"])
def test_link_to_nothing_or_to_itself_is_refused(sharded: Path, target: str) -> None:
    (sharded / "two.safetensors").unlink()
    (sharded / "two.safetensors").symlink_to(target)
    assert refused(sharded).file == "two.safetensors"


@pytest.mark.parametrize("name", ["../config.json", "/etc/hostname", "", ".", "a/../../b.json"])
def test_json_cannot_leave_the_folder(sharded: Path, name: str) -> None:
    with open_checkpoint(sharded) as checkpoint, pytest.raises(CheckpointError, match="inside"):
        checkpoint.json(name)


def test_json_link_out_of_the_folder_or_to_nothing_is_refused(sharded: Path, outside: Path) -> None:
    (sharded / "config.json").symlink_to(outside / "config.json")
    (sharded / "params.json").symlink_to("gone.json")
    with open_checkpoint(sharded) as checkpoint:
        with pytest.raises(CheckpointError, match="symbolic link") as caught:
            checkpoint.json("config.json")
        assert caught.value.file == "config.json"
        with pytest.raises(CheckpointError, match="cannot be opened"):
            checkpoint.json("params.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_named_pipe_is_refused_without_waiting(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    os.mkfifo(sharded / "two.safetensors")
    os.mkfifo(sharded / "config.json")
    assert "not a regular file" in str(refused(sharded))
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_json(sharded / "config.json")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_device_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_regular(Path("/dev/zero"))


def test_folder_without_safetensors_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*pickles.*convert"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["absent", "absent.safetensors", "x.bin", "\0", "\0/a.safetensors"]
)
def test_path_that_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError):
        open_checkpoint(f"{tmp_path}/{name}")


# JSON files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected JSON"),
        (b"{", "expected JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b'"text"', "expected a JSON object, got str"),
        (b"1", "expected a JSON object, got int"),
        (b"null", "expected a JSON object, got NoneType"),
        (b'{"a": "\xff"}', "expected JSON in UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "expected JSON in UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "expected JSON in UTF-8"),
        (rb'{"\ud800": 1}', "expected JSON in UTF-8"),
        (b'{"a": 1, "b": 2, "a": 3}', "duplicate key 'a'"),
        (b'{"n": {"a": 1, "a": 1}}', "duplicate key 'a'"),
        (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"9" * 1_000_000 + b"}", "an integer of 1000000 digits"),
        (b'{"a": [' + b"[]," * 1_000_000 + b"[]]}", "more than 1000000 values"),
        (b'{"a": [' + b"1," * 1_000_000 + b"1]}", "more than 1000000 values"),
    ],
    ids=range(17),
)
def test_bad_json_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=message) as caught:
        read_json(tmp_path / "config.json")
    assert time.monotonic() - begin < 5
    assert caught.value.file == "config.json"
    assert len(str(caught.value)) < 1000


def test_huge_json_is_refused_before_it_is_read(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(10**12)
    with pytest.raises(CheckpointError, match="1000000000000 bytes"):
        read_json(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="1000000000000 bytes"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="at most 8"):
        read_json(tmp_path / "config.json", max_bytes=8)


def test_syntax_error_names_line_and_column(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1,\n  b}')
    with pytest.raises(CheckpointError) as caught:
        read_json(tmp_path / "config.json")
    assert caught.value.place == "line 2 column 3"


def test_numbers_of_real_configs_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"limit": [0.0, Infinity], "nan": NaN, "large": 1e400, "digits": ' + "9" * 300 + "}"
    )
    values = read_json(tmp_path / "config.json")
    assert values["limit"] == [0.0, float("inf")]
    assert values["nan"] != values["nan"]
    assert values["large"] == float("inf")
    assert float(str(values["digits"])) == pytest.approx(1e300)


# Mutations of valid files: the safetensors library is the oracle

TENSORS = {
    "layers.0.self_attn.k_scale": torch.tensor([[0.031], [0.017]], dtype=torch.bfloat16),
    "layers.0.self_attn.v_scale": torch.tensor(0.023),
    "layers.0.weight": torch.arange(21, dtype=torch.float32).reshape(3, 7),
    "mask": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4, dtype=torch.float16),
}
FRAGMENTS = [
    "", " ", "\t\n", "{", "}", "[", "]", ",", ":", '"', "\\", "\\u0041", "\\ud800", "\0", "é",
    "-", "-0", "0", "00", "1", "2", "7", "1.0", "1e3", "1e400", "true", "null", "NaN", "{}", "[]",
    "9223372036854775807", "9223372036854775808", "18446744073709551616", '"a":', '"__metadata__"',
    '"__metadata__":{"format":"pt"},', '"dtype"', '"shape"', '"data_offsets"', '"x":null,',
    "F32", "BF16", "F16", "U8", "BOOL", "F64", "F4", "F8_E8M0", "C64", "I64",
]  # fmt: skip


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("mutated") / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path, path.read_bytes()


def check_against_the_library(path: Path, content: bytes) -> bool:
    """Whether we accept the file; if so the library does too and both read the same bytes."""
    path.unlink()
    path.write_bytes(content)
    fault, ours = None, {}
    try:
        with open_checkpoint(path) as checkpoint:
            ours = {key: checkpoint.read(key) for key in checkpoint.tensors}
    except CheckpointError as error:
        fault = error
    if fault is not None:
        assert fault.file == path.name
        assert fault.place is not None
        return False
    theirs = load_file(path)
    assert set(ours) == set(theirs)
    for key, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[key].dtype, theirs[key].shape)
        if tensor.numel():
            left, right = (stored_bytes(t) for t in (tensor, theirs[key]))
            assert torch.equal(left, right)
    return True


def stored_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor; of booleans whether they are 0, since copying makes 1 of the rest."""
    stored = tensor.contiguous().reshape(-1).view(torch.uint8)
    return stored != 0 if tensor.dtype == torch.bool else stored


def header_length(content: bytes) -> int:
    return int.from_bytes(content[:8], "little")


@given(st.data())
def test_flipped_bytes(valid: tuple[Path, bytes], data: st.DataObject) -> None:
    path, content = valid
    mutated = bytearray(content)
    positions = st.integers(0, len(content) - 1)
    edits = st.lists(st.tuples(positions, st.integers(1, 255)), min_size=1, max_size=4)
    touched = data.draw(edits)
    for position, mask in touched:
        mutated[position] ^= mask
    accepted = check_against_the_library(path, bytes(mutated))
    if all(position >= 8 + header_length(content) for position, _ in touched):
        assert accepted


@given(st.data())
def test_truncated_and_extended(valid: tuple[Path, bytes], data: st.DataObject) -> None:
    path, content = valid
    cut = data.draw(st.integers(0, len(content) - 1))
    assert not check_against_the_library(path, content[:cut])
    extra = data.draw(st.binary(min_size=1, max_size=64))
    assert not check_against_the_library(path, content + extra)


@given(st.data())
def test_edited_header_text(valid: tuple[Path, bytes], data: st.DataObject) -> None:
    path, content = valid
    end = 8 + header_length(content)
    text = content[8:end].decode()
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, min(start + 12, len(text))))
        text = text[:start] + data.draw(st.sampled_from(FRAGMENTS)) + text[stop:]
    check_against_the_library(path, raw_file(text, content[end:]))


SIZES = st.one_of(
    st.integers(0, 12), st.sampled_from([-1, 2**31, 2**62, 2**63, 2**64, 1.0, True, None, "1"])
)
FIELDS = {
    "dtype": st.sampled_from(["F32", "BF16", "F16", "U8", "I8", "BOOL", "F64", "F4", "X", 1, None]),
    "shape": st.lists(SIZES, max_size=4) | st.none(),
    "data_offsets": st.lists(SIZES | st.integers(0, 110), max_size=3) | st.none(),
    "extra": st.just(1),
}


@given(st.data())
def test_edited_header_values(valid: tuple[Path, bytes], data: st.DataObject) -> None:
    path, content = valid
    end = 8 + header_length(content)
    header = json.loads(content[8:end])
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(TENSORS)))
        field = data.draw(st.sampled_from(sorted(FIELDS)))
        header[key][field] = data.draw(FIELDS[field])
    check_against_the_library(path, raw_file(json.dumps(header), content[end:]))


@given(st.permutations(sorted(TENSORS)), st.permutations(["dtype", "shape", "data_offsets"]))
def test_any_order_and_spacing_of_a_valid_header_is_accepted(
    valid: tuple[Path, bytes], keys: list[str], fields: list[str]
) -> None:
    path, content = valid
    end = 8 + header_length(content)
    header = json.loads(content[8:end])
    shuffled = {key: {field: header[key][field] for field in fields} for key in keys}
    for indent in (None, 2, "\t\r\n"):
        text = json.dumps(shuffled, indent=indent)
        assert check_against_the_library(path, raw_file(f" {text}\n  ", content[end:]))
