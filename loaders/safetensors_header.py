"""Parsing a safetensors header that may be hostile.

A file is 8 bytes (little-endian length of the header), the header (a JSON object) and the tensors'
bytes. The header's grammar is so small that it is walked token by token: nothing is built that the
grammar does not allow, so a hostile header is refused at its first fault and costs little more than
its text. The rules are those of the safetensors library (github.com/huggingface/safetensors,
"Format"); stricter here: no duplicate keys, no unknown fields, no types of less than a byte.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader

import torch

from quantattn.errors import CheckpointError

__all__ = ["HeaderEntry", "read_header"]

MAX_HEADER_BYTES = 100_000_000
MAX_MEMBERS = 500_000
MAX_DIMS = 64
MAX_BYTES = 2**63 - 1

_LENGTH_BYTES = 8

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
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

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()

# White space is bounded here because a failing match goes over all of it again.
_W = r"[ \t\n\r]{0,64}"
_COLON = rf"{_W}:{_W}"
_SIZE = r"(?:0|[1-9][0-9]{0,18})"
_FIELD = (
    rf'(?:"dtype"{_COLON}"(?P<dtype>[^"\\]{{0,64}})"'
    rf'|"shape"{_COLON}\[{_W}(?P<shape>(?:{_SIZE}{_W}(?:,{_W}{_SIZE}{_W}){{0,{MAX_DIMS - 1}}})?)\]'
    rf'|"data_offsets"{_COLON}\[{_W}(?P<begin>{_SIZE}){_W},{_W}(?P<end>{_SIZE}){_W}\])'
)
_ENTRY = re.compile(rf"\{{{_W}(?:{_FIELD}{_W}(?:,{_W}(?=\")|(?=\}}))){{3}}\}}")


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a file.

    Attributes:
        key: Name of the tensor.
        dtype: Its element type.
        shape: Its shape.
        begin: Offset of its first byte, from the start of the file.
        end: Offset behind its last byte.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: BufferedReader, name: str) -> tuple[HeaderEntry, ...]:
    """Read and check the header of a safetensors file.

    Args:
        file: The file, open for reading, at its start.
        name: What errors call the file.

    Returns:
        The tensors in the order of their bytes. They cover the file's data without hole or overlap.

    Raises:
        CheckpointError: The file is no valid safetensors file, or holds a type torch does not have.
    """
    size = os.fstat(file.fileno()).st_size
    length = _read_length(file, size, name)
    try:
        text = file.read(length).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{name}: the header is not UTF-8",
            file=name,
            place=f"byte {_LENGTH_BYTES + error.start}",
        ) from error
    cursor = _Cursor(text, name)
    entries = list(_entries(cursor, data_start=_LENGTH_BYTES + length))
    cursor.expect_end()
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_coverage(entries, _LENGTH_BYTES + length, size, name)
    return tuple(entries)


def _read_length(file: BufferedReader, size: int, name: str) -> int:
    prefix = file.read(_LENGTH_BYTES)
    if prefix == b"version ":
        raise CheckpointError(
            f"{name}: a Git LFS pointer instead of the tensors; fetch them with `git lfs pull`",
            file=name,
            place="byte 0",
        )
    length = int.from_bytes(prefix, "little")
    most = min(size - _LENGTH_BYTES, MAX_HEADER_BYTES)
    if len(prefix) < _LENGTH_BYTES or length > most:
        raise CheckpointError(
            f"{name}: claims a header of {length} bytes; a file of {size} bytes can have at most "
            f"{max(most, 0)}: truncated, or not a safetensors file",
            file=name,
            place="byte 0",
        )
    return length


def _entries(cursor: _Cursor, data_start: int) -> Iterator[HeaderEntry]:
    for key in cursor.members():
        if not key.isprintable():
            raise cursor.refuse("a name that cannot be printed, expected text", key)
        if key == "__metadata__":
            for _ in cursor.members():
                cursor.string()
        else:
            yield _entry(cursor, key, data_start)


def _entry(cursor: _Cursor, key: str, data_start: int) -> HeaderEntry:
    dtype, sizes, begin, end = cursor.entry(key)
    if dtype not in _DTYPES:
        raise cursor.refuse(f"dtype {dtype!r}, expected one of {', '.join(_DTYPES)}", key)
    shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
    torch_dtype = _DTYPES[dtype]
    # A zero must not hide the others' product: torch computes strides from them.
    if math.prod(max(size, 1) for size in shape) * torch_dtype.itemsize > MAX_BYTES:
        raise cursor.refuse(f"shape {shape} is larger than any memory", key)
    expected = math.prod(shape) * torch_dtype.itemsize
    if end - begin != expected:
        raise cursor.refuse(
            f"data_offsets {begin} to {end}, expected {expected} bytes for {dtype} {shape}", key
        )
    return HeaderEntry(key, torch_dtype, shape, data_start + begin, data_start + end)


def _check_coverage(entries: list[HeaderEntry], start: int, size: int, name: str) -> None:
    position = start
    for entry in entries:
        if entry.end > size:
            fault = f"ends at byte {entry.end} of a file of {size} bytes"
        elif entry.begin < position:
            fault = f"begins at byte {entry.begin}, inside the tensor before it"
        elif entry.begin > position:
            fault = f"begins at byte {entry.begin}; bytes from {position} on belong to no tensor"
        else:
            position = entry.end
            continue
        raise CheckpointError(
            f"{name}: tensor {entry.key[:200]!r} {fault}", file=name, place=entry.key
        )
    if position < size:
        raise CheckpointError(
            f"{name}: {size - position} bytes behind the last tensor belong to no tensor",
            file=name,
            place=f"byte {position}",
        )


class _Cursor:
    """A position in the header's text; every method moves it over what it reads."""

    def __init__(self, text: str, file: str) -> None:
        self._text = text
        self._file = file
        self._position = 0

    def members(self) -> Iterator[str]:
        """Yield each key of the object that comes next; the caller reads the value in between."""
        self._expect("{")
        if self._take("}"):
            return
        seen: set[str] = set()
        while True:
            key = self.string()
            if key in seen:
                raise self.refuse(f"duplicate key {key[:200]!r}", key)
            seen.add(key)
            if len(seen) > MAX_MEMBERS:
                raise self.refuse(f"an object of more than {MAX_MEMBERS} members")
            self._expect(":")
            yield key
            if not self._take(","):
                break
        self._expect("}")

    def string(self) -> str:
        self._expect('"')
        try:
            value, self._position = _DECODER.raw_decode(self._text, self._position - 1)
            value.encode()
        except ValueError as error:
            raise self.refuse("not a valid JSON string") from error
        return str(value)

    def entry(self, key: str) -> tuple[str, str, int, int]:
        """Read what describes a tensor: dtype, shape (its text), begin and end."""
        self._skip_space()
        found = _ENTRY.match(self._text, self._position)
        if found is None or None in found.groups():
            got = self._text[self._position : self._position + 120]
            raise self.refuse(
                'expected {"dtype": name, "shape": [at most 64 sizes], "data_offsets": '
                f"[begin, end]}} and nothing else, got {got!r}",
                key,
            )
        self._position = found.end()
        dtype, sizes, begin, end = found.groups()
        return dtype, sizes, int(begin), int(end)

    def expect_end(self) -> None:
        self._skip_space()
        if self._position < len(self._text):
            raise self.refuse("text behind the header's object")

    def refuse(self, message: str, key: str | None = None) -> CheckpointError:
        if key is not None:
            return CheckpointError(
                f"{self._file}: tensor {key[:200]!r}: {message}", file=self._file, place=key
            )
        at = _LENGTH_BYTES + len(self._text[: self._position].encode())
        return CheckpointError(
            f"{self._file}: header at byte {at}: {message}", file=self._file, place=f"byte {at}"
        )

    def _skip_space(self) -> None:
        found = _SPACE.match(self._text, self._position)
        if found is not None:
            self._position = found.end()

    def _take(self, token: str) -> bool:
        if not self._text.startswith(token, self._position):
            self._skip_space()
            if not self._text.startswith(token, self._position):
                return False
        self._position += len(token)
        return True

    def _expect(self, token: str) -> None:
        if not self._take(token):
            got = self._text[self._position : self._position + 20]
            raise self.refuse(f"expected {token!r}, got {got!r}")
