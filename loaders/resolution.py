"""What becomes of one checkpoint key: a value for its roles, a Linear's business, or a reason.

What the keys of one layer say together (one-sided, conflicting, missing) is the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import Tensor

from quantattn.errors import Problem
from quantattn.loaders.names import ScaleKind, ScaleName, Scope
from quantattn.loaders.values import ReadContext, ScaleValue, read_values

__all__ = ["Outcome", "Resolution", "has_cache", "resolve"]

_REFUSED_KINDS: dict[ScaleKind, tuple[str, str]] = {
    ScaleKind.RUNTIME_BUFFER: (
        "runtime_buffer",
        "an engine's saved buffer, which may already hold that platform's factor;"
        " load the checkpoint from which the engine was started, or accept_runtime_buffers",
    ),
    ScaleKind.ROLE_MISMATCH: (
        "role_mismatch",
        "one role's scale under another role's projection, so it is neither's; correct the file",
    ),
    ScaleKind.AFFINE_BIAS: (
        "affine_kv",
        "the cache was calibrated with an offset (affine), which has no place in a symmetric cache;"
        " export the checkpoint with a symmetric KV format",
    ),
    ScaleKind.UNKNOWN: (
        "unknown_scale",
        "looks like a scale of this attention, but no known producer writes this name",
    ),
}


class Outcome(Enum):
    """What becomes of one key."""

    VALUES = "values"
    LINEAR = "linear"
    """Left to the Linear loader."""
    IGNORED = "ignored"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Resolution:
    """What becomes of one key.

    Attributes:
        name: The key's name; its scope is `DRAFT` where the index lies beyond the decoder's layers.
        outcome: Which of the fields below say more.
        values: Role to multiplier, a float or one for each head. An ignored `mla_v_scale` has its
            value here as well: the latent's one scale is the maximum of k and v.
        code: For `IGNORED` and `PROBLEM`, the short name of the reason.
        message: The reason in words, with what to do.
    """

    name: ScaleName
    outcome: Outcome
    values: Mapping[str, ScaleValue] = field(default_factory=dict)
    code: str | None = None
    message: str = ""

    def problem(self, file: str | None = None) -> Problem:
        """The reason as a report's entry, for an ignored or a refused key."""
        return Problem(self.code or "", self.name.key, file, self.message)


def resolve(name: ScaleName, tensor: Tensor, context: ReadContext) -> Resolution:
    """Decide what one checkpoint key contributes.

    Args:
        name: The parsed key.
        tensor: Its tensor, any shape and dtype; read only where the name and context ask for it.
        context: The model's geometry and what its config declares.

    Example:
        >>> from quantattn.loaders.names import parse_name
        >>> name = parse_name("model.layers.0.self_attn.kv_scale")
        >>> context = ReadContext(kv="fp8_e4m3", num_heads=8, num_kv_heads=2)
        >>> dict(resolve(name, torch.tensor(0.25), context).values)
        {'k': 0.25, 'v': 0.25}
    """
    if _is_beyond_decoder(name, context):
        name = replace(name, scope=Scope.DRAFT)
    settled = _settled_by_name(name, context)
    if settled is not None:
        return settled
    if name.kind is ScaleKind.ZERO_POINT:
        return _resolve_zero_point(name, tensor)
    values = read_values(name, tensor, context)
    if isinstance(values, Problem):
        return Resolution(name, Outcome.PROBLEM, code=values.code, message=values.message)
    if context.is_mla and name.roles == ("v",):
        reason = "an MLA layer caches one latent with one scale, the maximum of its k and v scales"
        return replace(_ignored(name, "mla_v_scale", reason), values=values)
    return Resolution(name, Outcome.VALUES, values)


def has_cache(name: ScaleName, context: ReadContext) -> bool:
    """Whether the attention module of a name can have a KV cache, as far as is known."""
    if name.scope is Scope.VISION or (name.layer is None and name.scope is not Scope.DRAFT):
        return False
    layers = context.attention_layers
    is_decoder = name.scope is Scope.DECODER and not _is_beyond_decoder(name, context)
    return layers is None or not is_decoder or name.layer in layers


def _is_beyond_decoder(name: ScaleName, context: ReadContext) -> bool:
    if name.scope is not Scope.DECODER or name.layer is None or context.num_layers is None:
        return False
    return name.layer >= context.num_layers


def _settled_by_name(name: ScaleName, context: ReadContext) -> Resolution | None:
    """What the name and the context settle without the value; the order is the rules' priority."""
    if name.kind is ScaleKind.OUT_ALIAS:
        return Resolution(name, Outcome.LINEAR)
    if name.scope is Scope.VISION:
        return _ignored(name, "vision_no_cache", "the attention of an encoder has no KV cache")
    if name.kind is ScaleKind.RESIDUE:
        return _ignored(name, "calibration_residue", "left over from calibration, nothing uses it")
    if name.kind is ScaleKind.OUTPUT_SCALE and not _output_scale_is_the_caches(context):
        return Resolution(name, Outcome.LINEAR)
    if context.kv is None and name.kind is ScaleKind.UNKNOWN:
        return Resolution(name, Outcome.LINEAR)
    if context.kv is None:
        return _ignored(name, "kv_not_declared", "the config declares no quantized KV cache")
    is_accepted = name.kind is ScaleKind.RUNTIME_BUFFER and context.accept_runtime_buffers
    if name.kind in _REFUSED_KINDS and not is_accepted:
        return _refused(name, _REFUSED_KINDS[name.kind])
    if name.layer is None and name.scope is not Scope.DRAFT:
        reason = "no layer number in the path, so no layer can be said to own it"
        return _refused(name, ("no_layer", reason))
    if not has_cache(name, context):
        reason = f"the config says that layer {name.layer} has no attention, so no cache to scale"
        return _refused(name, ("no_layer", reason))
    if name.kind is ScaleKind.MLA_AMAX and not context.is_mla:
        reason = "an MLA latent's range, but the config declares no latent (no kv_lora_rank)"
        return _refused(name, ("mla_name_on_mha", reason))
    is_shared = name.scope is Scope.DECODER and name.layer in context.shared_layers
    if is_shared and not {"k", "v"}.isdisjoint(name.roles):
        reason = "this layer reads another layer's cache and uses that layer's scales"
        return _ignored(name, "shared_kv_layer", reason)
    return None


def _output_scale_is_the_caches(context: ReadContext) -> bool:
    declared = context.kv is not None and not context.linear_outputs_quantized
    return declared and context.method != "quanto"


def _resolve_zero_point(name: ScaleName, tensor: Tensor) -> Resolution:
    if tensor.device.type == "meta":
        reason = f"got shape {list(tensor.shape)}, far too large for zero points of heads"
        return _refused(name, ("shape", reason))
    # float8 and unsigned integers have no comparison of their own.
    common = torch.complex128 if tensor.is_complex() else torch.float64
    nonzero = int(torch.count_nonzero(tensor.to(common)))
    if nonzero:
        reason = (
            f"{nonzero} of {tensor.numel()} zero points are not 0 (asymmetric quantization);"
            " export the checkpoint with a symmetric KV format"
        )
        return _refused(name, ("asymmetric", reason))
    return _ignored(name, "zero_point", "all 0, so symmetric quantization: nothing to apply")


def _refused(name: ScaleName, fault: tuple[str, str]) -> Resolution:
    code, reason = fault
    return Resolution(name, Outcome.PROBLEM, code=code, message=f"{name.key}: {reason}")


def _ignored(name: ScaleName, code: str, reason: str) -> Resolution:
    return Resolution(name, Outcome.IGNORED, code=code, message=f"{name.key}: {reason}")
