"""`mpic-rag bench quality`: how well linked caches answer, beside full prefill."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from mpic_rag.bench.quality import cases
from mpic_rag.bench.quality.measure import METHODS, Row, measure
from mpic_rag.bench.quality.summary import by_kind, markdown, summarise, table
from mpic_rag.compiler import MODES
from mpic_rag.model import BUNDLED, Model
from mpic_rag.output import JsonOption, console, progress_bars, write_json
from mpic_rag.selection import Selector


def quality(
    on: Annotated[
        Literal["world", "prose"],
        typer.Option(
            help="`world`: the bundled guide's kind, which the bundled model was made for;"
            " `prose`: passages of Python's documentation, for any model of texts."
        ),
    ] = "world",
    model: Annotated[
        str, typer.Option("--model", help="Model folder, .gguf file or hub name.")
    ] = str(BUNDLED),
    questions: Annotated[
        int | None,
        typer.Option(min=1, help="World: 1000 unless told. Prose: all 120 prompts unless told."),
    ] = None,
    chunks: Annotated[
        int, typer.Option(min=4, max=32, help="World: chunks in context, an even number.")
    ] = 16,
    method: Annotated[
        list[str] | None,
        typer.Option(help="A mode and a selector, as `document, query:10%`; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(help="World: which shelves.")] = 20_000,
    quick: Annotated[bool, typer.Option("--quick", help="Few questions, within a minute.")] = False,
    markdown_: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write tables to FILE, too.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Accuracy, and distance from full prefill, by method.

    Every question is answered by full prefill, then scored along that answer by each method: mean
    KL, and the share of tokens that would be the same. On the world, an answer is correct to the
    letter, or not; where facts stand behind others in their document, the question is asked again
    with what stands before them left out, as retrieval does (`orphans`), beside full prefill with
    these documents restored.
    """
    methods = method or METHODS
    for one in methods:
        mode, _, selector = one.partition(", ")
        if mode not in MODES:
            raise ValueError(f"{one!r} needs a mode of {', '.join(MODES)}, a comma, a selector")
        Selector.parse(selector)
    if chunks % 2:
        raise ValueError("--chunks must be even: half are pictures, half texts")
    total = questions or (1000 if on == "world" else 120)
    total = min(total, 10 if on == "world" else 2) if quick else total
    groups = cases.world(chunks, total, seed) if on == "world" else cases.prose(total)
    rows: list[Row] = []
    loaded = Model.load(model)
    with tempfile.TemporaryDirectory() as folder, progress_bars() as told:
        seen: set[tuple[int, str]] = set()
        for row in measure(loaded, groups, methods, folder, model):
            rows.append(row)
            seen.add((row["group"], row["question"]))
            told("Asking", len(seen), total)
    made = [_tables(rows, context) for context in dict.fromkeys(row["context"] for row in rows)]
    tables = [lines for one in made for lines in one]
    if markdown_:
        titles = [
            f"{t[0]['context']}, {t[0]['kind']}, {t[0]['questions']} questions" for t in tables
        ]
        pages = [f"{title}\n\n{markdown(t)}\n" for title, t in zip(titles, tables, strict=True)]
        markdown_.write_text("\n".join(pages))
    if json:
        write_json([line | {"model": model} for lines in tables for line in lines], json)
    if json != "-":
        for pooled, *kinds in made:
            console.print(table(pooled))
            console.print(by_kind(kinds))


def _tables(rows: list[Row], context: str) -> list[list[Row]]:
    """All kinds together, then each."""
    kinds = dict.fromkeys(row["kind"] for row in rows if row["context"] == context)
    return [summarise(rows, context, kind) for kind in (None, *kinds)]
