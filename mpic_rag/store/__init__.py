"""Chunk KVs that people can trust: memory over disk over remote, libraries, faults, costs."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from mpic_rag.store.costs import Costs
from mpic_rag.store.entry import Entry, StoreError
from mpic_rag.store.faults import Faults
from mpic_rag.store.files import Stored
from mpic_rag.store.library import Library
from mpic_rag.store.memory import Held, Memory
from mpic_rag.store.policy import Policy
from mpic_rag.store.remote import Remote, RemoteError

__all__ = [
    "Candidate",
    "Entry",
    "Found",
    "Held",
    "Library",
    "Policy",
    "Store",
    "StoreError",
    "Stored",
]

DYNAMIC = "dynamic"
ABSENT_S = 60.0  # how long it is remembered that the remote has no such entry
_NAME = re.compile(r"dynamic|static-[0-9a-f]{32}")


class Candidate(NamedTuple):
    """An entry that may serve a chunk."""

    mode: str
    library: Library
    key: str


class Found(NamedTuple):
    """The entry that serves a chunk; of one on disk, nothing is read yet."""

    candidate: Candidate
    entry: Held | Stored | Entry

    @property
    def tier(self) -> str:
        """Where it lies: memory, disk or remote."""
        if isinstance(self.entry, Held):
            return "memory"
        return "disk" if isinstance(self.entry, Stored) else self.entry.tier

    @property
    def size(self) -> int:
        """Bytes that are still to be loaded."""
        if isinstance(self.entry, Held):
            return 0
        return self.entry.size - (self.entry.bytes_read if isinstance(self.entry, Entry) else 0)

    def tokens(self, per_token: int) -> int:
        """Its tokens, of so many bytes each; of an entry on disk, about."""
        if isinstance(self.entry, Stored):
            return self.entry.size // per_token
        return self.entry.tokens if isinstance(self.entry, Entry) else len(self.entry.kv.segment)


class Store:
    """Libraries below `root`, with a memory tier of `memory` bytes and, at will, a `remote` URL.

    `int8` stores new entries with 8 bits a number; `adaptive` passes over entries that are quicker
    to compute than to load. `options` go to the remote's file system.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        memory: int = 1_000_000_000,
        remote: str | None = None,
        remote_timeout: float = 2.0,
        int8: bool = False,
        adaptive: bool = True,
        **options: Any,
    ) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self.int8, self.adaptive = int8, adaptive
        self.memory = Memory(memory)
        self.faults = Faults()
        self.costs = Costs(self.root / "costs.json")
        self.remote = Remote(remote, remote_timeout, **options) if remote else None
        self._libraries: dict[str, Library] = {}
        self._absent: dict[str, float] = {}
        self._lock = threading.Lock()
        self._background = ThreadPoolExecutor(2, "store")
        self._pending: set[Future[object]] = set()

    def library(self, name: str = DYNAMIC) -> Library:
        """A library by the name of its folder."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"there is no library {name!r}")
        with self._lock:
            if name not in self._libraries:
                self._libraries[name] = Library(self, name)
            return self._libraries[name]

    @property
    def dynamic(self) -> Library:
        """The shared reference collection."""
        return self.library()

    def static(self, owner: str) -> Library:
        """One owner's uploads; nobody else's requests reach it."""
        if not owner:
            raise ValueError("a static library needs an owner")
        return self.library("static-" + hashlib.sha256(owner.encode()).hexdigest()[:32])

    def libraries(self) -> list[Library]:
        """All libraries on this disk."""
        names = (path.name for path in sorted(self.root.iterdir()) if path.is_dir())
        return [self.library(name) for name in names if _NAME.fullmatch(name)]

    def find(self, wanted: Sequence[Sequence[Candidate]], far: bool = True) -> list[Found | None]:
        """The best entry for each chunk, whose candidates come best first.

        The nearest tiers first; if `far`, the remote is asked, in one go, for what would be better.
        """
        keys: dict[Library, list[str]] = {}
        for candidate in (c for candidates in wanted for c in candidates):
            keys.setdefault(candidate.library, []).append(candidate.key)
        here: dict[tuple[Library, str], Held | Stored] = {}
        for library, asked in keys.items():
            library.feed.poll()
            library.mark()
            here |= {(library, k): e for k, e in library.find(list(dict.fromkeys(asked))).items()}
        found: list[tuple[int, Found] | None] = []
        for candidates in wanted:
            hits = ((n, c, here.get((c.library, c.key))) for n, c in enumerate(candidates))
            found.append(next(((n, Found(c, e)) for n, c, e in hits if e), None))
        if far and self.remote and self.remote.available:
            self._ask_remote(self.remote, wanted, found)
        return [pair[1] if pair else None for pair in found]

    def _ask_remote(
        self,
        remote: Remote,
        wanted: Sequence[Sequence[Candidate]],
        found: list[tuple[int, Found] | None],
    ) -> None:
        now = monotonic()
        asked = [
            (i, n, candidate)
            for i, candidates in enumerate(wanted)
            for n, candidate in enumerate(candidates)
            if ((best := found[i]) is None or n < best[0])
            and now > self._absent.get(candidate.key, 0)
        ]
        if not asked:
            return
        heads = remote.open([(c.library.name, c.key) for _, _, c in asked])
        if not any(isinstance(opened, RemoteError) for opened in heads):
            self.costs.measure_look("remote", monotonic() - now)
        for (i, n, candidate), opened in zip(asked, heads, strict=True):
            if opened is None:
                self._absent[candidate.key] = now + ABSENT_S
            elif isinstance(opened, RemoteError):
                candidate.library.fault(candidate.key, opened)
            elif entry := candidate.library.admit(candidate.key, opened):
                best = found[i]
                if best is None or n < best[0]:
                    found[i] = n, Found(candidate, entry)

    def later(self, work: Callable[[], object]) -> None:
        """Do something that no request waits for."""
        future = self._background.submit(work)
        with self._lock:
            self._pending = {f for f in self._pending if not f.done()} | {future}

    def drain(self) -> None:
        """Wait for what `later` began; raises what went wrong there."""
        while True:
            with self._lock:
                pending, self._pending = self._pending, set()
            if not pending:
                return
            for future in pending:
                future.result()

    def close(self) -> None:
        """Finish what was begun and close the indexes."""
        self.drain()
        self.costs.save()
        for library in self._libraries.values():
            library.close()
