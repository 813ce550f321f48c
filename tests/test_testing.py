"""The helpers that users test with: what they compare and how they fail."""

from __future__ import annotations

import pytest
import torch

from quantattn.testing import assert_matches, make_batch, poisoned_pages


def test_a_bound_that_is_exceeded_names_the_worst_element() -> None:
    expected = torch.arange(6.0).view(2, 3)
    actual = expected.clone()
    actual[1, 2] += 1
    with pytest.raises(AssertionError, match=r"at \[1, 2\]: got 6.0, expected 5.0"):
        assert_matches(actual, expected)
    assert_matches(actual, expected, rel_l2=0.2)
    with pytest.raises(AssertionError, match="largest difference"):
        assert_matches(actual, expected, rel_l2=0.2, max_abs=0.5)


def test_a_nan_never_matches_a_number() -> None:
    with pytest.raises(AssertionError, match="nan"):
        assert_matches(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), rel_l2=1e9)


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"shape \[1\], expected \[2\]"):
        assert_matches(torch.ones(1), torch.ones(2))


def test_equal_infinities_match_and_nothing_matches_nothing() -> None:
    assert_matches(torch.tensor([-torch.inf, 1.0]), torch.tensor([-torch.inf, 1.0]))
    assert_matches(torch.ones(0), torch.ones(0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_poison_is_nan_in_every_format(dtype) -> None:
    assert poisoned_pages(2, 4, dtype).float().isnan().all()


def test_only_written_rows_of_a_batch_are_numbers() -> None:
    batch = make_batch([1, 2], [5, 17], num_heads=2, num_kv_heads=1, head_dim=8, padding=3)
    assert int((~batch.pages.isnan()).sum()) == 22 * 2 * 8
    assert batch.query[3:].isnan().all()
    assert batch.query[:3].isfinite().all()
    assert not torch.equal(
        batch.query[:3],
        make_batch([1, 2], [5, 17], num_heads=2, num_kv_heads=1, head_dim=8, seed=1).query,
    )
