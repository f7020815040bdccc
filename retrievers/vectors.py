"""Vectors by key, in one file: FAISS searches, every change keeps what it must."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import faiss
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file


class Vectors:
    """Normalised vectors under string keys, ranked by inner product; exact search.

    Numbers inside FAISS only ever grow, so a deleted key's number never means another key.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._index = faiss.IndexIDMap2(faiss.IndexFlatIP(width))
        self._ids: dict[str, int] = {}
        self._keys: dict[int, str] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, key: str) -> bool:
        return key in self._ids

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def add(self, keys: Sequence[str], vectors: np.ndarray) -> None:
        """Add vectors [keys, width], in place of those that a key had; raises `ValueError`."""
        vectors = normalised(vectors)
        if vectors.shape != (len(keys), self.width):
            raise ValueError(
                f"{len(keys)} vectors of {self.width} numbers are needed, not {vectors.shape}:"
                " another embedding model needs another index"
            )
        last = {key: n for n, key in enumerate(keys)}
        self.remove(list(last))
        numbers = np.arange(self._next, self._next + len(last), dtype=np.int64)
        self._next += len(last)
        self._index.add_with_ids(vectors[list(last.values())], numbers)
        for key, number in zip(last, numbers.tolist(), strict=True):
            self._ids[key], self._keys[number] = number, key

    def remove(self, keys: Sequence[str]) -> int:
        """Remove keys; returns how many there were."""
        numbers = [self._ids.pop(key) for key in dict.fromkeys(keys) if key in self._ids]
        for number in numbers:
            del self._keys[number]
        if numbers:
            self._index.remove_ids(faiss.IDSelectorBatch(np.array(numbers, dtype=np.int64)))
        return len(numbers)

    def search(
        self, vector: np.ndarray, count: int, among: Collection[str] | None = None
    ) -> list[tuple[str, float]]:
        """The nearest keys with their cosine similarity, at most `count`, best first."""
        if not self._ids or count < 1:
            return []
        parameters = None
        if among is not None:
            numbers = [self._ids[key] for key in among if key in self._ids]
            if not numbers:
                return []
            selector = faiss.IDSelectorBatch(np.array(numbers, dtype=np.int64))
            parameters = faiss.SearchParameters()
            parameters.sel = selector
        query = normalised(np.asarray(vector)[None])
        if query.shape[1] != self.width:
            raise ValueError(
                f"the query has {query.shape[1]} numbers, the index {self.width}: it was built"
                " with another embedding model"
            )
        scores, found = self._index.search(query, min(count, len(self)), params=parameters)
        pairs = zip(found[0].tolist(), scores[0].tolist(), strict=True)
        return [(self._keys[number], score) for number, score in pairs if number >= 0]

    def save(self, path: Path, extra: bytes = b"") -> None:
        """Write all to one file, at once; `extra` is kept beside."""
        numbers = np.array(list(self._ids.values()), dtype=np.int64)
        vectors = self._index.reconstruct_batch(numbers) if len(numbers) else _none(self.width)
        keys = json.dumps(list(self._ids)).encode()
        tensors = {
            "vectors": vectors,
            "numbers": numbers,
            "next": np.array([self._next]),
            "keys": np.frombuffer(keys, np.uint8),
            "extra": np.frombuffer(extra, np.uint8),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            save_file(tensors, part)
            Path(part).replace(path)
        finally:
            Path(part).unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> tuple[Vectors, bytes]:
        """Read a file that `save` wrote, and its extra; raises `ValueError`."""
        try:
            tensors = load_file(path)
            vectors, numbers = tensors["vectors"], tensors["numbers"]
            keys = json.loads(tensors["keys"].tobytes())
            made = cls(vectors.shape[1])
            if len(numbers):
                made._index.add_with_ids(vectors, numbers)
            made._ids = dict(zip(keys, numbers.tolist(), strict=True))
            made._next = int(tensors["next"][0])
            extra = tensors["extra"].tobytes()
        except (SafetensorError, KeyError, ValueError, IndexError) as error:
            raise ValueError(f"{path} is not a vector index, or damaged: {error}") from error
        made._keys = {number: key for key, number in made._ids.items()}
        return made, extra


def normalised(vectors: np.ndarray) -> np.ndarray:
    """Vectors [n, width] scaled to length 1, float32; one of no length stays so."""
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths == 0, 1, lengths)


def _none(width: int) -> np.ndarray:
    return np.empty((0, width), np.float32)
