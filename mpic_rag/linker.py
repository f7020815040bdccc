"""Place chunk KVs in a prompt: slots, positions, rotation, one contiguous cache a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from mpic_rag.cache import LinkedCache
from mpic_rag.kernels.rerotate import rerotate
from mpic_rag.model import Model
from mpic_rag.segment import ChunkKV, Segment


@dataclass(frozen=True)
class Piece:
    """A segment of the prompt: its KV, if it is reused, and where it starts once placed.

    In place of `kv`, `layer` waits for one layer's keys and values, both [heads, tokens, dim].
    `knows_more`: it was compiled behind something that this prompt lacks.
    """

    segment: Segment
    kv: ChunkKV | None = None
    layer: Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None = None
    slot: int = 0
    position: int = 0
    knows_more: bool = False

    @property
    def reused(self) -> bool:
        """Whether it has a KV."""
        return self.kv is not None or self.layer is not None

    @property
    def slots(self) -> torch.Tensor:
        """Indices in the prompt [tokens]."""
        return torch.arange(self.slot, self.slot + len(self.segment))

    @property
    def positions(self) -> torch.Tensor:
        """Position ids in the prompt [axes, tokens]."""
        return self.segment.positions + self.position


def place(pieces: Sequence[Piece], slot: int, position: int) -> tuple[list[Piece], int]:
    """Lay pieces out one behind the other; also returns the position after the last."""
    placed = []
    for piece in pieces:
        placed.append(replace(piece, slot=slot, position=position))
        slot += len(piece.segment)
        position += piece.segment.span
    return placed, position


def link(model: Model, cache: LinkedCache, pieces: Sequence[Piece]) -> None:
    """Extend the cache by all pieces and fill in the reused ones, rotated to their positions.

    Those still being loaded are filled in, layer by layer, by the next pass.
    """
    cache.extend(sum(len(piece.segment) for piece in pieces))
    ready = [(piece, piece.kv) for piece in pieces if piece.kv is not None]
    if ready:
        slots, cos, sin = _places(model, [piece for piece, _ in ready])
        keys = torch.cat([kv.keys for _, kv in ready], dim=2).to(model.device)
        values = torch.cat([kv.values for _, kv in ready], dim=2).to(model.device)
        cache.write(slots, rerotate(keys, cos, sin), values)
    coming = [(piece, piece.layer) for piece in pieces if piece.layer is not None]
    if coming:
        slots, cos, sin = _places(model, [piece for piece, _ in coming])

        def read(n: int) -> tuple[torch.Tensor, torch.Tensor]:
            pairs = [layer(n) for _, layer in coming]
            keys, values = (torch.cat(side, dim=1) for side in zip(*pairs, strict=True))
            rotated = rerotate(keys.to(model.device)[None], cos, sin)[0]
            return rotated, values.to(model.device)

        cache.defer(slots, read)


def _places(model: Model, pieces: Sequence[Piece]) -> tuple[torch.Tensor, ...]:
    """Slots [tokens] of all pieces, and cosines and sines [tokens, dim] of their positions."""
    slots = torch.cat([piece.slots for piece in pieces]).to(model.device)
    return slots, *model.rotary(torch.cat([piece.positions for piece in pieces], dim=1))


def prefill(
    model: Model, cache: LinkedCache, pieces: Sequence[Piece], rows: Sequence[torch.Tensor]
) -> torch.Tensor:
    """One pass over the chosen rows of each piece; returns their hidden states [rows, hidden].

    Their fresh keys and values overwrite the cache; each sees all slots up to its own. Every
    slot of `pieces` must be either linked or chosen, and the last one chosen.
    """
    chosen = [(piece, r.nonzero().flatten()) for piece, r in zip(pieces, rows, strict=True)]
    chosen = [(piece, index) for piece, index in chosen if len(index)]
    slots = torch.cat([piece.slot + index for piece, index in chosen]).to(model.device)
    cache.scatter(slots)
    try:
        return model.forward(
            torch.cat([model.embed(piece.segment, index) for piece, index in chosen]),
            torch.cat([piece.positions[:, index] for piece, index in chosen], dim=1),
            cache,
            slots if cache.length > len(slots) > 1 else None,
        )
    finally:
        cache.scatter(None)
