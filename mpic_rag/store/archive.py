"""A library as one tar file, to carry it elsewhere."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import torch

from mpic_rag.store.entry import KEY, Entry, StoreError
from mpic_rag.store.library import Library

LARGEST = 1 << 34  # bytes of an entry that an archive may hold


def export(library: Library, target: Path, progress: Callable[[], None] = lambda: None) -> int:
    """Write all sound entries to a tar file; returns how many."""
    count = 0
    part = target.with_name(target.name + ".part")
    try:
        with tarfile.open(part, "w") as archive:
            for row in library.rows():
                progress()
                try:
                    data = library.disk.open(row.entry).raw()
                except (StoreError, OSError) as error:
                    library.fault(row.key, error)
                    continue
                info = tarfile.TarInfo(f"{library.name}/{row.key}")
                info.size, info.mtime = len(data), int(row.stored)
                archive.addfile(info, io.BytesIO(data))
                count += 1
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return count


def import_(library: Library, source: Path, progress: Callable[[], None] = lambda: None) -> int:
    """Store the entries of a tar file; returns how many.

    A member's name is only ever compared, never used as a path. Raises `ValueError` where the
    archive is none, or holds anything but sound entries of this library, before it that is stored.
    """
    count, since = 0, library.mark()
    try:
        with tarfile.open(source, "r:") as archive:
            for member in archive:
                name, _, key = member.name.partition("/")
                if not member.isreg() or not KEY.fullmatch(key) or member.size > LARGEST:
                    raise ValueError(f"{source} holds {member.name!r}, which is no entry")
                if name != library.name:
                    raise ValueError(
                        f"{source} is of the library {name}: an entry's key names its library, so"
                        f" {library.name} would never find it"
                    )
                file = archive.extractfile(member)
                data = file.read() if file else b""
                entry = Entry(key, reader(data), "archive")
                entry.verify()
                if library.put_bytes(key, data, entry.facts.get("document", ""), since):
                    count += 1
                progress()
    except (tarfile.TarError, StoreError) as error:
        raise ValueError(f"{source} is damaged, {count} entries were stored: {error}") from error
    return count


def reader(data: bytes) -> Callable[[int, int], torch.Tensor]:
    """Reads from bytes in memory."""
    whole = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    return lambda start, end: whole[start:end]
