"""Rotary embeddings as models spell them, and what looks like one and is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantattn.models.rope import Rope, rotate, rotation

HEAD_DIM = 64


@dataclass(frozen=True)
class Spelling:
    """`turn(x, *angles(positions, dtype, table))` rotates `[num_tokens, heads, head_dim]`."""

    turn: Callable[..., Tensor]
    angles: Callable[..., tuple[Tensor, ...]]


def in_float32(spelling: Spelling) -> Spelling:
    """The same rotation by the same angles, which rounds once, at the end."""
    if spelling.turn is complex_pairs:
        return Spelling(complex_pairs_in_reals, spelling.angles)

    def turn(x: Tensor, *angles: Tensor) -> Tensor:
        return spelling.turn(x.float(), *[a.float() for a in angles]).to(x.dtype)

    return Spelling(turn, spelling.angles)


def half_angles(positions: Tensor, *_) -> tuple[Tensor, ...]:
    return rotation(Rope(), positions, HEAD_DIM)


def model_angles(positions: Tensor, dtype: torch.dtype, *_) -> tuple[Tensor, ...]:
    return tuple(x.to(dtype) for x in rotation(Rope(), positions, HEAD_DIM))


def partial_angles(positions: Tensor, dtype: torch.dtype, *_) -> tuple[Tensor, ...]:
    return tuple(x.to(dtype) for x in rotation(Rope(), positions, 24))


def frequencies(positions: Tensor, width: int) -> Tensor:
    steps = torch.arange(0, width, 2, device=positions.device).float() / width
    return positions[:, None].float() / 10000.0**steps


def doubled_angles(positions: Tensor, dtype: torch.dtype, *_, width=HEAD_DIM) -> tuple[Tensor, ...]:
    """As transformers has them: both halves, scaled, in the model's dtype."""
    angles = frequencies(positions, width)
    both = torch.cat((angles, angles), dim=-1)
    return tuple((x * 1.5).to(dtype).unsqueeze(1) for x in (both.cos(), both.sin()))


def doubled_partial_angles(positions: Tensor, dtype: torch.dtype, *_) -> tuple[Tensor, ...]:
    return doubled_angles(positions, dtype, width=24)


def repeated_angles(positions: Tensor, dtype: torch.dtype, *_) -> tuple[Tensor, ...]:
    angles = frequencies(positions, HEAD_DIM).repeat_interleave(2, dim=-1)
    return tuple(x.to(dtype)[:, None] for x in (angles.cos(), angles.sin()))


def complex_angles(positions: Tensor, *_) -> tuple[Tensor, ...]:
    angles = frequencies(positions, HEAD_DIM)
    return (torch.polar(torch.ones_like(angles), angles)[:, None],)


def sequence_angles(positions: Tensor, dtype: torch.dtype, *_) -> tuple[Tensor, ...]:
    """Of two positions, `[1, 2, head_dim]`, which a batch of two sequences shares."""
    cos, sin = doubled_angles(positions[:2], dtype)
    return cos[:, 0][None], sin[:, 0][None]


def angles_of_heads(positions: Tensor, *_) -> tuple[Tensor, ...]:
    """Other angles for each of the key's two heads."""
    first, second = (rotation(Rope(), positions * n, HEAD_DIM) for n in (1, 2))
    return tuple(torch.cat(x, dim=1) for x in zip(first, second, strict=True))


def by_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = x.shape[1] // cos.shape[1]
    return rotate(x, *(angles.repeat(1, heads, 1) for angles in (cos, sin)))


def angles_of_table(positions: Tensor, dtype: torch.dtype, table: Tensor) -> tuple[Tensor, ...]:
    cos, sin = table[positions].to(dtype).unbind(1)
    return cos[:, None], sin[:, None]


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def sliced_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat((cos * a - b * sin, sin * a + b * cos), dim=-1).to(x.dtype)


def unbound_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def unbound_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).type_as(x)


def complex_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """As Llama's own code."""
    numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * angles).flatten(-2).type_as(x)


def complex_pairs_in_reals(x: Tensor, angles: Tensor) -> Tensor:
    """The same products, of which torch promises the order of rounding only in real numbers."""
    return unbound_pairs(x, *torch.view_as_real(angles).unbind(-1))


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos) + (turned * sin)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers for GLM and Cohere."""
    turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return (x * cos) + (turned * sin)


def batch_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers around it: two sequences of two tokens, heads before tokens."""
    states = x.view(2, 2, -1, HEAD_DIM).transpose(1, 2)
    states = rotate_half(states, cos.unsqueeze(1), sin.unsqueeze(1))
    return states.transpose(1, 2).reshape(4, -1).view(x.shape)


def flat(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As vLLM: rows of all heads, seen as heads for the rotation."""
    rows = x.flatten(1)
    heads = rows.view(len(x), -1, HEAD_DIM)
    return halves(heads, cos, sin).reshape(rows.shape).view(x.shape)


def on_first(turn: Callable[..., Tensor], width: int = 24) -> Callable[..., Tensor]:
    def turn_first(x: Tensor, *angles: Tensor) -> Tensor:
        return torch.cat((turn(x[..., :width], *angles), x[..., width:]), dim=-1)

    return turn_first


def split_first(x: Tensor, *angles: Tensor) -> Tensor:
    first, rest = x.split([24, HEAD_DIM - 24], dim=-1)
    return torch.cat((pairs(first, *angles), rest), dim=-1)


SPELLINGS = {
    "quantattn": Spelling(rotate, half_angles),
    "halves": Spelling(halves, half_angles),
    "halves, model dtype": Spelling(halves, model_angles),
    "sliced halves": Spelling(sliced_halves, half_angles),
    "unbound halves": Spelling(unbound_halves, model_angles),
    "pairs": Spelling(pairs, model_angles),
    "unbound pairs": Spelling(unbound_pairs, half_angles),
    "complex": Spelling(complex_pairs, complex_angles),
    "rotate_half": Spelling(rotate_half, doubled_angles),
    "rotate_pairs": Spelling(rotate_pairs, repeated_angles),
    "rows of heads": Spelling(flat, model_angles),
    "batch first": Spelling(batch_first, sequence_angles),
    "partial halves": Spelling(on_first(halves), partial_angles),
    "partial rotate_half": Spelling(on_first(rotate_half), doubled_partial_angles),
    "partial pairs": Spelling(split_first, partial_angles),
}


def backwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1).to(x.dtype)


def swapped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((b * cos - a * sin, a * cos + b * sin), dim=-1).to(x.dtype)


def in_fp16(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return halves(x.half(), cos.half(), sin.half()).to(x.dtype)


def rounded(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    first = (a * cos).to(x.dtype) - (b * sin).to(x.dtype)
    return torch.cat((first, ((b * cos).to(x.dtype) + (a * sin).to(x.dtype))), dim=-1)


def mixed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def last_columns(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    angles = cos[..., :12], sin[..., :12]
    return torch.cat((x[..., :40], halves(x[..., 40:].float(), *angles).to(x.dtype)), dim=-1)


def foreign_rest(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = halves(x[..., :24].float(), cos[..., :12], sin[..., :12])
    return torch.cat((turned.to(x.dtype), x[..., 23:63]), dim=-1)
