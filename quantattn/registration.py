"""Guarded scales for attention modules that exist already: `register_quant_scales` and `adopt`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from quantattn.errors import ScaleError
from quantattn.formats import parse_kv_cache_dtype
from quantattn.quant_scales import QuantScales
from quantattn.scale_buffers import ScaleState, commit_scales
from quantattn.scales import (
    DEFAULT_RANGES,
    ROLES,
    ScaleGranularity,
    ScaleShape,
    buffer_name,
    checked_range,
    fit_scale,
    raw_values,
)

__all__ = ["adopt", "register_quant_scales"]

_MIRROR_SUFFIX = re.compile(r"_(float|cpu|host)$")


def register_quant_scales(
    module: nn.Module,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    kv_cache_dtype: str = "auto",
    scale_granularity: str | ScaleGranularity = "tensor",
    layer_name: str = "",
    kv_sharing_target: QuantScales | None = None,
    one_latent: bool = False,
    q_range: float = DEFAULT_RANGES["q"],
    k_range: float = DEFAULT_RANGES["k"],
    v_range: float = DEFAULT_RANGES["v"],
) -> None:
    """Give an attention module guarded `q_scale`, `k_scale`, `v_scale`, `prob_scale` and ranges.

    The module's class is replaced by a subclass of it with the same name that is also a
    `QuantScales`, so that it keeps its methods and gains those of `QuantScales`.

    Args:
        module: Any attention module; changed in place.
        num_heads: Query heads.
        num_kv_heads: KV heads, a divisor of `num_heads`; default `num_heads`.
        kv_cache_dtype: Format of the cache that the module writes.
        scale_granularity: `tensor` (scales `[]`) or `head` (q, k and v scales `[num_kv_heads]`).
        layer_name: Name in messages and reports; by convention the path in the model.
        kv_sharing_target: The layer whose cache this one reads; its k and v scale are used.
        one_latent: The cache holds one latent for keys and values; `k_scale` serves both.
        q_range: amax of q is divided by this to calibrate `q_scale`.
        k_range: amax of k is divided by this to calibrate `k_scale`.
        v_range: amax of v is divided by this to calibrate `v_scale`.

    Raises:
        ScaleError: The module has scales already, an attribute is in the way, or an argument does
            not fit.

    Example:
        >>> attention = torch.nn.MultiheadAttention(64, 4)
        >>> register_quant_scales(attention, num_heads=4, kv_cache_dtype="fp8_e4m3")
        >>> attention.half().k_scale.dtype
        torch.float32
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ScaleError(
            f"num_kv_heads: got {num_kv_heads}, expected a divisor of num_heads {num_heads}"
        )
    try:
        granularity = ScaleGranularity(scale_granularity)
    except ValueError:
        raise ScaleError(
            f"scale_granularity: got {scale_granularity!r}, expected 'tensor' or 'head'"
        ) from None
    if kv_sharing_target is not None and not isinstance(kv_sharing_target, QuantScales):
        raise ScaleError(
            f"kv_sharing_target: got {type(kv_sharing_target).__name__}, expected the attention"
            " layer whose cache is shared"
        )
    cache_format = parse_kv_cache_dtype(kv_cache_dtype)
    shape = ScaleShape(num_heads, num_kv_heads, granularity)
    given = {"q": q_range, "k": k_range, "v": v_range}
    ranges = {role: checked_range(role, value) for role, value in given.items()}
    _refuse_occupied(module)
    if not isinstance(module, QuantScales):
        module.__class__ = _guarded_class(type(module))
        module.register_forward_pre_hook(_mend_before_forward)
    assert isinstance(module, QuantScales)
    module.layer_name = layer_name
    module.cache_format = cache_format
    module.setup_scales(ScaleState(shape, ranges, kv_sharing_target, one_latent))


def adopt(
    module: nn.Module,
    names: Mapping[str, str],
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    kv_cache_dtype: str | None = None,
    layer_name: str = "",
) -> None:
    """Turn a module's own scale attributes into guarded buffers and keep the old names readable.

    Floats and host copies that lie beside an adopted name (`_k_scale_float`, `_k_scale_cpu`) are
    dropped; reading them gives what the buffer holds now. Assigning to an old name writes into the
    buffer.

    Args:
        module: Any attention module whose scales are tensors, buffers, Parameters or floats.
        names: Old attribute -> guarded name (`{"_k_scale": "k_scale", "k_range": "k_range"}`).
        num_heads: Query heads; default `module.num_heads`, or 1 where it has none.
        num_kv_heads: KV heads; default `module.num_kv_heads`, or `num_heads`.
        kv_cache_dtype: Default `module.kv_cache_dtype`, or `auto`.
        layer_name: Default `module.layer_name`, or empty.

    Raises:
        ScaleError: A name is not there or no guarded name, or a value is invalid; the module is as
            it was.

    Example:
        >>> class Old(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self._k_scale = torch.tensor(0.5)
        ...         self._k_scale_float = 1.0
        >>> old = Old()
        >>> adopt(old, {"_k_scale": "k_scale"})
        >>> old.k_scale is old._k_scale, old._k_scale_float
        (True, 0.5)
    """
    heads = num_heads or getattr(module, "num_heads", None) or num_kv_heads or 1
    kv_heads = num_kv_heads or getattr(module, "num_kv_heads", None) or heads
    values = {old: _present_value(module, old, new) for old, new in names.items()}
    per_head = any(len(raw_values(v, what=old)[0]) > 1 for old, v in values.items())
    granularity = ScaleGranularity.HEAD if per_head else ScaleGranularity.TENSOR
    shape = ScaleShape(heads, kv_heads, granularity)
    records = {}
    ranges = dict(DEFAULT_RANGES)
    for old, new in names.items():
        role, _, kind = new.rpartition("_")
        if kind == "scale":
            records[role] = fit_scale(role, values[old], shape, layer=layer_name or old)
        else:
            ranges[role] = checked_range(role, values[old])
    mirrors = _mirrors(module, names)
    _remove(module, [*names, *mirrors])
    register_quant_scales(
        module,
        num_heads=heads,
        num_kv_heads=kv_heads,
        kv_cache_dtype=kv_cache_dtype or _own_cache_dtype(module),
        scale_granularity=granularity,
        layer_name=layer_name or str(getattr(module, "layer_name", "")),
        q_range=ranges["q"],
        k_range=ranges["k"],
        v_range=ranges["v"],
    )
    assert isinstance(module, QuantScales)
    renamed = {old: (new, _as_tensor) for old, new in names.items() if old != new}
    module.alias_scales({**renamed, **mirrors})
    commit_scales({module: records})


def _present_value(module: nn.Module, old: str, new: str) -> Any:
    guarded = [buffer_name(role) for role in ROLES] + [f"{role}_range" for role in DEFAULT_RANGES]
    if new not in guarded:
        raise ScaleError(f"names: got {new!r} for {old!r}, expected one of {', '.join(guarded)}")
    if not hasattr(module, old):
        raise ScaleError(f"names: {type(module).__name__} has no attribute {old!r}")
    return getattr(module, old)


def _mirrors(
    module: nn.Module, names: Mapping[str, str]
) -> dict[str, tuple[str, Callable[[Tensor], Any]]]:
    """Host copies beside the adopted attributes, and how each is derived from now on."""
    found: dict[str, tuple[str, Callable[[Tensor], Any]]] = {}
    guarded = {old.lstrip("_"): new for old, new in names.items()}
    for attribute, value in vars(module).items():
        new = guarded.get(_MIRROR_SUFFIX.sub("", attribute).lstrip("_"))
        if attribute not in names and new is not None and isinstance(value, (Tensor, float)):
            found[attribute] = (new, _as_number if isinstance(value, float) else _as_cpu_tensor)
    return found


def _as_tensor(buffer: Tensor) -> Tensor:
    return buffer


def _as_cpu_tensor(buffer: Tensor) -> Tensor:
    return buffer.detach().cpu()


def _as_number(buffer: Tensor) -> Any:
    return buffer.tolist()


def _remove(module: nn.Module, names: list[str]) -> None:
    for name in names:
        for table in (module._parameters, module._buffers, module.__dict__):
            table.pop(name, None)
        module._non_persistent_buffers_set.discard(name)


def _own_cache_dtype(module: nn.Module) -> str:
    own = getattr(module, "kv_cache_dtype", "auto")
    return own if isinstance(own, str) else "auto"


def _refuse_occupied(module: nn.Module) -> None:
    if isinstance(module, QuantScales) and module.has_scales:
        raise ScaleError(f"module: {type(module).__name__} has guarded scales already")
    taken = [
        name
        for name in [buffer_name(role) for role in ROLES] + [f"{role}_range" for role in "qkv"]
        if hasattr(module, name)
    ]
    if taken:
        old = {name: name for name in taken}
        raise ScaleError(
            f"module: {type(module).__name__} has its own {', '.join(taken)}; take them over with"
            f" adopt(module, {old})"
        )


def _mend_before_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
    assert isinstance(module, QuantScales)
    module.mend_scales()


_guarded_classes: dict[type[nn.Module], type[QuantScales]] = {}


def _guarded_class(base: type[nn.Module]) -> type[QuantScales]:
    """The one subclass of a class that is also a QuantScales; instances pickle as the base's."""
    if base not in _guarded_classes:
        attributes = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": _reduce_as_base,
        }
        _guarded_classes[base] = type(base.__name__, (QuantScales, base), attributes)
    return _guarded_classes[base]


def _reduce_as_base(self: QuantScales, protocol: Any) -> Any:
    reduced = object.__reduce_ex__(self, protocol)
    if isinstance(reduced, tuple) and type(self) in _guarded_classes.values():
        return (_new_guarded, type(self).__bases__[1:], *reduced[2:])
    return reduced


def _new_guarded(base: type[nn.Module]) -> QuantScales:
    guarded = _guarded_class(base)
    return guarded.__new__(guarded)
