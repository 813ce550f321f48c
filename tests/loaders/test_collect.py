"""Values of one checkpoint together: what an invalid one says about the others."""

from __future__ import annotations

import pytest
import torch

from quantattn.loaders.collect import FoundScales, ScaleKey, collect_scales
from quantattn.loaders.names import parse_name
from quantattn.loaders.values import ReadContext

PREFIX = "model.layers."


def collect(method: str, **values: float) -> FoundScales:
    """Scales called `layer_role`: k_scale of layer 1 is `l1_k`."""
    keys = []
    for place, value in values.items():
        layer, role = place.removeprefix("l").split("_")
        name = parse_name(f"{PREFIX}{layer}.self_attn.{role}_scale")
        keys.append(ScaleKey(name, None, lambda value=value: torch.tensor(value)))
    return collect_scales(keys, ReadContext(kv="fp8_e4m3", method=method))


def refused(found: FoundScales) -> dict[str, str]:
    return {problem.key.removeprefix(PREFIX): problem.code for problem in found.problems}


@pytest.mark.parametrize("value", [2.5e-21, 1.3e-37, 1.7e10, 1.6e29])
def test_uninitialised_memory_of_compressed_tensors_is_refused_though_all_of_it_is_valid(
    value: float,
) -> None:
    found = collect("compressed-tensors", l0_q=value, l0_k=0.0078, l1_q=0.012, l1_k=0.0059)
    assert refused(found) == {"0.self_attn.q_scale": "implausible"}
    assert found.tainted == {(f"{PREFIX}0.self_attn", "q")}
    assert refused(collect("modelopt", l0_q=value, l0_k=0.0078)) == {}


def test_beside_an_invalid_value_every_role_and_layer_is_doubted() -> None:
    found = collect("modelopt", l1_k=-2.5e38, l1_v=1.6e29, l3_k=2.7e-21, l3_v=0.0061)
    assert refused(found) == {
        "1.self_attn.k_scale": "nonpositive",
        "1.self_attn.v_scale": "implausible",
        "3.self_attn.k_scale": "implausible",
    }


def test_small_and_large_activations_are_no_uninitialised_memory() -> None:
    eps = torch.finfo(torch.float32).eps  # what compressed-tensors writes for a head of zeros
    assert refused(collect("compressed-tensors", l0_k=eps, l0_v=65504 / 448, l1_k=2048.0)) == {}
