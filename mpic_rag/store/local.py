"""The disk tier of one library: files of entries, and `diskcache`'s index of them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import diskcache
import torch
from diskcache.core import MODE_BINARY, EmptyDirWarning

from mpic_rag.store.entry import Entry, Read, StoreError

_FILE = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{28}\.val")
_PINNED = float("inf")  # the access time of what is never evicted
WHOLE = 1 << 20  # bytes of a file that is read at once
_QUARANTINE = 32  # damaged files that are kept to look into
# What a damaged index makes sqlite3 and diskcache raise.
_BROKEN = (sqlite3.Error, KeyError, TypeError, ValueError)
T = TypeVar("T")


class Row(NamedTuple):
    """One entry as the index has it; times in seconds since 1970."""

    key: str
    size: int
    stored: float
    used: float
    expires: float | None
    document: str
    file: str

    @property
    def pinned(self) -> bool:
        """Whether it is kept however full the store is."""
        return self.used == _PINNED


class Stored(NamedTuple):
    """An entry on disk that nobody has read yet."""

    key: str
    size: int
    file: str


class _Files(diskcache.Disk):
    """Every value is a file of bytes and every key a text: nothing is pickled, or unpickled.

    `diskcache` itself would unpickle what its index says is pickled (CVE-2025-69872).
    """

    def put(self, key: str) -> tuple[str, bool]:
        """Keys are kept as they are."""
        return key, True

    def get(self, key: str, raw: bool) -> str:
        """Keys are kept as they are."""
        return key

    def store(self, value: bytes, read: bool, key: Any = None) -> tuple[Any, ...]:
        """Write a file of bytes."""
        if type(value) is not bytes or read:
            raise TypeError("only bytes are stored")
        name, path = self.filename(key, value)
        self._write(path, iter((value,)), "xb")
        return len(value), MODE_BINARY, name, None

    def fetch(self, mode: int, filename: str, value: Any, read: bool) -> Any:
        """Read nothing: `Local.open` opens files."""
        raise StoreError("entries are opened by `Local.open`")

    def remove(self, file_path: str) -> None:
        """Remove a file of this store and no other."""
        if _FILE.fullmatch(file_path or ""):
            super().remove(file_path)


def _open(path: str) -> BinaryIO:
    return open(path, "rb", buffering=0)  # noqa: PTH123 - pathlib takes as long as reading


class Local:
    """Entries of one library below `folder`, up to `limit` bytes, shared between processes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.quarantine = folder / "quarantine"
        self._entries = str(folder / "entries")
        self.rebuilt = 0
        self._cache = self._open()

    def _open(self) -> diskcache.Cache:
        # Its own culling knows no pins and comes ten at a time: ours is in `put`.
        options = {"eviction_policy": "none", "cull_limit": 0, "size_limit": 1 << 62}
        folder = str(self.folder / "entries")
        try:
            return diskcache.Cache(folder, disk=_Files, tag_index=1, statistics=0, **options)
        except _BROKEN as error:
            if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                raise OSError(errno.EBUSY, "the index is locked", folder) from error
            self._set_index_aside()
        cache = diskcache.Cache(folder, disk=_Files, tag_index=1, statistics=0, **options)
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
                entry = Entry(None, reader(_open(str(path))), "disk").facts
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
                    entry.get("expires"),
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

    def contains(self, key: str) -> bool:
        """Whether an entry is there and not expired."""
        return self._index(lambda: key in self._cache)

    def find(self, keys: Sequence[str]) -> dict[str, Stored]:
        """Which entries are there and not expired, in one look at the index."""
        marks = ",".join("?" * len(keys))
        rows = self._index(
            lambda: self._cache._sql(
                f"SELECT key, size, filename FROM Cache WHERE key IN ({marks})"
                " AND (expire_time IS NULL OR expire_time > ?)",
                (*keys, time.time()),
            ).fetchall()
        )
        return {row[0]: Stored(*row) for row in rows}

    def open(self, stored: Stored) -> Entry:
        """Open an entry; raises `StoreError` where it is damaged, `OSError` where unreadable."""
        if not _FILE.fullmatch(stored.file or ""):
            raise StoreError("the index names no file of this store")
        try:
            file = _open(f"{self._entries}/{stored.file}")
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
        ttl: float | None = None,
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
                self._cache.set(key, data, expire=ttl, tag=document, retry=True)
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
                (_PINNED, newest),
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

    def touch(self, keys: Sequence[str], ttl: float | None) -> None:
        """Note that entries were used, and put their expiry off."""
        now = time.time()
        marks = ",".join("?" * len(keys))
        self._index(
            lambda: self._cache._sql(
                "UPDATE Cache SET access_time = ?, access_count = access_count + 1,"
                f" expire_time = ? WHERE access_time < ? AND key IN ({marks})",
                (now, now + ttl if ttl else None, _PINNED, *keys),
            )
        )

    def pin(self, keys: Sequence[str], pinned: bool = True) -> None:
        """Keep entries however full the store is, and whatever their age; or no longer."""
        used = _PINNED if pinned else time.time()
        marks = ",".join("?" * len(keys))
        self._index(
            lambda: self._cache._sql(
                f"UPDATE Cache SET access_time = ?, expire_time = NULL WHERE key IN ({marks})",
                (used, *keys),
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
        for row in self.rows():
            if row.key == key and _FILE.fullmatch(row.file):
                self.quarantine.mkdir(exist_ok=True)
                path = self.folder / "entries" / row.file
                with contextlib.suppress(FileNotFoundError):
                    path.replace(self.quarantine / f"{key}.{time.time_ns()}")
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


def reader(file: BinaryIO) -> Read:
    """Reads from an open file into new buffers [bytes], fewer where the file ends.

    No memory map: a file that is cut short under one kills the process.
    """
    size = os.fstat(file.fileno()).st_size

    def read(start: int, end: int) -> torch.Tensor:
        if start == 0 and size <= WHOLE:
            end = size
        buffer = torch.empty(max(0, min(end, size) - start), dtype=torch.uint8)
        view, done = buffer.numpy().data, 0
        while done < len(buffer):  # one call reads 2 GiB at most
            count = os.preadv(file.fileno(), [view[done:]], start + done)
            if not count:
                return buffer[:done]
            done += count
        return buffer

    return read
