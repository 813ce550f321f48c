"""LayerIndex and the plan: each scale goes to the layer it is for, and no layer takes another's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from quantattn import QuantAttention, RefusedCheckpointError
from quantattn.loaders import load_checkpoint, load_kv_scales
from quantattn.loaders.layer_index import LayerIndex
from quantattn.loaders.names import Scope, parse_name
from tests.loaders.toy import CONFIG, bits, float32, save

SELF, CROSS = "model.decoder.layers.{}.self_attn", "model.decoder.layers.{}.encoder_attn"


def model_of(*paths: str, plain: tuple[str, ...] = ()) -> nn.Module:
    """Guarded attention at the paths, modules without scales at the plain ones."""
    model = nn.Module()
    for path in (*paths, *plain):
        parent = model
        *outer, leaf = path.split(".")
        for part in outer:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]
        parent.add_module(leaf, nn.Module() if path in plain else QuantAttention(4, 8))
    return model


def scales(path: str, layers: int = 2, first: float = 0.125) -> dict[str, float]:
    return {
        f"{path.format(n)}.{role}_scale": first * (n + 1) + shift
        for n in range(layers)
        for role, shift in (("k", 0.0), ("v", 0.5))
    }


def values(model: nn.Module) -> dict[str, tuple[object, object]]:
    index = LayerIndex(model)
    return {p: (at.host_scale("k"), at.host_scale("v")) for p, at in index.layers.items()}


def test_self_and_cross_attention_of_one_decoder_layer_get_their_own(tmp_path: Path) -> None:
    model = model_of(*(path.format(n) for n in range(2) for path in (SELF, CROSS)))
    load_checkpoint(model, save(tmp_path, {**scales(SELF), **scales(CROSS, first=0.25)}))
    assert values(model)[SELF.format(1)] == (0.25, 0.75)
    assert values(model)[CROSS.format(1)] == (0.5, 1.0)


@pytest.mark.parametrize("plain", [(), (CROSS.format(0), CROSS.format(1))])
def test_cross_attention_is_never_taken_for_self_attention(
    plain: tuple[str, ...], tmp_path: Path
) -> None:
    model = model_of(*(SELF.format(n) for n in range(2)), plain=plain)
    before = bits(model)
    with pytest.raises(RefusedCheckpointError, match="encoder_attn") as raised:
        load_checkpoint(model, save(tmp_path, scales(CROSS)))
    assert {problem.code for problem in raised.value.problems} == {"no_layer"}
    assert bits(model) == before


def test_two_decoders_for_the_same_layers_are_a_conflict(tmp_path: Path) -> None:
    talker, thinker = "talker.model.layers.{}.self_attn", "thinker.model.layers.{}.self_attn"
    model = model_of("model.layers.0.attn", "model.layers.1.attn")
    before = bits(model)
    with pytest.raises(RefusedCheckpointError, match=r"talker.*thinker|thinker.*talker") as raised:
        load_checkpoint(model, save(tmp_path, {**scales(talker), **scales(thinker, first=0.25)}))
    assert {problem.code for problem in raised.value.problems} == {"conflict"}
    assert bits(model) == before


def test_the_decoder_with_the_models_own_path_wins(tmp_path: Path) -> None:
    own, other = "model.layers.{}.self_attn", "talker.model.layers.{}.self_attn"
    model = model_of(own.format(0), own.format(1))
    folder = save(tmp_path, {**scales(own), **scales(other, first=0.25)})
    report = load_checkpoint(model, folder)
    assert values(model)[own.format(1)] == (0.25, 0.75)
    assert {p.key for p in report.ignored} == set(scales(other))
    assert {p.code for p in report.ignored} == {"layer_not_in_model"}


def test_draft_layer_does_not_land_in_the_decoder(tmp_path: Path) -> None:
    own, draft = "model.layers.{}.self_attn", "mtp.layers.{}.self_attn"
    model = model_of(own.format(0), own.format(1))
    load_checkpoint(model, save(tmp_path, {**scales(own), **scales(draft, 1, first=0.25)}))
    assert values(model)[own.format(0)] == (0.125, 0.625)
    model = model_of(own.format(0), own.format(1), "model.layers.2.mtp_block.self_attn")
    load_checkpoint(model, save(tmp_path, scales(own, 3)))
    assert values(model)["model.layers.2.mtp_block.self_attn"] == (0.375, 0.875)


def test_attention_in_an_encoder_keeps_its_own_saved_scales(tmp_path: Path) -> None:
    path = "vision_tower.encoder.layers.{}.self_attn"
    model = model_of(path.format(0), path.format(1))
    load_checkpoint(model, save(tmp_path, scales(path), config=CONFIG))
    assert values(model)[path.format(1)] == (0.25, 0.75)


def test_layers_of_one_number_are_told_apart_by_kind() -> None:
    index = LayerIndex(model_of("blocks.3.attn", "blocks.3.cross_attn", "mtp.layers.3.attn"))
    wanted = {
        "model.layers.3.self_attn.k_scale": (Scope.DECODER, "blocks.3.attn"),
        "model.layers.3.encoder_attn.k_scale": (Scope.CROSS, "blocks.3.cross_attn"),
        "model.mtp_layers.3.self_attn.k_scale": (Scope.DRAFT, "mtp.layers.3.attn"),
        "model.layers.4.self_attn.k_scale": (Scope.DECODER, None),
    }
    for key, (scope, path) in wanted.items():
        name = parse_name(key)
        assert (name.scope, index.find(name), index.by_path(name)) == (scope, path, None)


def test_scale_file_by_number_reaches_the_only_attention_of_a_layer(tmp_path: Path) -> None:
    """A layer of mllama has cross-attention in place of self-attention."""
    model = model_of("model.layers.0.self_attn", "model.layers.1.cross_attn")
    factors = {"0": {"0": 0.125, "1": 0.3}}
    document = {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": factors}}
    path = tmp_path / "kv_cache_scales.json"
    path.write_text(json.dumps(document))
    load_kv_scales(model, path)
    assert values(model)["model.layers.1.cross_attn"] == (float32(0.3), float32(0.3))
