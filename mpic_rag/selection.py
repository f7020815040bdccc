"""Which tokens of a reused chunk are computed afresh in their new context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mpic_rag import scoring
from mpic_rag.cache import LinkedCache
from mpic_rag.linker import Piece
from mpic_rag.model import Model
from mpic_rag.segment import Segment

LAYOUT = ("ids", "positions", "images")
KV = ("keys", "values")
Rows = list[torch.Tensor]  # a mask [tokens] for each piece


class Choice(NamedTuple):
    """Which rows of each piece to compute, and what choosing cost, as `Model.work` counts."""

    rows: Rows
    work: float = 0.0


@dataclass(frozen=True)
class Selector:
    """A rule, and the tensors that it needs from the store.

    Where `reads` lacks the KV, a chunk is computed in full; where it is empty, the store isn't
    asked at all.
    """

    name: str
    reads: tuple[str, ...]
    choose: Callable[[Model, LinkedCache, Sequence[Piece]], Choice]

    @property
    def reuses(self) -> bool:
        """Whether stored keys and values are used at all."""
        return KV[0] in self.reads

    @classmethod
    def parse(cls, spec: str) -> Selector:
        """Build from a name and, behind a colon, a number.

        `full`, `encoder` and `none` take no number; `first_k` and `epic` tokens (8 unless told);
        `query`, `deviation` and `random` a budget over all chunks, in tokens or, with `%`, as a
        share of them (10% unless told).
        """
        name, _, number = spec.partition(":")
        if name in _ALWAYS and not number:
            reads, every = _ALWAYS[name]
            return cls(spec, reads, lambda _m, _c, pieces: Choice(_each(pieces, every)))
        if name in _HEADS:
            k, head = _whole(spec, number or "8"), _HEADS[name]
            return cls(
                spec,
                _RECOMPUTES,
                lambda _m, _c, pieces: Choice(_each(pieces, lambda s: head(s, k))),
            )
        if name in _SCORES:
            return cls(spec, _RECOMPUTES, _best(_SCORES[name], spec, number or "10%"))
        names = ", ".join((*_ALWAYS, *_HEADS, *_SCORES))
        raise ValueError(f"there is no selector {spec!r}; choose from {names}")


def _whole(spec: str, number: str) -> int:
    if not (number.isdecimal() and int(number)):
        raise ValueError(f"{spec!r} needs a whole number above 0 behind the colon")
    return int(number)


def _share(spec: str, number: str) -> float:
    try:
        percent = float(number.removesuffix("%"))
    except ValueError:
        percent = 0.0
    if not 0 < percent <= 100:
        raise ValueError(f"{spec!r} needs tokens, or a share above 0% up to 100%, behind the colon")
    return percent / 100


def _each(pieces: Sequence[Piece], rule: Callable[[Segment], torch.Tensor]) -> Rows:
    """Apply a rule to each reused piece; the others are computed in full."""
    return [rule(piece.segment) if piece.reused else _all(piece.segment) for piece in pieces]


def _best(
    score: scoring.Score, spec: str, number: str
) -> Callable[[Model, LinkedCache, Sequence[Piece]], Choice]:
    """Choose the best-scored tokens of all reused pieces together, up to a budget.

    A piece that knows more than this prompt tells it is left alone, or it would forget that.
    """
    share = _share(spec, number) if number.endswith("%") else 0.0
    tokens = 0 if share else _whole(spec, number)

    def choose(model: Model, cache: LinkedCache, pieces: Sequence[Piece]) -> Choice:
        rows = _each(pieces, _none)
        reused = sum(len(piece.segment) for piece in pieces if piece.reused)
        budget = min(round(share * reused) if share else tokens, reused)
        open_ = [n for n, piece in enumerate(pieces) if piece.reused and not piece.knows_more]
        if not budget or not open_:
            return Choice(rows)
        scores, work = score(model, cache, pieces)
        joined = torch.cat([scores[n] for n in open_])
        chosen = torch.zeros(len(joined), dtype=torch.bool)
        chosen[joined.topk(min(budget, len(joined))).indices.cpu()] = True
        sizes = [len(pieces[n].segment) for n in open_]
        for n, mine in zip(open_, chosen.split(sizes), strict=True):
            rows[n] = mine
        return Choice(rows, work)

    return choose


def _all(segment: Segment) -> torch.Tensor:
    return torch.ones(len(segment), dtype=torch.bool)


def _none(segment: Segment) -> torch.Tensor:
    return torch.zeros(len(segment), dtype=torch.bool)


def _first_k(segment: Segment, k: int) -> torch.Tensor:
    """All text and the first k tokens of every image (MPIC, arXiv 2502.01960)."""
    return (segment.images == 0) | (segment.row_order() < k)


def _epic(segment: Segment, k: int) -> torch.Tensor:
    """The first k tokens of every chunk (EPIC's LegoLink, arXiv 2410.15332)."""
    return torch.arange(len(segment)) < k


_RECOMPUTES = (*LAYOUT, "features", *KV)
_ALWAYS: dict[str, tuple[tuple[str, ...], Callable[[Segment], torch.Tensor]]] = {
    "full": ((), _all),
    "encoder": ((*LAYOUT, "features"), _all),
    "none": ((*LAYOUT, *KV), _none),
}
_HEADS: dict[str, Callable[[Segment, int], torch.Tensor]] = {"first_k": _first_k, "epic": _epic}
_SCORES: dict[str, scoring.Score] = {
    "query": scoring.query,
    "deviation": scoring.deviation,
    "random": scoring.random,
}
