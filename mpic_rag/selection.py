"""Which tokens of a reused chunk are computed afresh in their new context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mpic_rag.segment import Segment

LAYOUT = ("ids", "positions", "images")
KV = ("keys", "values")


@dataclass(frozen=True)
class Selector:
    """A rule, and the tensors that it needs from the store.

    `rows` maps a chunk's segment to a mask [tokens] of those to recompute. Where `reads` lacks
    the KV, the chunk is computed in full; where it is empty, the store isn't asked at all.
    """

    name: str
    reads: tuple[str, ...]
    rows: Callable[[Segment], torch.Tensor]

    @property
    def reuses(self) -> bool:
        """Whether stored keys and values are used at all."""
        return KV[0] in self.reads

    @classmethod
    def parse(cls, spec: str) -> Selector:
        """Build from `full`, `encoder`, `none`, `first_k:K` or `epic:K` (K defaults to 8)."""
        name, _, number = spec.partition(":")
        if name not in _RULES or (number and name not in ("first_k", "epic")):
            raise ValueError(f"there is no selector {spec!r}; choose from {', '.join(_RULES)}")
        if number and not (number.isdigit() and int(number)):
            raise ValueError(f"{spec!r} needs a whole number above 0 behind the colon")
        reads, rule = _RULES[name]
        k = int(number or 8)
        return cls(spec, reads, lambda segment: rule(segment, k))


def _all(segment: Segment, _k: int) -> torch.Tensor:
    return torch.ones(len(segment), dtype=torch.bool)


def _none(segment: Segment, _k: int) -> torch.Tensor:
    return torch.zeros(len(segment), dtype=torch.bool)


def _first_k(segment: Segment, k: int) -> torch.Tensor:
    """All text and the first k tokens of every image (MPIC, arXiv 2502.01960)."""
    return (segment.images == 0) | (segment.row_order() < k)


def _epic(segment: Segment, k: int) -> torch.Tensor:
    """The first k tokens of every chunk (EPIC's LegoLink, arXiv 2410.15332)."""
    return torch.arange(len(segment)) < k


_RULES: dict[str, tuple[tuple[str, ...], Callable[[Segment, int], torch.Tensor]]] = {
    "full": ((), _all),
    "encoder": ((*LAYOUT, "features"), _all),
    "none": ((*LAYOUT, *KV), _none),
    "first_k": ((*LAYOUT, "features", *KV), _first_k),
    "epic": ((*LAYOUT, "features", *KV), _epic),
}
