"""The fastest tier: decoded entries in memory, least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from mpic_rag.segment import ChunkKV

Name = tuple[str, str]  # library and key


class Held(NamedTuple):
    """An entry in memory, and the document that it belongs to."""

    kv: ChunkKV
    document: str
    bytes: int


class Memory:
    """Entries by library and key, up to `limit` bytes; safe to share between threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._held: OrderedDict[Name, Held] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, name: Name) -> Held | None:
        """The entry, which is now the most recently used one."""
        with self._lock:
            held = self._held.get(name)
            if held:
                self._held.move_to_end(name)
            return held

    def put(self, name: Name, kv: ChunkKV, document: str) -> None:
        """Keep an entry, unless it is larger than the tier."""
        tensors = (kv.keys, kv.values, *vars(kv.segment).values())
        size = sum(t.numel() * t.element_size() for t in tensors)
        if size > self.limit:
            return
        with self._lock:
            self._drop(name)
            self._held[name] = Held(kv, document, size)
            self.bytes += size
            while self.bytes > self.limit:
                self._drop(next(iter(self._held)))

    def drop(self, library: str, keys: Iterable[str], documents: Iterable[str] = ()) -> None:
        """Forget entries of a library, and those of whole documents."""
        gone = set(documents)
        with self._lock:
            held = [n for n, h in self._held.items() if n[0] == library and h.document in gone]
            for name in [*((library, key) for key in keys), *held]:
                self._drop(name)

    def _drop(self, name: Name) -> None:
        held = self._held.pop(name, None)
        self.bytes -= held.bytes if held else 0
