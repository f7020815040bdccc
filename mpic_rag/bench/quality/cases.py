"""What is asked: questions with the chunks that are shown for them, from two sources."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpic_rag.data.world import KINDS, Question, Shelf, make_shelf
from mpic_rag.documents import Chunk, Document, Picture

PROSE = Path(__file__).parent.parent / "prose.json"
PER_SHELF = 10
ANSWER = 32  # tokens of an answer to prose


@dataclass(frozen=True)
class Case:
    """One question; `context` is `all`, or `orphans` where what stands before facts is dropped.

    `restored` are the chunks with all that their documents say before them; `expected` is empty
    where only full prefill can be compared with.
    """

    question: str
    chunks: tuple[Chunk, ...]
    restored: tuple[Chunk, ...]
    kind: str
    context: str = "all"
    expected: str = ""
    split: bool = False


def world(shown: int, total: int, seed: int) -> Iterator[tuple[list[Document], list[Case]]]:
    """Fresh shelves of `shown` chunks, half of them pictures, and questions of all kinds."""
    rng = random.Random(seed)
    half = shown // 2
    while total > 0:
        shelf = make_shelf(rng, half, half, shown - half)
        pages = documents(shelf)
        asked = [q for q in shelf.questions if q.kind in KINDS]
        asked = one_kind_after_the_other(rng.sample(asked, len(asked)))[: min(PER_SHELF, total)]
        total -= len(asked)
        cases = []
        for question in asked:
            order = rng.sample(range(len(pages)), len(pages))
            whole = [list(page.chunks) for page in pages]
            torn = orphaned(pages, question)
            restored = tuple(chunk for page in order for chunk in whole[page])
            for context, chunks in [("all", whole)] + [("orphans", torn)] * (torn != whole):
                cases.append(
                    Case(
                        question.text,
                        tuple(chunk for page in order for chunk in chunks[page]),
                        restored,
                        question.kind,
                        context,
                        question.answer,
                        question.split,
                    )
                )
        yield pages, cases


def prose(total: int) -> Iterator[tuple[list[Document], list[Case]]]:
    """Kept prompts of passages from unrelated documents, kinds in turn."""
    kept = json.loads(PROSE.read_text(encoding="utf-8"))
    made = [
        Document.of(f"{passage['document']}/{n}", [[passage["text"]]])
        for n, passage in enumerate(kept["passages"])
    ]
    kinds = sorted({prompt["kind"] for prompt in kept["prompts"]})
    sides = [[p for p in kept["prompts"] if p["kind"] == kind] for kind in kinds]
    for prompt in [p for together in zip(*sides, strict=True) for p in together][:total]:
        pages = [made[n] for n in prompt["chunks"]]
        chunks = tuple(page.chunks[0] for page in pages)
        yield pages, [Case(prompt["question"], chunks, chunks, prompt["kind"])]


def documents(shelf: Shelf) -> list[Document]:
    """The pages of a shelf as documents."""
    return [
        Document.of(
            page.name,
            [[p if isinstance(p, str) else Picture.of(p) for p in c] for c in page.chunks],
        )
        for page in shelf.pages
    ]


def orphaned(documents: Sequence[Document], question: Question) -> list[list[Chunk]]:
    """Drop what stands before the question's facts in their documents, other facts aside."""
    chunks = [list(document.chunks) for document in documents]
    last: dict[int, int] = {}
    for page, index in question.evidence:
        last[page] = max(index, last.get(page, 0))
    for page, index in last.items():
        chunks[page] = [
            chunk
            for n, chunk in enumerate(documents[page].chunks)
            if n >= index or (page, n) in question.evidence
        ]
    return chunks


def one_kind_after_the_other(questions: Sequence[Question]) -> list[Question]:
    """Order questions so that a shelf's first few are of all kinds."""
    seen: Counter[str] = Counter()
    ranks = []
    for number, question in enumerate(questions):
        ranks.append((seen[question.kind], number))
        seen[question.kind] += 1
    return [questions[number] for _, number in sorted(ranks)]
