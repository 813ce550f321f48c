"""Notes of which scale wrote into which cache last as long as both live, and no longer."""

from __future__ import annotations

import sys
import threading
import timeit

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quantattn import cache_writes
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


@pytest.mark.parametrize(
    ("written", "cleared", "holds"),
    [
        (lambda pages: pages, lambda pages: pages[:4], True),
        (lambda pages: pages[4:], lambda pages: pages, False),
        (lambda pages: pages[5:6], lambda pages: pages, False),
        (lambda pages: pages[3:6], lambda pages: pages[4:], True),
        (lambda pages: pages[1:], lambda pages: pages[:-1], True),
        (lambda pages: pages[2:4], lambda pages: pages[::2], True),
        (lambda pages: pages[2:3], lambda pages: pages[::2], False),
        (lambda pages: pages[3:4], lambda pages: pages[::2], True),
        (lambda pages: pages[::4], lambda pages: pages[::2], False),
    ],
)
@pytest.mark.parametrize("gap", [0, 8])
def test_clearing_pages_drops_the_notes_about_those_alone(written, cleared, holds, gap) -> None:
    scale, pages = torch.tensor(0.5), torch.zeros(8, 32 + gap)[:, gap:]
    note_write(scale, written(pages))
    forget(cleared(pages))
    assert holds_entries(scale) is holds
    forget(pages)
    assert not holds_entries(scale)


def test_clearing_a_layer_leaves_a_page_of_the_layer_beside_it() -> None:
    scale, buffer = torch.tensor(0.5), torch.zeros(5, 2, 8)
    note_write(scale, buffer[2:3, 1])
    forget(buffer[:, 0])
    assert holds_entries(scale)
    forget(buffer.flatten(1))
    assert not holds_entries(scale)


def test_threads_write_into_caches_of_their_own_with_one_scale() -> None:
    scale, failures = torch.tensor(0.5), []

    def write() -> None:
        try:
            for _ in range(300):
                cache = torch.zeros(2, 8)
                note_write(scale, cache)
                assert holds_entries(scale)
                forget(cache)
        except Exception as failure:
            failures.append(failure)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=write) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


def test_scales_that_are_gone_leave_nothing_behind() -> None:
    cache = torch.zeros(2, 8)
    forget(cache)
    before = len(cache_writes._writes)
    scales = [torch.tensor(0.5) for _ in range(100)]
    for scale in scales:
        note_write(scale, cache)
    del scales, scale
    note_write(torch.tensor(0.25), cache)
    assert len(cache_writes._writes) <= before + 1


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
    with FakeTensorMode():
        forget(torch.zeros(2, 8))
    assert holds_entries(kept)


def test_a_repeated_note_costs_microseconds() -> None:
    scale, cache = torch.tensor(0.5), torch.zeros(2, 8)
    note_write(scale, cache)
    seconds = min(timeit.repeat(lambda: note_write(scale, cache), number=2000, repeat=5)) / 2000
    assert seconds < 10e-6
