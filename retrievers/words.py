"""BM25: which texts share rare words with the question."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import bm25s
import numpy as np
import Stemmer
from bm25s.stopwords import STOPWORDS_EN_PLUS

logging.getLogger("bm25s").setLevel(logging.WARNING)  # which it sets to DEBUG
_WORD = re.compile(r"\w+")
_COMMON = frozenset(STOPWORDS_EN_PLUS)


class Words:
    """An index of texts by their words, built in memory."""

    def __init__(self, keys: Sequence[str], texts: Sequence[str]) -> None:
        self.keys = list(keys)
        split = [words(text) for text in texts]
        self._vocabulary = {word for some in split for word in some}
        self._index = bm25s.BM25(method="lucene")
        if self._vocabulary:
            self._index.index(split, show_progress=False)

    def search(self, query: str, count: int) -> list[tuple[str, float]]:
        """The keys of the best texts with their scores; none that share no word."""
        asked = telling(query) or words(query)
        known = [word for word in asked if word in self._vocabulary]
        if not known:
            return []
        scores = self._index.get_scores(known)
        best = np.argsort(-scores, kind="stable")[:count]
        return [(self.keys[n], float(scores[n])) for n in best if scores[n] > 0]


def words(text: str) -> list[str]:
    """The stems of a text's words; Snowball's for English, which changes others little."""
    stemmer = Stemmer.Stemmer("english")  # one a call: they are not safe to share
    return list(stemmer.stemWords(_WORD.findall(text.lower())))


def telling(text: str) -> list[str]:
    """The stems of those words that a question is about: "how do I" says nothing."""
    return words(" ".join(w for w in _WORD.findall(text.lower()) if w not in _COMMON))
