"""The plan of a load: every scale matched with its layer, converted and checked, none written.

`LayerIndex` says which layer of the model a scale is for; no layer takes the scales of two modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from quantattn.errors import Problem, RefusedCheckpointError, ScaleError
from quantattn.loaders.collect import FoundScale, FoundScales
from quantattn.loaders.layer_index import LayerIndex
from quantattn.loaders.names import ScaleName, Scope
from quantattn.quant_scales import QuantScales
from quantattn.scales import RecordedScale, ScaleSource, buffer_name, fit_scale

__all__ = ["Rank", "ScalePlan", "plan_scales"]


@dataclass(frozen=True)
class Rank:
    """Which slice of the heads a model holds.

    A rank of several owns the heads that follow those of the ranks before it; where there are more
    ranks than KV heads, neighbouring ranks hold the same head.

    Attributes:
        tp_rank: This rank, from 0.
        tp_size: Number of ranks.
    """

    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.tp_size < 1 or not 0 <= self.tp_rank < self.tp_size:
            raise ScaleError(
                f"tp_rank, tp_size: got {self.tp_rank} of {self.tp_size}, expected"
                " 0 <= tp_rank < tp_size"
            )

    def heads(self, values: list[float]) -> list[float] | None:
        """This rank's part of one value a head; None where the heads cannot be divided so.

        Example:
            >>> Rank(1, 2).heads([0.1, 0.2, 0.3, 0.4])
            [0.3, 0.4]
            >>> Rank(5, 8).heads([0.1, 0.2])
            [0.2]
        """
        count = len(values)
        if count % self.tp_size == 0:
            own = count // self.tp_size
            return values[self.tp_rank * own : (self.tp_rank + 1) * own]
        if self.tp_size % count == 0:
            return [values[self.tp_rank // (self.tp_size // count)]]
        return None


@dataclass
class ScalePlan:
    """Checked scales by layer, and what was found wrong.

    Attributes:
        updates: For each layer of the model the new record by role.
        problems: Why the checkpoint is refused.
        ignored: Keys that are left aside, and why.
    """

    updates: dict[QuantScales, dict[str, RecordedScale]]
    problems: list[Problem] = field(default_factory=list)
    ignored: list[Problem] = field(default_factory=list)

    def refuse(self, path: str) -> None:
        """Raise what stands in the way, every problem named; nothing was written.

        Raises:
            RefusedCheckpointError: There is a problem.
        """
        if self.problems:
            lines = "".join(f"\n- {problem}" for problem in self.problems)
            raise RefusedCheckpointError(
                f"{path}: refused, nothing was loaded; {len(self.problems)} problem(s):{lines}",
                self.problems,
            )


def plan_scales(
    model: nn.Module,
    found: FoundScales,
    *,
    index: LayerIndex | None = None,
    rank: Rank = Rank(),
    strict: bool = False,
    kv_dtype: str | None = None,
) -> ScalePlan:
    """Match what a checkpoint holds with a model's layers and check that it fits; write nothing.

    Args:
        model: The model; may be on the meta device.
        found: The checkpoint's scales.
        index: The model's layers, where the caller has them already.
        rank: Which slice of the heads the model holds.
        strict: Also refuse layers of which k or v is absent.
        kv_dtype: What the checkpoint declares that its k and v scales are for; None: not said.
    """
    index = index or LayerIndex(model)
    plan = ScalePlan({layer: {} for layer in index.layers.values()})
    plan.problems.extend(found.problems)
    plan.ignored.extend(found.ignored)
    owners = index.owners([scale.name for scale in found.scales.values()])
    for scale in _with_latent_v(found, index):
        if (scale.name.attention, scale.role) not in found.tainted:
            _place_scale(scale, index, owners, rank, plan, kv_dtype)
    _refuse_if_none_arrived(found, plan)
    if strict:
        plan.problems.extend(_absent(index, plan, kv_dtype))
    return plan


def _with_latent_v(found: FoundScales, index: LayerIndex) -> Iterable[FoundScale]:
    """Merge k and v for layers that hold one latent; the config may not have said so."""
    for (attention, role), scale in found.scales.items():
        path = index.find(scale.name)
        one_latent = path is not None and index.layers[path].scale_state.has_one_latent
        other = found.scales.get((attention, "v" if role == "k" else "k"))
        if one_latent and role in ("k", "v") and other is not None:
            larger = max(scale, other, key=lambda s: s.numbers)
            k, v = (scale, other) if role == "k" else (other, scale)
            note = f"maximum of k {k.value} and v {v.value}: the latent has one scale"
            yield replace(larger, role="k", note=note)
        else:
            yield scale


def _place_scale(
    scale: FoundScale,
    index: LayerIndex,
    owners: Mapping[str, ScaleName],
    rank: Rank,
    plan: ScalePlan,
    kv_dtype: str | None,
) -> None:
    name = scale.name
    path = index.find(name)
    owner = name if path is None else owners[path]
    if owner.attention != name.attention:
        if index.by_path(name) is not None or index.by_path(owner) is None:
            message = (
                f"{name.key}: {name.attention!r} and {owner.attention!r} are both for layer"
                f" {path!r}; give a checkpoint that holds one of them"
            )
            plan.problems.append(Problem("conflict", name.key, scale.file, message))
            return
        path = None
    if path is None:
        if name.scope is Scope.DRAFT or not index.has_block(name):
            message = f"{name.key}: the model has no layer {name.attention!r}"
            plan.ignored.append(Problem("layer_not_in_model", name.key, scale.file, message))
        else:
            message = (
                f"{name.key}: the model has a module {name.attention.rpartition('.')[0]!r} but no"
                " attention layer with guarded scales in it; use QuantAttention there, or"
                " register_quant_scales"
            )
            plan.problems.append(Problem("no_layer", name.key, scale.file, message))
        return
    layer = index.layers[path]
    of_no_use = _of_no_use(layer, scale.role, kv_dtype)
    if of_no_use is not None:
        code, why = of_no_use
        message = f"{name.key}: layer {path!r} {why}"
        plan.ignored.append(Problem(code, name.key, scale.file, message))
        return
    try:
        plan.updates[layer][scale.role] = _fitted(scale, layer, path, rank)
    except ScaleError as error:
        plan.problems.append(Problem("granularity", name.key, scale.file, str(error)))


def _of_no_use(layer: QuantScales, role: str, kv_dtype: str | None) -> tuple[str, str] | None:
    """Code and reason, where a layer has no use for a checkpoint's scale of this role."""
    if role not in layer.scale_roles:
        if layer.kv_sharing_target is not None:
            return "shared_kv_layer", "reads another layer's cache"
        return "mla_v_scale", "has one scale for its latent"
    stored = layer.cache_format
    if role in ("k", "v") and stored.uses_layer_scales and kv_dtype not in (None, stored.name):
        return "other_format", (
            f"stores {stored.name}, and the scale is declared for {kv_dtype}: 1.0 is used; build it"
            f" with kv_cache_dtype={kv_dtype!r}, or set its scales yourself"
        )
    return None


def _fitted(scale: FoundScale, layer: QuantScales, path: str, rank: Rank) -> RecordedScale:
    value = scale.value
    key = scale.name.key
    if isinstance(value, list) and rank.tp_size > 1:
        own = rank.heads(value)
        if own is None:
            raise ScaleError(
                f"{key}: got {len(value)} heads, which {rank.tp_size} ranks can neither divide nor"
                " share",
                layer=path,
                role=scale.role,
                key=key,
            )
        value = own
        if len(own) == 1 and layer.scale_shape.of(scale.role) == ():
            raise ScaleError(
                f"{key}: got shape [{len(scale.numbers)}], but the layer's scale is per tensor,"
                ' shape []; build the layer with scale_granularity="head"',
                layer=path,
                role=scale.role,
                key=key,
            )
    return fit_scale(
        scale.role,
        value,
        layer.scale_shape,
        layer=path,
        source=ScaleSource.CHECKPOINT,
        key=key,
        file=scale.file,
        note=scale.note,
    )


def _refuse_if_none_arrived(found: FoundScales, plan: ScalePlan) -> None:
    if found.scales and not plan.problems and not any(plan.updates.values()):
        stray = [p for p in plan.ignored if p.code == "layer_not_in_model"]
        for problem in stray:
            plan.ignored.remove(problem)
            plan.problems.append(replace(problem, code="no_layer"))


def _absent(index: LayerIndex, plan: ScalePlan, kv_dtype: str | None) -> Iterable[Problem]:
    """Layers without a k or a v scale, which only strict=True refuses."""
    given = any(plan.updates.values())
    for path, layer in index.layers.items():
        wanted = [role for role in ("k", "v") if _of_no_use(layer, role, kv_dtype) is None]
        absent = [role for role in wanted if role not in plan.updates[layer]]
        if absent:
            whole = "missing_partial" if given else "missing_all"
            code = whole if absent == wanted else f"missing_{absent[0]}"
            names = " and ".join(buffer_name(role) for role in absent)
            message = f"layer {path!r}: the checkpoint has no valid {names}"
            yield Problem(code, None, None, message)
