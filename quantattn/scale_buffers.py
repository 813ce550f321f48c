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

from quantattn.cache_writes import holds_entries
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
        """Register the buffers; `register_quant_scales` calls it with checked arguments."""
        self.__dict__["scale_state"] = state
        for role in state.roles:
            ones = torch.ones(state.shape.of(role), dtype=torch.float32)
            self.register_buffer(buffer_name(role), ones)
        for role in state.roles:
            if role in state.ranges:
                value = torch.tensor(state.ranges[role], dtype=torch.float32)
                self.register_buffer(f"{role}_range", value, persistent=False)

    @property
    def has_scales(self) -> bool:
        """Whether the buffers are registered: true once a constructor has run."""
        return "scale_state" in self.__dict__

    def guarded_buffers(self) -> dict[str, Tensor]:
        """The module's own scales and ranges by name."""
        named = self._buffers.items()
        return {name: b for name, b in named if name in GUARDED_NAMES and b is not None}

    @torch.no_grad()
    def sound_buffer(self, name: str) -> Tensor:
        """A buffer of the right shape and dtype under a name, to be written into."""
        buffer = self._buffers[name]
        shape = self.scale_state.values(name)[1]
        if buffer is None or buffer.is_meta or buffer.shape != shape:
            buffer = torch.empty(shape, dtype=torch.float32, device=self._home_device())
            self._buffers[name] = buffer
        elif buffer.dtype is not torch.float32:
            buffer.data = torch.empty(shape, dtype=torch.float32, device=buffer.device)
        return buffer

    def _home_device(self) -> torch.device:
        tensors = itertools.chain(self.parameters(), self.buffers())
        return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        guarded = {id(buffer): name for name, buffer in self.guarded_buffers().items()}

        def move(tensor: Tensor) -> Tensor:
            name = guarded.get(id(tensor))
            return fn(tensor) if name is None else self._moved(name, tensor, fn)

        return super()._apply(move, recurse)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _moved(self, name: str, buffer: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        """Let `fn` choose the device (and the storage, if it keeps float32); the bits stay ours."""
        moved = fn(buffer)
        if moved is buffer:
            return buffer
        if moved.dtype is not torch.float32:
            moved = torch.empty(buffer.shape, dtype=torch.float32, device=moved.device)
        if moved.is_meta:
            return moved
        if buffer.dtype is torch.float32 and not buffer.is_meta:
            return moved.copy_(buffer)
        values, shape = self.scale_state.values(name)
        return moved.copy_(torch.tensor(values, dtype=torch.float32).view(shape))


Layer = TypeVar("Layer", bound=ScaleBuffers)  # a Mapping's keys do not vary with their class


def commit_scales(
    updates: Mapping[Layer, Mapping[str, RecordedScale]], *, replace: bool = False
) -> None:
    """Record checked scales for many modules and write their buffers, all or none.

    Args:
        updates: For each module, the new record by role; roles left out keep what is recorded.
        replace: Forget what was recorded for the roles left out, so that they become 1.0.

    Raises:
        ScaleError: A live cache holds entries that were written with a scale that would change;
            nothing was changed.
    """
    check_commit(updates, replace=replace)
    for module, new in updates.items():
        state = module.scale_state
        state.record = {**({} if replace else state.record), **new}
    _write_buffers(updates)


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
    if new != old and holds_entries(module.guarded_buffers()[name]):
        layer = str(getattr(module, "layer_name", ""))
        raise ScaleError(
            f"{name} of layer {layer!r}: a cache holds entries written with {list(old)}, so it"
            f" cannot become {list(new)}; clear the cache first (PagedKVCache.clear(), or"
            " quantattn.cache_writes.forget(pages) for storage of your own)",
            layer=layer,
            role=role,
            value=new,
        )


def process_scales(modules: Iterable[ScaleBuffers]) -> None:
    """Write the records of many modules into their buffers and mark them as loaded."""
    modules = list(modules)
    _write_buffers(modules)
    for module in modules:
        module.scale_state.is_processed = True


@torch.no_grad()
def _write_buffers(modules: Iterable[ScaleBuffers]) -> None:
    """Write records and ranges into the buffers in place, with one transfer a device."""
    buffers: dict[torch.device, list[Tensor]] = {}
    values: dict[torch.device, list[float]] = {}
    for module in modules:
        for name in [name for name in module._buffers if name in GUARDED_NAMES]:
            buffer = module.sound_buffer(name)
            buffers.setdefault(buffer.device, []).append(buffer)
            values.setdefault(buffer.device, []).extend(module.scale_state.values(name)[0])
    for device, tensors in buffers.items():
        flat = torch.tensor(values[device], dtype=torch.float32).to(device)
        parts = flat.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(
            tensors, [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
        )
