"""Which files a checkpoint consists of, and whether a name in it may be opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath

from quantattn.errors import CheckpointError
from quantattn.loaders.json_file import read_json

__all__ = ["CheckpointFiles", "find_files", "path_inside"]

MAX_INDEX_BYTES = 64 * 1024 * 1024

_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of one checkpoint; nothing in them is read yet.

    Attributes:
        root: Folder of the checkpoint, resolved.
        files: Path of each safetensors file to read, by its name relative to `root`.
        unlisted_files: Safetensors files in the folder that are not to be read.
        index: The index that names `files`; None without one.
        weight_map: The file of each tensor, as the index says; empty without one.
    """

    root: Path
    files: Mapping[str, Path]
    unlisted_files: tuple[str, ...] = ()
    index: str | None = None
    weight_map: Mapping[str, str] = field(default_factory=dict)


def find_files(path: Path) -> CheckpointFiles:
    """Find the files of the checkpoint at `path`, by the rules of `open_checkpoint`.

    Args:
        path: A folder, a `.safetensors` file or a `.safetensors.index.json` file.

    Raises:
        CheckpointError: Nothing readable is there, the index is malformed, or a name or link in it
            leads out of the folder.
    """
    if path.is_dir():
        return _from_folder(_resolve(path))
    root = _resolve(path.parent)
    if path.name.endswith(_INDEX):
        return _from_index(root, path.name)
    if path.name.endswith(_WEIGHTS):
        return CheckpointFiles(root, {path.name: root / path.name})
    found = "another file" if path.exists() else "nothing"
    raise CheckpointError(
        f"{path}: expected a folder, a *{_WEIGHTS} file or a *{_INDEX} file, found {found}",
        file=path.name,
    )


def path_inside(root: Path, name: str, *, named_in: str | None = None) -> Path:
    """Join `root` and `name` if neither the name nor its symbolic links lead out of `root`.

    Args:
        root: A resolved folder.
        name: Name of a file in it, which need not exist.
        named_in: The file that the name was read from, for the error.

    Raises:
        CheckpointError: The name is empty or absolute, has `..` or unprintable characters in it, or
            is a link to a place outside.

    Example:
        >>> path_inside(Path("/models/llama"), "../secret.json")
        Traceback (most recent call last):
        quantattn.errors.CheckpointError: '../secret.json' does not name a file inside /models/llama
    """
    # Both flavours on every system, so that a checkpoint is refused everywhere or nowhere.
    pures = (PurePosixPath(name), PureWindowsPath(name))
    if not name.isprintable() or any(not p.name or p.anchor or ".." in p.parts for p in pures):
        prefix, file, place = (f"{named_in}: ", named_in, name) if named_in else ("", name, None)
        raise CheckpointError(
            f"{prefix}{name[:200]!r} does not name a file inside {root}", file=file, place=place
        )
    path = root / name
    target = _resolve(path)
    if not target.is_relative_to(root):
        raise CheckpointError(
            f"{name}: a symbolic link to {target}, out of the checkpoint's folder; copy the folder "
            "with its links resolved (`cp -rL`) and give the copy",
            file=name,
        )
    return path


def _from_folder(root: Path) -> CheckpointFiles:
    names = _list_names(root)
    indexes = [name for name in names if name.endswith(_INDEX)]
    if f"model{_INDEX}" in indexes:
        indexes = [f"model{_INDEX}"]
    if len(indexes) > 1:
        raise CheckpointError(
            f"{root}: several indexes, {', '.join(indexes)}; give the path of the one to read"
        )
    if indexes:
        path_inside(root, indexes[0])
        return _from_index(root, indexes[0])
    weights = [name for name in names if name.endswith(_WEIGHTS)]
    if not weights:
        shown = ", ".join(map(repr, names[:20])) or "nothing"
        raise CheckpointError(
            f"{root}: expected a *{_WEIGHTS} file, found {shown}; pickles (.bin, .pt, .pth) can "
            "run code and are never read: convert them to safetensors"
        )
    listed = [name for name in weights if not name.startswith("consolidated")] or weights
    return CheckpointFiles(
        root,
        {name: path_inside(root, name) for name in listed},
        tuple(name for name in weights if name not in listed),
    )


def _from_index(root: Path, index: str) -> CheckpointFiles:
    weight_map = read_json(root / index, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: weight_map: expected an object with at least one key",
            file=index,
            place="weight_map",
        )
    for key, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(_WEIGHTS):
            got = repr(name)[:200]
            raise CheckpointError(
                f"{index}: the file of {key[:200]!r} is {got}, expected the name of a *{_WEIGHTS}",
                file=index,
                place=key,
            )
    names = sorted(set(weight_map.values()))
    files = {name: path_inside(root, name, named_in=index) for name in names}
    unlisted = tuple(
        name for name in _list_names(root) if name.endswith(_WEIGHTS) and name not in files
    )
    return CheckpointFiles(root, files, unlisted, index, weight_map)


def _list_names(root: Path) -> list[str]:
    try:
        return sorted(os.listdir(root))
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be listed: {error.strerror}") from error


def _resolve(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)[:200]!r} cannot be resolved: {error}", file=path.name
        ) from error
