"""QuantScales: the module mixin that guards attention scales against what happens to modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quantattn.errors import ScaleError
from quantattn.formats import CacheFormat, fnuz_factor
from quantattn.scale_buffers import (
    GUARDED_NAMES,
    RANGE_ROLES,
    SCALE_ROLES,
    ScaleBuffers,
    check_commit,
    commit_scales,
    process_scales,
    read_scales,
    write_buffers,
)
from quantattn.scales import (
    ROLES,
    RecordedScale,
    ScaleShape,
    ScaleSource,
    buffer_name,
    checked_range,
    fit_scale,
    raw_values,
)

__all__ = ["QuantScales", "accept_scales", "guarded_layers", "plain_path"]

Translator = Callable[["QuantScales", dict[str, Any], str], None]


class QuantScales(ScaleBuffers):
    """Mixin for an attention module whose scales and ranges are guarded float32 buffers.

    `q_scale`, `k_scale`, `v_scale` and `prob_scale` are in the state dict; `q_range`, `k_range` and
    `v_range` are not. They follow `.to(device)` and never change dtype; assigning to one writes
    into it. Use `QuantAttention`, `MLAAttention` or `register_quant_scales`, which set it up.

    Attributes:
        layer_name: Name in messages and reports.
        cache_format: Format of the cache that the layer writes.
    """

    layer_name: str
    cache_format: CacheFormat

    translate_state_dict: ClassVar[Translator | None] = None
    """Renames the keys of other conventions in a state dict; quantattn.loaders sets it."""

    @property
    def scale_shape(self) -> ScaleShape:
        """The head counts and the granularity of the scales."""
        return self.scale_state.shape

    @property
    def scale_roles(self) -> tuple[str, ...]:
        """The roles whose scale this layer owns: not k and v where it shares another's cache."""
        return self.scale_state.roles

    @property
    def scale_ranges(self) -> dict[str, float]:
        """By role: the constant that turns an observed amax into a scale."""
        return dict(self.scale_state.ranges)

    @property
    def scale_sources(self) -> dict[str, RecordedScale]:
        """By role: the recorded value and its source; the default where nothing was given."""
        return {role: self.scale_state.recorded(role) for role in ROLES}

    @property
    def kv_sharing_target(self) -> QuantScales | None:
        """The layer whose cache, and therefore whose k and v scale, this one uses."""
        target = self.scale_state.kv_sharing_target
        return target if isinstance(target, QuantScales) else None

    def set_scale(
        self,
        role: str,
        value: object,
        *,
        source: ScaleSource | str = ScaleSource.CALLER,
        key: str | None = None,
        file: str | None = None,
    ) -> None:
        """Check a scale, record it and write it into its buffer in place.

        Args:
            role: `q`, `k`, `v` or `prob`.
            value: A number, or one for each KV head (for q also one for each query head, reduced by
                the maximum of each group); a float, a list or a floating tensor.
            source: `caller`, `calibrated` or `checkpoint`; kept in the record.
            key: The checkpoint's key, kept in the record.
            file: The checkpoint's file, kept in the record.

        Raises:
            ScaleError: The value is invalid or does not fit, the role is another layer's, or a live
                cache holds entries that were written with the present k or v scale.

        Example:
            >>> layer = QuantAttention(4, 32, num_kv_heads=2)
            >>> layer.set_scale("k", 0.0123)
            >>> layer.host_scale("k") == torch.tensor(0.0123).item()
            True
        """
        self._check_owned(role)
        try:
            source = ScaleSource(source)
        except ValueError:
            known = ", ".join(known.value for known in ScaleSource)
            raise ScaleError(f"source: got {source!r}, expected one of {known}") from None
        record = fit_scale(
            role,
            value,
            self.scale_shape,
            layer=self.layer_name,
            source=source,
            key=key,
            file=file,
        )
        commit_scales({self: {role: record}})

    def _check_owned(self, role: str) -> None:
        if role not in ROLES or role in self.scale_roles:
            return
        target = self.kv_sharing_target
        if target is not None:
            reason = f"shares the cache of {target.layer_name!r}; set it there"
        else:
            reason = "has one latent for keys and values, scaled by k_scale; set that"
        raise ScaleError(
            f"{buffer_name(role)}: layer {self.layer_name!r} {reason}",
            layer=self.layer_name,
            role=role,
        )

    def set_range(self, role: str, value: float) -> None:
        """Set the constant that turns an observed amax into a scale, `scale = amax / range`.

        Raises:
            ScaleError: The value is not a number above zero, or the role has no range.

        Example:
            >>> layer = QuantAttention(4, 32)
            >>> layer.set_range("k", 150.0)
            >>> layer.k_range
            tensor(150.)
        """
        owned = [owner for owner in self.scale_roles if owner in self.scale_state.ranges]
        if role not in owned:
            raise ScaleError(
                f"range: got role {role!r}, expected one of {', '.join(owned)}", role=role
            )
        self.scale_state.ranges[role] = checked_range(role, value)
        write_buffers({self: [f"{role}_range"]})

    def reset_scales(self) -> None:
        """Forget every recorded scale and write 1.0 into the buffers.

        Raises:
            ScaleError: A live cache holds entries that were written with the present scales.

        Example:
            >>> layer = QuantAttention(4, 32)
            >>> layer.set_scale("k", 0.5)
            >>> layer.reset_scales()
            >>> layer.host_scale("k")
            1.0
        """
        commit_scales({self: {}}, replace=True)

    def reset_parameters(self) -> None:
        """Initialise as after construction: scales 1.0 and the configured ranges.

        What builds models on the meta device calls this after `to_empty`.

        Example:
            >>> with torch.device("meta"):
            ...     layer = QuantAttention(4, 32)
            >>> layer.to_empty(device="cpu").reset_parameters()
            >>> layer.k_scale
            tensor(1.)
        """
        parent = getattr(super(), "reset_parameters", None)
        if parent is not None:
            parent()
        self.reset_scales()

    def accept_buffers(self) -> None:
        """Make what the buffers hold the record: for engines that overwrite them in place.

        Raises:
            ScaleError: A buffer holds no valid scale, or a live cache holds entries that were
                written with another k or v scale; the record is left as it was.

        Example:
            >>> layer = QuantAttention(4, 32)
            >>> _ = layer.k_scale.fill_(0.5)
            >>> layer.accept_buffers()
            >>> layer.scale_sources["k"].value, layer.scale_sources["k"].source.value
            (0.5, 'buffer')
        """
        self.mend_scales()
        accept_scales([self])

    def host_scale(self, role: str) -> float | list[float]:
        """Read a scale from its buffer: a float, or a list by KV head. Waits for the device.

        Example:
            >>> QuantAttention(4, 32, num_kv_heads=2, scale_granularity="head").host_scale("k")
            [1.0, 1.0]
        """
        if role not in ROLES:
            raise ScaleError(f"role: got {role!r}, expected one of {', '.join(ROLES)}", role=role)
        self.mend_scales()
        values, shape = raw_values(getattr(self, buffer_name(role)), what=buffer_name(role))
        return values if shape else values[0]

    def effective_scale(self, role: str) -> Tensor:
        """The scale as this platform's kernels use it: the buffer, times 2 where e4m3 is FNUZ.

        Example:
            >>> layer = QuantAttention(4, 32, kv_cache_dtype="fp8")
            >>> layer.effective_scale("k") is layer.k_scale
            True
        """
        scale: Tensor = getattr(self, buffer_name(role))
        factor = fnuz_factor() if self.cache_format.has_fnuz_form else 1.0
        return scale if factor == 1.0 or role == "prob" else scale * factor

    def process_weights_after_loading(self, *args: object) -> None:
        """Write the recorded scales into the buffers, 1.0 where nothing was given; idempotent.

        Undoes what a dummy load or a cast left in the buffers, and materialises buffers that are
        still on the meta device. `args` go to the parent class's method of this name, if it has
        one.

        Example:
            >>> layer = QuantAttention(4, 32)
            >>> layer.set_scale("k", 0.5)
            >>> _ = layer.k_scale.uniform_(-1e-3, 1e-3)
            >>> layer.process_weights_after_loading()
            >>> layer.k_scale
            tensor(0.5000)
        """
        parent = getattr(super(), "process_weights_after_loading", None)
        if parent is not None:
            parent(*args)
        process_scales([self])

    def mend_scales(self) -> None:
        """Make float32 of a buffer whose dtype was changed under the module.

        Sharded training casts buffers so; then the recorded bits are restored. A loader that put
        another value there meant it: that is taken over, as `accept_buffers` does.

        Raises:
            ScaleError: Such a value is invalid, or a live cache was written with another.

        Example:
            >>> layer = QuantAttention(4, 32)
            >>> layer.k_scale.data = layer.k_scale.data.half()
            >>> layer.mend_scales()
            >>> layer.k_scale.dtype
            torch.float32
        """
        if self.kv_sharing_target is not None:
            self.kv_sharing_target.mend_scales()
        for name, buffer in self._buffers.items():
            if name in GUARDED_NAMES and buffer is not None and buffer.dtype is not torch.float32:
                self._mend(name, buffer)

    def _mend(self, name: str, buffer: Tensor) -> None:
        values, shape = self.scale_state.values(name)
        role = SCALE_ROLES.get(name)
        recorded = torch.tensor(values, dtype=torch.float32, device="cpu").view(shape)
        if role is None or buffer.is_meta or torch.equal(recorded.to(buffer.dtype), buffer.cpu()):
            write_buffers({self: [name]})
            return
        record = fit_scale(
            role, buffer, self.scale_shape, layer=self.layer_name, source=ScaleSource.BUFFER
        )
        commit_scales({self: {role: record}})

    def alias_scales(self, aliases: Mapping[str, tuple[str, Callable[[Tensor], Any]]]) -> None:
        """Keep old attribute names readable: old name -> (guarded name, how to read its buffer).

        Example:
            >>> layer = QuantAttention(4, 32)
            >>> layer.alias_scales({"_k_scale": ("k_scale", lambda buffer: buffer)})
            >>> layer._k_scale is layer.k_scale
            True
        """
        self.scale_state.aliases.update(aliases)

    def __getattr__(self, name: str) -> Any:
        if self.has_scales:
            state = self.scale_state
            if name in GUARDED_NAMES:
                own = self._buffers.get(name)
                if own is not None:
                    return own
            if name in GUARDED_NAMES and name[0] in "kv":
                if state.kv_sharing_target is not None:
                    return getattr(state.kv_sharing_target, name)
                if state.has_one_latent and name[0] == "v":
                    return getattr(self, "k" + name[1:])
            if name in state.aliases:
                guarded, read = state.aliases[name]
                return read(getattr(self, guarded))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.has_scales:
            aliases = self.scale_state.aliases
            name = aliases[name][0] if name in aliases else name
            if name in GUARDED_NAMES:
                self._assign(name, value)
                return
            if name == "kv_sharing_target":
                raise ScaleError(f"{name}: layer {self.layer_name!r} gets it at construction")
        super().__setattr__(name, value)

    def _assign(self, name: str, value: Any) -> None:
        """Write an assigned value into its buffer.

        To a buffer on meta, a tensor only says where it is to be: loaders of empty models assign
        uninitialised memory to what a checkpoint lacks. What they did load they mark.
        """
        buffer = self._buffers.get(name)
        is_loaded = getattr(value, "_is_hf_initialized", False)
        if buffer is not None and buffer.is_meta and isinstance(value, Tensor) and not is_loaded:
            write_buffers({self: [name]}, value.device)
        elif name in SCALE_ROLES:
            source = ScaleSource.CHECKPOINT if is_loaded else ScaleSource.CALLER
            if buffer is not None and buffer.is_meta and isinstance(value, Tensor):
                write_buffers({self: [name]}, value.device)
            self.set_scale(SCALE_ROLES[name], value, source=source)
        else:
            self.set_range(RANGE_ROLES[name], value)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a buffer; a value for a guarded name is written into the present buffer.

        Example:
            >>> layer = QuantAttention(4, 32)
            >>> layer.register_buffer("k_scale", torch.tensor(0.5))
            >>> layer.scale_sources["k"].value
            0.5
        """
        if self.has_scales and name in GUARDED_NAMES:
            self._assign(name, tensor)
        else:
            super().register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: Any) -> None:
        """Register a Parameter; one of a guarded name is refused, as it would hide the buffer.

        Raises:
            ScaleError: The name is a scale's or a range's.
        """
        if self.has_scales and name in GUARDED_NAMES:
            raise ScaleError(
                f"{name}: layer {self.layer_name!r} keeps it as a buffer; assign to it"
            )
        super().register_parameter(name, param)

    def __delattr__(self, name: str) -> None:
        if name in GUARDED_NAMES:
            raise ScaleError(f"{name}: a scale or range of layer {self.layer_name!r} stays with it")
        super().__delattr__(name)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.mend_scales()
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        translate = type(self).translate_state_dict
        if translate is not None:
            translate(self, state_dict, prefix)
        names = {prefix + buffer_name(role): role for role in self.scale_roles}
        for old, (guarded, _) in self.scale_state.aliases.items():
            if guarded in SCALE_ROLES and prefix + guarded not in state_dict:
                names[prefix + old] = SCALE_ROLES[guarded]
        updates = {
            role: fit_scale(
                role,
                state_dict[key],
                self.scale_shape,
                layer=self.layer_name or prefix.rstrip("."),
                source=ScaleSource.CHECKPOINT,
                key=key,
            )
            for key, role in names.items()
            if key in state_dict
        }
        check_commit({self: updates})
        given = next((t.device for t in map(state_dict.get, names) if isinstance(t, Tensor)), None)
        commit_scales({self: updates}, device=given)
        write_buffers({self: self.scale_state.own_names()}, given)
        others = {key: value for key, value in state_dict.items() if key not in names}
        super()._load_from_state_dict(
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        missing_keys[:] = [key for key in missing_keys if key not in names]


def accept_scales(layers: Iterable[QuantScales]) -> None:
    """Make what the buffers of many layers hold their record, all or none; one transfer a device.

    Raises:
        ScaleError: A buffer holds no valid scale, or a live cache holds entries that were written
            with another k or v scale; every record is left as it was.
    """
    updates = {}
    for layer, values in read_scales(layers).items():
        records = {
            role: fit_scale(
                role, value, layer.scale_shape, layer=layer.layer_name, source=ScaleSource.BUFFER
            )
            for role, value in values.items()
        }
        recorded = layer.scale_state.recorded
        updates[layer] = {r: new for r, new in records.items() if new.values != recorded(r).values}
    commit_scales(updates)


_WRAPPER_PARTS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.?")


def plain_path(path: str) -> str:
    """A module's path without the parts that compilation, sharding and checkpointing add."""
    return _WRAPPER_PARTS.sub("", path).rstrip(".")


def guarded_layers(model: nn.Module) -> dict[str, QuantScales]:
    """Every module with guarded scales, by its path in the model without wrappers.

    Example:
        >>> list(guarded_layers(torch.nn.ModuleList([QuantAttention(4, 32)])))
        ['0']
    """
    modules = model.named_modules()
    return {
        plain_path(path): module
        for path, module in modules
        if isinstance(module, QuantScales) and module.has_scales
    }
