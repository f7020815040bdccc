"""Accuracy per kind and method over fresh shelves: python benchmarks/accuracy.py [--quick].

Each question is asked with all 16 chunks in context, and, where its facts stand apart from their
station's name, once more with everything that stands before them in their documents dropped
(orphans). Documents come in random order. Answers count where they match to the letter.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from rich.progress import track
from rich.table import Table

from mpic_rag import Chunk, Document, Engine, Model, Picture, Store
from mpic_rag.data.world import KINDS, Question, Shelf, make_shelf
from mpic_rag.output import console, log, with_json_target, write_json

SELECTORS = ("none", "first_k:8", "epic:8")
PER_SHELF = 10
METHODS = ["full", *(f"{m}, {s}" for m in ("document", "isolated") for s in SELECTORS)]


def documents(shelf: Shelf) -> list[Document]:
    """The pages of a shelf as documents."""
    return [
        Document.of(
            page.name,
            [[p if isinstance(p, str) else Picture.of(p) for p in c] for c in page.chunks],
        )
        for page in shelf.pages
    ]


def orphaned(documents: list[Document], question: Question) -> list[list[Chunk]]:
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


def one_kind_after_the_other(questions: list[Question]) -> list[Question]:
    """Order questions so that a shelf's first few are of all kinds."""
    seen: Counter[str] = Counter()
    ranks = []
    for number, question in enumerate(questions):
        ranks.append((seen[question.kind], number))
        seen[question.kind] += 1
    return [questions[number] for _, number in sorted(ranks)]


def measure(model: Model, total: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield one row per question, method and context."""
    rng = random.Random(seed)
    for _ in range(max(1, total // PER_SHELF)):
        shelf = make_shelf(rng)
        pages = documents(shelf)
        asked = [q for q in shelf.questions if q.kind in KINDS]
        asked = one_kind_after_the_other(rng.sample(asked, len(asked)))
        with tempfile.TemporaryDirectory() as folder:
            engines = {
                m: Engine(model, Store(folder, adaptive=False), mode=m)
                for m in ("document", "isolated")
            }
            for engine in engines.values():
                engine.compile(pages)
            for question in asked[:PER_SHELF]:
                order = rng.sample(range(len(pages)), len(pages))
                whole = [list(page.chunks) for page in pages]
                contexts = {"all": whole, "orphans": orphaned(pages, question)}
                if contexts["orphans"] == whole:
                    del contexts["orphans"]
                for context, chunks in contexts.items():
                    shown = [chunk for page in order for chunk in chunks[page]]
                    yield from answers(engines, question, context, shown)


def answers(
    engines: dict[str, Engine], question: Question, context: str, chunks: list[Chunk]
) -> Iterator[dict[str, Any]]:
    """Ask one question by every method."""
    for method in METHODS:
        mode, _, selector = method.rpartition(", ")
        engine = engines[mode or "document"]
        answer = engine.ask(question.text, chunks, selector=selector, max_tokens=48)
        yield {
            "method": method,
            "kind": question.kind,
            "split": question.split,
            "context": context,
            "model": "bundled",
            "context_tokens": answer.report.context_tokens,
            "recomputed": answer.report.recomputed,
            "correct": answer.text == question.answer,
        }


def table(rows: list[dict[str, Any]], context: str, split: bool | None = None) -> Table:
    """Accuracy per method and kind."""
    rows = [r for r in rows if r["context"] == context and split in (None, r["split"])]
    cells: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for r in rows:
        cells[r["method"], r["kind"]].append(r["correct"])
        cells[r["method"], "all"].append(r["correct"])
    count = len(cells[METHODS[0], "all"])
    which = {None: "", True: ", split", False: ", not split"}[split]
    result = Table(title=f"{context}{which}: {count} questions")
    result.add_column("method", no_wrap=True)
    for column in ("recomputed", *KINDS, "all"):
        result.add_column(column.replace("_", "\n"), justify="right")
    for method in METHODS:
        shares = [r["recomputed"] for r in rows if r["method"] == method]
        values = [cells[method, kind] for kind in (*KINDS, "all")]
        result.add_row(
            method,
            f"{sum(shares) / len(shares):.0%}" if shares else "",
            *(f"{sum(v) / len(v):.3f}" if v else "" for v in values),
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=20_000)
    parser.add_argument("--quick", action="store_true", help="30 questions")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(with_json_target(sys.argv[1:]))
    total = 30 if args.quick else args.questions
    steps = measure(Model.load(), total, args.seed)
    rows = list(track(steps, "Asking", total=None, console=log))
    if args.json:
        write_json(rows, args.json)
    if args.json != "-":
        for context, split in (("all", None), ("all", True), ("all", False), ("orphans", None)):
            console.print(table(rows, context, split))


if __name__ == "__main__":
    main()
