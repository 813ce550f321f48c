"""Guarded scales for attention modules that exist already: `register_quant_scales` and `adopt`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from quantattn.errors import ScaleError
from quantattn.formats import CacheFormat, parse_kv_cache_dtype
from quantattn.quant_scales import QuantScales
from quantattn.scale_buffers import GUARDED_NAMES, ScaleState
from quantattn.scales import (
    DEFAULT_RANGES,
    ROLES,
    RecordedScale,
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
    cache_format = parse_kv_cache_dtype(kv_cache_dtype)
    shape = _checked_shape(num_heads, num_kv_heads, scale_granularity)
    given = {"q": q_range, "k": k_range, "v": v_range}
    ranges = {role: checked_range(role, value) for role, value in given.items()}
    state = ScaleState(shape, ranges, kv_sharing_target, one_latent)
    _check_sharing(kv_sharing_target, state, cache_format)
    _refuse_occupied(module)
    _guard(module, state, layer_name, cache_format)


def _guard(
    module: nn.Module, state: ScaleState, layer_name: str, cache_format: CacheFormat
) -> None:
    if not isinstance(module, QuantScales):
        module.__class__ = _guarded_class(type(module))
        module.register_forward_pre_hook(_mend_before_forward)
    assert isinstance(module, QuantScales)
    module.layer_name = layer_name
    module.cache_format = cache_format
    module.setup_scales(state)


def _checked_shape(
    num_heads: int, num_kv_heads: int | None, granularity: str | ScaleGranularity
) -> ScaleShape:
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    for name, count in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ScaleError(f"{name}: got {count!r}, expected a number of heads above 0")
    if num_heads % num_kv_heads:
        raise ScaleError(
            f"num_kv_heads: got {num_kv_heads}, expected a divisor of num_heads {num_heads}"
        )
    try:
        return ScaleShape(num_heads, num_kv_heads, ScaleGranularity(granularity))
    except ValueError:
        raise ScaleError(
            f"scale_granularity: got {granularity!r}, expected 'tensor' or 'head'"
        ) from None


def _check_sharing(
    target: QuantScales | None, state: ScaleState, cache_format: CacheFormat
) -> None:
    if target is None:
        return
    if not isinstance(target, QuantScales):
        raise ScaleError(
            f"kv_sharing_target: got {type(target).__name__}, expected the attention layer whose"
            " cache is shared"
        )
    own = (state.shape.num_kv_heads, state.has_one_latent, cache_format.name)
    other_state = target.scale_state
    other = (
        other_state.shape.num_kv_heads,
        other_state.has_one_latent,
        target.cache_format.name,
    )
    if own != other:
        raise ScaleError(
            f"kv_sharing_target: its (num_kv_heads, one_latent, kv_cache_dtype) is {other}, this"
            f" layer's {own}; layers that share a cache have them in common"
        )


def adopt(
    module: nn.Module,
    names: Mapping[str, str],
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    kv_cache_dtype: str | None = None,
    layer_name: str = "",
    kv_sharing_target: QuantScales | None = None,
    one_latent: bool = False,
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
        kv_sharing_target: As for `register_quant_scales`; the module's own k and v are dropped.
        one_latent: As for `register_quant_scales`; the module's own v is dropped.

    Raises:
        ScaleError: A name is not there or no guarded name, a value is invalid or two disagree, or
            an argument does not fit; the module is as it was.

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
    if isinstance(module, QuantScales):
        raise ScaleError(f"module: {type(module).__name__} has guarded scales already")
    heads = num_heads or getattr(module, "num_heads", None) or num_kv_heads or 1
    kv_heads = num_kv_heads or getattr(module, "num_kv_heads", None) or heads
    values = {old: _present_value(module, old, new) for old, new in names.items()}
    per_head = any(len(raw_values(v, what=old)[0]) > 1 for old, v in values.items())
    granularity = ScaleGranularity.HEAD if per_head else ScaleGranularity.TENSOR
    name = layer_name or str(getattr(module, "layer_name", ""))
    cache_format = parse_kv_cache_dtype(kv_cache_dtype or _own_cache_dtype(module))
    shape = _checked_shape(heads, kv_heads, granularity)
    state = ScaleState(shape, dict(DEFAULT_RANGES), kv_sharing_target, one_latent)
    _check_sharing(kv_sharing_target, state, cache_format)
    state.record, ranges = _adopted_values(names, values, state, name)
    state.ranges.update(ranges)
    state.aliases = {
        **{old: (new, _reader(values[old])) for old, new in names.items() if old != new},
        **_mirrors(module, names),
    }
    _refuse_occupied(module, besides=[*names, *state.aliases])
    _remove(module, [*names, *state.aliases])
    _guard(module, state, name, cache_format)


def _adopted_values(
    names: Mapping[str, str], values: Mapping[str, Any], state: ScaleState, layer: str
) -> tuple[dict[str, RecordedScale], dict[str, float]]:
    """Check what the old attributes hold, by role: scales, and ranges."""
    records: dict[str, RecordedScale] = {}
    ranges: dict[str, float] = {}
    for old, new in names.items():
        role, _, kind = new.rpartition("_")
        if kind == "range":
            number = checked_range(role, values[old])
            agrees = ranges.setdefault(role, number) == number
        else:
            record = fit_scale(role, values[old], state.shape, layer=layer or old)
            agrees = records.setdefault(role, record).values == record.values
        if not agrees:
            raise ScaleError(f"names: {old!r} and another name of {new!r} hold different values")
    return {role: record for role, record in records.items() if role in state.roles}, ranges


def _present_value(module: nn.Module, old: str, new: str) -> Any:
    guarded = [buffer_name(role) for role in ROLES] + [f"{role}_range" for role in DEFAULT_RANGES]
    if new not in guarded:
        raise ScaleError(f"names: got {new!r} for {old!r}, expected one of {', '.join(guarded)}")
    if hasattr(type(module), old):
        raise ScaleError(
            f"names: {old!r} is an attribute of the class, which would hide the buffer"
        )
    for table in (module._parameters, module._buffers, module.__dict__):
        if table.get(old) is not None:
            return table[old]
    raise ScaleError(f"names: {type(module).__name__} has no attribute {old!r}")


def _mirrors(
    module: nn.Module, names: Mapping[str, str]
) -> dict[str, tuple[str, Callable[[Tensor], Any]]]:
    """Host copies beside the adopted attributes, and how each is derived from now on."""
    guarded = {old.lstrip("_"): new for old, new in names.items()}
    found: dict[str, tuple[str, Callable[[Tensor], Any]]] = {}
    for attribute, value in {**vars(module), **module._buffers, **module._parameters}.items():
        new = guarded.get(_MIRROR_SUFFIX.sub("", attribute).lstrip("_"))
        is_mirror = attribute not in names and _MIRROR_SUFFIX.search(attribute)
        if is_mirror and new is not None and value is not None:
            found[attribute] = (new, _as_cpu_tensor if isinstance(value, Tensor) else _as_number)
    return found


def _reader(value: Any) -> Callable[[Tensor], Any]:
    return _as_tensor if isinstance(value, Tensor) else _as_number


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


def _refuse_occupied(module: nn.Module, besides: Iterable[str] = ()) -> None:
    """Refuse a module that has attributes of guarded names, other than those that will go."""
    if isinstance(module, QuantScales) and module.has_scales:
        raise ScaleError(f"module: {type(module).__name__} has guarded scales already")
    tables = (module._parameters, module._buffers, vars(module), dir(type(module)))
    taken = [n for n in sorted(GUARDED_NAMES - set(besides)) if any(n in t for t in tables)]
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
