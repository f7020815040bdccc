"""The disk tier of one library: files of entries, and `diskcache`'s index of them."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import diskcache
from diskcache.core import MODE_BINARY, EmptyDirWarning

from mpic_rag.store.entry import Entry, StoreError
from mpic_rag.store.files import FILE, PINNED, Files, Row, Stored, open_file, reader

_QUARANTINE = 32  # damaged files that are kept to look into
# What a damaged index makes sqlite3 and diskcache raise.
_BROKEN = (sqlite3.Error, KeyError, TypeError, ValueError)
T = TypeVar("T")


class Local:
    """Entries of one library below `folder`, up to `limit` bytes, shared between processes."""

    def __init__(self, folder: Path, limit: int, ttl: float | None = None) -> None:
        """`ttl`: seconds that an entry lives without being used."""
        self.folder, self.limit, self.ttl = folder, limit, ttl
        self.quarantine = folder / "quarantine"
        self._entries = str(folder / "entries")
        self.rebuilt = 0
        self._cache = self._open()

    def _open(self) -> diskcache.Cache:
        # Its own culling knows no pins and comes ten at a time: ours is in `put`.
        options = {"eviction_policy": "none", "cull_limit": 0, "size_limit": 1 << 62}
        folder = str(self.folder / "entries")
        try:
            return diskcache.Cache(folder, disk=Files, tag_index=1, statistics=0, **options)
        except _BROKEN as error:
            if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                raise OSError(errno.EBUSY, "the index is locked", folder) from error
            self._set_index_aside()
        cache = diskcache.Cache(folder, disk=Files, tag_index=1, statistics=0, **options)
        self._adopt(cache)
        return cache

    def _set_index_aside(self) -> None:
        self.quarantine.mkdir(exist_ok=True)
        for name in ("cache.db", "cache.db-wal", "cache.db-shm"):
            path = self.folder / "entries" / name
            if path.exists():
                path.replace(self.quarantine / f"{name}.{time.time_ns()}")
        self.rebuilt += 1

    def _adopt(self, cache: diskcache.Cache) -> None:
        """Fill an empty index from the headers of the files."""
        root = self.folder / "entries"
        for path in root.glob("*/*/*.val"):
            try:
                entry = Entry(None, reader(open_file(str(path))), "disk").facts
            except (StoreError, OSError):
                continue
            size, now = path.stat().st_size, time.time()
            cache._sql(
                "INSERT OR REPLACE INTO Cache(key, raw, store_time, expire_time, access_time,"
                " access_count, tag, size, mode, filename, value) VALUES"
                " (?, 1, ?, ?, ?, 0, ?, ?, ?, ?, NULL)",
                (
                    entry["key"],
                    now,
                    self._expiry(now),
                    now,
                    entry.get("document", ""),
                    size,
                    MODE_BINARY,
                    str(path.relative_to(root)),
                ),
            )

    def _index(self, work: Callable[[], T]) -> T:
        """Run something on the index; where that is damaged, rebuild it and run it again."""
        try:
            return work()
        except diskcache.Timeout as error:
            raise OSError(errno.EBUSY, "the index is locked") from error
        except sqlite3.OperationalError as error:
            text = str(error)
            if "disk is full" in text:
                raise OSError(errno.ENOSPC, text) from error
            if "readonly" in text:
                raise OSError(errno.EROFS, text) from error
            if "locked" in text:
                raise OSError(errno.EBUSY, text) from error
            self._rebuild()
        except (sqlite3.Error, StoreError):
            self._rebuild()
        return work()

    def _rebuild(self) -> None:
        self._cache.close()
        self._set_index_aside()
        self._cache = self._open()
        self._adopt(self._cache)

    def find(self, keys: Sequence[str]) -> dict[str, Stored]:
        """Which entries are there and not expired, in one look at the index."""
        marks = ",".join("?" * len(keys))
        rows = self._index(
            lambda: self._cache._sql(
                f"SELECT key, size, filename, tag FROM Cache WHERE key IN ({marks})"
                " AND (expire_time IS NULL OR expire_time > ?)",
                (*keys, time.time()),
            ).fetchall()
        )
        return {row[0]: Stored(*row) for row in rows}

    def open(self, stored: Stored) -> Entry:
        """Open an entry; raises `StoreError` where it is damaged, `OSError` where unreadable."""
        if not FILE.fullmatch(stored.file or ""):
            raise StoreError("the index names no file of this store")
        try:
            file = open_file(f"{self._entries}/{stored.file}")
        except FileNotFoundError:
            now = self.find([stored.key]).get(stored.key)
            if now is None or now == stored:
                raise
            return self.open(now)  # replaced since we looked
        return Entry(stored.key, reader(file), "disk")

    def put(
        self,
        key: str,
        data: bytes,
        document: str = "",
        allowed: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Write an entry and evict others until all fit; false where it isn't `allowed`.

        A reader sees the old entry, the new one or none. The file is written inside the index's
        transaction: a crash leaves at most a file that no row names, which `check` removes. Old
        files are removed in transactions of their own: diskcache would do it before ours ends.
        """

        def work() -> bool:
            if not allowed():
                return False
            self._cache.delete(key, retry=True)
            with self._cache.transact(retry=True):
                if not allowed():
                    return False
                self._cache.set(key, data, expire=self.ttl, tag=document, retry=True)
            self._evict(key)
            return True

        try:
            return self._index(work)
        except OSError as error:
            # diskcache makes its folders as it goes and reports a full disk as it finds it.
            raise OSError(error.errno, f"can't store: {error.strerror or error}") from error

    def _evict(self, newest: str) -> None:
        while (excess := self._cache.volume() - self.limit) > 0:
            victims = self._cache._sql(
                "SELECT key, size FROM Cache WHERE access_time < ? AND key != ?"
                " ORDER BY access_time LIMIT 16",
                (PINNED, newest),
            ).fetchall()
            if not victims:
                return
            for key, size in victims:
                self._cache.delete(key, retry=True)
                excess -= size
                if excess <= 0:
                    break

    def delete(self, keys: Sequence[str]) -> int:
        """Delete entries; returns how many there were."""
        return sum(self._index(partial(self._delete, key)) for key in keys)

    def _delete(self, key: str) -> bool:
        return bool(self._cache.delete(key, retry=True))

    def delete_document(self, document: str) -> int:
        """Delete all entries of a document."""
        return int(self._index(lambda: self._cache.evict(document, retry=True)))

    def touch(self, keys: Sequence[str]) -> None:
        """Note that entries were used, and put their expiry off."""
        now = time.time()
        marks = ",".join("?" * len(keys))
        self._index(
            lambda: self._cache._sql(
                "UPDATE Cache SET access_time = ?, access_count = access_count + 1,"
                f" expire_time = ? WHERE access_time < ? AND key IN ({marks})",
                (now, self._expiry(now), PINNED, *keys),
            )
        )

    def _expiry(self, now: float) -> float | None:
        return now + self.ttl if self.ttl else None

    def pin(self, keys: Sequence[str], pinned: bool = True) -> None:
        """Keep entries however full the store is, and whatever their age; or no longer."""
        now = time.time()
        used, expires = (PINNED, None) if pinned else (now, self._expiry(now))
        marks = ",".join("?" * len(keys))
        self._index(
            lambda: self._cache._sql(
                f"UPDATE Cache SET access_time = ?, expire_time = ? WHERE key IN ({marks})",
                (used, expires, *keys),
            )
        )

    def rows(self) -> Iterator[Row]:
        """All entries, most recently used first."""
        rows = self._index(
            lambda: self._cache._sql(
                "SELECT key, size, store_time, access_time, expire_time, tag, filename FROM Cache"
                " ORDER BY access_time DESC"
            ).fetchall()
        )
        return (Row(*row) for row in rows)

    def volume(self) -> int:
        """Bytes on disk, the index's own among them."""
        return int(self._index(lambda: self._cache.volume()))

    def expire(self) -> int:
        """Delete what has expired; returns how many there were."""
        return int(self._index(lambda: self._cache.expire(retry=True)))

    def set_aside(self, key: str) -> None:
        """Move a damaged entry's file to the quarantine and forget it."""
        for stored in self.find([key]).values():
            if FILE.fullmatch(stored.file or ""):
                self.quarantine.mkdir(exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    Path(self._entries, stored.file).replace(
                        self.quarantine / f"{key}.{time.time_ns()}"
                    )
        self.delete([key])
        kept = sorted(self.quarantine.glob("*"), key=lambda p: p.name.rpartition(".")[2])
        for path in kept[:-_QUARANTINE]:
            path.unlink(missing_ok=True)

    def tidy(self) -> list[str]:
        """Make index and files agree; returns what was wrong, in words.

        Inside one transaction, so that no file of a writer at work is taken for a left-over.
        """

        def work() -> list[str]:
            ((word,),) = self._cache._sql("PRAGMA integrity_check(1)").fetchall()
            if word != "ok":
                raise sqlite3.DatabaseError(word)
            found = self._cache.check(fix=True, retry=True)
            return [str(w.message) for w in found if w.category is not EmptyDirWarning]

        before = self.rebuilt
        found = self._index(work)
        return ["the index was damaged and is rebuilt", *found] if self.rebuilt > before else found

    def close(self) -> None:
        """Close the index."""
        self._cache.close()
