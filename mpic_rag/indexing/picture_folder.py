"""Pictures as files, named by their content."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Container
from pathlib import Path

import filetype

from mpic_rag.documents import Picture


class PictureFolder:
    """A folder of pictures; equal ones are one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """Where a picture lies."""
        return self.folder / name[:2] / name

    def load(self, name: str) -> Picture:
        """A picture by its file's name."""
        return Picture(self.path(name).read_bytes(), name)

    def keep(self, picture: Picture) -> str:
        """Write a picture's file, whole or not at all; returns its name."""
        kind = filetype.guess_extension(picture.data[:512]) or "bin"
        name = f"{picture.digest}.{kind}"
        path = self.path(name)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(dir=path.parent, prefix=".")
            with os.fdopen(handle, "wb") as file:
                file.write(picture.data)
            Path(part).replace(path)
        return name

    def sweep(self, used: Container[str]) -> int:
        """Remove all others, unfinished ones too; returns how many."""
        removed = 0
        for path in self.folder.glob("*/*"):
            if path.name not in used:
                path.unlink(missing_ok=True)
                removed += 1
        return removed
