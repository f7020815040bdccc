"""What was deleted, in a file that every process reads on: a deleted entry must not come back.

Someone may hold a deleted entry in memory, have it half computed or half fetched. So each deletion
is written down before anything is deleted, and whoever is about to serve or to store an entry
looks here first. A line is "-" or "+" and a key, or "-" and a document's digest behind a "d".
"""

from __future__ import annotations

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
        self._when: dict[str, int] = {}  # where the log says that a key or document was deleted
        self._back: dict[str, int] = {}  # where it says that a key was stored again
        self._lock = threading.Lock()

    def note(self, names: Iterable[str], sign: str = "-") -> None:
        """Write names down; one write each time, so that lines of several processes don't mix."""
        text = "".join(f"{sign}{name}\n" for name in names)
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, text.encode())
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
        with self._lock, self.path.open("rb") as file:
            file.seek(self._seen)
            text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            gone: set[str] = set()
            for n, line in enumerate(text.decode(errors="replace").split("\n")[:-1]):
                name, place = line[1:], self._seen + n + 1
                if line[:1] == "-":
                    self._when[name] = place
                    gone.add(name)
                else:
                    self._back[name] = place
            self._seen += len(text)
        keys = {name for name in gone if name[:1] != "d" or len(name) == 64}
        self._forget(keys, gone - keys)
        return self._seen

    def deleted(self, key: str, document: str, since: int = 0) -> bool:
        """Whether a key or its document was deleted after the mark, the key not stored since."""
        when = max(self._when.get(key, 0), self._when.get(document, 0) if document else 0)
        return when > max(since, self._back.get(key, 0))

    def known(self, name: str) -> bool:
        """Whether the log has the name at all."""
        return name in self._when
