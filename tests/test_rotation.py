"""The rotation of int4 rows: the matrix it stands for, and the bits it must give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantattn.rotation import rotate, rotate_back, run_length
from tests.ops import page_oracle

WIDTHS = [1, 7, 8, 24, 64, 80, 96, 128, 256]


@pytest.mark.parametrize(("width", "length"), [(7, 1), (8, 8), (24, 8), (80, 16), (256, 256)])
def test_a_run_is_the_largest_power_of_two_in_the_width(width, length) -> None:
    assert run_length(width) == length


@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_a_block_diagonal_hadamard_matrix_behind_signs(width) -> None:
    x = torch.randn(5, width)
    expected = x.double().numpy() @ page_oracle.rotation(width)
    np.testing.assert_allclose(rotate(x).numpy(), expected, atol=3e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_follows_from_the_order_of_additions(width, source) -> None:
    x = (torch.randn(3, 2, width) * 17).to(source)
    rotated = rotate(x)
    assert rotated.dtype == torch.float32
    for row, expected in zip(rotated.view(-1, width), x.float().view(-1, width), strict=True):
        np.testing.assert_array_equal(row.numpy(), page_oracle.rotate_row(expected.numpy()))


@pytest.mark.parametrize("width", WIDTHS)
def test_it_can_be_undone_and_lengths_stay(width) -> None:
    x = torch.randn(4, width)
    torch.testing.assert_close(rotate_back(rotate(x)), x, rtol=0, atol=2e-6)
    torch.testing.assert_close(rotate(x).norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("width", [16, 64, 96, 128, 256])
def test_what_a_row_has_in_common_is_spread_evenly(width) -> None:
    columns = torch.arange(width)
    for stride in (0, 1, 2, 4, 8):
        shared = 1.0 - 2.0 * ((columns & stride) != 0)
        assert rotate(shared).abs().max() < 1.5


def test_runs_do_not_mix() -> None:
    x = torch.zeros(24)
    x[9] = 1.0
    assert (rotate(x) != 0).tolist() == [False] * 8 + [True] * 8 + [False] * 8


def test_strides_and_empty_tensors_are_served() -> None:
    x = torch.randn(3, 4, 16).transpose(0, 1)[..., ::2]
    assert torch.equal(rotate(x), rotate(x.contiguous()))
    assert rotate(torch.empty(0, 2, 24)).shape == (0, 2, 24)
