"""The same in one piece, under one mask."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def slot_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return [1, heads, rows, dim] for queries of that shape at `slots` [rows].

    keys and values [1, heads, total, dim] are those of all slots.
    """
    seen = torch.arange(keys.shape[2], device=slots.device) <= slots[:, None]
    return scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale)
