"""`mpic-rag ask`: a question to an index, or to files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.markup import escape
from rich.table import Table

from mpic_rag import guide
from mpic_rag.compiler import Mode
from mpic_rag.conversation import Stream
from mpic_rag.documents import Chunk, Document, Picture, read_folder
from mpic_rag.engine import Engine
from mpic_rag.index import Index, settings
from mpic_rag.indexing.collection import FILE
from mpic_rag.model import BUNDLED, Model
from mpic_rag.output import (
    DEFAULT_STORE,
    JsonOption,
    RemoteOption,
    console,
    log,
    progress_bars,
    write_json,
)
from mpic_rag.report import Report
from mpic_rag.retrievers.search import Found
from mpic_rag.sampling import Sampling
from mpic_rag.store import Store

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", help="Model folder, .gguf file or hub name; default: the index's, or bundled."
    ),
]
StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        envvar="MPIC_RAG_STORE",
        help=f"Folder of compiled caches; default: the index's, else {DEFAULT_STORE}.",
    ),
]
ModeOption = Annotated[
    str, typer.Option(help="Compile chunks in their `document`'s context, `isolated` or `bare`.")
]
OwnerOption = Annotated[
    str | None,
    typer.Option(help="Whose private library to use; default: the shared one alone."),
]
Int8Option = Annotated[bool, typer.Option("--int8", help="Store 8 bits a number: half the bytes.")]


def ask(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[SOURCE]... QUESTION",
            help="An index that `mpic-rag index` made; or Markdown, text and picture files or"
            " folders, of which all is shown; without any, the first shelf of the bundled guide."
            " Then the question.",
        ),
    ],
    picture: Annotated[
        list[Path] | None,
        typer.Option("--picture", "--image", help="A picture that is part of the question."),
    ] = None,
    model: ModelOption = None,
    store: StoreOption = None,
    remote: RemoteOption = None,
    owner: OwnerOption = None,
    int8: Int8Option = False,
    mode: ModeOption = "document",
    selector: Annotated[
        str,
        typer.Option(
            help="Which chunk tokens are computed again: none, query:10%, epic:8, full, ..."
        ),
    ] = "none",
    top_k: Annotated[int, typer.Option(min=1, help="Passages to take from an index.")] = 8,
    around: Annotated[
        int, typer.Option(min=0, help="Passages before and behind each of these to take along.")
    ] = 1,
    show_sources: Annotated[
        bool,
        typer.Option("--show-sources", help="Show where the passages stand and what they say."),
    ] = False,
    stream: Annotated[bool, typer.Option(help="Print the answer as it comes.")] = True,
    system: Annotated[str | None, typer.Option(help="Replaces the system prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: Annotated[int | None, typer.Option()] = None,
    json: JsonOption = None,
) -> None:
    """Answer a question from an index, or from files, which are compiled on first use."""
    *names, question = arguments
    if names and Path(question).exists() and not Path(names[0]).exists():
        question, *names = arguments  # the question first is as clear
    sources = [Path(name) for name in names] or [guide.FOLDER / "shelf-1"]
    pictures = [Picture.load(path) for path in picture or []]
    if not question.strip():
        raise ValueError("the question is empty")
    if len(arguments) == 1 and Path(question).exists():
        raise ValueError(f"{question} is a file or folder: the question comes last")
    folder = sources[0] if len(sources) == 1 and (sources[0] / FILE).is_file() else None
    bundled = {"model": str(BUNDLED), "store": DEFAULT_STORE}
    known: dict[str, Any] = settings(folder) if folder else bundled
    name, place = model or known["model"], store or known["store"]
    kept = Store(place, remote=remote, int8=int8)
    engine = Engine(Model.load(name), kept, mode=cast(Mode, mode), selector=selector, owner=owner)
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "sampling": Sampling(temperature, seed=seed),
    }
    shown: list[dict[str, Any]] = []
    if folder:
        index = Index(folder, engine=engine)
        said, found = index.ask(question, pictures, top_k, around, system, **options)
        shown = [_source(number, f, index) for number, f in enumerate(found, 1)]
    else:
        said = _whole(engine, sources, [*pictures, question], system, options)
    warn_of_unknown_text(engine.model, [c for c in said.content if isinstance(c, str)], name)
    text = ""
    for piece in said:
        text += piece
        if stream and json != "-":
            print(piece, end="", flush=True)
    if json:
        write_json([_row(question, text, said.report, name) | {"sources": shown}], json)
    if json != "-":
        print("" if stream else text)
        if show_sources:
            console.print(_sources_table(shown))
        log.print(_report_table(said.report))
    close(kept)


def compile_documents(engine: Engine, documents: list[Document], title: str) -> int:
    """Compile what is missing, with a progress bar."""
    with progress_bars() as told:
        done = 0

        def advance(_document: Document, _new: int) -> None:
            nonlocal done
            done += 1
            told(title, done, len(documents))

        return engine.compile(documents, advance)


def close(store: Store) -> None:
    """Finish uploads, keep the measured speeds, say what went wrong on the way."""
    store.close()
    if store.faults.counts:
        log.print(f"faults: {dict(store.faults.counts)}")


def read(path: Path) -> list[Document]:
    """A file, or all below a folder."""
    return read_folder(path) if path.is_dir() else [Document.read(path)]


def texts(chunks: Iterable[Chunk]) -> list[str]:
    """Chunks' texts."""
    return [part for chunk in chunks for part in chunk.parts if isinstance(part, str)]


def warn_of_unknown_text(model: Model, parts: Sequence[str], name: str) -> None:
    """A tokenizer that spells a text out letter by letter never saw its language."""
    characters = sum(map(len, parts))
    if name == str(BUNDLED) and characters < 2 * sum(len(model.codec.encode(p)) for p in parts):
        log.print(
            "warning: most of this text is unknown to the bundled model, which knows its guide"
            " only; expect no sensible answer, and choose another with --model",
            style="yellow",
        )


def _whole(
    engine: Engine,
    sources: Sequence[Path],
    question: Sequence[Any],
    system: str | None,
    options: Any,
) -> Stream:
    """All of these files, in their order."""
    documents = [document for path in sources for document in read(path)]
    chunks = [chunk for document in documents for chunk in document.chunks]
    if engine.selector != "full":
        compile_documents(engine, documents, "Compiling")
    return engine.conversation(system).stream(question, chunks, **options)


def _source(number: int, found: Found, index: Index) -> dict[str, Any]:
    row = found.row
    return {
        "number": number,
        "passage": row.id,
        "file": index.collection.paths().get(row.document, ""),
        "title": row.name,
        "headings": row.headings,
        "page": row.page,
        "text": row.text,
        "picture": str(index.collection.pictures.path(row.picture)) if row.picture else None,
        "score": found.score,
        "ranks": found.ranks,
    }


def _sources_table(sources: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Sources")
    for column in ("", "where", "what", "ranks"):
        table.add_column(column, overflow="fold")
    for source in sources:
        page = f", page {source['page']}" if source["page"] else ""
        where = "\n".join([source["file"] + page, " > ".join(source["headings"])]).strip()
        what = "\n".join(part for part in (source["text"][:300], source["picture"]) if part)
        ranks = "\n".join(f"{name} {rank}" for name, rank in source["ranks"].items())
        table.add_row(str(source["number"]), escape(where), escape(what), ranks)
    return table


def _row(question: str, text: str, report: Report, model: str) -> dict[str, object]:
    return {
        "method": report.selector,
        "model": model,
        "question": question,
        "answer": text,
        "retrieve_s": report.retrieve_s,
        "ttft_s": report.ttft_s,
        "seconds": report.seconds,
        "context_tokens": report.context_tokens,
        "reused_tokens": report.reused_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "fresh_tokens": report.fresh_tokens,
        "recomputed": report.recomputed,
        "bytes_read": report.bytes_read,
        "chunks": [chunk.__dict__ for chunk in report.chunks],
    }


def _report_table(report: Report) -> Table:
    ttft = report.retrieve_s + report.ttft_s
    table = Table(title=f"first token after {ttft * 1e3:.0f} ms")
    for column in ("chunk", "tokens", "recomputed", "cache"):
        table.add_column(column, justify="right" if column in ("tokens", "recomputed") else "left")
    for chunk in report.chunks:
        fate = chunk.hit or f"miss: {chunk.miss}"
        table.add_row(escape(chunk.source), str(chunk.tokens), str(chunk.recomputed), fate)
    seconds = {"retrieve": report.retrieve_s} if report.retrieve_s else {}
    stages = "  ".join(f"{name} {s * 1e3:.1f}" for name, s in (seconds | report.seconds).items())
    later = report.later_s
    each = f"; each later token {sum(later) / len(later) * 1e3:.1f} ms" if later else ""
    table.caption = (
        f"ms: {stages}{each}; tokens: {report.reused_tokens} reused,"
        f" {report.recomputed_tokens} recomputed, {report.fresh_tokens} fresh;"
        f" {report.bytes_read / 1e6:.1f} MB read"
    )
    return table
