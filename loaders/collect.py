"""All scales of one checkpoint, by attention module and role, before any model is looked at.

`resolve` reads one key at a time; here the keys of a checkpoint meet: two that say the same or that
contradict each other, the two scales of an MLA layer, the neighbours of an invalid value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from torch import Tensor

from quantattn.errors import Problem
from quantattn.loaders.names import ScaleKind, ScaleName
from quantattn.loaders.resolution import Outcome, resolve
from quantattn.loaders.values import ReadContext, ScaleValue

__all__ = ["FoundScale", "FoundScales", "ScaleKey", "collect_scales"]

_INVALID = frozenset({"nonfinite", "nonpositive"})
# ModelOpt's quantizers in a plain state dict, and Mistral's own format.
_DECLARED_BY_NAME = frozenset({"A10", "B1", "B2", "B3"})
# A float32 number and the reciprocal of its rounded reciprocal are at most this far apart.
_RECIPROCAL_ERROR = 2.0**-22
# An FP8 scale outside these bounds means activations below 1e-9 or above 1e9.
_PLAUSIBLE = (2.0**-40, 2.0**24)


@dataclass(frozen=True)
class ScaleKey:
    """One scale-like key of a checkpoint and how to read its tensor."""

    name: ScaleName
    file: str | None
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class FoundScale:
    """The multiplier of one role of one attention module.

    Attributes:
        name: The parsed key; its `attention` is the module's path in the checkpoint.
        role: `q`, `k`, `v` or `prob`.
        value: One number, or one for each head.
        file: The file that the key is in.
        note: What was done to the value, if anything.
    """

    name: ScaleName
    role: str
    value: ScaleValue
    file: str | None
    note: str | None = None

    @property
    def numbers(self) -> list[float]:
        """The value as a list."""
        return self.value if isinstance(self.value, list) else [self.value]


@dataclass
class FoundScales:
    """What a checkpoint holds for its attention modules.

    Attributes:
        scales: By attention path and role.
        latent_v: v scales of MLA modules, which have no place of their own, by attention path.
        tainted: Attention paths and roles whose value cannot be used, because of a problem with a
            key beside it (a non-zero zero point, an offset, a second value).
        problems: Keys that are refused.
        ignored: Keys that are left aside, and why.
        left_to_linear: Keys that look like scales and are a Linear's.
    """

    scales: dict[tuple[str, str], FoundScale] = field(default_factory=dict)
    latent_v: dict[str, FoundScale] = field(default_factory=dict)
    tainted: set[tuple[str, str]] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    ignored: list[Problem] = field(default_factory=list)
    left_to_linear: list[str] = field(default_factory=list)


def collect_scales(keys: Iterable[ScaleKey], context: ReadContext) -> FoundScales:
    """Read every scale key of a checkpoint.

    Args:
        keys: The keys that `parse_name` recognised.
        context: The model's geometry and what the config declares.
    """
    found = FoundScales()
    for key in keys:
        resolution = resolve(key.name, key.read(), _context_for(key, context))
        if resolution.outcome is Outcome.LINEAR:
            found.left_to_linear.append(key.name.key)
        elif resolution.outcome is Outcome.PROBLEM:
            found.problems.append(resolution.problem(key.file))
            found.tainted.update((resolution.name.attention, role) for role in key.name.roles)
        elif resolution.code == "mla_v_scale" and resolution.values:
            value = resolution.values["v"]
            entry = FoundScale(resolution.name, "v", value, key.file)
            found.latent_v[resolution.name.attention] = entry
            found.ignored.append(resolution.problem(key.file))
        elif resolution.outcome is Outcome.IGNORED:
            found.ignored.append(resolution.problem(key.file))
        else:
            for role, value in resolution.values.items():
                _add(found, FoundScale(resolution.name, role, value, key.file))
    _merge_latents(found)
    _refuse_implausible(found, context)
    return found


def _context_for(key: ScaleKey, context: ReadContext) -> ReadContext:
    """Some formats have no field for the cache: holding such a quantizer is their declaration."""
    if context.kv is None and key.name.rule in _DECLARED_BY_NAME:
        return replace(context, kv="fp8_e4m3")
    return context


def _add(found: FoundScales, new: FoundScale) -> None:
    place = (new.name.attention, new.role)
    old = found.scales.get(place)
    if old is None:
        found.scales[place] = new
    elif new.name.kind is ScaleKind.MLA_AMAX and old.name.kind is ScaleKind.MLA_AMAX:
        larger = max(old, new, key=lambda scale: scale.numbers)
        found.scales[place] = replace(larger, note="maximum over the parts of the latent")
    elif _is_reciprocal_of(old, new):
        if old.name.kind is ScaleKind.RECIPROCAL:
            found.scales[place] = new
    elif old.numbers != new.numbers:
        message = (
            f"{new.name.key!r} says {new.value} and {old.name.key!r} says {old.value} for the same"
            f" {new.role} scale; remove one of them"
        )
        found.problems.append(Problem("conflict", new.name.key, new.file, message))
        found.tainted.add(place)


def _is_reciprocal_of(old: FoundScale, new: FoundScale) -> bool:
    """Whether one is stored as a multiplier, the other as its reciprocal, and both agree."""
    kinds = {old.name.kind, new.name.kind}
    return kinds == {ScaleKind.MULTIPLIER, ScaleKind.RECIPROCAL} and all(
        math.isclose(a, b, rel_tol=_RECIPROCAL_ERROR)
        for a, b in itertools.zip_longest(old.numbers, new.numbers, fillvalue=math.nan)
    )


def _merge_latents(found: FoundScales) -> None:
    """One scale serves an MLA latent: the maximum of k and v where a file has both."""
    for attention, v in found.latent_v.items():
        k = found.scales.get((attention, "k"))
        if k is not None:
            larger = max(k, v, key=lambda scale: scale.numbers)
            note = f"maximum of k {k.value} and v {v.value}: the latent has one scale"
            found.scales[attention, "k"] = replace(larger, role="k", note=note)


def _refuse_implausible(found: FoundScales, context: ReadContext) -> None:
    """Refuse what no activations can have led to, in files that may hold uninitialised memory.

    A producer that writes such memory does so for every layer, and some of it is by chance a valid
    float: beside an invalid value each other is doubted, and compressed-tensors is known for it.
    """
    is_suspect = any(problem.code in _INVALID for problem in found.problems)
    if not is_suspect and context.method != "compressed-tensors":
        return
    low, high = _PLAUSIBLE
    for place, scale in found.scales.items():
        if not all(low <= number <= high for number in scale.numbers):
            message = (
                f"{scale.name.key}: got {scale.value}, which no activations can have led to;"
                " the producer saved uninitialised memory: quantize it again"
            )
            found.problems.append(Problem("implausible", scale.name.key, scale.file, message))
            found.tainted.add(place)
