"""What other machines delete from the shared remote, learnt before it is too late."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from mpic_rag.store.deletions import is_document
from mpic_rag.store.entry import KEY
from mpic_rag.store.remote import Remote, RemoteError

if TYPE_CHECKING:
    from mpic_rag.store.library import Library

POLL = 60.0  # seconds until what other machines deleted is gone here, while the remote answers
SOON = 30.0  # seconds until it is asked for beside a request, so that few have to wait for it


class Feed:
    """The notes of deletions on one library's remote."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._read = float("-inf")
        self._lock = threading.Lock()
        self._newest = library.folder / "newest"  # the note up to which all is dealt with

    def poll(self) -> None:
        """See that all is dealt with that was deleted more than `POLL` seconds ago."""
        store = self._library.store
        age = time.monotonic() - self._read
        if not store.remote or age < SOON or not store.remote.available:
            return
        if age > POLL:
            self._poll(store.remote)
        elif not self._lock.locked():
            store.later(partial(self._poll, store.remote))

    def _poll(self, remote: Remote) -> None:
        library, began = self._library, time.monotonic()
        with self._lock:
            if began - self._read < SOON:
                return  # somebody else just did
            after = self._newest.read_text() if self._newest.exists() else ""
            try:
                names, newest = remote.deletions(library.name, after)
            except RemoteError as error:
                library.store.faults.count(error.cause, error)
                return
            self._read = began
            keys = [name for name in names if KEY.fullmatch(name)]
            tags = [name for name in names if is_document(name)]
            if keys or tags:
                library.deletions.note([*keys, *tags], "~")
                library.disk.delete(keys)
                for tag in tags:
                    library.disk.delete_document(tag)
                self._newest.write_text(newest)
