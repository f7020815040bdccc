"""The files of the disk tier: what they are called, how they are written and read."""

from __future__ import annotations

import os
import re
from typing import Any, BinaryIO, NamedTuple

import diskcache
import torch
from diskcache.core import MODE_BINARY

from mpic_rag.store.entry import Read, StoreError

FILE = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{28}\.val")
PINNED = float("inf")  # the access time of what is never evicted
WHOLE = 1 << 20  # bytes of a file that is read at once


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
    def entry(self) -> Stored:
        """What `Local.open` takes."""
        return Stored(self.key, self.size, self.file, self.document)

    @property
    def pinned(self) -> bool:
        """Whether it is kept however full the store is."""
        return self.used == PINNED


class Stored(NamedTuple):
    """An entry on disk that nobody has read yet."""

    key: str
    size: int
    file: str
    document: str


class Files(diskcache.Disk):
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
        if FILE.fullmatch(file_path or ""):
            super().remove(file_path)


def open_file(path: str) -> BinaryIO:
    """Open for reading, without a buffer."""
    return open(path, "rb", buffering=0)  # noqa: PTH123 - pathlib takes as long as reading


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
