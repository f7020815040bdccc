"""A set of chunk KVs with one owner: memory over disk over remote, and what may be done with it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from mpic_rag.segment import ChunkKV
from mpic_rag.store.deletions import Deletions, digest
from mpic_rag.store.entry import KEY, Entry, StoreError, encode
from mpic_rag.store.faults import cause
from mpic_rag.store.feed import Feed
from mpic_rag.store.files import Row, Stored
from mpic_rag.store.local import Local
from mpic_rag.store.memory import Held
from mpic_rag.store.policy import Policy
from mpic_rag.store.remote import Remote, RemoteError

if TYPE_CHECKING:
    from mpic_rag.store import Store

T = TypeVar("T")


class Library:
    """Entries by content key; made by `Store.library`. Errors are counted in the store's faults."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        self.folder = store.root / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.policy = Policy.read(self.folder / "policy.json")
        self.disk = Local(self.folder, self.policy.limit, self.policy.ttl_s)
        self.deletions = Deletions(self.folder / "deleted.log", self._forget)
        self.mark()
        self.feed = Feed(self)

    def set_policy(self, policy: Policy) -> None:
        """Change the rules, for every process that opens the library from now on."""
        policy.write(self.folder / "policy.json")
        self.policy, self.disk.limit, self.disk.ttl = policy, policy.limit, policy.ttl_s

    def mark(self) -> int:
        """A point in time: what is deleted after it can't be stored by work begun before it."""
        return self.deletions.sync()

    def contains(self, key: str) -> bool:
        """Whether this disk has an entry; only reading tells whether it is sound."""
        return bool(self._on_disk([_checked(key)]))

    def find(self, keys: Sequence[str]) -> dict[str, Held | Stored]:
        """Which of these entries memory or disk has; nothing is read yet."""
        for key in keys:
            _checked(key)
        here: dict[str, Held | Stored] = {}
        for key in keys:
            if held := self.store.memory.get((self.name, key)):
                here[key] = held
        rest = [key for key in keys if key not in here]
        if rest:
            here |= self._on_disk(rest)
        return here

    def _on_disk(self, keys: Sequence[str]) -> dict[str, Stored]:
        nothing: dict[str, Stored] = {}
        rows = self._quietly(lambda: self.disk.find(keys), nothing)
        # A crash may leave a deleted entry's file, which a rebuilt index would bring back.
        barred = self.deletions.barred
        return {key: row for key, row in rows.items() if not barred(key, row.document)}

    def open(self, key: str) -> Held | Entry | None:
        """Open an entry in memory or on disk; None where there is none that can be trusted."""
        there = self.find([key]).get(key)
        if not isinstance(there, Stored):
            return there
        try:
            return self.disk.open(there)
        except (StoreError, OSError) as error:
            self.fault(key, error)
            return None

    def admit(self, key: str, opened: Callable[[], Entry]) -> Entry | None:
        """Open an entry that was fetched, unless it is damaged or was deleted."""
        try:
            entry = opened()
        except (StoreError, RemoteError) as error:
            self.fault(key, error, "remote")
            return None
        return None if self.deletions.barred(key, entry.facts.get("document", "")) else entry

    def fault(self, key: str, error: BaseException, tier: str = "disk") -> None:
        """Count a fault; a damaged entry is set aside on disk, and removed from the remote."""
        what = error.cause if isinstance(error, RemoteError) else cause(error)
        self.store.faults.count(what, f"{self.name}/{key[:12]}: {error}", key)
        self._forget([key])
        remote = self.store.remote
        if remote and tier == "remote":
            if what == "damaged":
                self.store.later(lambda: self._discard(remote, key))
        elif what == "damaged":
            self._quietly(lambda: self.disk.set_aside(key), None)
        elif what == "vanished":
            self._quietly(lambda: self.disk.delete([key]), 0)

    def _discard(self, remote: Remote, key: str) -> None:
        with contextlib.suppress(RemoteError):  # found damaged again, next time
            remote.discard(self.name, key)

    def put(
        self,
        key: str,
        kv: ChunkKV,
        document: str = "",
        facts: Mapping[str, str] | None = None,
        since: int | None = None,
    ) -> bool:
        """Store an entry in every tier; false if it was deleted after the mark `since`.

        Raises `OSError` where the disk can't take it; the remote gets it in the background.
        """
        _checked(key)
        since = self.mark() if since is None else since
        tag = digest(document)
        about = {**(facts or {}), "library": self.name, "document": tag, "name": document}
        data, _ = encode(key, kv, about, self.store.int8)
        return self.put_bytes(key, data, tag, since)

    def put_bytes(self, key: str, data: bytes, tag: str, since: int) -> bool:
        """Store an encoded entry, as `put` does."""

        def allowed() -> bool:
            self.mark()
            if self.deletions.deleted(key, tag, since):
                return False
            if self.deletions.barred(key, tag):
                self.deletions.note([key], "+", since)
            return True

        if not self.disk.put(key, data, tag, allowed):
            return False
        self._forget([key])
        if self.store.remote:
            # From disk: entries that wait their turn must not fill the memory.
            self.store.later(partial(self.push, key))
        return True

    def keep(self, key: str, entry: Entry, kv: ChunkKV, since: int) -> None:
        """Keep what was loaded in the tiers above: memory, and the disk if it came from afar."""
        tag = entry.facts.get("document", "")
        self.mark()
        if self.deletions.deleted(key, tag, since):
            return
        self.store.memory.put((self.name, key), kv, tag)
        if self.mark() and self.deletions.deleted(key, tag, since):
            self._forget([key])
        if entry.tier == "remote":
            self.store.later(partial(self._fill, key, entry, since))

    def _fill(self, key: str, entry: Entry, since: int) -> bool:
        def allowed() -> bool:
            self.mark()
            return not self.deletions.deleted(key, entry.facts.get("document", ""), since)

        try:
            data = entry.raw()
            return self.disk.put(key, data, entry.facts.get("document", ""), allowed)
        except (StoreError, RemoteError) as error:
            self.fault(key, error, "remote")
        except OSError as error:
            self.fault(key, error)
        return False

    def fetch(self, key: str) -> bool:
        """Bring an entry from the remote to this disk; false if it can't be."""
        remote, since, began = self.store.remote, self.mark(), time.monotonic()
        if not remote or not remote.available:
            return False
        (opened,) = remote.open([(self.name, _checked(key))])
        if isinstance(opened, RemoteError):
            self.fault(key, opened, "remote")
        entry = self.admit(key, opened) if callable(opened) else None
        if entry is None:
            return False
        looked, read = time.monotonic(), entry.bytes_read
        self.store.costs.measure_look("remote", looked - began)
        stored = self._fill(key, entry, since)
        if entry.bytes_read > read:
            seconds = time.monotonic() - looked
            self.store.costs.measure_load("remote", entry.bytes_read - read, seconds)
        return stored

    def push(self, key: str) -> bool:
        """Bring an entry from this disk to the remote; false if it can't be."""
        remote, since = self.store.remote, self.mark()
        if not remote or not remote.available:
            return False
        try:
            (stored,) = self._on_disk([_checked(key)]).values()
            remote.put(self.name, key, self.disk.open(stored).raw(), stored.document)
            self.mark()
            if self.deletions.deleted(key, stored.document, since):
                remote.delete(self.name, [key], stored.document)
                return False
        except ValueError:  # deleted or evicted meanwhile
            return False
        except RemoteError as error:
            self.fault(key, error, "remote")
            return False
        except (OSError, StoreError) as error:
            self.fault(key, error)
            return False
        return True

    def delete(self, keys: Sequence[str]) -> int:
        """Delete entries everywhere; returns how many this disk had.

        Raises `RemoteError` where the remote can't be reached: then its copies stay, unserved by
        this machine, until the same call succeeds.
        """
        for key in keys:
            _checked(key)
        self.deletions.note(keys)
        count = self.disk.delete(keys)
        if self.store.remote and keys:
            self.store.remote.delete(self.name, keys)
        return count

    def delete_document(self, document: str) -> int:
        """Delete all entries of a document everywhere; returns and raises as `delete` does."""
        tag = digest(document)
        if not tag:
            raise ValueError("name the document to delete")
        self.deletions.note([tag])
        count = self.disk.delete_document(tag)
        if self.store.remote:
            keys = self.store.remote.keys(self.name, tag)
            self.store.remote.delete(self.name, keys, tag)
        return count

    def touch(self, keys: Sequence[str]) -> None:
        """Note that entries were used."""
        if keys:
            self._quietly(lambda: self.disk.touch(keys), None)

    def rows(self) -> Iterator[Row]:
        """All entries on this disk, most recently used first."""
        return self.disk.rows()

    def check(self, progress: Callable[[], None] = lambda: None) -> list[str]:
        """Read every entry, set damaged ones aside, make index and files agree; says what it found.

        What was found wrong is mended when this returns.
        """
        found = self.disk.tidy()
        for row in list(self.rows()):
            try:
                self.disk.open(row.entry).verify()
            except (StoreError, OSError) as error:
                found.append(f"{row.key[:12]} {error}")
                self.fault(row.key, error)
            progress()
        return found

    def _forget(self, keys: Iterable[str], documents: Iterable[str] = ()) -> None:
        self.store.memory.drop(self.name, keys, documents)

    def close(self) -> None:
        """Close the index."""
        self.disk.close()

    def _quietly(self, work: Callable[[], T], otherwise: T) -> T:
        try:
            return work()
        except (OSError, StoreError) as error:
            self.store.faults.count(cause(error), error)
            return otherwise


def _checked(key: str) -> str:
    if not KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not a content key")
    return key
