"""Block by block: no row looks at slots that all rows of its block must not see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

ROWS = 256  # of a block: fewer make the kernel slower, more make it look at more in vain


class Block(NamedTuple):
    """Rows `first` to `last`, which see slots up to `end` as `mask` [rows, end] lets them."""

    first: int
    last: int
    end: int
    mask: torch.Tensor


def blocks(slots: torch.Tensor, dtype: torch.dtype) -> list[Block]:
    """Plan attention for rows at `slots` [rows], ascending; serves all layers of a pass."""
    ends = slots.tolist()
    plan = []
    for first in range(0, len(ends), ROWS):
        last = min(first + ROWS, len(ends))
        end = ends[last - 1] + 1
        hidden = torch.arange(end, device=slots.device) > slots[first:last, None]
        mask = torch.zeros(last - first, end, dtype=dtype, device=slots.device)
        plan.append(Block(first, last, end, mask.masked_fill_(hidden, float("-inf"))))
    return plan


def slot_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: Sequence[Block],
    scale: float,
) -> torch.Tensor:
    """Return [1, heads, rows, dim] for queries of that shape, laid out by `blocks`.

    keys and values [1, heads, total, dim] are those of all slots.
    """
    found = torch.empty_like(queries)
    for first, last, end, mask in plan:
        found[:, :, first:last] = scaled_dot_product_attention(
            queries[:, :, first:last],
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=mask,
            scale=scale,
        )
    return found
