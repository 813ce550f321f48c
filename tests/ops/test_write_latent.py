"""write_latent: rows of a latent cache, one scale for the whole row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantattn.cache_writes import holds_entries
from quantattn.errors import FormatError, ScaleError
from quantattn.ops import write_latent
from quantattn.testing import POISON, poisoned_pages
from tests import fp8_oracle
from tests.ops.oracles import FP8

WIDTH, SIZE = 12, 4


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.tensor([0.3])])
def test_codes_are_the_quotients_and_padding_is_skipped(kv_cache_dtype, scale) -> None:
    dtype = FP8[kv_cache_dtype]
    pages = poisoned_pages(2, SIZE * WIDTH, dtype)
    latent = torch.randn(3, WIDTH).bfloat16()
    write_latent(
        latent, pages, torch.tensor([6, -1, 1]), scale=scale, kv_cache_dtype=kv_cache_dtype
    )
    rows = pages.view(torch.uint8).reshape(2 * SIZE, WIDTH)
    expected = fp8_oracle.encode(fp8_oracle.quotient(latent.float().numpy(), 0.3), dtype)
    np.testing.assert_array_equal(rows[[6, 1]].numpy(), expected[[0, 2]])
    assert (rows[[0, 2, 3, 4, 5, 7]] == POISON).all()
    assert holds_entries(scale)


def test_an_unquantized_cache_ignores_the_scale() -> None:
    latent = torch.randn(2, WIDTH)
    pages = poisoned_pages(1, SIZE * WIDTH, torch.bfloat16)
    scale = torch.tensor(0.3)
    write_latent(latent, pages, torch.tensor([1, 3]), scale=scale, kv_cache_dtype="auto")
    assert torch.equal(pages.reshape(SIZE, WIDTH)[[1, 3]], latent.bfloat16())
    assert not holds_entries(scale)


GOOD = {
    "latent": torch.zeros(2, WIDTH),
    "kv_cache": torch.zeros(2, SIZE * WIDTH, dtype=torch.float8_e4m3fn),
    "slot_mapping": torch.zeros(2, dtype=torch.int64),
    "scale": torch.tensor(0.5),
    "kv_cache_dtype": "fp8",
}


@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"),
    [
        ("latent", torch.zeros(2, 1, WIDTH), FormatError, "latent: got shape"),
        ("kv_cache", torch.zeros(2, 13, dtype=torch.uint8), FormatError, "no multiple of the 12"),
        ("slot_mapping", torch.zeros(3, dtype=torch.int64), FormatError, "slot_mapping: got shape"),
        ("scale", None, ScaleError, "scale: got None"),
        ("scale", torch.ones(2), ScaleError, r"scale: got shape \[2\]"),
        ("kv_cache_dtype", "fp8_per_token_head", FormatError, "latent cache does not serve"),
    ],
)
def test_wrong_arguments_are_refused_by_name(name, wrong, error, message) -> None:
    with pytest.raises(error, match=message):
        write_latent(**{**GOOD, name: wrong})
