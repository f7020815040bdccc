"""Known chunks, found again by their bytes inside prompts that others put together."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from mpic_rag.documents import Chunk, Document, Part, Picture

ANCHOR = 16  # characters by which a text is looked up before it is compared
WHOLE = 32  # characters from which on a text may stand amid others
_WORD = re.compile(r"(?<!\S)\S")


class Known(NamedTuple):
    """What is kept of a chunk: enough to recognise it, not its content."""

    digest: str
    length: int
    source: str
    context: str
    document: str


class Catalog:
    """Chunks of one text or picture each, by content; the bytes that are found are the chunk.

    Where several documents hold the same bytes, the one that the prompt has just come from is
    taken, else one that the caller names, else the first that was learned.
    """

    def __init__(self, documents: Iterable[Document] = ()) -> None:
        self._texts: dict[str, list[Known]] = {}
        self._anchors: set[int] = set()  # lengths of the texts' first characters
        self._pictures: dict[str, list[Known]] = {}
        self.add(documents)

    def add(self, documents: Iterable[Document]) -> None:
        """Take in the chunks of compiled documents."""
        for document in documents:
            for chunk in document.chunks:
                if len(chunk.parts) == 1:
                    self.learn(chunk)

    def learn(self, chunk: Chunk) -> None:
        """Take in one chunk."""
        (part,) = chunk.parts
        if isinstance(part, Picture):
            place, length = self._pictures.setdefault(part.digest, []), 0
        else:
            place, length = self._texts.setdefault(part[:ANCHOR], []), len(part)
            self._anchors.add(min(ANCHOR, length))
        known = Known(chunk.digest, length, chunk.source, chunk.context, chunk.document)
        if not any((k.digest, k.context) == (known.digest, known.context) for k in place):
            place.append(known)

    def find(
        self,
        parts: Iterable[Part],
        contexts: Collection[str] = (),
        before: str | None = None,
    ) -> list[Part | Chunk]:
        """Replace known texts and pictures by their chunks, also inside longer texts.

        White space next to a chunk goes, since a chunk brings its own. Among chunks of equal
        content, the one with context `before` is taken, else one with any of `contexts`.
        """
        found: list[Part | Chunk] = []
        for part in parts:
            pieces: Iterable[Part | Chunk]
            pieces = [part] if isinstance(part, Picture) else self._cut(part, before, contexts)
            for piece in pieces:
                if isinstance(piece, Picture):
                    known = self._pictures.get(piece.digest, [])
                    if known:
                        piece = _chunk(piece, _best(known, before, contexts))
                if isinstance(piece, Chunk):
                    before = piece.following
                found.append(piece)
        return found

    def _cut(
        self, text: str, before: str | None, contexts: Collection[str]
    ) -> Iterator[str | Chunk]:
        done = 0
        for word in _WORD.finditer(text):
            at = word.start()
            # Behind another chunk, or on a line of its own.
            apart = not text[done:at].strip() or text[at - 1] == "\n"
            known = self._at(text, at, apart) if at >= done else []
            if not known:
                continue
            gap = text[done:at].lstrip() if done else text[:at]
            if gap.strip():
                yield gap
            done = at + known[0].length
            chunk = _chunk(text[at:done], _best(known, before, contexts))
            before = chunk.following
            yield chunk
        if rest := text[done:].lstrip() if done else text:
            yield rest

    def _at(self, text: str, at: int, apart: bool) -> list[Known]:
        """The longest known text that stands here and ends with the text or a word.

        A short one must stand `apart` and end its line, or lead to another known text.
        """
        starts = (text[at : at + length] for length in self._anchors)
        candidates = [known for start in starts for known in self._texts.get(start, ())]
        for length in sorted({known.length for known in candidates}, reverse=True):
            end = at + length
            if end < len(text) and not text[end].isspace():
                continue
            digest = Chunk.of(text[at:end]).digest
            same = [known for known in candidates if known.digest == digest]
            if same and (length >= WHOLE or (apart and self._leads_on(text, end))):
                return same
        return []

    def _leads_on(self, text: str, end: int) -> bool:
        after = _WORD.search(text, end)
        if after is None or "\n" in text[end : after.start()]:
            return True
        return bool(self._at(text, after.start(), True))


def _best(known: list[Known], before: str | None, contexts: Collection[str]) -> Known:
    ways = (lambda k: k.context == before, lambda k: k.context in contexts, lambda k: True)
    return next(k for way in ways for k in known if way(k))


def _chunk(part: Part, known: Known) -> Chunk:
    return Chunk((part,), known.source, known.context, known.document)
