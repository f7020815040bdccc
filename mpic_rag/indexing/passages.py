"""Blocks as passages: what is retrieved, and compiled, as one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpic_rag.documents import Part, Picture
from mpic_rag.indexing.blocks import Block, Content

CHARACTERS = 800  # of a passage, about
OPENING = 80  # characters of a document's first words that stand for a title, at most
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+")


@dataclass(frozen=True)
class Passage:
    """A text, or a picture with its caption; `near` is what is said around it, for retrieval."""

    text: str
    picture: Picture | None
    headings: tuple[str, ...]
    page: int | None
    near: str = ""

    @property
    def parts(self) -> list[Part]:
        """What the model sees, a caption before its picture."""
        return [part for part in (self.text, self.picture) if part]

    def search_text(self, title: str) -> str:
        """What retrievers of texts see."""
        parts = (title, *self.headings, self.text, self.near)
        return "\n".join(dict.fromkeys(part for part in parts if part))


def passages(content: Content, characters: int = CHARACTERS) -> list[Passage]:
    """Pack paragraphs to passages of about so many characters; 0 keeps each paragraph apart.

    A heading stands with what follows it, and a new one starts a passage.
    """
    made: list[Passage] = []
    run: list[Block] = []

    def flush() -> None:
        if run:
            text = "\n".join(block.text for block in run)
            made.append(Passage(text, None, run[-1].headings, run[0].page))
            run.clear()

    for index, block in enumerate(content.blocks):
        if block.picture:
            flush()
            near = _near(content.blocks, index)
            hint = "\n".join(part for part in (block.hint, near) if part)
            made.append(Passage(block.text, block.picture, block.headings, block.page, hint))
            continue
        for piece in _pieces(block, characters) if block.text else ():
            size = sum(len(b.text) + 1 for b in run)
            only_headings = all(b.heading for b in run)
            full = size + len(piece.text) > characters and not only_headings
            starts = piece.heading and not only_headings
            if run and (full or starts or piece.page != run[0].page):
                flush()
            run.append(piece)
    flush()
    return made


def opening(content: Content) -> str:
    """The first words of a document that has no title: often they name what it is about."""
    first = next((b.text for b in content.blocks if b.text), "")
    sentence = _SENTENCE.split(first)[0]
    if len(sentence) <= OPENING:
        return sentence
    space = sentence.rfind(" ", 1, OPENING)
    return sentence[: space if space > 0 else OPENING] + " …"


def _near(blocks: Sequence[Block], index: int) -> str:
    """The paragraphs just before and after a picture, which often say what it shows."""
    around = [*blocks[max(0, index - 1) : index], *blocks[index + 1 : index + 2]]
    return "\n".join(block.text[-400:] for block in around if block.text and not block.picture)


def _pieces(block: Block, characters: int) -> Iterator[Block]:
    """A paragraph that is far too long, cut between sentences, or else between words."""
    limit = max(characters, CHARACTERS) * 2
    if len(block.text) <= limit:
        yield block
        return
    run = ""
    for sentence in _SENTENCE.split(block.text):
        while len(sentence) > limit:
            cut = sentence.rfind(" ", 1, limit)
            cut = cut if cut > 0 else limit
            if run:
                yield _part(block, run)
                run = ""
            yield _part(block, sentence[:cut])
            sentence = sentence[cut:].strip()
        if run and len(run) + len(sentence) > max(characters, CHARACTERS):
            yield _part(block, run)
            run = ""
        run = f"{run} {sentence}".strip()
    if run:
        yield _part(block, run)


def _part(block: Block, text: str) -> Block:
    return Block(text.strip(), None, block.headings, block.page)
