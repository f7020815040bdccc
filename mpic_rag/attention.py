"""How transformers' layers attend while a prompt is linked: its own way to plug attention in."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mpic_rag.kernels.slot_attention import slot_attention

NAME = "mpic_rag"
PLAN = "slot_blocks"  # the keyword that a pass hands its layers


def register() -> None:
    """Make `NAME` known to transformers; changes nothing else."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by the plan of the pass, where it has one; else as `sdpa` does."""
    plan = kwargs.pop(PLAN, None)
    if plan is None:
        found, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return found, None
    groups = query.shape[1] // key.shape[1]
    key, value = (repeat_kv(states, groups) for states in (key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return slot_attention(query, key, value, plan, scale).transpose(1, 2).contiguous(), None
