"""The fastest tier: decoded entries in memory, least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from mpic_rag.segment import ChunkKV


class Held(NamedTuple):
    """An entry in memory, and the document that it belongs to."""

    kv: ChunkKV
    document: str
    bytes: int


class Memory:
    """Entries by key, up to `limit` bytes; safe to share between threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: str) -> Held | None:
        """The entry, which is now the most recently used one."""
        with self._lock:
            held = self._held.get(key)
            if held:
                self._held.move_to_end(key)
            return held

    def put(self, key: str, kv: ChunkKV, document: str) -> None:
        """Keep an entry, unless it is larger than the tier."""
        tensors = (kv.keys, kv.values, *vars(kv.segment).values())
        size = sum(t.numel() * t.element_size() for t in tensors)
        if size > self.limit:
            return
        with self._lock:
            self._drop(key)
            self._held[key] = Held(kv, document, size)
            self.bytes += size
            while self.bytes > self.limit:
                self._drop(next(iter(self._held)))

    def drop(self, keys: Iterable[str], documents: Iterable[str] = ()) -> None:
        """Forget entries, and those of whole documents."""
        documents = set(documents)
        with self._lock:
            for key in [*keys, *(k for k, h in self._held.items() if h.document in documents)]:
                self._drop(key)

    def _drop(self, key: str) -> None:
        held = self._held.pop(key, None)
        self.bytes -= held.bytes if held else 0
