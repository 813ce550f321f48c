"""Random writes leave the bytes that the definitions of the formats give, and no others."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.random_writes import draw


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_writes_are_those_of_the_definition(first) -> None:
    for seed in range(first, first + 20):
        write = draw(seed)
        np.testing.assert_array_equal(write.act("cpu"), write.expected(), err_msg=f"seed {seed}")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(16))
def test_random_writes_on_a_gpu_are_those_of_the_definition(seed) -> None:
    write = draw(1000 + seed)
    np.testing.assert_array_equal(write.act("cuda"), write.expected())
