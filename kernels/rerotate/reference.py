"""Rotate keys that were stored before RoPE to where they now stand."""

from __future__ import annotations

import torch


def rerotate(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return keys [..., tokens, dim] rotated by cos and sin [tokens, dim].

    The same operations, in the same order and dtype, as in transformers' attention layers
    (half-split pairs, RoFormer, arXiv 2104.09864), so that a moved key equals, bit for bit, the
    key that the model would compute there from the same hidden state.
    """
    first, second = keys.chunk(2, dim=-1)
    return keys * cos + torch.cat((-second, first), dim=-1) * sin
