"""The buffers that hold a layer's scales, the record beside them, and the one way to write.

Whatever happens to a buffer (a dummy load, a cast, released memory), the record on the host says
what it should hold. Every scale of every layer is written by `commit_scales` and
`process_scales`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quantattn.cache_writes import follow, holds_entries
from quantattn.errors import ScaleError
from quantattn.scales import (
    DEFAULT_RANGES,
    DEFAULT_SCALE,
    ROLES,
    RecordedScale,
    ScaleShape,
    buffer_name,
)

__all__ = [
    "GUARDED_NAMES",
    "RANGE_ROLES",
    "SCALE_ROLES",
    "ScaleBuffers",
    "ScaleState",
    "check_commit",
    "commit_scales",
    "process_scales",
    "read_scales",
    "write_buffers",
]

SCALE_ROLES = {buffer_name(role): role for role in ROLES}
RANGE_ROLES = {f"{role}_range": role for role in DEFAULT_RANGES}
GUARDED_NAMES = frozenset({*SCALE_ROLES, *RANGE_ROLES})


@dataclass
class ScaleState:
    """What a layer knows about its scales, on the host.

    Attributes:
        shape: Head counts and granularity.
        ranges: By role: the constant that turns an observed amax into a scale.
        kv_sharing_target: The layer whose cache, and therefore whose k and v scale, this one uses.
        has_one_latent: The cache holds one latent for keys and values; `k_scale` serves both.
        record: By role: what was last loaded or set; roles that are not there are at the default.
        aliases: Old attribute name -> guarded name, and how its buffer is read under the old one.
        is_processed: Whether loading has finished.
    """

    shape: ScaleShape
    ranges: dict[str, float]
    kv_sharing_target: ScaleBuffers | None = None
    has_one_latent: bool = False
    record: dict[str, RecordedScale] = field(default_factory=dict)
    aliases: dict[str, tuple[str, Callable[[Tensor], Any]]] = field(default_factory=dict)
    is_processed: bool = False

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles whose scale the layer owns."""
        if self.kv_sharing_target is not None:
            return ("q", "prob")
        return ("q", "k", "prob") if self.has_one_latent else ROLES

    def own_names(self) -> tuple[str, ...]:
        """Names of the layer's own buffers: its scales, then its ranges."""
        scales = [name for name, role in SCALE_ROLES.items() if role in self.roles]
        return (*scales, *(name for name, role in RANGE_ROLES.items() if role in self.roles))

    def recorded(self, role: str) -> RecordedScale:
        """What the layer's scale of a role should be; a shared cache's is its owner's."""
        if self.kv_sharing_target is not None and role in ("k", "v"):
            return self.kv_sharing_target.scale_state.recorded(role)
        role = "k" if role == "v" and self.has_one_latent else role
        default = (DEFAULT_SCALE,) * math.prod(self.shape.of(role))
        return self.record.get(role) or RecordedScale(default)

    def values(self, name: str) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """What a buffer should hold, and its shape."""
        if name in RANGE_ROLES:
            return (self.ranges[RANGE_ROLES[name]],), ()
        role = SCALE_ROLES[name]
        return self.recorded(role).values, self.shape.of(role)


class ScaleBuffers(nn.Module):
    """A module with guarded float32 buffers: moves take them along, casts leave them alone."""

    scale_state: ScaleState

    def setup_scales(self, state: ScaleState) -> None:
        """Make the buffers; `register_quant_scales` calls it with checked arguments."""
        self.__dict__["scale_state"] = state
        for name in state.own_names():
            values, shape = state.values(name)
            # An inference tensor could not be written into later.
            with torch.inference_mode(False):
                self._buffers[name] = torch.tensor(values, dtype=torch.float32).reshape(shape)
            if name in RANGE_ROLES:
                self._non_persistent_buffers_set.add(name)

    @property
    def has_scales(self) -> bool:
        """Whether the buffers are registered: true once a constructor has run."""
        return "scale_state" in self.__dict__

    def guarded_buffers(self) -> dict[str, Tensor]:
        """The module's own scales and ranges by name."""
        named = self._buffers.items()
        return {name: b for name, b in named if name in GUARDED_NAMES and b is not None}

    @torch.no_grad()
    def sound_buffer(self, name: str, device: torch.device | None = None) -> Tensor:
        """A buffer of the right shape and dtype under a name, to be written into.

        Args:
            name: A guarded name.
            device: Where to make it, if it is on meta and the module has no other tensor.
        """
        buffer = self._buffers.get(name)
        shape = self.scale_state.values(name)[1]
        if buffer is None or buffer.is_meta or buffer.shape != shape:
            buffer = self._buffers[name] = self._empty(shape, self._home_device(device))
        elif buffer.dtype is not torch.float32:
            buffer.data = self._empty(shape, buffer.device)
        return buffer

    def _empty(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=torch.float32, device=device)

    def _home_device(self, otherwise: torch.device | None) -> torch.device:
        tensors = itertools.chain(self.parameters(), self.buffers())
        default = otherwise or torch.device("cpu")
        return next((t.device for t in tensors if not t.is_meta), default)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        guarded = {id(buffer): name for name, buffer in self.guarded_buffers().items()}

        def move(tensor: Tensor) -> Tensor:
            name = guarded.get(id(tensor))
            return fn(tensor) if name is None else self._moved(name, tensor, fn)

        return super()._apply(move, recurse)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _moved(self, name: str, buffer: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        """Let `fn` choose the device (and the storage, if it keeps float32); the bits stay ours.

        A cast on the same device leaves the buffer where it is, as captured graphs need it.
        """
        moved = fn(buffer)
        is_sound = buffer.dtype is torch.float32 and not buffer.is_meta
        is_cast = moved.dtype is not torch.float32 and moved.device == buffer.device
        if is_sound and (is_cast or moved is buffer):
            return buffer
        if moved.dtype is not torch.float32 or moved.is_inference():
            moved = self._empty(tuple(buffer.shape), moved.device)
        if moved.is_meta:
            return moved
        if is_sound:
            follow(buffer, moved)
            return moved.copy_(buffer)
        values, shape = self.scale_state.values(name)
        return moved.copy_(torch.tensor(values, dtype=torch.float32, device="cpu").view(shape))


Layer = TypeVar("Layer", bound=ScaleBuffers)  # a Mapping's keys do not vary with their class


def commit_scales(
    updates: Mapping[Layer, Mapping[str, RecordedScale]],
    *,
    replace: bool = False,
    device: torch.device | None = None,
) -> None:
    """Record checked scales for many modules and write their buffers, all or none.

    Args:
        updates: For each module, the new record by role; roles left out keep what is recorded, and
            their buffers are not touched.
        replace: Forget what was recorded for the roles left out, so that they become 1.0.
        device: Where to make buffers of modules that are wholly on meta; None: the CPU.

    Raises:
        ScaleError: A live cache holds entries that were written with a scale that would change;
            nothing was changed.
    """
    check_commit(updates, replace=replace)
    before = {module: module.scale_state.record for module in updates}
    for module, new in updates.items():
        module.scale_state.record = {**({} if replace else before[module]), **new}
    names = {
        module: list(module.scale_state.own_names()) if replace else [*map(buffer_name, new)]
        for module, new in updates.items()
    }
    try:
        write_buffers(names, device)
    except BaseException:
        for module, record in before.items():
            module.scale_state.record = record
        raise


def check_commit(
    updates: Mapping[Layer, Mapping[str, RecordedScale]], *, replace: bool = False
) -> None:
    """Raise what `commit_scales` would raise, and change nothing.

    Raises:
        ScaleError: A live cache holds entries that were written with a scale that would change.
    """
    for module, new in updates.items():
        state = module.scale_state
        for role in ("k", "v"):
            if role in state.roles and (replace or role in new):
                default = (DEFAULT_SCALE,) * math.prod(state.shape.of(role))
                values = new[role].values if role in new else default
                _refuse_if_in_use(module, role, values)


def _refuse_if_in_use(module: ScaleBuffers, role: str, new: tuple[float, ...]) -> None:
    old = module.scale_state.recorded(role).values
    name = buffer_name(role)
    buffer = module.guarded_buffers().get(name)
    if new != old and buffer is not None and holds_entries(buffer):
        layer = str(getattr(module, "layer_name", ""))
        raise ScaleError(
            f"{name} of layer {layer!r}: a cache holds entries written with {list(old)}, so it"
            f" cannot become {list(new)}; clear the cache first (PagedKVCache.clear(), or"
            " quantattn.cache_writes.forget(pages) for storage of your own)",
            layer=layer,
            role=role,
            value=new,
        )


def process_scales(modules: Iterable[Layer], device: torch.device | None = None) -> None:
    """Write the records and ranges of many modules into their buffers and mark them as loaded.

    Args:
        modules: Guarded modules.
        device: Where to make buffers of modules that are wholly on meta; None: the CPU.
    """
    modules = list(modules)
    write_buffers({module: list(module.scale_state.own_names()) for module in modules}, device)
    for module in modules:
        module.scale_state.is_processed = True


@torch.no_grad()
def write_buffers(names: Mapping[Layer, Iterable[str]], device: torch.device | None = None) -> None:
    """Write records and ranges into some buffers in place, with one transfer a device.

    Args:
        names: For each module, the guarded names to write.
        device: Where to make buffers of modules that are wholly on meta; None: the CPU.
    """
    buffers: dict[torch.device, list[Tensor]] = {}
    values: dict[torch.device, list[float]] = {}
    for module, some in names.items():
        for name in some:
            buffer = module.sound_buffer(name, device)
            buffers.setdefault(buffer.device, []).append(buffer)
            values.setdefault(buffer.device, []).extend(module.scale_state.values(name)[0])
    for place, tensors in buffers.items():
        flat = torch.tensor(values[place], dtype=torch.float32, device="cpu").to(place)
        parts = flat.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(
            tensors, [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
        )


def read_scales(modules: Iterable[Layer]) -> dict[Layer, dict[str, Tensor]]:
    """Copy the scale buffers of many modules to the host, with one transfer a device and dtype.

    Returns:
        For each module, its own scales by role, on the CPU.
    """
    places = [(m, role) for m in modules for role in m.scale_state.roles]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    buffers = [m.guarded_buffers()[buffer_name(role)].detach() for m, role in places]
    for index, buffer in enumerate(buffers):
        groups.setdefault((buffer.device, buffer.dtype), []).append(index)
    host: dict[Layer, dict[str, Tensor]] = {}
    for (device, _), indices in groups.items():
        if device.type == "meta":
            parts = [buffers[i] for i in indices]
        else:
            flat = torch.cat([buffers[i].reshape(-1) for i in indices]).cpu()
            split = flat.split([buffers[i].numel() for i in indices])
            parts = [part.view(buffers[i].shape) for part, i in zip(split, indices, strict=True)]
        for part, i in zip(parts, indices, strict=True):
            module, role = places[i]
            host.setdefault(module, {})[role] = part
    return host
