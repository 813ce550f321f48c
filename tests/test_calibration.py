"""calibrate: amax over a batch, divided by the role's range."""

from __future__ import annotations

import pytest
import torch

from quantattn import AttentionMetadata, MLAAttention, PagedKVCache, QuantAttention, ScaleError


def batch(q: float, k: float, v: float) -> list[torch.Tensor]:
    data = [torch.rand(5, heads, 8) for heads in (4, 2, 2)]
    for tensor, peak in zip(data, (q, k, v), strict=True):
        tensor.mul_(peak / tensor.abs().max())
        tensor[2, 1, 3] = -peak
    return data


def test_scale_is_amax_over_range_per_tensor() -> None:
    layer = QuantAttention(4, 8, num_kv_heads=2, q_range=190.0, k_range=210.0, v_range=110.0)
    layer.calibrate(*batch(3.0, 5.0, 2.0))
    assert layer.host_scale("q") == pytest.approx(3.0 / 190.0, rel=1e-6)
    assert layer.host_scale("k") == pytest.approx(5.0 / 210.0, rel=1e-6)
    assert layer.host_scale("v") == pytest.approx(2.0 / 110.0, rel=1e-6)
    assert layer.host_scale("prob") == 1.0
    assert layer.scale_sources["k"].source == "calibrated"


def test_scale_is_amax_over_range_per_kv_head() -> None:
    layer = QuantAttention(4, 8, num_kv_heads=2, scale_granularity="head")
    query, key, value = batch(3.0, 5.0, 2.0)
    layer.calibrate(query, key, value)
    for role, data, constant in (("q", query, 200.0), ("k", key, 200.0), ("v", value, 100.0)):
        heads = data.abs().reshape(5, 2, -1).amax(dim=(0, 2)).double() / constant
        assert layer.host_scale(role) == pytest.approx(heads.tolist(), rel=1e-6)


def test_a_batch_of_zeros_or_of_nothing_teaches_nothing() -> None:
    """F01 (vLLM #37565): scales were frozen from a warm-up batch."""
    layer = QuantAttention(4, 8, num_kv_heads=2, scale_granularity="head")
    layer.set_scale("k", [0.3, 0.7])
    zeros = torch.zeros(5, 2, 8)
    layer.calibrate(torch.zeros(5, 4, 8), zeros, zeros)
    layer.calibrate(torch.zeros(0, 4, 8), torch.zeros(0, 2, 8), torch.zeros(0, 2, 8))
    assert layer.scale_sources["k"].source == "caller"
    one_sided = zeros.clone()
    one_sided[:, 1] = 5.0
    layer.calibrate(torch.zeros(5, 4, 8), one_sided, zeros)
    kept, learnt = layer.host_scale("k")
    assert kept == torch.tensor(0.3).item()
    assert learnt == pytest.approx(5.0 / 200.0, rel=1e-6)
    layer.calibrate(*batch(1.0, 5.0, 1.0))
    assert max(layer.host_scale("k")) == pytest.approx(5.0 / 200.0, rel=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.rand(5, 3, 8),
        torch.rand(5, 4, 8),
        torch.rand(()),
        torch.rand(5, 2, 8).to(torch.float8_e4m3fn),
        torch.ones(5, 2, 8, dtype=torch.int32),
        torch.empty(5, 2, 8, device="meta"),
        None,
    ],
    ids=lambda w: "none" if w is None else f"{w.dtype}{list(w.shape)}{w.device}",
)
def test_a_batch_of_another_layers_heads_is_refused(wrong) -> None:
    layer = QuantAttention(4, 8, num_kv_heads=2, scale_granularity="head")
    query, _, value = batch(1.0, 1.0, 1.0)
    with pytest.raises(ScaleError, match="calibrate"):
        layer.calibrate(query, wrong, value)
    assert all(record.source == "default" for record in layer.scale_sources.values())


def test_amax_is_not_rounded_on_the_way() -> None:
    layer = QuantAttention(4, 8, num_kv_heads=2)
    layer.calibrate(*batch(3.3, 5.1, 2.7))
    assert layer.host_scale("k") == pytest.approx(5.1 / 200.0, rel=1e-6)


def test_data_that_is_not_finite_is_refused() -> None:
    layer = QuantAttention(4, 8, num_kv_heads=2)
    query, key, value = batch(1.0, 1.0, 1.0)
    key[0, 0, 0] = float("nan")
    with pytest.raises(ScaleError, match="k_scale"):
        layer.calibrate(query, key, value)
    assert layer.scale_sources["q"].source == "default"


def test_entries_that_were_written_stay_decodable() -> None:
    layer = QuantAttention(4, 8, num_kv_heads=2, kv_cache_dtype="fp8")
    query, key, value = batch(1.0, 1.0, 1.0)
    layer.calibrate(query, key, value)
    cache = PagedKVCache(1, 1, 8, 2, 8, dtype=torch.float32, kv_cache_dtype="fp8")
    metadata = AttentionMetadata.from_lengths([5], [5], torch.zeros(1, 1, dtype=torch.int32), 8)
    layer(query, key, value, cache.layer(0), metadata)
    with pytest.raises(ScaleError, match="clear"):
        layer.calibrate(*batch(2.0, 2.0, 2.0))
    layer.calibrate(query, key, value)


def test_an_mla_layer_calibrates_its_latent() -> None:
    layer = MLAAttention(4, 6, 2, softmax_scale=0.1, k_range=210.0)
    latent = torch.rand(5, 8)
    latent[0, 0] = -3.0
    layer.calibrate(torch.rand(5, 4, 8), latent)
    assert layer.host_scale("k") == pytest.approx(3.0 / 210.0, rel=1e-6)


@pytest.mark.gpu
def test_calibration_under_graph_capture_is_refused() -> None:
    layer = QuantAttention(4, 8, num_kv_heads=2).cuda()
    data = [tensor.cuda() for tensor in batch(1.0, 1.0, 1.0)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data[0].add_(1.0)  # torch warns of a graph without work
        with pytest.raises(ScaleError, match="capture"):
            layer.calibrate(*data)
