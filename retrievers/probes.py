"""Questions that a collection answers itself: its sections' titles, its figures' captions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import xxhash

from mpic_rag.indexing.collection import Collection
from mpic_rag.retrievers.fused import fuse
from mpic_rag.retrievers.search import DEPTH, Search
from mpic_rag.retrievers.words import telling

STEPS = (0.0, 0.1, 0.3, 1.0, 3.0)


class Probe(NamedTuple):
    """A question of a kind, and the passages that answer it."""

    kind: str
    question: str
    answers: frozenset[str]


class Scores(NamedTuple):
    """How well rankings answer probes: share answered among the first five, mean 1 / rank."""

    recall_5: float
    mrr: float
    questions: int


def probes(collection: Collection, half: int, limit: int = 100) -> list[Probe]:
    """Figures by their captions and sections by their titles, at most `limit` of each.

    Those of the two halves, 0 and 1, are different ones: one to choose by, one to measure on.
    """
    figures: dict[str, set[str]] = {}
    sections: dict[str, set[str]] = {}
    for row in collection.rows():
        if row.picture:
            caption = row.text or row.near.split("\n")[0]
            if len(set(telling(caption))) >= 2:
                figures.setdefault(caption, set()).add(row.id)
        elif row.headings and len(set(telling(row.headings[-1]))) >= 2:
            sections.setdefault(row.headings[-1], set()).add(row.id)
    made = []
    for kind, found in (("figure", figures), ("section", sections)):
        mine = [q for q in found if xxhash.xxh3_64_intdigest(q.encode()) % 2 == half]
        chosen = sorted(mine, key=lambda q: xxhash.xxh3_64_intdigest(q.encode()))[:limit]
        made += [Probe(kind, question, frozenset(found[question])) for question in chosen]
    return made


def score(rankings: Sequence[Sequence[str]], asked: Sequence[Probe]) -> Scores:
    """Scores of one ranking for each probe."""
    ranks = [
        next((n for n, key in enumerate(ranking, 1) if key in probe.answers), 0)
        for ranking, probe in zip(rankings, asked, strict=True)
    ]
    count = max(len(ranks), 1)
    hits = sum(1 for rank in ranks if 0 < rank <= 5)
    return Scores(hits / count, sum(1 / rank for rank in ranks if rank) / count, len(ranks))


def fused(
    rankings: Sequence[Mapping[str, Sequence[str]]], weights: Mapping[str, float]
) -> list[list[str]]:
    """Each probe's rankings as one."""
    return [[key for key, _ in fuse(one, weights, DEPTH)] for one in rankings]


def calibrate(search: Search) -> dict[str, float]:
    """Keep with the collection the weights that answer its own probes best."""
    asked = probes(search.collection, 0)
    chosen = choose([search.rankings(probe.question) for probe in asked], asked)
    search.collection.set_fact("weights", chosen)
    return chosen


def choose(
    rankings: Sequence[Mapping[str, Sequence[str]]], asked: Sequence[Probe]
) -> dict[str, float]:
    """The weights of rankings, against 1 for words, that answer probes best; even ones first.

    A ranking that knows nothing gets none.
    """
    names = sorted({name for one in rankings for name in one} - {"words"})
    if not names:
        return {}
    best, chosen = -1.0, {}
    even = sorted(
        itertools.product(STEPS, repeat=len(names)), key=lambda w: sum(abs(x - 1) for x in w)
    )
    for steps in even:
        weights = {"words": 1.0, **dict(zip(names, steps, strict=True))}
        reached = score(fused(rankings, weights), asked).mrr
        if reached > best + 1e-3:
            best, chosen = reached, weights
    return chosen
