"""Retrievers side by side, fused by rank: their scores don't compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

K = 60  # reciprocal rank fusion's constant (Cormack, Clarke and Buettcher, SIGIR 2009)


def fuse(
    rankings: Mapping[str, Sequence[str]], weights: Mapping[str, float], count: int
) -> list[tuple[str, float]]:
    """The best keys over all rankings, each of which gives weight / (60 + rank) to its keys."""
    scores: dict[str, float] = {}
    for name, ranking in rankings.items():
        for rank, key in enumerate(ranking, 1):
            scores[key] = scores.get(key, 0.0) + weights.get(name, 1.0) / (K + rank)
    best = sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))
    return best[:count]
