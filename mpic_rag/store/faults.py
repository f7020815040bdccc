"""What went wrong with stored entries: counted by cause, logged once each, with the cure."""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter

from mpic_rag.store.entry import StoreError

log = logging.getLogger("mpic_rag.store")

CURES = {
    "damaged": "the entry was set aside and is computed anew; `mpic-rag store check` finds more",
    "foreign format": "compile again with this version; `mpic-rag store gc` removes old entries",
    "vanished": "something else deletes the store's files; keep its folder to this program",
    "full disk": "free some space, or lower the limit with `mpic-rag store rules --limit`",
    "read-only disk": "remount it writable, or choose another --store",
    "no permission": "let this user read and write the store's folder",
    "disk error": "look at the system's log; the disk may be failing",
    "remote timeout": "look at the network and the remote storage, or give it more time",
    "remote refused": "look at the credentials and the bucket's policy",
    "remote error": "look at the remote storage's own log",
    "index damaged": "it is rebuilt from the entries' own headers",
}
_ERRNO = {
    errno.ENOSPC: "full disk",
    errno.EDQUOT: "full disk",
    errno.EROFS: "read-only disk",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.ENOENT: "vanished",
}


def cause(error: BaseException) -> str:
    """The kind of fault behind an error of the local tier."""
    if isinstance(error, StoreError):
        return "foreign format" if str(error).startswith("format ") else "damaged"
    if isinstance(error, OSError):
        return _ERRNO.get(error.errno or 0, "disk error")
    return "disk error"


class Faults:
    """A counter that speaks up the first time."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.latest: dict[str, str] = {}  # by key, why an entry did not serve
        self._lock = threading.Lock()

    def count(self, what: str, detail: object, key: str = "") -> None:
        """Count a fault; the first of its kind is logged with what to do about it."""
        with self._lock:
            if key:
                self.latest[key] = what
                if len(self.latest) > 1000:
                    self.latest.pop(next(iter(self.latest)))
            self.counts[what] += 1
            first = self.counts[what] == 1
        if first:
            log.warning("%s: %s (%s)", what, detail, CURES[what])
