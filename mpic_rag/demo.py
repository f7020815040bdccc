"""The main job on the bundled collection: the same questions by every way of computing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.markup import escape
from rich.table import Table

from mpic_rag import guide
from mpic_rag.baselines import PrefixReuse
from mpic_rag.conversation import Answer
from mpic_rag.documents import Chunk, Document
from mpic_rag.engine import Engine
from mpic_rag.index import Index
from mpic_rag.indexing.build import Options, Progress
from mpic_rag.model import Model
from mpic_rag.retrievers.shelf import retrieve_shelf
from mpic_rag.store import Store

METHODS = {
    "full": "full prefill: vision tower and language model over everything",
    "encoder": "vision features from the store, language model over everything",
    "prefix": "exact prefix reuse: transformers' own cache of the last prompt",
    "none": "linked caches compiled in their documents, nothing recomputed",
    "first_k:8": "linked, MPIC's rule: all text and 8 tokens of each picture recomputed",
    "epic:8": "linked, EPIC's rule: 8 tokens of each chunk recomputed",
    "none, isolated": "linked caches, each chunk compiled alone, nothing recomputed",
}
TOP = 8  # passages that are retrieved
Row = dict[str, Any]
Retrieve = Callable[[guide.Question, int], list[Chunk]]


def methods(model: Model, store: Store) -> tuple[list[Engine], dict[str, Callable[..., Answer]]]:
    """The engines whose caches must be compiled, and each method's `ask`."""
    document, isolated = Engine(model, store), Engine(model, store, mode="isolated")
    prefix = PrefixReuse(model)

    def ask(name: str) -> Callable[..., Answer]:
        if name == "prefix":
            return prefix.ask
        selector, _, alone = name.partition(", ")
        engine = isolated if alone else document
        return lambda *args, **kwargs: engine.ask(*args, selector=selector, **kwargs)

    return [document, isolated], {name: ask(name) for name in METHODS}


def whole_shelf() -> Retrieve:
    """All that a question's shelf has, documents in random order."""
    shelves = guide.shelves()
    return lambda question, number: retrieve_shelf(shelves[question.shelf], seed=number)


def index(engine: Engine, folder: Path, progress: Progress) -> dict[str, Index]:
    """The shelves, each indexed below `folder`, paragraph by paragraph."""
    return {
        path.name: Index.build(
            path, folder / path.name, engine=engine, options=Options(0), progress=progress
        )
        for path in sorted(guide.FOLDER.glob("shelf-*"))
    }


def pages(indexes: dict[str, Index]) -> list[Document]:
    """All that is indexed, as it is compiled."""
    collections = [index.collection for index in indexes.values()]
    return [
        page for one in collections for name in one.documents() for page in one.compilable(name)
    ]


def found(indexes: dict[str, Index], around: int) -> Retrieve:
    """What a shelf's index finds for a question, with so many passages around each."""

    def retrieve(question: guide.Question, number: int) -> list[Chunk]:
        index = indexes[question.shelf]
        hits = index.retrieve(question.question, count=TOP, around=around)
        return [chunk for hit in hits for chunk in index.collection.chunks(hit.row)]

    return retrieve


def run(
    asks: dict[str, Callable[..., Answer]], model_name: str, retrieve: Retrieve
) -> Iterator[Row]:
    """Ask every question by every method, methods in turn; one row each."""
    for number, question in enumerate(guide.questions()):
        chunks = retrieve(question, number)
        for method, ask in asks.items():
            if number == 0:  # the first call of each pays for imports, page cache and allocation
                ask(question.question, chunks, max_tokens=2)
                if method == "prefix":  # ... and must not find its own prompt again
                    ask(question.question, chunks[::-1], max_tokens=2)
            yield row(question, method, ask(question.question, chunks, max_tokens=48), model_name)


def row(question: guide.Question, method: str, answer: Answer, model_name: str) -> Row:
    """One line of `demo --json`."""
    report = answer.report
    return {
        "method": method,
        "kind": question.kind,
        "split": question.split,
        "model": model_name,
        "question": question.question,
        "expected": question.answer,
        "answer": answer.text,
        "correct": answer.text == question.answer,
        "ttft_s": report.ttft_s,
        "seconds": report.seconds,
        "context_tokens": report.context_tokens,
        "chunk_tokens": report.chunk_tokens,
        "reused_tokens": report.reused_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "fresh_tokens": report.fresh_tokens,
        "recomputed": report.recomputed,
        "bytes_read": report.bytes_read,
    }


def answers_table(rows: list[Row]) -> Table:
    """Each question with the answers by full prefill and from linked caches."""
    table = Table(title="Full prefill and linked caches, side by side")
    for column in ("question", "expected", "full prefill", "linked caches"):
        table.add_column(column, overflow="fold")
    for column in ("full ms", "linked ms", "times faster"):
        table.add_column(column, justify="right")
    full = [r for r in rows if r["method"] == "full"]
    linked = [r for r in rows if r["method"] == "none"]
    for a, b in zip(full, linked, strict=True):
        table.add_row(
            a["question"],
            a["expected"],
            *(_marked(r) for r in (a, b)),
            *(f"{r['ttft_s'] * 1e3:.0f}" for r in (a, b)),
            f"{a['ttft_s'] / b['ttft_s']:.1f}",
        )
    return table


def summary_table(rows: list[Row]) -> Table:
    """Per method: right answers, median time to first token, and what was recomputed."""
    table = Table(title="By method")
    table.add_column("method")
    table.add_column("what it does", overflow="fold")
    for column in ("right", "TTFT ms", "of full", "recomputed"):
        table.add_column(column, justify="right")
    baseline = median(r["ttft_s"] for r in rows if r["method"] == "full")
    for method, text in METHODS.items():
        mine = [r for r in rows if r["method"] == method]
        ttft = median(r["ttft_s"] for r in mine)
        table.add_row(
            method,
            text,
            f"{sum(r['correct'] for r in mine)}/{len(mine)}",
            f"{ttft * 1e3:.1f}",
            f"{ttft / baseline:.2f}",
            f"{median(r['recomputed'] for r in mine):.0%}",
        )
    return table


def context(rows: list[Row]) -> str:
    """What stood in each prompt, in words."""
    tokens = sorted({r["context_tokens"] for r in rows})
    return f"{tokens[0]} to {tokens[-1]} tokens of context"


def _marked(row: Row) -> str:
    return f"[{'green' if row['correct'] else 'red'}]{escape(row['answer'])}[/]"
