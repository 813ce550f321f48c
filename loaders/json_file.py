"""Reading one JSON file that nobody vouches for: size known first, an object, no duplicate keys."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from io import BufferedReader
from pathlib import Path

from quantattn.errors import CheckpointError

__all__ = ["open_regular", "read_json"]

MAX_JSON_BYTES = 16 * 1024 * 1024
MAX_JSON_VALUES = 1_000_000

# float() takes any integer of 300 digits, so no reader of the result can overflow.
_MAX_DIGITS = 300


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, object]:
    """Read a JSON file whose top level is an object.

    `NaN`, `Infinity` and numbers beyond float64 come back as non-finite floats, because real
    `config.json` files hold them: whoever takes a number from the result checks it.

    Args:
        path: The file; a symbolic link is followed.
        max_bytes: Largest accepted size in bytes, compared before anything is read.

    Raises:
        CheckpointError: The file is absent, no regular file, too large, no UTF-8, no JSON, nested
            too deeply, no object, has more than a million values, a duplicate key or an integer of
            more than 300 digits.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "config.json").write_text('{"num_attention_heads": 4}')
        >>> read_json(folder / "config.json")
        {'num_attention_heads': 4}
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise CheckpointError(
                f"{path}: {size} bytes of JSON; at most {max_bytes} are read", file=path.name
            )
        data = file.read(size)
    # An empty list takes twenty times the memory of its text; every value costs one of these bytes.
    if sum(data.count(mark) for mark in (b"[", b"{", b",")) > MAX_JSON_VALUES:
        raise CheckpointError(f"{path}: more than {MAX_JSON_VALUES} values of JSON", file=path.name)
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_int=_bounded_int)
    except RecursionError as error:
        raise CheckpointError(f"{path}: JSON is nested too deeply", file=path.name) from error
    except ValueError as error:
        raise CheckpointError(
            f"{path}: expected JSON in UTF-8: {error}", file=path.name, place=_place(error)
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: expected a JSON object, got {type(value).__name__}", file=path.name
        )
    return value


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; pipes, devices and folders are refused without blocking.

    Args:
        path: The file; a symbolic link is followed.

    Raises:
        CheckpointError: The file is absent, not readable, or no regular file.

    Example:
        >>> open_regular(Path("/"))
        Traceback (most recent call last):
        quantattn.errors.CheckpointError: /: not a regular file
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: cannot be opened: {reason}", file=path.name) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: not a regular file", file=path.name)
    return BufferedReader(os.fdopen(descriptor, "rb", buffering=0))


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"duplicate key {twice[:200]!r}")
    for key in members:
        key.encode()
    return members


def _bounded_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits; at most {_MAX_DIGITS} are read")
    return int(text)


def _place(error: ValueError) -> str | None:
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno} column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start}"
    return None
