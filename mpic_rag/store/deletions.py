"""What was deleted, in a file that every process reads on: a deleted entry must not come back.

Someone may hold a deleted entry in memory, have it half computed or half fetched. So each deletion
is written down before anything is deleted, and whoever is about to serve or to store an entry
looks here first. A line is

    - NAME        deleted here, everywhere: not even the remote's copy is to be served
    ~ NAME        deleted on another machine, which has removed the remote's copy
    + NAME MARK   stored again, by work that began at MARK: undoes what was deleted before it

where NAME is a key, or a document's digest, and MARK a length of this file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path


def digest(document: str) -> str:
    """A document's name as it stands in indexes: "" stays "", anything else is hashed."""
    return "d" + hashlib.sha256(document.encode()).hexdigest()[:40] if document else ""


class Deletions:
    """The log of one library; `forget(keys, documents)` is told what others deleted."""

    def __init__(self, path: Path, forget: Callable[[set[str], set[str]], None]) -> None:
        self.path = path
        self._forget = forget
        self._seen = 0
        self._when: dict[str, int] = {}  # where the log says that a name was deleted, by anyone
        self._barred: dict[str, int] = {}  # ... and on this machine
        self._back: dict[str, int] = {}  # up to where deletions of a key are undone
        self._lock = threading.Lock()

    def note(self, names: Iterable[str], sign: str = "-", mark: int = 0) -> None:
        """Write names down; one write each time, so that lines of several processes don't mix."""
        text = "".join(f"{sign} {name} {mark}\n" for name in names)
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.write(fd, text.encode()) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        finally:
            os.close(fd)
        self.sync()

    def sync(self) -> int:
        """Read what is new; returns the length of the log, a mark for `since`."""
        try:
            if self.path.stat().st_size == self._seen:
                return self._seen
        except FileNotFoundError:
            return self._seen
        gone: set[str] = set()
        with self._lock, self.path.open("rb") as file:
            file.seek(self._seen)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._seen += len(line)
                sign, name, mark = (*line.decode(errors="replace").split(), "", "", "")[:3]
                if sign == "+":
                    self._back[name] = int(mark) if mark.isdigit() else 0
                    continue
                gone.add(name)
                self._when[name] = self._seen
                if sign == "-":
                    self._barred[name] = self._seen
        keys = {name for name in gone if not is_document(name)}
        self._forget(keys, gone - keys)
        return self._seen

    def deleted(self, key: str, document: str, since: int) -> bool:
        """Whether a key or its document was deleted after the mark."""
        return self._last(self._when, key, document) > max(since, self._back.get(key, 0))

    def barred(self, key: str, document: str) -> bool:
        """Whether this machine deleted a key or its document, and did not store it since."""
        return self._last(self._barred, key, document) > self._back.get(key, 0)

    @staticmethod
    def _last(where: dict[str, int], key: str, document: str) -> int:
        return max(where.get(key, 0), where.get(document, 0) if document else 0)


def is_document(name: str) -> bool:
    """Whether a name is a document's digest rather than a key."""
    return name[:1] == "d" and len(name) != 64
