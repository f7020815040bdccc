"""A stretch of the prompt with one origin, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Segment:
    """Tokens with positions that start at 0.

    ids [tokens]; positions [axes, tokens]; images [tokens], 0 for text and n for the n-th
    picture; features [image tokens, hidden], or no rows where nobody will ask for them.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    images: torch.Tensor
    features: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def span(self) -> int:
        """How far the next segment's positions lie: under M-RoPE less than the token count."""
        return int(self.positions.max()) + 1 if len(self) else 0

    def row_order(self) -> torch.Tensor:
        """The n of each token within its own picture [tokens]; text tokens count on their own."""
        starts = torch.ones_like(self.images, dtype=torch.bool)
        starts[1:] = self.images[1:] != self.images[:-1]
        index = torch.arange(len(self))
        return index - torch.where(starts, index, 0).cummax(0).values


@dataclass(frozen=True)
class ChunkKV:
    """A compiled chunk: keys before RoPE and values, both [layers, heads, tokens, dim]."""

    segment: Segment
    keys: torch.Tensor
    values: torch.Tensor
