"""What attention kernels are told of stored keys and values: where they lie, what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

from quantattn.kernels._counts import next_power_of_2

__all__ = ["Side", "SideSpec", "Spec"]


class Side(NamedTuple):
    """Where the K rows or the V rows lie.

    Attributes:
        codes: Pointer to the first row.
        block_stride: Elements between blocks; between tokens where there are no blocks.
        numbers: Pointer to the float32 numbers of each row (scale, offset); None: rows have none.
        number_block_stride: float32 elements between the numbers of two blocks.
    """

    codes: Any
    block_stride: Any
    numbers: Any
    number_block_stride: Any


@dataclass(frozen=True)
class SideSpec:
    """What of the K rows or the V rows is known when a kernel is compiled; strides in elements.

    `first` is the column of the stored row where these rows begin.
    """

    width: int
    token_stride: int
    head_stride: int
    number_token_stride: int
    number_head_stride: int
    offset_stride: int
    first: int = 0

    @property
    def columns(self) -> int:
        """Columns of a tile of such rows; at least 64.

        Of products with V tiles of 16 columns, ptxas 12.8 computes for sm_90 all places in shared
        memory but the first from registers that hold something else.
        """
        columns = next_power_of_2(self.width)
        return max(64, columns)


@dataclass(frozen=True)
class Spec:
    """What of a call is known when a kernel is compiled.

    Attributes:
        codes: `e4m3`, `e5m2`, `int8` or `int4`; None: the rows are numbers of the model's dtype.
        keys: The K rows.
        values: The V rows.
        block_size: Tokens a block; None: the rows lie one after another.
        group_size: Query heads that share a KV head.
        num_kv_heads: KV heads.
        causal: Whether a row sees no key behind its own position.
        window: Keys that a row sees; None: all.
        soft_cap: Cap of the logits; None: none.
        rounds_prob: Whether probabilities are quantized.
        compute: Dtype of the products' operands.
        native: Whether the device itself converts to and from FP8, see `is_native`.
        block_m: Query rows of a tile.
        block_n: Keys of a tile.
        rope: What of a latent row is key, but not value: the rest is both, and loaded once; None:
            K rows and V rows are loaded apart.
    """

    codes: str | None
    keys: SideSpec
    values: SideSpec
    block_size: int | None
    group_size: int
    num_kv_heads: int
    causal: bool
    window: int | None
    soft_cap: float | None
    rounds_prob: bool
    compute: Any
    native: bool
    block_m: int
    block_n: int
    rope: SideSpec | None = None

    @property
    def has_row_scales(self) -> bool:
        """Whether each row has a scale of its own."""
        return self.keys.number_token_stride > 0

    @property
    def has_inline_scales(self) -> bool:
        """Whether each row's scale lies behind its codes."""
        return self.has_row_scales and self.keys.token_stride == 4 * self.keys.number_token_stride

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.group_size * self.num_kv_heads

    @property
    def headroom(self) -> float:
        """Log 2 of the largest probability: in fp16, small ones keep more bits if it is large."""
        return 14.0 if self.compute == tl.float16 else 0.0
