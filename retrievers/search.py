"""Search an index: words, texts and pictures each ranked on their own, then fused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import numpy as np
import xxhash

from mpic_rag.documents import Picture
from mpic_rag.indexing.collection import Collection
from mpic_rag.indexing.rows import Row
from mpic_rag.retrievers.embedders import ClipEmbedder, TextEmbedder
from mpic_rag.retrievers.fused import fuse
from mpic_rag.retrievers.vectors import Vectors
from mpic_rag.retrievers.words import Words

DEPTH = 50  # how far down each ranking is fused
TEXTS, PICTURES = 256, 32  # embedded at once
SAVE_EVERY = 30.0  # seconds
Progress = Callable[[str, int, int], None]


class Found(NamedTuple):
    """A passage, its fused score, and its rank in each ranking that has it."""

    row: Row
    score: float
    ranks: dict[str, int]


class Search:
    """Rankings over a collection; a question may be a text, a picture, or both."""

    def __init__(
        self,
        collection: Collection,
        text: TextEmbedder | None = None,
        pictures: ClipEmbedder | None = None,
    ) -> None:
        self.collection, self.text, self.pictures = collection, text, pictures
        self._lock = threading.Lock()
        self._state: tuple[object, Words, Vectors | None, Vectors | None] | None = None

    def update(self, progress: Progress = lambda what, done, total: None) -> None:
        """Embed what is new and drop what is gone; safe to interrupt, goes on where it was."""
        rows = self.collection.rows()
        if self.text:
            texts = {row.id: row.search for row in rows}
            self._embed(
                self.text.name, texts, self.text.documents, TEXTS, "Embedding texts", progress
            )
        if self.pictures:
            shown = {row.picture: row.picture for row in rows if row.picture}

            def embed(names: Sequence[str]) -> np.ndarray:
                assert self.pictures
                return self.pictures.pictures(
                    [self.collection.pictures.load(name) for name in names]
                )

            self._embed(self.pictures.name, shown, embed, PICTURES, "Embedding pictures", progress)

    def search(
        self,
        question: str = "",
        picture: Picture | None = None,
        count: int = 8,
        only: Sequence[str] = (),
        around: int = 0,
    ) -> list[Found]:
        """The best passages, best first; `only` names the rankings to use, by default all.

        What several documents say alike is found once.

        Each hit brings so many passages `around` it along; then those of a document stand together,
        in reading order.
        """
        rankings = self.rankings(question, picture)
        if only:
            rankings = {name: keys for name, keys in rankings.items() if name in only}
        weights = self.collection.fact("weights") or {}
        ranks = {name: {key: n for n, key in enumerate(keys, 1)} for name, keys in rankings.items()}
        best = fuse(rankings, weights, 4 * count)
        rows = self.collection.get(key for key, _ in best)  # what was deleted meanwhile is left out
        found: dict[tuple[str, ...], Found] = {}  # by content: pages repeat their menus and icons
        for key, score in best:
            if key in rows and len(found) < count:
                says = tuple(digest for digest, _ in rows[key].chunks)
                where = {name: places[key] for name, places in ranks.items() if key in places}
                found.setdefault(says, Found(rows[key], score, where))
        hits = list(found.values())
        return self._with_neighbours(hits, around) if around else hits

    def rankings(self, question: str = "", picture: Picture | None = None) -> dict[str, list[str]]:
        """Each retriever's passages, best first."""
        words, texts, pictures, shows = self._load()
        found: dict[str, list[str]] = {}
        if question.strip():
            found["words"] = [key for key, _ in words.search(question, DEPTH)]
            if texts and self.text:
                near = texts.search(self.text.query(question), DEPTH)
                found["text"] = [key for key, _ in near]
        if pictures and self.pictures:
            if question.strip():
                vector = self.pictures.query(question)
                found["picture"] = _passages(pictures.search(vector, DEPTH), shows)
            if picture:
                vector = self.pictures.pictures([picture])[0]
                found["query picture"] = _passages(pictures.search(vector, DEPTH), shows)
        return found

    def _with_neighbours(self, found: list[Found], reach: int) -> list[Found]:
        documents: dict[str, dict[int, Found]] = {}
        for hit in found:
            mine = documents.setdefault(hit.row.document, {})
            for row in self.collection.around(hit.row, reach):
                mine.setdefault(row.number, Found(row, hit.score, {}))
            mine[hit.row.number] = hit
        return [mine[number] for mine in documents.values() for number in sorted(mine)]

    def _load(self) -> tuple[Words, Vectors | None, Vectors | None, dict[str, list[str]]]:
        with self._lock:
            revision = (self.collection.revision, *map(self._changed, (self.text, self.pictures)))
            if self._state is None or self._state[0] != revision:
                rows = self.collection.rows()
                words = Words([row.id for row in rows], [row.search for row in rows])
                texts = self._vectors(self.text.name) if self.text else None
                pictures = self._vectors(self.pictures.name) if self.pictures else None
                self._shows: dict[str, list[str]] = {}
                for row in rows:
                    if row.picture:
                        self._shows.setdefault(row.picture, []).append(row.id)
                self._state = (revision, words, texts, pictures)
            return *self._state[1:], self._shows

    def _vectors(self, name: str) -> Vectors | None:
        path = self._path(name)
        return Vectors.load(path)[0] if path.exists() else None

    def _changed(self, embedder: TextEmbedder | ClipEmbedder | None) -> int:
        """When an embedder's vectors were last written."""
        path = self._path(embedder.name) if embedder else None
        return path.stat().st_mtime_ns if path and path.exists() else 0

    def _path(self, name: str) -> Path:
        kind = name.partition(":")[0]
        digest = xxhash.xxh3_64_hexdigest(name.encode())
        return self.collection.folder / "vectors" / f"{kind}-{digest}.safetensors"

    def _embed(
        self,
        name: str,
        wanted: dict[str, str],
        embed: Callable[[Sequence[str]], np.ndarray],
        batch: int,
        what: str,
        progress: Progress,
    ) -> None:
        try:
            vectors = self._vectors(name)
        except ValueError:  # damaged: made anew
            vectors = None
        gone = [key for key in vectors if key not in wanted] if vectors else []
        changed = bool(vectors and vectors.remove(gone))
        missing = [key for key in wanted if not vectors or key not in vectors]
        saved = monotonic()
        for start in range(0, len(missing), batch):
            progress(what, start, len(missing))
            keys = missing[start : start + batch]
            matrix = embed([wanted[key] for key in keys])
            vectors = vectors or Vectors(matrix.shape[1])
            vectors.add(keys, matrix)
            changed = True
            if monotonic() > saved + SAVE_EVERY:
                vectors.save(self._path(name))
                saved = monotonic()
        if vectors and changed:
            vectors.save(self._path(name))
        progress(what, len(missing), len(missing))


def _passages(found: Sequence[tuple[str, float]], shows: dict[str, list[str]]) -> list[str]:
    return [passage for picture, _ in found for passage in shows.get(picture, ())]
