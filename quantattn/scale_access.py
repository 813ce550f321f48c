"""ScaleAccess: how a layer's scales are set, read, reset, restored and taken over."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quantattn.errors import ScaleError
from quantattn.formats import CacheFormat, fnuz_factor
from quantattn.scale_buffers import (
    GUARDED_NAMES,
    SCALE_ROLES,
    ScaleBuffers,
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

__all__ = ["ScaleAccess", "accept_scales"]


class ScaleAccess(ScaleBuffers):
    """The methods by which callers reach a module's guarded scales; see `QuantScales`.

    Attributes:
        layer_name: Name in messages and reports.
        cache_format: Format of the cache that the layer writes.
    """

    layer_name: str
    cache_format: CacheFormat

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
    def kv_sharing_target(self) -> ScaleAccess | None:
        """The layer whose cache, and therefore whose k and v scale, this one uses."""
        target = self.scale_state.kv_sharing_target
        return target if isinstance(target, ScaleAccess) else None

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


def accept_scales(layers: Iterable[ScaleAccess]) -> None:
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
