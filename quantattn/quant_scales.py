"""QuantScales: the module mixin that guards attention scales against what happens to modules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from quantattn.errors import ScaleError
from quantattn.scale_access import ScaleAccess
from quantattn.scale_buffers import (
    GUARDED_NAMES,
    RANGE_ROLES,
    SCALE_ROLES,
    commit_scales,
    write_buffers,
)
from quantattn.scales import ScaleSource, buffer_name, fit_scale

__all__ = ["QuantScales", "guarded_layers", "plain_path"]

Translator = Callable[["QuantScales", dict[str, Any], str], None]


class QuantScales(ScaleAccess):
    """Mixin for an attention module whose scales and ranges are guarded float32 buffers.

    `q_scale`, `k_scale`, `v_scale` and `prob_scale` are in the state dict; `q_range`, `k_range` and
    `v_range` are not. They follow `.to(device)` and never change dtype; assigning to one writes
    into it. Use `QuantAttention`, `MLAAttention` or `register_quant_scales`, which set it up.
    """

    translate_state_dict: ClassVar[Translator | None] = None
    """Renames the keys of other conventions in a state dict; quantattn.loaders sets it."""

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
        given = next((t.device for t in map(state_dict.get, names) if isinstance(t, Tensor)), None)
        commit_scales({self: updates}, device=given)
        write_buffers({self: self.scale_state.own_names()}, given)
        others = {key: value for key, value in state_dict.items() if key not in names}
        super()._load_from_state_dict(
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        missing_keys[:] = [key for key in missing_keys if key not in names]


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
