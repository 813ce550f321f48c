"""A consumer's strip in a Hopper prefill: masks, online softmax, and the finished rows.

The tensor cores leave columns 8j + 2q + e of two rows with thread q of a quad. Scores are kept as
`[rows, keys / 8, 4, 2]`, and what belongs to a row as `[rows, 4]`, one number for each of the four
threads: then what a thread does with its own part takes no shuffle, and says so.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disable-error-code=assignment

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quantattn.kernels._attend_tiles import LOG2_E
from quantattn.kernels._tiles import divide, encode_fp8
from quantattn.kernels.hopper import prefill_operands as operands
from quantattn.kernels.hopper.memory import hide
from quantattn.kernels.hopper.prefill_items import read_item, read_strip
from quantattn.kernels.hopper.prefill_quads import largest_of_rows, quads

__all__ = ["attend_strip", "store_strip"]

NOTHING: gl.constexpr = gl.constexpr(-1e30)
"""Reference of a row that saw no key: finite, so that it gives 0 and no NaN."""


# A sum that the compiler does not see through: it would keep the part that never changes.
EDGE: gl.constexpr = gl.constexpr("mad.lo.s32 $0, $2, -2, $3; add.s32 $0, $0, $1;")


@gluon.constexpr_function
def _score_layout(SPEC) -> gl.NVMMADistributedLayout:
    return operands.score_layout(SPEC)


@gluon.constexpr_function
def _sum_layout(SPEC) -> gl.NVMMADistributedLayout:
    return operands.sum_layout(SPEC)


@gluon.jit
def _new_state(SPEC: gl.constexpr) -> gl.tuple:
    """Of no tile yet: reference of each row, shares of the denominator, sums of values."""
    products = gl.full([SPEC.block_m, SPEC.block_n], 0.0, gl.float32, _score_layout(SPEC))
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, quads(products).type.layout))
    reference = gl.full([SPEC.block_m, 4], NOTHING, gl.float32, rows)
    total = gl.full([SPEC.block_m, 4], 0.0, gl.float32, rows)
    weighted = ()
    for _ in gl.static_range(operands.sum_parts(SPEC)):
        weighted += (
            gl.full([SPEC.block_m, operands.sum_width(SPEC)], 0.0, gl.float32, _sum_layout(SPEC)),
        )
    return reference, total, weighted


@gluon.jit
def _cap(scores, factor, SOFT_CAP: gl.constexpr) -> gl.tensor:
    """Cap products times `factor`; tanh(x) = 1 - 2 / (e^2x + 1) overflows nowhere."""
    power = gl.exp2(scores * (factor * (2.0 / SOFT_CAP))[:, None, :, None])
    return (SOFT_CAP * LOG2_E) * (1.0 - 2.0 / (power + 1.0))


@gluon.jit
def _edge(row, place, layout: gl.constexpr) -> gl.tensor:
    """Sum of row and place, less 2q for thread q of a quad."""
    row, quad = gl.broadcast(row, gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :])
    return gl.inline_asm_elementwise(
        EDGE, "=r,r,r,r", [row, quad, place], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _mask(scores, first_key, position, num_keys, SPEC: gl.constexpr) -> gl.tensor:
    """Put -inf where a row does not see a key: a thread's columns against a number of its own."""
    layout: gl.constexpr = scores.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout))
    eights: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    ones: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    column = (8 * gl.arange(0, SPEC.block_n // 8, layout=eights))[None, :, None, None]
    column = column + gl.arange(0, 2, layout=ones)[None, None, None, :]
    row = gl.arange(0, SPEC.block_m, layout=gl.SliceLayout(1, rows))[:, None]
    # A thread's second row is 8 below its first, which costs no register as a constant.
    second = (row & 8)[:, None, :, None]
    if SPEC.causal:
        edge = _edge(row - (row & 8), position - first_key, rows)
        visible = column - second <= edge[:, None, :, None]
    else:
        edge = _edge(gl.zeros_like(row), num_keys - first_key, rows)
        visible = column < edge[:, None, :, None]
    scores = gl.where(visible, scores, -float("inf"))
    if SPEC.window is not None:
        edge = _edge(row - (row & 8), position - first_key - SPEC.window, rows)
        visible = column - second > edge[:, None, :, None]
        scores = gl.where(visible, scores, -float("inf"))
    return scores


@gluon.jit
def _pass_on(tile_barriers, count, step, STAGES: gl.constexpr, SPEC: gl.constexpr) -> Any:
    """Release tiles that only other strips of the item see."""
    for _ in range(count):
        operands.pass_on(tile_barriers, step, STAGES, SPEC)
        step += 1
    return step


@gluon.jit
def attend_strip(
    memory,
    barriers,
    record,
    turn,
    step,
    WITH_LSE: gl.constexpr,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    SPEC: gl.constexpr,
) -> gl.tuple:
    """Attend to the tiles of an item, the last first, with the strip of consumer GROUP.

    Returns:
        What each row's exponents refer to, the shares of its denominator, parts of its weighted
        sum of values; and the steps.
    """
    N: gl.constexpr = SPEC.block_n
    _, query_empty, tile_barriers = barriers
    BUFFERS: gl.constexpr = operands.query_buffers(SPEC)
    item = read_item(record)
    strip = read_strip(item, GROUP, SPEC)
    first, full_first, _, end = strip.bounds
    step = _pass_on(tile_barriers, item.end_tile - end // N, step, STAGES, SPEC)
    rows: gl.constexpr = _new_state(SPEC)[0].type.layout
    query_slot = turn % BUFFERS * GROUPS + GROUP
    row_terms = operands.start_strip(memory, query_slot, item, rows, SPEC)
    state = _new_state(SPEC)
    if BUFFERS == 1:
        mbarrier.arrive(query_empty.index(0), count=1, pred=end == first)
    # From a tile's first key to the last key that all rows see: a loop's count needs no register.
    to_edge = (strip.position if SPEC.causal else item.num_keys - 1) - (end - N)
    for first_key in range(end - N, first - 1, -N):
        scores = operands.score_tile(
            memory, tile_barriers, query_slot, row_terms, step, STAGES, SPEC
        )
        if BUFFERS == 1:
            mbarrier.arrive(query_empty.index(0), count=1, pred=first_key == first)
        # Reading it again is cheaper than registers.
        item = read_item(record)
        factor = row_terms[0]
        if SPEC.soft_cap is not None:
            scores = _cap(scores, factor, SPEC.soft_cap)
            factor = gl.full_like(factor, 1.0)
        is_cut = to_edge < N - 1
        if SPEC.window is not None:
            is_cut = is_cut | (first_key < full_first)
        if is_cut:
            strip = read_strip(item, GROUP, SPEC)
            scores = _mask(scores, first_key, strip.position, item.num_keys, SPEC)
        reference, total, weighted = state
        headroom = operands.headroom(item, memory, step, STAGES, SPEC)
        new = gl.maximum(reference, largest_of_rows(scores, rows) * factor - headroom)
        shrink = gl.exp2(reference - new)
        state = operands.add_values(
            (new, total, weighted),
            shrink,
            scores,
            factor,
            memory,
            tile_barriers,
            step,
            WITH_LSE,
            STAGES,
            SPEC,
        )
        step += 1
        to_edge += N
    if SPEC.window is not None:
        item = read_item(record)
        strip = read_strip(item, GROUP, SPEC)
        step = _pass_on(tile_barriers, strip.bounds[0] // N - item.first_tile, step, STAGES, SPEC)
    return state, step


@gluon.jit
def _finish(sinks, item, strip, state, SPEC: gl.constexpr) -> gl.tuple:
    """What to multiply each row's sums with, and its LSE; 0 and -inf where it saw no key."""
    layout: gl.constexpr = gl.SliceLayout(1, _sum_layout(SPEC))
    reference, total, _ = state
    reference = gl.convert_layout(gl.max(reference, 1), layout, assert_trivial=True)
    total = gl.convert_layout(gl.sum(total, 1), layout, assert_trivial=True)
    is_empty = total == 0.0
    numerator = item.v_scale + gl.zeros_like(total)
    if sinks is not None:
        sink = gl.load(sinks + strip.head).to(gl.float32) * LOG2_E
        ceiling = gl.maximum(reference, sink)
        shrink = gl.exp2(reference - ceiling)
        total = total * shrink + gl.exp2(sink - ceiling)
        numerator *= shrink
        reference = ceiling
    lse = (reference + gl.log2(total)) * (1.0 / LOG2_E)
    lse = gl.where(is_empty, -float("inf"), lse)
    return gl.where(is_empty, 0.0, numerator / total), lse


@gluon.constexpr_function
def _shares_scale(SPEC, OUTPUT) -> bool:
    """Whether the columns of a part of the output have one scale."""
    part, group = operands.sum_width(SPEC), OUTPUT.group_columns
    return group is None or group % part == SPEC.values.width % part == 0


@gluon.jit
def _load_shared_scales(output, head, SPEC: gl.constexpr, OUTPUT: gl.constexpr) -> gl.tuple:
    """Load the scale of each part of a head's output, where it has one."""
    scales = ()
    if output.scale is not None and _shares_scale(SPEC, OUTPUT):
        for part in gl.static_range(operands.sum_parts(SPEC)):
            place = 0
            if OUTPUT.group_columns is not None:
                first = head * SPEC.values.width + part * operands.sum_width(SPEC)
                place = first // OUTPUT.group_columns
            scales += (gl.load(output.scale + place),)
    return scales


@gluon.jit
def _load_scales(
    scale, head, like, COLUMN: gl.constexpr, SPEC: gl.constexpr, OUTPUT: gl.constexpr
) -> gl.tensor:
    """Load the scales of columns of the output from COLUMN on, one beside each of `like`."""
    WIDTH: gl.constexpr = SPEC.values.width
    columns = COLUMN + gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, like.type.layout))
    groups = (head * WIDTH + columns) // OUTPUT.group_columns
    scales = gl.load(scale + groups, mask=columns < WIDTH, other=1.0)
    return scales[None, :] + gl.zeros_like(like)


@gluon.jit
def _quantized_part(
    output,
    sums,
    factor,
    scales,
    head,
    PART: gl.constexpr,
    SPEC: gl.constexpr,
    OUTPUT: gl.constexpr,
) -> gl.tensor:
    """Codes of a part of the output: its sums of values, times `factor`, over the scales.

    With rounded probabilities both are done at once, where that is not to be the quantization of
    rounded rows: one code in some 250,000 is then the neighbour of the quotient's.
    """
    COLUMN: gl.constexpr = PART * sums.shape[1]
    SHARES: gl.constexpr = _shares_scale(SPEC, OUTPUT)
    if SPEC.rounds_prob and SHARES and not OUTPUT.round_through:
        # Sums of products of codes are less than 2^38, so no product overflows.
        factor = gl.minimum(factor / scales[PART], 2.0**88)
        rows = operands.output_part(sums * factor[:, None], COLUMN, SPEC)
    else:
        rows = operands.output_part(sums * factor[:, None], COLUMN, SPEC)
        if OUTPUT.round_through:
            rows = rows.to(OUTPUT.dtype).to(gl.float32)
        if SHARES:
            rows = divide(rows, scales[PART], True)
        else:
            rows = divide(rows, _load_scales(output.scale, head, rows, COLUMN, SPEC, OUTPUT), True)
    # The same codes: where one form lacks registers, the other does not.
    if output.lse is None and SPEC.values.width == SPEC.values.columns:
        return encode_fp8(rows, 3, True)
    else:
        return rows.to(gl.float8e4nv).to(gl.uint8, bitcast=True)


@gluon.constexpr_function
def _stored_layout(columns, bits, SPEC) -> gl.DistributedLinearLayout:
    """Registers of output rows: 16 bytes of a row a thread, which the products' quads exchange.

    Where values are transposed, a thread has four neighbours already, see `operands.output_part`.
    """
    wide = 4 if SPEC.rounds_prob else 128 // bits
    own = [[0, 1 << i] for i in range(wide.bit_length() - 1)]
    rest = [[0, 1 << i] for i in range((4 * wide).bit_length() - 1, columns.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*own, *rest, [8, 0]],
        lane_bases=[[0, wide], [0, 2 * wide], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def _store_part(
    output,
    sums,
    factor,
    scales,
    first,
    PART: gl.constexpr,
    strip,
    SPEC: gl.constexpr,
    OUTPUT: gl.constexpr,
) -> None:
    """Finish, and round or quantize, a part of a strip's rows; store it from row `first` on."""
    WIDTH: gl.constexpr = SPEC.values.width
    COLUMN: gl.constexpr = PART * sums.shape[1]
    if output.scale is None:
        tile = operands.output_part(sums * factor[:, None], COLUMN, SPEC).to(OUTPUT.dtype)
    else:
        tile = _quantized_part(output, sums, factor, scales, strip.head, PART, SPEC, OUTPUT)
    layout: gl.constexpr = _stored_layout(sums.shape[1], tile.dtype.primitive_bitwidth, SPEC)
    tile = gl.convert_layout(tile, layout, assert_trivial=SPEC.rounds_prob)
    rows = gl.arange(0, SPEC.block_m, layout=gl.SliceLayout(1, layout))
    columns = COLUMN + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout))
    mask = (rows < strip.num_tokens)[:, None] & (columns < WIDTH)[None, :]
    stride = hide(SPEC.num_heads) * WIDTH
    places = output.rows + first * WIDTH + (rows * stride)[:, None]
    gl.store(places + columns[None, :], tile, mask=mask)


@gluon.jit
def store_strip(
    output, sinks, item, strip, state, SPEC: gl.constexpr, OUTPUT: gl.constexpr
) -> None:
    """Finish a strip's rows and store them with their LSE."""
    # Before the first rows are stored: what comes behind a store is loaded again.
    scales = _load_shared_scales(output, strip.head, SPEC, OUTPUT)
    factor, lse = _finish(sinks, item, strip, state, SPEC)
    token = (item.start + strip.first_token).to(gl.int64)
    first = token * SPEC.num_heads + strip.head
    if output.lse is not None:
        rows = gl.arange(0, SPEC.block_m, layout=lse.type.layout)
        places = output.lse + first + rows * SPEC.num_heads
        gl.store(places, lse, mask=rows < strip.num_tokens)
    sums = operands.finish_sums(state[2], SPEC)
    for part in gl.static_range(len(sums)):
        _store_part(output, sums[part], factor, scales, first, part, strip, SPEC, OUTPUT)
