"""The command line."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, cast

import transformers
import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoConfig

from mpic_rag import demo as demo_
from mpic_rag import guide
from mpic_rag.cli_bench import bench_app
from mpic_rag.cli_store import store_app
from mpic_rag.compiler import Mode
from mpic_rag.documents import Chunk, Document, Picture, read_folder
from mpic_rag.engine import Engine
from mpic_rag.families import FAMILIES, check
from mpic_rag.model import BUNDLED, Model, locate
from mpic_rag.output import (
    DEFAULT_STORE,
    JsonOption,
    RemoteOption,
    StoreOption,
    console,
    fail,
    log,
    with_json_target,
    write_json,
)
from mpic_rag.report import Report
from mpic_rag.sampling import Sampling
from mpic_rag.store import Store

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Answers from pictures and texts whose KV caches are already computed.\n\n"
    "Start with `mpic-rag demo`; then `mpic-rag ask 'who keeps larkmouth?'`.",
)

app.add_typer(store_app, name="store")
app.add_typer(bench_app, name="bench")

ModelOption = Annotated[
    str, typer.Option("--model", help="Model folder, .gguf file or hub name; default: bundled.")
]
ModeOption = Annotated[
    str, typer.Option(help="Compile chunks in their `document`'s context, `isolated` or `bare`.")
]
OwnerOption = Annotated[
    str | None,
    typer.Option(help="Whose private library to use; default: the shared one alone."),
]
Int8Option = Annotated[bool, typer.Option("--int8", help="Store 8 bits a number: half the bytes.")]
_INTERRUPTED = 130  # the status that Typer makes of Ctrl-C


@app.command()
def demo(store: StoreOption = DEFAULT_STORE, json: JsonOption = None) -> None:
    """Ask the bundled guide 45 questions by every method, and compare answers and times."""
    model = Model.load()
    engines, asks = demo_.methods(model, Store(store))
    for engine in engines:
        documents = [d for shelf in guide.shelves().values() for d in shelf]
        _compile(engine, documents, f"Compiling the guide ({engine.compiler.mode})")
    rows = []
    total = len(guide.questions()) * len(asks)
    with _progress() as progress:
        task = progress.add_task("Asking", total=total)
        for row in demo_.run(asks, "bundled"):
            rows.append(row)
            progress.advance(task)
    if json:
        write_json(rows, json)
    if json != "-":
        console.print(demo_.answers_table(rows))
        console.print(demo_.summary_table(rows))
        console.print(demo_.context(rows))


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Documents to answer from: Markdown, text, pictures, or folders."
            " Without any: the first shelf of the bundled guide."
        ),
    ] = None,
    picture: Annotated[
        list[Path] | None, typer.Option(help="A picture that is part of the question.")
    ] = None,
    model: ModelOption = str(BUNDLED),
    store: StoreOption = DEFAULT_STORE,
    remote: RemoteOption = None,
    owner: OwnerOption = None,
    int8: Int8Option = False,
    mode: ModeOption = "document",
    selector: Annotated[
        str, typer.Option(help="Who is recomputed: full, encoder, none, first_k:K or epic:K.")
    ] = "none",
    system: Annotated[str | None, typer.Option(help="Replaces the system prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: Annotated[int | None, typer.Option()] = None,
    json: JsonOption = None,
) -> None:
    """Answer a question from documents; they are compiled on first use, and linked from then on."""
    documents = [d for path in files or [guide.FOLDER / "shelf-1"] for d in _read(path)]
    pictures = [Picture.load(path) for path in picture or []]
    if not question.strip():
        raise ValueError("the question is empty")
    engine = Engine(
        Model.load(model),
        Store(store, remote=remote, int8=int8),
        mode=cast(Mode, mode),
        selector=selector,
        owner=owner,
    )
    chunks = [chunk for document in documents for chunk in document.chunks]
    _warn_of_unknown_text(engine.model, [question, *_texts(chunks)], model)
    if selector != "full":
        _compile(engine, documents, "Compiling")
    stream = engine.conversation(system).stream(
        [*pictures, question],
        chunks,
        max_tokens=max_tokens,
        sampling=Sampling(temperature, seed=seed),
    )
    text = ""
    for piece in stream:
        text += piece
        if json != "-":
            print(piece, end="", flush=True)
    if json:
        write_json([_row(question, text, stream.report, model)], json)
    if json != "-":
        print()
        log.print(_report_table(stream.report))
    _close(engine.store)


@app.command("compile")
def compile_(
    folders: Annotated[list[Path], typer.Argument(help="Folders or files to compile.")],
    model: ModelOption = str(BUNDLED),
    store: StoreOption = DEFAULT_STORE,
    remote: RemoteOption = None,
    owner: OwnerOption = None,
    int8: Int8Option = False,
    mode: ModeOption = "document",
) -> None:
    """Compile documents ahead of questions; what is compiled already is skipped."""
    documents = [d for path in folders for d in _read(path)]
    kept = Store(store, remote=remote, int8=int8)
    engine = Engine(Model.load(model), kept, mode=cast(Mode, mode), owner=owner)
    _warn_of_unknown_text(engine.model, _texts(c for d in documents for c in d.chunks), model)
    new = _compile(engine, documents, "Compiling")
    total = sum(len(d.chunks) for d in documents)
    _close(kept)
    console.print(f"{new} of {total} chunks compiled, {total - new} were there; store: {store}")


@app.command("model")
def model_(
    name: Annotated[str, typer.Argument(help="Model folder or hub name.")] = str(BUNDLED),
    json: JsonOption = None,
) -> None:
    """Say what a model is, whether it is supported, and what its caches take."""
    try:
        source, options = locate(name)
        config = AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"can't read the model {name}: {str(error).splitlines()[0]}") from error
    family = check(config)
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * head
    facts = {
        "model": name,
        "family": config.model_type,
        "supported": True,
        "reads": "texts and pictures" if family.markers else "texts",
        "layers": text.num_hidden_layers,
        "kv_heads": text.num_key_value_heads,
        "head_dim": head,
        "context_tokens": text.max_position_embeddings,
        "positions": f"{family.axes}-D RoPE",
        "kv_bytes_per_token_fp32": 4 * numbers,
        "kv_bytes_per_token_bf16": 2 * numbers,
    }
    if json:
        write_json([facts], json)
    if json != "-":
        table = Table(show_header=False)
        for key, value in facts.items():
            table.add_row(key.replace("_", " "), str(value))
        console.print(table)
        console.print(f"Families: {', '.join(FAMILIES)}.")


def main() -> None:
    """Run the command line; problems with input end in one line, not in a traceback."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sys.argv[1:] = with_json_target(sys.argv[1:])
    try:
        app()
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            log.print("interrupted; what was compiled is kept, run the same command to go on")
        raise
    except (ValueError, OSError) as error:
        fail(str(error))


def _close(store: Store) -> None:
    """Finish uploads, keep the measured speeds, say what went wrong on the way."""
    store.close()
    if store.faults.counts:
        log.print(f"faults: {dict(store.faults.counts)}")


def _read(path: Path) -> list[Document]:
    return read_folder(path) if path.is_dir() else [Document.read(path)]


def _texts(chunks: Iterable[Chunk]) -> list[str]:
    return [part for chunk in chunks for part in chunk.parts if isinstance(part, str)]


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=log,
    )


def _compile(engine: Engine, documents: list[Document], title: str) -> int:
    with _progress() as progress:
        task = progress.add_task(title, total=len(documents))
        return engine.compile(documents, lambda _document, _new: progress.advance(task))


def _warn_of_unknown_text(model: Model, texts: list[str], name: str) -> None:
    """A tokenizer that spells a text out letter by letter never saw its language."""
    characters = sum(map(len, texts))
    if name == str(BUNDLED) and characters < 2 * sum(
        len(model.codec.encode(text)) for text in texts
    ):
        log.print(
            "warning: most of this text is unknown to the bundled model, which knows its guide"
            " only; expect no sensible answer, and choose another with --model",
            style="yellow",
        )


def _row(question: str, text: str, report: Report, model: str) -> dict[str, object]:
    return {
        "method": report.selector,
        "model": model,
        "question": question,
        "answer": text,
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
    table = Table(title=f"first token after {report.ttft_s * 1e3:.0f} ms")
    for column in ("chunk", "tokens", "recomputed", "cache"):
        table.add_column(column, justify="right" if column in ("tokens", "recomputed") else "left")
    for chunk in report.chunks:
        fate = chunk.hit or f"miss: {chunk.miss}"
        table.add_row(escape(chunk.source), str(chunk.tokens), str(chunk.recomputed), fate)
    stages = "  ".join(f"{name} {s * 1e3:.1f}" for name, s in report.seconds.items())
    later = report.later_s
    each = f"; each later token {sum(later) / len(later) * 1e3:.1f} ms" if later else ""
    table.caption = (
        f"ms: {stages}{each}; tokens: {report.reused_tokens} reused,"
        f" {report.recomputed_tokens} recomputed, {report.fresh_tokens} fresh;"
        f" {report.bytes_read / 1e6:.1f} MB read"
    )
    return table


if __name__ == "__main__":
    main()
