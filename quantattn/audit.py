"""audit: name what would go wrong with the attention scales of a model."""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantattn.errors import ScaleError
from quantattn.quant_scales import QuantScales
from quantattn.scale_buffers import GUARDED_NAMES, SCALE_ROLES
from quantattn.scales import buffer_name, invalid_reason, raw_values

__all__ = ["Finding", "audit"]

_SCALE_LIKE = re.compile(
    r"_?(q|k|v|kv|p|prob|key|value|(?P<out>o|out))(_cache)?_(scale|range|descale)(?P<more>_\w+)?"
)


@dataclass(frozen=True)
class Finding:
    """One thing that would go wrong.

    Attributes:
        code: `plain_tensor`, `host_mirror`, `cast_rounds`, `parameter`, `invalid`, `on_meta`,
            `cast`, `not_saved`, `removed`, `differs_from_record` or `never_loaded`.
        module: Path of the module in the model, empty for the model itself.
        name: The attribute at fault.
        message: What it is, what will happen, what to do.
    """

    code: str
    module: str
    name: str
    message: str

    def __str__(self) -> str:
        place = f"{self.module}.{self.name}" if self.module else self.name
        return f"{place}: {self.message} [{self.code}]"


def audit(model: nn.Module) -> list[Finding]:
    """Look through every module of a model for scales that can be lost, rounded or stale.

    Reads values, so it synchronises with the device; meant for start-up and tests.

    Args:
        model: Any model, with or without quantattn layers.

    Example:
        >>> class Old(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self._k_scale = torch.tensor(0.5)
        >>> [finding.code for finding in audit(Old())]
        ['plain_tensor']
        >>> audit(QuantAttention(4, 32))
        []
    """
    findings: list[Finding] = []
    for path, module in model.named_modules():
        if isinstance(module, QuantScales) and module.has_scales:
            findings.extend(_audit_guarded(path, module))
        findings.extend(_audit_attributes(path, module))
    return findings


def _audit_guarded(path: str, layer: QuantScales) -> Iterator[Finding]:
    for name in layer.scale_state.own_names():
        buffer = layer._buffers.get(name)
        if buffer is None:
            yield Finding("removed", path, name, "the buffer is gone; build the layer again")
        elif buffer.is_meta:
            message = "it is on the meta device; call process_weights_after_loading"
            yield Finding("on_meta", path, name, message)
        else:
            yield from _audit_buffer(path, name, buffer, layer)
    if layer.scale_state.is_processed and layer.cache_format.expects_scales:
        for role in ("k", "v"):
            owned = role in layer.scale_roles
            if owned and layer.scale_sources[role].source.value == "default":
                message = "loading gave it no value, so it is 1.0 over an FP8 cache"
                yield Finding("never_loaded", path, buffer_name(role), message)


def _audit_buffer(path: str, name: str, buffer: Tensor, layer: QuantScales) -> Iterator[Finding]:
    values = raw_values(buffer, what=name)[0]
    recorded = list(layer.scale_state.values(name)[0])
    if (fault := _invalid(values)) is not None:
        yield Finding("invalid", path, name, f"the buffer holds {fault}")
    if buffer.dtype is not torch.float32:
        message = f"it was cast to {buffer.dtype} from outside; mend_scales() restores it"
        yield Finding("cast", path, name, message)
    if name in SCALE_ROLES and name in layer._non_persistent_buffers_set:
        yield Finding("not_saved", path, name, "it was made non-persistent, so it is not saved")
    if values != recorded:
        message = (
            f"the buffer holds {values}, but {recorded} was last set; call accept_buffers() to keep"
            " the buffer, process_weights_after_loading() to restore the record"
        )
        yield Finding("differs_from_record", path, name, message)


def _audit_attributes(path: str, module: nn.Module) -> Iterator[Finding]:
    guarded = isinstance(module, QuantScales) and module.has_scales
    for name, parameter in module._parameters.items():
        if parameter is not None and _SCALE_LIKE.fullmatch(name):
            fault = "a Parameter, which optimizers, casts and snapshots treat wrongly"
            yield Finding("parameter", path, name, f"{fault}; {_remedy(name, module)}")
            yield from _audit_value(path, name, parameter)
    for name, buffer in module._buffers.items():
        is_ours = guarded and name in GUARDED_NAMES
        if buffer is None or is_ours or not _SCALE_LIKE.fullmatch(name):
            continue
        if buffer.is_floating_point():
            fault = "a buffer that .half() or .to(dtype) rounds"
            yield Finding("cast_rounds", path, name, f"{fault}; {_remedy(name, module)}")
        yield from _audit_value(path, name, buffer)
    yield from _audit_plain(path, module)


def _audit_plain(path: str, module: nn.Module) -> Iterator[Finding]:
    """Attributes that are neither buffers nor Parameters."""
    tables = (module._parameters, module._buffers, vars(module))
    names = [name for table in tables for name in table if _SCALE_LIKE.fullmatch(name)]
    for name, value in vars(module).items():
        match = _SCALE_LIKE.fullmatch(name)
        if match is None or not isinstance(value, (Tensor, numbers.Real, list, tuple)):
            continue
        is_copy = match["more"] or (not isinstance(value, Tensor) and len(names) > 1)
        if is_copy:
            kind = type(value).__name__
            message = f"a {kind} beside the scale goes stale when that changes; adopt drops it"
            yield Finding("host_mirror", path, name, message)
        elif isinstance(value, Tensor):
            fault = "a plain tensor does not follow .to(device) and is not saved"
            yield Finding("plain_tensor", path, name, f"{fault}; {_remedy(name, module)}")
        else:
            continue
        yield from _audit_value(path, name, value)


def _remedy(name: str, module: nn.Module) -> str:
    match = _SCALE_LIKE.fullmatch(name)
    if match is not None and match["out"]:
        return "keep it in a buffer, and set it again in float32 after a cast"
    if isinstance(module, QuantScales) and module.has_scales:
        return "use the layer's own scale and remove this one"
    return "adopt it"


def _audit_value(path: str, name: str, value: object) -> Iterator[Finding]:
    try:
        fault = _invalid(raw_values(value, what=name)[0])
    except ScaleError as error:
        fault = str(error)
    if fault is not None:
        yield Finding("invalid", path, name, f"it holds {fault}")


def _invalid(values: list[float]) -> str | None:
    for number in values:
        if (reason := invalid_reason(number)) is not None:
            return f"{number!r}, but {reason}"
    return None
