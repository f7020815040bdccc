"""A layer's keys and values as bytes: the model's own numbers, or 8 bits each.

Keys are quantised per channel, since real models' key channels differ by large constants, and
values per token, both before RoPE, with zero points (KIVI, arXiv:2402.02750).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


class LayerCodec(NamedTuple):
    """How keys and values [heads, tokens, dim] become bytes [n], and back."""

    encode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, int, int, int, torch.dtype], Pair]
    size: Callable[[int, int, int, torch.dtype], int]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _encode_plain(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.cat([_raw(keys), _raw(values)])


def _decode_plain(
    data: torch.Tensor, heads: int, tokens: int, dim: int, dtype: torch.dtype
) -> Pair:
    keys, values = data.view(dtype).view(2, heads, tokens, dim)
    return keys, values


def _quantise(x: torch.Tensor, axis: int) -> list[torch.Tensor]:
    """Codes, steps and zero points along an axis, such that no value lies outside the codes."""
    x = x.float()
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    if not bool(torch.isfinite(x).all()) or max(float(high.max()), -float(low.min())) > 6e4:
        raise ValueError("numbers too large for an int8 store; choose the model's own dtype")
    down, up = torch.tensor(-torch.inf).half(), torch.tensor(torch.inf).half()
    zero = torch.nextafter(low.half(), down)
    step = torch.nextafter(((high - zero.float()) / 255).half(), up)
    codes = ((x - zero.float()) / step.float()).round().clamp(0, 255).to(torch.uint8)
    return [codes, step, zero]


def _encode_int8(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    data = torch.cat([_raw(t) for t in (*_quantise(keys, 1), *_quantise(values, 2))])
    return torch.nn.functional.pad(data, (0, -len(data) % 8))  # what follows stays aligned


def _shapes(heads: int, tokens: int, dim: int) -> list[tuple[int, int, int, torch.dtype]]:
    shapes: list[tuple[int, int, int, torch.dtype]] = []
    for steps in ((heads, 1, dim), (heads, tokens, 1)):
        shapes += [(heads, tokens, dim, torch.uint8), *((*steps, torch.float16),) * 2]
    return shapes


def _decode_int8(data: torch.Tensor, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Pair:
    found, start = [], 0
    for *shape, kind in _shapes(heads, tokens, dim):
        end = start + prod(shape) * kind.itemsize
        # A half starts at an odd byte where the codes' count is odd: copied to where it may.
        found.append(data[start:end].clone().view(kind).view(shape).float())
        start = end
    keys, values = (c * step + zero for c, step, zero in (found[:3], found[3:]))
    return keys.to(dtype), values.to(dtype)


PLAIN = LayerCodec(
    _encode_plain, _decode_plain, lambda h, t, d, dtype: 2 * h * t * d * dtype.itemsize
)
INT8 = LayerCodec(
    _encode_int8,
    _decode_int8,
    lambda h, t, d, _: -(-sum(prod(s) * kind.itemsize for *s, kind in _shapes(h, t, d)) // 8) * 8,
)
