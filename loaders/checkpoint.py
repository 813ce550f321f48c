"""Reading a safetensors checkpoint lazily and safely.

Opening reads headers only. Tensors are copied out of one window of a file that moves along, so a
model being loaded needs its own memory plus that window. The file's size is compared before every
copy; only a file that another process cuts during a copy can still stop this one (SIGBUS).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType, TracebackType

import torch
from torch import Tensor

from quantattn.errors import CheckpointError
from quantattn.loaders.checkpoint_files import CheckpointFiles, find_files, path_inside
from quantattn.loaders.json_file import open_regular, read_json
from quantattn.loaders.safetensors_header import read_header

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]

WINDOW_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class TensorInfo:
    """What a checkpoint's header says about one tensor.

    Attributes:
        key: Name of the tensor in the checkpoint.
        dtype: Element type as stored.
        shape: Shape as stored.
        nbytes: Size of its data in bytes.
        file: The file it is in, relative to the checkpoint's folder.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file: str


@dataclass(frozen=True)
class _Shard:
    path: Path
    identity: tuple[int, ...]
    begins: Mapping[str, int]


@dataclass(frozen=True)
class _Window:
    file: str
    begin: int
    end: int
    buffer: mmap.mmap

    def covers(self, begin: int, end: int) -> bool:
        return self.begin <= begin and end <= self.end


class Checkpoint:
    """An open checkpoint; made by `open_checkpoint`, closed by `with` or `close`.

    Attributes:
        root: Folder of the checkpoint, resolved.
        files: Safetensors files that are read, relative to `root`.
        unlisted_files: Safetensors files that lie in the folder and are not read.
        tensors: Every tensor by its key; the order is that of the files and of the bytes in them.
    """

    def __init__(
        self,
        root: Path,
        unlisted_files: tuple[str, ...],
        shards: Mapping[str, _Shard],
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        self.root = root
        self.files = tuple(shards)
        self.unlisted_files = unlisted_files
        self.tensors = MappingProxyType(tensors)
        self._shards = shards
        self._window: _Window | None = None
        self._closed = False

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def read(self, key: str) -> Tensor:
        """Read one tensor into memory of its own, on the CPU, with its stored dtype.

        Args:
            key: Name of the tensor.

        Raises:
            CheckpointError: There is no such key, the checkpoint is closed, or its file changed.
        """
        info = self._info(key)
        tensor = torch.empty(info.shape, dtype=info.dtype, device="cpu")
        self.copy_to(key, tensor)
        return tensor

    def copy_to(self, key: str, destination: Tensor) -> None:
        """Copy one tensor into `destination`, converting its dtype as `Tensor.copy_` does.

        Args:
            key: Name of the tensor.
            destination: Tensor of the stored shape on any device; modified in place, not recorded
                by autograd.

        Raises:
            CheckpointError: There is no such key, the shapes differ, the checkpoint is closed, or
                its file changed since it was opened.
        """
        info = self._info(key)
        if tuple(destination.shape) != info.shape:
            raise CheckpointError(
                f"{info.file}: tensor {key!r} has shape {info.shape}, "
                f"its destination {tuple(destination.shape)}",
                file=info.file,
                place=key,
            )
        if info.nbytes == 0:
            return
        begin = self._shards[info.file].begins[key]
        shape = info.shape or (1,)
        target = destination.detach().view(shape)
        row_bytes = info.nbytes // shape[0]
        step = max(1, WINDOW_BYTES // row_bytes)
        for first in range(0, shape[0], step):
            part = target[first : first + step]
            self._copy_bytes(info, begin + first * row_bytes, part)

    def json(self, name: str) -> dict[str, object] | None:
        """Read a JSON file of the checkpoint's folder; None when there is none.

        Args:
            name: File name, relative to the folder.

        Raises:
            CheckpointError: The name or a symbolic link leads out of the folder, or the file is no
                JSON object (see `read_json`).
        """
        path = path_inside(self.root, name)
        return read_json(path) if os.path.lexists(path) else None

    def close(self) -> None:
        """Unmap the file in use; reading a tensor is an error from then on."""
        self._closed = True
        self._window = None

    def _info(self, key: str) -> TensorInfo:
        info = self.tensors.get(key)
        if info is None:
            raise CheckpointError(f"{self.root}: holds no tensor {key!r}", place=key)
        return info

    def _copy_bytes(self, info: TensorInfo, begin: int, part: Tensor) -> None:
        """Fill `part` with the bytes that begin at `begin` in the tensor's file."""
        nbytes = part.numel() * info.dtype.itemsize
        window = self._window_over(info, begin, begin + nbytes)
        data = torch.frombuffer(
            window.buffer, dtype=torch.uint8, count=nbytes, offset=begin - window.begin
        )
        if begin % info.dtype.itemsize:
            data = data.clone()
        part.copy_(data.view(info.dtype).view(part.shape))

    def _window_over(self, info: TensorInfo, begin: int, end: int) -> _Window:
        if self._closed:
            raise CheckpointError(f"{self.root}: the checkpoint is closed", file=info.file)
        window = self._window
        if window is None or window.file != info.file or not window.covers(begin, end):
            # Unmapped before the next is mapped, so that there is only ever one.
            window = self._window = None
            window = self._window = _map_window(self._shards[info.file], info, begin, end)
        if window.buffer.size() < end:
            raise CheckpointError(
                f"{info.file}: tensor {info.key!r}: the file was cut while it was read",
                file=info.file,
                place=info.key,
            )
        return window


def _map_window(shard: _Shard, info: TensorInfo, begin: int, end: int) -> _Window:
    with open_regular(shard.path) as file:
        if _identity(file) != shard.identity:
            raise CheckpointError(
                f"{info.file}: changed since the checkpoint was opened; open it again",
                file=info.file,
            )
        first = begin - begin % mmap.ALLOCATIONGRANULARITY
        last = min(max(end, begin + WINDOW_BYTES), os.fstat(file.fileno()).st_size)
        try:
            # Copy-on-write, because torch warns of a buffer that it could not write to.
            buffer = mmap.mmap(file.fileno(), last - first, access=mmap.ACCESS_COPY, offset=first)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{info.file}: bytes {first} to {last} cannot be mapped: {error}",
                file=info.file,
                place=info.key,
            ) from error
    return _Window(info.file, first, last, buffer)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: a folder, one `.safetensors` file, or a `.safetensors.index.json` file.

    In a folder `model.safetensors.index.json`, or the only `*.safetensors.index.json`, names the
    files to read. Without an index every `*.safetensors` is read, except `consolidated*` where
    others exist. Only headers are read here.

    Args:
        path: May itself be a symbolic link. Links inside the folder must not lead out of it.

    Raises:
        CheckpointError: Nothing readable is there, a file is damaged, a name or a link leads out of
            the folder, a key is in two files, or the index and the files disagree.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> file = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> save_file({"k_scale": torch.tensor([0.25, 0.5])}, file)
        >>> with open_checkpoint(file.parent) as checkpoint:
        ...     checkpoint.tensors["k_scale"].shape, checkpoint.read("k_scale").tolist()
        ((2,), [0.25, 0.5])
    """
    found = find_files(Path(path))
    shards: dict[str, _Shard] = {}
    tensors: dict[str, TensorInfo] = {}
    for name, file_path in found.files.items():
        with open_regular(file_path) as file:
            identity = _identity(file)
            entries = read_header(file, name)
        for e in entries:
            if e.key in tensors:
                raise CheckpointError(
                    f"{name}: tensor {e.key[:200]!r} is also in {tensors[e.key].file!r}",
                    file=name,
                    place=e.key,
                )
            tensors[e.key] = TensorInfo(e.key, e.dtype, e.shape, e.end - e.begin, name)
        shards[name] = _Shard(file_path, identity, {e.key: e.begin for e in entries})
    _check_index(found, tensors)
    return Checkpoint(found.root, found.unlisted_files, shards, tensors)


def _check_index(found: CheckpointFiles, tensors: Mapping[str, TensorInfo]) -> None:
    for key, shard in found.weight_map.items():
        info = tensors.get(key)
        if info is None or info.file != shard:
            holder = "no file holds it" if info is None else f"it is in {info.file!r}"
            raise CheckpointError(
                f"{found.index}: says that {key[:200]!r} is in {shard!r}, but {holder}",
                file=found.index,
                place=key,
            )


def _identity(file: BufferedReader) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
