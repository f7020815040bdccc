"""What readers make of a file: texts and pictures in reading order."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mpic_rag.documents import Picture

_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class Block:
    """A paragraph, or a picture with its caption, and where in the file it stands.

    `hint` is for retrieval only: a picture's alternative text, which pages don't show.
    """

    text: str = ""
    picture: Picture | None = None
    headings: tuple[str, ...] = ()
    page: int | None = None
    hint: str = ""
    heading: bool = False


@dataclass
class Content:
    """A file's blocks, its title, the files that it drew pictures from, and what was left out."""

    title: str = ""
    blocks: list[Block] = field(default_factory=list)
    depends: set[str] = field(default_factory=set)
    notes: dict[str, int] = field(default_factory=dict)

    def note(self, what: str) -> None:
        """Count something that was left out."""
        self.notes[what] = self.notes.get(what, 0) + 1

    def without(self, what: str) -> Picture | None:
        """Count a picture that was left out."""
        self.note(what)
        return None


def squeezed(text: str) -> str:
    """Text with every run of white space as one space."""
    return _SPACE.sub(" ", text.replace("\x00", " ")).strip()
