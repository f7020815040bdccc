"""Questions that a collection answers itself, to weigh retrievers by."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import xxhash

from mpic_rag.indexing.collection import Collection
from mpic_rag.indexing.rows import Row
from mpic_rag.retrievers.fused import fuse
from mpic_rag.retrievers.search import DEPTH, Search
from mpic_rag.retrievers.words import telling

STEPS = (0.0, 0.1, 0.3, 1.0, 3.0)
TOLERANCE = 0.01  # of the mean reciprocal rank, for weights that are more even
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


class Probe(NamedTuple):
    """A question of a kind, the passages that answer it, and those that it was taken from."""

    kind: str
    question: str
    answers: frozenset[str]
    taken_from: frozenset[str] = frozenset()


class Scores(NamedTuple):
    """How well rankings answer probes: share answered among the first five, mean 1 / rank."""

    recall_5: float
    mrr: float
    questions: int


def probes(collection: Collection, half: int, limit: int = 100) -> list[Probe]:
    """At most `limit` of each kind; those of the halves 0 and 1 are different ones.

    A figure is asked for by its caption, a section by its title. These are in the passages word for
    word, which flatters retrieval by words; so a sentence, too, asks for the passages next to its
    own (the inverse cloze task of Lee, Chang and Toutanova, ACL 2019).
    """
    figures: dict[str, set[str]] = {}
    sections: dict[str, set[str]] = {}
    rows = collection.rows()
    for row in rows:
        if row.picture:
            caption = row.text or row.near.split("\n")[0]
            if len(set(telling(caption))) >= 2:
                figures.setdefault(caption, set()).add(row.id)
        elif row.headings and len(set(telling(row.headings[-1]))) >= 2:
            sections.setdefault(row.headings[-1], set()).add(row.id)
    found = [Probe("figure", text, frozenset(ids)) for text, ids in figures.items()]
    found += [Probe("section", text, frozenset(ids)) for text, ids in sections.items()]
    found += _sentences(rows)
    made: list[Probe] = []
    for _, group in itertools.groupby(found, lambda probe: probe.kind):
        mine = [probe for probe in group if _hash(probe.question) % 2 == half]
        made += sorted(mine, key=lambda probe: _hash(probe.question))[:limit]
    return made


def _sentences(rows: Sequence[Row]) -> Iterator[Probe]:
    """A sentence of each passage that has neighbours in its section."""
    for place, row in enumerate(rows):
        beside = [*rows[max(0, place - 1) : place], *rows[place + 1 : place + 2]]
        near = [r.id for r in beside if (r.document, r.headings) == (row.document, row.headings)]
        said = [text for text in _SENTENCE.split(row.text) if len(set(telling(text))) >= 6]
        if near and len(said) >= 3 and not row.picture:
            chosen = said[_hash(row.text) % len(said)]
            yield Probe("sentence", chosen, frozenset(near), frozenset([row.id]))


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def ranked(search: Search, probe: Probe) -> dict[str, list[str]]:
    """Each retriever's passages, best first, without those that the question was taken from."""
    return {
        name: [key for key in keys if key not in probe.taken_from]
        for name, keys in search.rankings(probe.question).items()
    }


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
    chosen = choose([ranked(search, probe) for probe in asked], asked)
    search.collection.set_fact("weights", chosen)
    return chosen


def choose(
    rankings: Sequence[Mapping[str, Sequence[str]]], asked: Sequence[Probe]
) -> dict[str, float]:
    """The most even weights, against 1 for words, that answer probes about as well as any.

    A ranking that knows nothing gets none.
    """
    names = sorted({name for one in rankings for name in one} - {"words"})
    if not names:
        return {}
    tried = []
    for steps in itertools.product(STEPS, repeat=len(names)):
        weights = {"words": 1.0, **dict(zip(names, steps, strict=True))}
        tried.append((score(fused(rankings, weights), asked).mrr, weights))
    best = max(reached for reached, _ in tried)
    good = [weights for reached, weights in tried if reached >= best - TOLERANCE]
    return min(good, key=lambda weights: sum(abs(weight - 1) for weight in weights.values()))
