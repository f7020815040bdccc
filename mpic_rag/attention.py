"""How transformers' layers attend while a prompt is linked: its own way to plug attention in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from mpic_rag.kernels.slot_attention import Block, slot_attention

NAME = "mpic_rag"
Watch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]
_plan: ContextVar[Sequence[Block]] = ContextVar("plan")
_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Show `watch` each layer's queries, keys, values and scale before it attends by a plan.

    Shapes as in `attend`; keys and values have fewer heads where queries share them.
    """
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


@contextmanager
def planned(config: Any, plan: Sequence[Block]) -> Iterator[torch.Tensor]:
    """Make the layers of a text model's config attend by a plan; gives the mask to pass.

    transformers takes a mask of four dimensions as it is, and our attention ignores it.
    """
    AttentionInterface.register(NAME, attend)
    before, token = config._attn_implementation, _plan.set(plan)
    config._attn_implementation = NAME
    try:
        yield plan[0].mask.new_zeros(1, 1, 1, 1)
    finally:
        config._attn_implementation = before
        _plan.reset(token)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by this thread's plan; query [1, heads, rows, dim], key and value of all slots."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if watch := _watch.get():
        watch(query, key, value, scale)
    groups = query.shape[1] // key.shape[1]
    key, value = (repeat_kv(states, groups) for states in (key, value))
    found = slot_attention(query, key, value, _plan.get(), scale)
    return found.transpose(1, 2).contiguous(), None
