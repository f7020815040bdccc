"""Retrievers side by side, fused by rank: their scores don't compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

K = 60  # reciprocal rank fusion's constant (Cormack, Clarke and Buettcher, SIGIR 2009)
FIRST = 5


def fuse(
    rankings: Mapping[str, Sequence[str]], weights: Mapping[str, float], count: int
) -> list[tuple[str, float]]:
    """The best keys over all rankings, each of which gives weight / (60 + rank) to its keys.

    The first of each ranking is among the first five: it may know what the others can't, such as
    what a picture shows. A ranking of weight 0 has no say.
    """
    told = {name: keys for name, keys in rankings.items() if keys and weights.get(name, 1.0) > 0}
    if not told:
        return []
    scores: dict[str, float] = {}
    for name, ranking in told.items():
        for rank, key in enumerate(ranking, 1):
            scores[key] = scores.get(key, 0.0) + weights.get(name, 1.0) / (K + rank)
    best = sorted(scores, key=lambda key: (-scores[key], key))
    late = [key for key in dict.fromkeys(keys[0] for keys in told.values()) if key in best[FIRST:]]
    late = late[: FIRST - 1]
    head = best[: FIRST - len(late)]
    scores.update(dict.fromkeys(late, scores[head[-1]]))  # who sorts by score keeps the order
    order = [*head, *late, *(key for key in best[len(head) :] if key not in late)]
    return [(key, scores[key]) for key in order[:count]]
