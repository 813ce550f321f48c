"""Notes of which scale wrote into which cache last as long as both live, and no longer."""

from __future__ import annotations

import timeit

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quantattn.cache_writes import forget, holds_entries, note_write


def test_a_written_cache_is_held_by_its_scale_only() -> None:
    k_scale, v_scale, cache = torch.tensor(0.5), torch.tensor(0.25), torch.zeros(2, 8)
    note_write(k_scale, cache)
    assert holds_entries(k_scale)
    assert not holds_entries(v_scale)


def test_a_freed_cache_no_longer_counts() -> None:
    scale, cache = torch.tensor(0.5), torch.zeros(2, 8)
    note_write(scale, cache)
    del cache
    assert not holds_entries(scale)


def test_a_new_scale_at_a_reused_address_holds_nothing() -> None:
    memory = torch.zeros(4)
    cache = torch.zeros(2, 8)
    scale = torch.from_numpy(memory.numpy()[:1])
    note_write(scale, cache)
    address = scale.data_ptr()
    del scale
    reused = torch.from_numpy(memory.numpy()[:1])
    assert reused.data_ptr() == address
    assert not holds_entries(reused)
    note_write(reused, cache)
    assert holds_entries(reused)


def test_a_view_of_the_cache_keeps_it_alive() -> None:
    scale, cache = torch.tensor(0.5), torch.zeros(2, 8)
    note_write(scale, cache)
    view = cache[1]
    del cache
    assert holds_entries(scale)
    del view
    assert not holds_entries(scale)


def test_forgetting_one_layer_of_a_buffer_leaves_the_others() -> None:
    scale, buffer = torch.tensor(0.5), torch.zeros(2, 3, 8)
    note_write(scale, buffer[0])
    note_write(scale, buffer[1])
    forget(buffer[0])
    assert holds_entries(scale)
    forget(buffer[1])
    assert not holds_entries(scale)


def test_scales_in_one_buffer_are_told_apart() -> None:
    scales, cache = torch.tensor([0.5, 0.25]), torch.zeros(2, 8)
    note_write(scales[1], cache)
    assert holds_entries(scales[1])
    assert not holds_entries(scales[0])


def test_tensors_without_data_hold_nothing() -> None:
    cache, kept = torch.zeros(2, 8), torch.tensor(0.5)
    note_write(kept, cache)
    with FakeTensorMode():
        fake = torch.tensor(0.5)
    assert not holds_entries(fake)
    assert not holds_entries(torch.tensor(0.5, device="meta"))


def test_a_repeated_note_costs_microseconds() -> None:
    scale, cache = torch.tensor(0.5), torch.zeros(2, 8)
    note_write(scale, cache)
    seconds = min(timeit.repeat(lambda: note_write(scale, cache), number=2000, repeat=5)) / 2000
    assert seconds < 10e-6
