"""BM25: which texts share rare words with the question."""

from __future__ import annotations

import re
from collections.abc import Sequence

import bm25s
import numpy as np

_WORD = re.compile(r"\w+")


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
        known = [word for word in words(query) if word in self._vocabulary]
        if not known:
            return []
        scores = self._index.get_scores(known)
        best = np.argsort(-scores, kind="stable")[:count]
        return [(self.keys[n], float(scores[n])) for n in best if scores[n] > 0]


def words(text: str) -> list[str]:
    """Lower-case words, without the commonest ones and common endings."""
    found = (word.lower() for word in _WORD.findall(text))
    return [_stem(word) for word in found if word not in _COMMON]


def _stem(word: str) -> str:
    """Harman's S-stemmer: plurals only, which is safe in what it joins."""
    if len(word) > 3 and word.endswith("ies") and not word.endswith(("eies", "aies")):
        return word[:-3] + "y"
    if len(word) > 3 and word.endswith("es") and not word.endswith(("aes", "ees", "oes")):
        return word[:-1]
    if len(word) > 3 and word.endswith("s") and not word.endswith(("us", "ss")):
        return word[:-1]
    return word


_COMMON = frozenset(
    """a an and are as at be but by for from if in into is it its no not of on or s such t that the
    their then there these they this to was were what when where which who will
    with""".split()  # noqa: SIM905
)
